"""How deep a parameter lies in its tower, for layer-wise decay of the learning rate."""

from __future__ import annotations

import re

from torch import nn

BLOCK = re.compile(r"(?:blocks|layers?|resblocks)\.(\d+)\.")
# what stands above the last block, under this project's, open_clip's and Hugging Face's names
ABOVE = re.compile(r"(transformer\.norm|projection|head|ln_post|ln_final|attn_pool|pooler|\.proj$)")


def layers_above(model: nn.Module, prefix: str) -> dict[str, int]:
    """Parameter name -> blocks above it, of all whose name starts with ``prefix``.

    0 for the top block and what stands above it, ``depth`` for what lies below the lowest block (embeddings). Where a
    pretrained tower lies below own attention, its blocks alone are counted, and all that is new is at the top. A tower
    that knows its layers (``layer_numbers``, see :class:`vlretrieval.model.timm_tower.TimmTower`) is asked.
    """
    names = [name for name, _ in model.named_parameters() if name.startswith(prefix)]
    base = f"{prefix.removesuffix('.').removesuffix('.base')}.base."
    tower = [name for name in names if name.startswith(base)]
    found = dict.fromkeys(names, 0)
    module = dict(model.named_modules()).get(base.removesuffix("."))
    if module is not None and hasattr(module, "layer_numbers"):
        numbers: dict[str, int] = module.layer_numbers()
        top = max(numbers.values())
        return found | {base + name: top - number for name, number in numbers.items() if base + name in found}
    tower = tower or names
    blocks = {name: int(match[1]) for name in tower if (match := BLOCK.search(name))}
    depth = 1 + max(blocks.values(), default=-1)
    for name in tower:
        found[name] = depth - 1 - blocks[name] if name in blocks else 0 if ABOVE.search(name) else depth
    return found

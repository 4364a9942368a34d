"""The attention layers of a model by name: what queries what in each, and how to call a head."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from vlretrieval.model.attention import MultiHeadAttention

# kind -> (what queries, what is queried, how it is called)
KINDS = {
    "image": ("image", "image", "image"),
    "text": ("text", "text", "text"),
    "text_to_image": ("text", "image", "text-to-image"),
    "between": ("text", "text", "text between crossings"),
    "image_to_text": ("image", "text", "image-to-text"),
    "joint": ("joint", "joint", "joint"),
}
CROSS = ("text_to_image", "image_to_text", "joint")  # kinds in which one modality looks at the other
DIRECTIONS = {"text_to_image": "text to image", "image_to_text": "image to text"}

Head = tuple[str, int]  # module name, number of the head in it from 0


@dataclass(frozen=True)
class Layer:
    """One attention layer: its name in the model, its kind, and which block of that kind it is (from 0)."""

    name: str
    kind: str
    depth: int
    module: MultiHeadAttention

    @property
    def heads(self) -> int:
        return self.module.num_heads

    @property
    def queries(self) -> str:
        """ "text", "image" or "joint"."""
        return KINDS[self.kind][0]

    @property
    def keys(self) -> str:
        """ "text", "image" or "joint"."""
        return KINDS[self.kind][1]

    @property
    def title(self) -> str:
        """ "text-to-image, layer 1"."""
        return f"{KINDS[self.kind][2]}, layer {self.depth + 1}"

    def head_title(self, head: int) -> str:
        """ "text-to-image, layer 1, head 2"."""
        return f"{self.title}, head {head + 1}"


def layers_of(model: nn.Module) -> list[Layer]:
    """Every multi-head attention of a model, in its own order.

    Raises:
        ValueError: it has none of this project's (a pretrained tower's own attention cannot be looked into).
    """
    found = [
        Layer(name, kind_of(name), block_of(name), module)
        for name, module in model.named_modules()
        if isinstance(module, MultiHeadAttention)
    ]
    if not found:
        raise ValueError(
            "this model has no attention of vlretrieval.model.attention, so there are no heads to look at; "
            "towers of other libraries cannot be looked into"
        )
    return found


def kind_of(name: str) -> str:
    """The kind of heads of the attention called ``name`` in a RetrievalModel."""
    if name.startswith("crossmodal.joint"):
        return "joint"
    if name.startswith("crossmodal.text_to_image"):
        return "text_to_image" if name.endswith(".cross") else "between"
    if name.startswith("crossmodal.image_to_text"):
        return "image_to_text"
    return "image" if name.startswith("image") else "text"


def block_of(name: str) -> int:
    """The number of the block in a module's name, 0 if it has none."""
    found = re.search(r"blocks\.(\d+)", name)
    return int(found[1]) if found else 0


def heads_of(layers: Sequence[Layer]) -> list[Head]:
    """Every head of the layers."""
    return [(layer.name, head) for layer in layers for head in range(layer.heads)]

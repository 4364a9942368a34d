"""What is unusual about a model: lines for the log, never an error."""

from __future__ import annotations

import re

from torch import nn

from vlretrieval.model.attention import MultiHeadAttention

USUAL_HEAD_DIM = 64


def head_width_hints(model: nn.Module) -> list[str]:
    """A line for each stack of heads whose width is below half or above twice the field's 64.

    Common models keep to it (512 -> 8 heads, 768 -> 12, 1024 -> 16); many narrow heads tend to overfit, few wide ones
    can attend to little at a time.
    """
    hints = {}
    for name, module in model.named_modules():
        if isinstance(module, MultiHeadAttention):
            width, usual = module.head_dim, max(1, round(module.dim / USUAL_HEAD_DIM))
            if module.num_heads != usual and not USUAL_HEAD_DIM / 2 <= width <= USUAL_HEAD_DIM * 2:
                stack = re.sub(r"\.blocks\.\d+", "", name)
                hints[stack] = (
                    f"{stack}: {module.num_heads} heads are {width} wide at dim={module.dim}; "
                    f"the usual width is {USUAL_HEAD_DIM}, with {usual} head{'s' * (usual > 1)}"
                )
    return list(hints.values())

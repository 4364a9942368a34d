"""In how many bits an export stores its weights. Small vectors (norms, biases, the scale) always stay in float32."""

from __future__ import annotations

import torch
from torch import Tensor

PRECISIONS = ("fp32", "fp16", "bf16", "int8")
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
LEAST = 256  # numbers that a tensor must hold to be worth it


def worth_storing_in_half(value: Tensor) -> bool:
    """Whether a float32 tensor is large enough that 16 bits save anything."""
    return value.dtype == torch.float32 and value.numel() >= LEAST


def stored(weights: dict[str, Tensor], precision: str) -> dict[str, Tensor]:
    """The weights as an export in ``precision`` (fp32, fp16 or bf16) stores them: contiguous, and apart.

    Raises:
        ValueError: a weight beyond what float16 can hold (65,504), which would become infinite.
    """
    result = {}
    for name, value in weights.items():
        kept = value.detach().clone().contiguous()  # safetensors refuses tensors that share memory
        if precision in HALF and worth_storing_in_half(kept):
            kept = kept.to(HALF[precision])
            if not torch.isfinite(kept).all():
                raise ValueError(
                    f"precision={precision} cannot hold {name}, which reaches {value.abs().max():g}; take bf16"
                )
        result[name] = kept
    return result

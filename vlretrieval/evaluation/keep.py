"""Room for a gallery's tokens: memory while it is small, a mapped temporary file beyond, so that RAM is bounded."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

IN_MEMORY_BYTES = 4 << 30


def room_for(shape: Sequence[int], dtype: torch.dtype, in_memory: int = IN_MEMORY_BYTES) -> Tensor:
    """An uninitialised CPU tensor; from ``in_memory`` bytes on it lies in a file that vanishes with it."""
    count = math.prod(shape)
    if count * dtype.itemsize <= in_memory:
        return torch.empty(tuple(shape), dtype=dtype)
    with tempfile.NamedTemporaryFile(prefix="vlretrieval-tokens-", delete=False) as file:
        file.truncate(count * dtype.itemsize)
    try:
        return torch.from_file(file.name, shared=True, size=count, dtype=dtype).view(tuple(shape))
    finally:
        Path(file.name).unlink()  # the mapping keeps it alive

"""Gradient caching (arXiv:2101.06983): encoders and matching in chunks, so that a large batch needs the memory of one.

The paper's two passes are written out as activation checkpointing of whole chunks: the first pass keeps embeddings and
tokens only; in the backward pass each chunk is computed again, with the random state that it had, and its gradient goes
on into the weights before the next chunk's turn. So the loss sees all negatives, DDP one backward pass, and dropout and
patch dropout give the same features twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vlretrieval.model.crossmodal import Encoded


def runs(rows: int, size: int) -> Iterator[slice]:
    """Runs of at most ``size`` rows that make up ``rows``."""
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def recomputed(function: Callable[..., Encoded], size: int | None, *rows: Tensor) -> Encoded:
    """``function(*rows)``, ``size`` rows at a time, computed again in the backward pass; None: all at once."""
    if size is None:
        return function(*rows)
    parts = [
        checkpoint(function, *(tensor[run] for tensor in rows), use_reentrant=False) for run in runs(len(rows[0]), size)
    ]
    masks = [part.mask for part in parts if part.mask is not None]
    return Encoded(
        torch.cat([part.embedding for part in parts]),
        torch.cat([part.tokens for part in parts]),
        torch.cat(masks) if masks else None,
    )


def recomputed_logits(function: Callable[[slice], Tensor], rows: int, size: int) -> Tensor:
    """``function`` of runs of ``rows`` rows -> their logits end to end, computed again in the backward pass."""
    return torch.cat([checkpoint(function, run, use_reentrant=False) for run in runs(rows, size)])

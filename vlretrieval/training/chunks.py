"""Gradient caching (arXiv:2101.06983): encoders and matching in chunks, so that a large batch needs the memory of one.

The paper's two passes are written out as activation checkpointing of whole chunks: the first pass keeps embeddings and
tokens only; in the backward pass each chunk is computed again, with the random state that it had, and its gradient goes
on into the weights before the next chunk's turn. So the loss sees all negatives, DDP one backward pass, and dropout and
patch dropout give the same features twice. Batch norms that are trained see a chunk, not the batch: freeze them
where that matters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from vlretrieval.model.encoded import Encoded


def runs(rows: int, size: int) -> Iterator[slice]:
    """Runs of at most ``size`` rows that make up ``rows``."""
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def recomputed(function: Callable[..., Encoded], size: int | None, *rows: Tensor, model: nn.Module) -> Encoded:
    """``function(*rows)``, ``size`` rows at a time, computed again in the backward pass; None: all at once.

    Args:
        function: from tensors of n rows to what ``model`` makes of them.
        rows: tensors (B, ...).
        model: its batch norms count each chunk into their running statistics once.
    """
    if size is None:
        return function(*rows)
    parts = [
        checkpoint(
            function,
            *(tensor[run] for tensor in rows),
            use_reentrant=False,
            context_fn=lambda: (nullcontext(), statistics_held(model)),
        )
        for run in runs(len(rows[0]), size)
    ]
    masks = [part.mask for part in parts if part.mask is not None]
    return Encoded(
        torch.cat([part.embedding for part in parts]),
        torch.cat([part.tokens for part in parts]),
        torch.cat(masks) if masks else None,
    )


@contextmanager
def statistics_held(model: nn.Module) -> Iterator[None]:
    """Within, batch norms in training compute as ever and leave their running statistics alone."""
    norms: list[Any] = [
        module
        for module in model.modules()
        if isinstance(module, _BatchNorm) and module.training and module.track_running_stats
    ]
    before = [(norm.momentum, norm.num_batches_tracked.clone()) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0  # of the new statistics; without tracking other tensors would be kept than the first time
    try:
        yield
    finally:
        for norm, (momentum, batches) in zip(norms, before, strict=True):
            norm.momentum = momentum
            norm.num_batches_tracked.copy_(batches)


def recomputed_logits(function: Callable[[slice], Tensor], rows: int, size: int) -> Tensor:
    """``function`` of runs of ``rows`` rows -> their logits end to end, computed again in the backward pass."""
    return torch.cat([checkpoint(function, run, use_reentrant=False) for run in runs(rows, size)])

"""Everybody's rows on every rank, with gradients. Beside :mod:`sharding`, what speaks to ``torch.distributed``."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torch.nn.functional as F
from torch import Tensor

from vlretrieval.model.encoded import Encoded


def world() -> tuple[int, int]:
    """(rank, world size); (0, 1) outside a distributed run."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def gather_rows(rows: Tensor) -> Tensor:
    """(B, ...) of each rank -> (W B, ...) in rank order; gradients go back to the rank that they belong to.

    With the loss averaged over a rank's own rows and gradients averaged over ranks (what DDP does), the gradient is
    that of the whole batch on one process. Every rank must bring equally many rows.
    """
    if world()[1] == 1:
        return rows
    if rows.is_floating_point() and rows.requires_grad:
        return torch.cat(dist_nn.all_gather(rows.contiguous()))
    gathered = [torch.empty_like(rows) for _ in range(world()[1])]
    dist.all_gather(gathered, rows.contiguous())
    return torch.cat(gathered)


def gather_encoded(encoded: Encoded, *, tokens: bool) -> Encoded:
    """All ranks' rows of an :class:`Encoded`; its tokens too (padded to the longest of all) if they are asked for."""
    if world()[1] == 1:
        return encoded
    embedding = gather_rows(encoded.embedding)
    if not tokens:
        return Encoded(embedding, encoded.tokens[:0])
    length = torch.tensor(encoded.tokens.shape[1], device=embedding.device)
    dist.all_reduce(length, op=dist.ReduceOp.MAX)
    short = int(length) - encoded.tokens.shape[1]
    mask = encoded.mask
    if mask is None and short:  # this rank's rows are shorter than another's: say which places are real
        mask = torch.ones(encoded.tokens.shape[:2], dtype=torch.bool, device=embedding.device)
    return Encoded(
        embedding,
        gather_rows(F.pad(encoded.tokens, (0, 0, 0, short))),
        None if mask is None else gather_rows(F.pad(mask, (0, short)).to(torch.uint8)).bool(),
    )


def over_ranks(figures: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each scalar's mean over ranks, on every rank: a rank's own loss is that of its rows alone."""
    if world()[1] == 1 or not figures:
        return figures
    means = torch.stack([value.detach().float() for value in figures.values()])
    dist.all_reduce(means)
    return dict(zip(figures, means / world()[1], strict=True))


def highest(value: int, device: torch.device) -> int:
    """The highest of all ranks' values, on every rank: how they agree on what to do next."""
    if world()[1] == 1:
        return value
    shared = torch.tensor(value, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return int(shared)


def mean_over_ranks(value: Tensor) -> Tensor:
    """The mean of all ranks' values of a scalar, float32, without a gradient."""
    shared = value.detach().float().clone()
    if world()[1] > 1:
        dist.all_reduce(shared)
    return shared / world()[1]

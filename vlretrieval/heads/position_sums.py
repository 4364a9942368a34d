"""How far place alone explains a head's maps: sums over a data set."""

from __future__ import annotations

import torch
from torch import Tensor

from vlretrieval.heads import measures
from vlretrieval.heads.figures import Floats


class PositionSums:
    """Mean map by place, entropies and freedoms: what :func:`measures.explained_by_position` asks for."""

    def __init__(self) -> None:
        self.total = torch.zeros(0, 0, 0, dtype=torch.float64)
        self.visits = torch.zeros(0, dtype=torch.float64)
        self.entropy = torch.zeros(0, dtype=torch.float64)
        self.freedom = 0.0

    @property
    def queries(self) -> int:
        return int(self.visits.sum())

    def add(self, weights: Tensor, rows: Tensor, keys: Tensor, entropies: Tensor) -> None:
        """(B, H, Lq, Lk) maps, (B, Lq) and (B, Lk) bool, (B, H, Lq) entropies."""
        weight = rows[:, None, :, None].to(weights.dtype)
        batch = (weights * weight).sum(0).double().cpu()
        shape = tuple(max(a, b) for a, b in zip(self.total.shape, batch.shape, strict=True))
        self.total = _grown(self.total, shape) + _grown(batch, shape)
        self.visits = _grown(self.visits, shape[1:2]) + _grown(rows.sum(0).double().cpu(), shape[1:2])
        own = (entropies * rows[:, None]).sum((0, 2)).double().cpu()
        self.entropy = own if not len(self.entropy) else self.entropy + own
        self.freedom += float((rows.sum(1) * keys.sum(1).clamp(min=1).log()).sum())

    def common_map(self, square: bool) -> Tensor:
        """(H, Lq, Lk) float32 mean map of the places that a tenth of the pairs or more have; longer texts are rare.

        Args:
            square: keys are the same tokens as queries, and are cut to the same places.
        """
        common = int((self.visits >= 0.1 * self.visits.max()).sum())
        mean = (self.total / self.visits[:, None].clamp(min=1)).float()[:, :common]
        return mean[:, :, :common] if square and common > 1 else mean

    def explained(self) -> Floats:
        mean = self.total / self.visits[:, None].clamp(min=1)
        freedom = torch.tensor(self.freedom, dtype=torch.float64)
        return measures.explained_by_position(mean, self.visits, self.entropy, freedom).numpy()


def _grown(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(tensor.shape) == shape:
        return tensor
    larger = torch.zeros(shape, dtype=tensor.dtype)
    larger[tuple(slice(0, size) for size in tensor.shape)] = tensor
    return larger

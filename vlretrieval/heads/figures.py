"""A layer's heads in figures: means over pictures with their intervals, from sums alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Figure:
    """A mean over pictures, for each of H heads, and its 95 % interval (1.96 standard errors); NaN where unmeasured."""

    mean: Floats
    low: Floats
    high: Floats
    count: int


class Running:
    """Sums from which a mean and its error follow; NaN entries are left out."""

    def __init__(self) -> None:
        self.count: Tensor | float = 0.0
        self.total: Tensor | float = 0.0
        self.squares: Tensor | float = 0.0

    def add(self, values: Tensor) -> None:
        """(n, H) figures of n pictures."""
        values = values.double().cpu()
        there = ~values.isnan()
        values = values.nan_to_num()
        self.count = self.count + there.sum(0)
        self.total = self.total + values.sum(0)
        self.squares = self.squares + (values * values).sum(0)

    def figure(self) -> Figure:
        count, total, squares = (
            np.asarray(value, dtype=np.float64) for value in (self.count, self.total, self.squares)
        )
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = np.where(count > 0, total / count, np.nan)
            variance = np.clip(squares / count - mean**2, 0, None) * count / (count - 1)
            half = 1.96 * np.sqrt(variance / count)
        return Figure(mean, mean - half, mean + half, int(count.max(initial=0)))


@dataclass
class LayerStatistics:
    """A layer's heads in figures.

    Attributes:
        figures: "entropy", "distance", "neighbours", "first", "last", "separators", "column", "position", and where
            places are known "grounding", "others", "pointing".
        chance: of "neighbours", "grounding" and "pointing", for a head that looks at everything alike.
        scope: "words" if grounding is that of each phrase, "caption" if one query speaks for the whole caption.
        words: for each head, (word, score) that it answers to, best first.
        mean_map: (H, Lq, Lk) mean weights by place, of places that are not rare.
    """

    name: str
    kind: str
    depth: int
    heads: int
    title: str
    figures: dict[str, Figure] = field(default_factory=dict)
    chance: dict[str, float] = field(default_factory=dict)
    scope: str | None = None
    words: list[list[tuple[str, float]]] = field(default_factory=list)
    mean_map: Tensor = field(default_factory=lambda: torch.zeros(0))

    def of(self, measure: str, head: int) -> float:
        """A head's mean of a measure, NaN if it was not measured."""
        return float(self.figures[measure].mean[head]) if measure in self.figures else math.nan

    def interval(self, measure: str, head: int) -> tuple[float, float]:
        """Its 95 % interval."""
        figure = self.figures[measure]
        return float(figure.low[head]), float(figure.high[head])

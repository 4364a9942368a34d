"""Whether a true caption scores above its false sister on the same picture, by kind of fault, for both scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vlretrieval.data.splits import HardNegatives
from vlretrieval.metrics.bootstrap import bootstrap_means, cluster_sums, interval
from vlretrieval.metrics.scores import IntArray


def draw_negatives(negatives: HardNegatives, per_kind: int | None, seed: int = 0) -> IntArray:
    """Rows of the hard negatives that are scored: all, or ``per_kind`` of each kind drawn without replacement."""
    if per_kind is None:
        return np.arange(len(negatives))
    if per_kind < 1:
        raise ValueError(f"negatives_per_kind={per_kind} must be at least 1, or null for all of them")
    kinds = np.asarray(list(negatives.kinds))
    rng = np.random.default_rng(seed)
    drawn = [rng.permutation(np.flatnonzero(kinds == kind))[:per_kind] for kind in sorted(set(kinds.tolist()))]
    return np.sort(np.concatenate(drawn)) if drawn else np.arange(0)


@dataclass(frozen=True)
class NegativePairs:
    """Pairs of a true and a false caption on one picture, and whether each score tells them apart.

    Attributes:
        kind: (K,) kind of fault. image: (K,) the picture, the cluster that intervals draw.
        correct: {"cosine": (K,) bool, "match": (K,) bool}; an equal score counts against the model.
    """

    kind: npt.NDArray[np.str_]
    image: IntArray
    correct: dict[str, npt.NDArray[np.bool_]]


def accuracies(pairs: NegativePairs, *, replicates: int = 1000, seed: int = 0) -> dict[str, Any]:
    """Accuracy by kind and over all, percent, for each score; with intervals, and the paired difference's.

    Returns:
        {kind: {"pairs": n, "cosine": {"accuracy", "interval"}, "match": ..., "difference": ...}, ..., "all": ...};
        "difference" is match - cosine in points where both scores are given.
    """
    scores = pairs.correct
    correct = {name: 100.0 * right for name, right in scores.items()}
    if {"cosine", "match"} <= correct.keys():
        correct["difference"] = correct["match"] - correct["cosine"]
    names, table = list(correct), np.stack(list(correct.values()), axis=1)
    kind_of, image = pairs.kind, pairs.image
    result: dict[str, Any] = {}
    for kind in [*sorted(set(kind_of.tolist())), "all"]:
        chosen = np.arange(len(kind_of)) if kind == "all" else np.flatnonzero(kind_of == kind)
        figures: dict[str, Any] = {"pairs": len(chosen)}
        means = table[chosen].mean(0)
        for column, name in enumerate(names):
            figures[name] = {"accuracy" if name in scores else "points": float(means[column])}
        if replicates:
            pictures, cluster = np.unique(image[chosen], return_inverse=True)
            drawn = bootstrap_means(*cluster_sums(table[chosen], cluster, len(pictures)), replicates, seed)
            for name, bounds in zip(names, interval(drawn).tolist(), strict=True):
                figures[name]["interval"] = bounds
        result[kind] = figures
    return result

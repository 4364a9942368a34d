"""Whether a true caption scores above its false sister on the same picture, by kind of fault, for both scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vlretrieval.data.splits import HardNegatives
from vlretrieval.metrics.bootstrap import bootstrap_means, cluster_sums, interval
from vlretrieval.metrics.scores import IntArray

Floats = npt.NDArray[np.float64]


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


def accuracies(
    kinds: Sequence[str],
    image: IntArray,
    scores: dict[str, tuple[Floats, Floats]],
    *,
    replicates: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """Accuracy by kind and over all, percent, for each score; with intervals, and the paired difference's.

    Args:
        kinds: (K,) kind of each pair of a true and a false caption.
        image: (K,) its picture: the clusters that the intervals draw.
        scores: {"cosine": (true (K,), false (K,)), "match": ...}. An equal score counts against the model.

    Returns:
        {kind: {"pairs": n, "cosine": {"accuracy", "interval"}, "match": ..., "difference": ...}, ..., "all": ...};
        "difference" is match - cosine in points where both scores are given.
    """
    correct = {name: 100.0 * (true > false) for name, (true, false) in scores.items()}
    if {"cosine", "match"} <= correct.keys():
        correct["difference"] = correct["match"] - correct["cosine"]
    names, table = list(correct), np.stack(list(correct.values()), axis=1)
    kind_of = np.asarray(list(kinds))
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

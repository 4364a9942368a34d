"""How far a mean over queries can be trusted: the bootstrap over pictures.

The captions of one picture stand or fall together, so pictures are drawn, not queries (a cluster bootstrap; Efron and
Tibshirani, An Introduction to the Bootstrap, 1993, ch. 13 for percentile intervals). Everything drawn in one call is
drawn together: two columns of one call are paired, and so is their difference.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vlretrieval.metrics.scores import IntArray

Floats = npt.NDArray[np.float64]


def cluster_sums(values: npt.ArrayLike, cluster: IntArray, clusters: int) -> tuple[Floats, Floats]:
    """Sums and counts per cluster, what the bootstrap draws from.

    Args:
        values: (Q,) or (Q, m) one row a query.
        cluster: (Q,) which cluster (picture) each query belongs to, 0 <= cluster < clusters.

    Returns:
        sums (clusters, m) and counts (clusters, m).
    """
    table = np.asarray(values, dtype=np.float64)
    table = table[:, None] if table.ndim == 1 else table
    sums = np.stack([np.bincount(cluster, column, minlength=clusters) for column in table.T], axis=1).astype(np.float64)
    counts = np.bincount(cluster, minlength=clusters).astype(np.float64)
    return sums, np.repeat(counts[:, None], table.shape[1], axis=1)


def bootstrap_means(sums: Floats, counts: Floats, replicates: int = 1000, seed: int = 0) -> Floats:
    """(replicates, m) means over queries, each replicate drawing as many clusters as there are, with replacement.

    A mean is the drawn clusters' sum over their count, so clusters of uneven size weigh by their queries. A column that
    a replicate draws nothing of gives NaN there. Memory stays at a few MB for any number of clusters up to a million.
    """
    clusters = len(sums)
    rng = np.random.default_rng(seed)
    means = np.empty((replicates, sums.shape[1]))
    step = max(1, 1_000_000 // clusters)
    for start in range(0, replicates, step):
        size = min(step, replicates - start)
        drawn = rng.integers(0, clusters, (size, clusters)) + clusters * np.arange(size)[:, None]
        weight = np.bincount(drawn.reshape(-1), minlength=size * clusters).reshape(size, clusters).astype(np.float64)
        with np.errstate(invalid="ignore"):
            means[start : start + size] = (weight @ sums) / (weight @ counts)
    return means


def interval(means: Floats, level: float = 0.95) -> Floats:
    """(m, 2) percentile interval of each column of bootstrap means; NaN replicates are left out."""
    if not 0 < level < 1:
        raise ValueError(f"level={level}: an interval's level lies between 0 and 1; 0.95 is the usual one")
    tail = (1 - level) / 2
    return np.nanquantile(means, [tail, 1 - tail], axis=0).T

"""Embeddings and positives in, figures out: pure functions of NumPy arrays; no model, no file, no process group.

Reading order: scores, ranks, recall, bootstrap, graded, hubness.
"""

from vlretrieval.metrics.bootstrap import bootstrap_means, cluster_sums, interval
from vlretrieval.metrics.ranks import Ranks, rank_both
from vlretrieval.metrics.recall import Fold, both_directions, mean_rank, mean_reciprocal_rank, median_rank, recall_at
from vlretrieval.metrics.scores import NonFiniteEmbedding, unit_rows

__all__ = [
    "Fold",
    "NonFiniteEmbedding",
    "Ranks",
    "both_directions",
    "bootstrap_means",
    "cluster_sums",
    "interval",
    "mean_rank",
    "mean_reciprocal_rank",
    "median_rank",
    "rank_both",
    "recall_at",
    "unit_rows",
]

"""From ranks to the figures of a results table: R@k, median and mean rank, MRR, rsum, with their intervals.

"Recall@k" is the field's hit rate, the share of queries with at least one positive among the first k, in percent; the
share of all positives found is :func:`vlretrieval.metrics.graded.true_recall`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vlretrieval.metrics.bootstrap import Floats, bootstrap_means, cluster_sums, interval
from vlretrieval.metrics.ranks import Ranks, TieRule
from vlretrieval.metrics.scores import IntArray

RULES: tuple[TieRule, ...] = ("pessimistic", "expected", "optimistic")


def recall_at(ranks: Ranks, k: int, ties: TieRule = "pessimistic") -> float:
    """Share of queries with a positive among the first k, percent. k beyond the gallery takes all of it."""
    return 100 * float(ranks.hits(k, ties).mean())


def median_rank(ranks: Ranks, ties: TieRule = "pessimistic") -> float:
    """Median place of the best positive, 1 is best; the mean of the middle two when they are even in number."""
    return float(np.median(ranks.rank(ties)))


def mean_rank(ranks: Ranks, ties: TieRule = "pessimistic") -> float:
    return float(ranks.rank(ties).mean())


def mean_reciprocal_rank(ranks: Ranks, ties: TieRule = "pessimistic") -> float:
    """Mean of 1 / rank of the best positive, 0 to 1 (under "expected": of the mean rank)."""
    return float((1 / ranks.rank(ties)).mean())


def query_figures(ranks: Ranks, ks: Sequence[int]) -> tuple[list[str], Floats]:
    """Names (m) and one row of figures a query (Q, m): what is averaged for the table, and what is resampled."""
    rank = ranks.rank()
    columns = [100 * ranks.hits(k) for k in ks] + [rank, 1 / rank]
    return [f"R@{k}" for k in ks] + ["mean_rank", "MRR"], np.stack(columns, axis=1)


def direction_figures(ranks: Ranks, ks: Sequence[int]) -> dict[str, Any]:
    """One direction's figures as plain data; ties count against the model, the other two rules stand beside."""
    if not len(ranks):
        raise ValueError("no query has a positive: there is nothing to rank")
    names, table = query_figures(ranks, ks)
    figures: dict[str, Any] = dict(zip(names, table.mean(0).tolist(), strict=True))
    figures["median_rank"] = median_rank(ranks)
    figures["queries"], figures["gallery"], figures["left_out"] = len(ranks), ranks.gallery, ranks.left_out
    figures["tied_share"] = 100 * ranks.tied_share
    figures["ties"] = {f"R@{k}": [recall_at(ranks, k, rule) for rule in RULES] for k in ks}
    return figures


def both_directions(
    t2i: Ranks,
    i2t: Ranks,
    caption_image: IntArray,
    ks: Sequence[int] = (1, 5, 10),
    *,
    replicates: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """{"t2i": figures, "i2t": figures, "rsum": sum of all recalls}, with 95 % intervals when replicates > 0.

    Args:
        caption_image: (M,) each caption's picture: the clusters that the intervals draw.
        replicates: bootstrap draws; 0 leaves the intervals out (training's validation, where time counts).
    """
    result: dict[str, Any] = {"t2i": direction_figures(t2i, ks), "i2t": direction_figures(i2t, ks)}
    result["rsum"] = sum(result[way][f"R@{k}"] for way in ("t2i", "i2t") for k in ks)
    if replicates:
        clusters = max(int(caption_image.max()), int(i2t.query.max())) + 1
        names, t2i_table = query_figures(t2i, ks)
        _, i2t_table = query_figures(i2t, ks)
        t2i_sums, t2i_counts = cluster_sums(t2i_table, caption_image[t2i.query], clusters)
        i2t_sums, i2t_counts = cluster_sums(i2t_table, i2t.query, clusters)
        means = bootstrap_means(np.hstack([t2i_sums, i2t_sums]), np.hstack([t2i_counts, i2t_counts]), replicates, seed)
        for way, part in (("t2i", means[:, : len(names)]), ("i2t", means[:, len(names) :])):
            result[way]["interval"] = dict(zip(names, interval(part).tolist(), strict=True))
        recalls = [column for column, name in enumerate(names * 2) if name.startswith("R@")]
        result["rsum_interval"] = interval(means[:, recalls].sum(1, keepdims=True))[0].tolist()
    return result

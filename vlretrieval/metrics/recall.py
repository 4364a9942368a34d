"""From ranks to the figures of a results table: R@k, median and mean rank, MRR, rsum, with their intervals.

"Recall@k" is the field's hit rate, the share of queries with at least one positive among the first k, in percent; the
share of all positives found is :func:`vlretrieval.metrics.graded.true_recall`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

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


def query_intervals(
    ranks: Ranks, ks: Sequence[int], cluster: IntArray, *, replicates: int, seed: int = 0
) -> dict[str, list[float]]:
    """{name: 95 % interval} of one direction's figures. ``cluster``: (queries of the gallery,) each one's picture."""
    names, table = query_figures(ranks, ks)
    own = cluster[ranks.query]
    drawn = bootstrap_means(*cluster_sums(table, own, int(own.max()) + 1), replicates, seed)
    return dict(zip(names, interval(drawn).tolist(), strict=True))


class Fold(NamedTuple):
    """One gallery: its ranks both ways, and each caption's picture (M,), the clusters that intervals draw."""

    t2i: Ranks
    i2t: Ranks
    caption_image: IntArray


def both_directions(
    folds: Sequence[Fold], ks: Sequence[int] = (1, 5, 10), *, replicates: int = 1000, seed: int = 0
) -> dict[str, Any]:
    """{"t2i": figures, "i2t": figures, "rsum": sum of all recalls}, means over the folds; with 95 % intervals.

    Args:
        folds: usually one gallery; each of several counts alike.
        replicates: bootstrap draws; 0 leaves the intervals out (training's validation, where time counts).
    """
    found = [{"t2i": direction_figures(f.t2i, ks), "i2t": direction_figures(f.i2t, ks)} for f in folds]
    result: dict[str, Any] = {way: _mean([figures[way] for figures in found]) for way in ("t2i", "i2t")}
    result["rsum"] = sum(result[way][f"R@{k}"] for way in ("t2i", "i2t") for k in ks)
    if replicates:
        names, _ = query_figures(folds[0].t2i, ks)
        means = np.mean([_draw(fold, ks, replicates, seed + n) for n, fold in enumerate(folds)], axis=0)
        for way, part in (("t2i", means[:, : len(names)]), ("i2t", means[:, len(names) :])):
            result[way]["interval"] = dict(zip(names, interval(part).tolist(), strict=True))
        recalls = [column for column, name in enumerate(names * 2) if name.startswith("R@")]
        result["rsum_interval"] = interval(means[:, recalls].sum(1, keepdims=True))[0].tolist()
    return result


def _draw(fold: Fold, ks: Sequence[int], replicates: int, seed: int) -> Floats:
    """(replicates, 2 m) means of both directions' figures, one draw of pictures for both."""
    clusters = max(int(fold.caption_image.max()), int(fold.i2t.query.max())) + 1
    t2i = cluster_sums(query_figures(fold.t2i, ks)[1], fold.caption_image[fold.t2i.query], clusters)
    i2t = cluster_sums(query_figures(fold.i2t, ks)[1], fold.i2t.query, clusters)
    return bootstrap_means(np.hstack([t2i[0], i2t[0]]), np.hstack([t2i[1], i2t[1]]), replicates, seed)


def _mean(figures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means of like figures; counts of queries are summed."""
    if len(figures) == 1:
        return figures[0]
    mean: dict[str, Any] = {}
    for name, value in figures[0].items():
        values = [found[name] for found in figures]
        if isinstance(value, dict):
            mean[name] = _mean(values)
        elif name in ("queries", "left_out"):
            mean[name] = sum(values)
        elif name == "gallery":
            mean[name] = value if len(set(values)) == 1 else values
        else:
            mean[name] = np.mean(values, axis=0).tolist()
    return mean

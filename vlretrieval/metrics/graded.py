"""Figures that look at every positive, not only the best: mAP@R, average precision, R-precision, nDCG, true recall.

They stand on the place of each positive in the full list, found by counting as in :mod:`vlretrieval.metrics.ranks`, so
ties count against the model and nothing is sorted but a query's own positives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vlretrieval.metrics.ranks import BLOCK, Probes, check_embeddings, check_positives, count_rivals
from vlretrieval.metrics.scores import Embeddings, IntArray, pair_scores

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PositivePlaces:
    """Where all positives of all queries stand, wrong candidates first at an equal score.

    Flat over (query, positive), grouped by query, best place first: ``number`` counts a query's positives 1, 2, ...
    """

    query: IntArray  # (Q,) queries with a positive, ascending
    total: IntArray  # (Q,) R, the positives of each
    place: IntArray  # (P,) place in the full list, 1 is best
    number: IntArray  # (P,) 1..R within the query
    gallery: int

    @property
    def owner(self) -> IntArray:
        """(P,) position in ``query`` of each positive."""
        return np.repeat(np.arange(len(self.query)), self.total)

    def per_query(self, values: npt.ArrayLike) -> Floats:
        """(Q,) sums of (P,) values."""
        sums = np.bincount(self.owner, np.asarray(values, dtype=np.float64), minlength=len(self.query))
        return sums.astype(np.float64)


def positive_places(
    text: Embeddings, image: Embeddings, positives: npt.ArrayLike, block: int = BLOCK
) -> tuple[PositivePlaces, PositivePlaces]:
    """The places of all positives, (text to image, image to text). Arguments as for ``rank_both``."""
    text_norms, image_norms = check_embeddings(text, image)
    pairs = check_positives(positives, len(text), len(image))
    own = pair_scores(text, image, pairs[:, 0], pairs[:, 1])
    probes = []
    for column in (0, 1):
        order = np.lexsort((-own, pairs[:, column]))
        probes.append(Probes(pairs[order, column], own[order]))
    counts = count_rivals(text, image, pairs, probes[0], probes[1], text_norms, image_norms, block)
    found = []
    for probe, (above, tied), gallery in zip(probes, counts, (len(image), len(text)), strict=True):
        query, total = np.unique(probe.row, return_counts=True)
        first = np.repeat(np.cumsum(total) - total, total)
        number = np.arange(len(probe.row)) - first + 1
        found.append(PositivePlaces(query, total, number + above + tied, number, gallery))
    return found[0], found[1]


def precision_at_r(places: PositivePlaces, absent: IntArray | int = 0) -> Floats:
    """(Q,) R-precision: the share of positives among the first R, R being how many the query has.

    Args:
        absent: (Q,) further positives of each query that are not in the gallery, and so are missed.
    """
    wanted = places.total + absent
    return places.per_query(places.place <= np.repeat(wanted, places.total)) / wanted


def average_precision_at_r(places: PositivePlaces, absent: IntArray | int = 0) -> Floats:
    """(Q,) 1/R times the sum of precision(i) over positives at places i <= R (arXiv:2003.08505, eq. 1)."""
    wanted = places.total + absent
    within = places.place <= np.repeat(wanted, places.total)
    return places.per_query(within * places.number / places.place) / wanted


def average_precision(places: PositivePlaces) -> Floats:
    """(Q,) mean over the positives of the precision at the place of each."""
    return places.per_query(places.number / places.place) / places.total


def true_recall(places: PositivePlaces, k: int) -> Floats:
    """(Q,) share of a query's positives that are among the first k; the hit rate asks only for one."""
    return places.per_query(places.place <= k) / places.total


def ndcg(places: PositivePlaces, k: int | None = None) -> Floats:
    """(Q,) normalised discounted cumulative gain with gain 1 and discount log2(1 + place), over the first k or all."""
    limit = places.gallery if k is None else k
    gain = places.per_query((places.place <= limit) / np.log2(1 + places.place))
    ideal = np.cumsum(1 / np.log2(2 + np.arange(min(int(places.total.max()), limit))))
    return gain / ideal[np.minimum(places.total, limit) - 1]


def graded_figures(places: PositivePlaces, ks: Sequence[int]) -> dict[str, Any]:
    """One direction's figures as plain data: nDCG from 0 to 1, the others in percent."""
    return {
        "mAP@R": 100 * float(average_precision_at_r(places).mean()),
        "mAP": 100 * float(average_precision(places).mean()),
        "R-precision": 100 * float(precision_at_r(places).mean()),
        "nDCG": float(ndcg(places).mean()),
        **{f"nDCG@{k}": float(ndcg(places, k).mean()) for k in ks},
        **{f"true_recall@{k}": 100 * float(true_recall(places, k).mean()) for k in ks},
        "positives_a_query": float(places.total.mean()),
    }

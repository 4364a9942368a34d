"""The dual encoder's shortlists: each query's best ``top_k`` candidates, streamed in blocks, in exact order.

As in :mod:`vlretrieval.metrics.ranks`, float32 products are a filter only: their last bit differs with the block, and
would decide which of two equal pictures is the last of a shortlist. What they let through is scored again in double
precision, and the order is that of those scores.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vlretrieval.metrics.ranks import BLOCK, TIE, rounding
from vlretrieval.metrics.scores import Embeddings, IntArray, pair_scores, row_norms, rows_float32

Floats = npt.NDArray[np.float64]

AT_ONCE = 1 << 22  # scores in double precision held at a time
SPARE = 8  # candidates held beyond top_k while the blocks go by, so that few queries need a second look


def shortlist(
    queries: Embeddings, gallery: Embeddings, top_k: int, positives: IntArray, block: int = BLOCK
) -> tuple[IntArray, Floats]:
    """Candidates and scores of each query, best first.

    Args:
        queries: (Q, E); gallery: (G, E). Scores are dot products, cosines for unit vectors.
        top_k: how many; more than the gallery holds gives the whole gallery.
        positives: (P, 2) pairs (query, candidate), sorted. At an equal score a wrong candidate goes first, so that a
            tie at the end of the list is not won by luck; then the earlier one.

    Returns:
        candidates (Q, K) int64 and scores (Q, K) float64, K = min(top_k, G). Neither depends on ``block``.
    """
    size = min(top_k, len(gallery))
    candidates = np.empty((len(queries), size), dtype=np.int64)
    scores = np.empty((len(queries), size), dtype=np.float64)
    if not size:
        return candidates, scores
    width, longest = queries.shape[1], float(row_norms(gallery, "gallery").max())
    reach = row_norms(queries, "query") * longest
    doubt = rounding(width) * reach + width * 2.0**-149
    for top in range(0, len(queries), block):
        number = np.arange(top, min(top + block, len(queries)))
        held, edge = _filtered(queries, gallery, top, min(size + SPARE, len(gallery)), block)
        exact = pair_scores(queries, gallery, np.repeat(number, held.shape[1]), held.reshape(-1)).reshape(held.shape)
        order = _order(exact, held, number, positives, len(gallery), TIE * reach[number])[:, :size]
        candidates[number] = np.take_along_axis(held, order, axis=1)
        scores[number] = np.take_along_axis(exact, order, axis=1)
        if held.shape[1] == len(gallery):
            continue
        # what was dropped may still be level with, or above, the last one held
        again = number[edge + doubt[number] >= scores[number, -1] - TIE * reach[number]]
        step = max(1, AT_ONCE // len(gallery))
        for first in range(0, len(again), step):
            some = again[first : first + step]
            candidates[some] = _looked_at_again(queries, gallery, some, size, positives, TIE * reach[some], block)
            scores[some] = pair_scores(
                queries, gallery, np.repeat(some, size), candidates[some].reshape(-1)
            ).reshape(len(some), size)  # fmt: skip
    return candidates, scores


def _filtered(queries: Embeddings, gallery: Embeddings, top: int, size: int, block: int) -> tuple[IntArray, Floats]:
    """(rows, size) candidates of a block of queries by float32 score, in no order, and (rows,) the least of them."""
    rows = rows_float32(queries, top, top + block)
    score = np.empty((len(rows), 0), dtype=np.float32)
    held = np.empty((len(rows), 0), dtype=np.int64)
    for left in range(0, len(gallery), block):
        product = rows @ rows_float32(gallery, left, left + block).T
        at = np.broadcast_to(np.arange(left, left + product.shape[1]), product.shape)
        score, held = np.concatenate([score, product], axis=1), np.concatenate([held, at], axis=1)
        if score.shape[1] > size:
            keep = np.argpartition(score, score.shape[1] - size, axis=1)[:, -size:]
            score, held = np.take_along_axis(score, keep, axis=1), np.take_along_axis(held, keep, axis=1)
    return held, score.min(1).astype(np.float64)


def _looked_at_again(
    queries: Embeddings,
    gallery: Embeddings,
    number: IntArray,
    size: int,
    positives: IntArray,
    reach: Floats,
    block: int,
) -> IntArray:
    """(rows, size) lists of queries with many candidates level at the end: the whole gallery in double precision."""
    rows = np.asarray(queries[number], dtype=np.float32).astype(np.float64)
    exact = np.empty((len(rows), len(gallery)))
    for left in range(0, len(gallery), block):
        exact[:, left : left + block] = rows @ rows_float32(gallery, left, left + block).astype(np.float64).T
    edge = np.partition(exact, len(gallery) - size, axis=1)[:, len(gallery) - size]
    lists = np.empty((len(rows), size), dtype=np.int64)
    for row, query in enumerate(number.tolist()):
        held = np.flatnonzero(exact[row] >= edge[row] - reach[row])
        order = _order(exact[row][held][None], held[None], np.array([query]), positives, len(gallery), reach[[row]])
        lists[row] = held[order[0, :size]]
    return lists


def _order(
    exact: Floats, held: IntArray, number: IntArray, positives: IntArray, gallery: int, reach: Floats
) -> IntArray:
    """Columns of each row in order: higher scores, at an equal one wrong candidates, then earlier ones."""
    own = positives[np.searchsorted(positives[:, 0], number[0]) : np.searchsorted(positives[:, 0], number[-1] + 1)]
    good = np.isin(number[:, None] * gallery + held, own[:, 0] * gallery + own[:, 1])
    down = np.argsort(-exact, axis=1, kind="stable")
    falls = -np.diff(np.take_along_axis(exact, down, axis=1), axis=1) > reach[:, None]
    level = np.concatenate([np.zeros((len(held), 1), dtype=np.int64), np.cumsum(falls, axis=1)], axis=1)
    group = np.empty_like(level)
    np.put_along_axis(group, down, level, axis=1)
    return np.lexsort((held, good, group), axis=1)

"""The dual encoder's shortlists: each query's best ``top_k`` candidates, streamed in blocks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vlretrieval.metrics.ranks import BLOCK
from vlretrieval.metrics.scores import Embeddings, IntArray, rows_float32

Float32 = npt.NDArray[np.float32]


def shortlist(
    queries: Embeddings, gallery: Embeddings, top_k: int, positives: IntArray, block: int = BLOCK
) -> tuple[IntArray, Float32]:
    """Candidates and scores of each query, best first.

    Args:
        queries: (Q, E); gallery: (G, E). Scores are dot products, cosines for unit vectors.
        top_k: how many; more than the gallery holds gives the whole gallery.
        positives: (P, 2) pairs (query, candidate), sorted by query. At an equal score a wrong candidate goes first, so
            that a tie at the end of the list is not won by luck.

    Returns:
        candidates (Q, K) int64 and scores (Q, K) float32, K = min(top_k, G).
    """
    size = min(top_k, len(gallery))
    candidates = np.empty((len(queries), size), dtype=np.int64)
    scores = np.empty((len(queries), size), dtype=np.float32)
    for top in range(0, len(queries), block):
        rows = rows_float32(queries, top, top + block)
        own = positives[np.searchsorted(positives[:, 0], top) : np.searchsorted(positives[:, 0], top + len(rows))]
        best_score = np.empty((len(rows), 0), dtype=np.float32)
        best = np.empty((len(rows), 0), dtype=np.int64)
        good = np.empty((len(rows), 0), dtype=np.bool_)
        for left in range(0, len(gallery), block):
            product = rows @ rows_float32(gallery, left, left + block).T
            true = np.zeros(product.shape, dtype=np.bool_)
            here = own[(own[:, 1] >= left) & (own[:, 1] < left + product.shape[1])] - (top, left)
            true[here[:, 0], here[:, 1]] = True
            at = np.broadcast_to(np.arange(left, left + product.shape[1]), product.shape)
            best_score = np.concatenate([best_score, product], axis=1)
            best = np.concatenate([best, at], axis=1)
            good = np.concatenate([good, true], axis=1)
            keep = _best(best_score, good, size)
            best_score = np.take_along_axis(best_score, keep, axis=1)
            best, good = np.take_along_axis(best, keep, axis=1), np.take_along_axis(good, keep, axis=1)
        candidates[top : top + block], scores[top : top + block] = best, best_score
    return candidates, scores


def _best(scores: Float32, good: npt.NDArray[np.bool_], size: int) -> IntArray:
    """Columns of the ``size`` best of each row in order: higher scores, then wrong ones, then earlier ones."""
    if scores.shape[1] > 4 * size:
        # all that reach the size-th best score are sorted in full, so that ties at the edge are settled by the rule
        edge = np.partition(scores, scores.shape[1] - size, axis=1)[:, [scores.shape[1] - size]]
        reach = int((scores >= edge).sum(1).max())
        if reach <= 4 * size:
            some = np.sort(np.argpartition(-scores, reach - 1, axis=1)[:, :reach], axis=1)
            within = _best(np.take_along_axis(scores, some, axis=1), np.take_along_axis(good, some, axis=1), size)
            return np.take_along_axis(some, within, axis=1)
    return np.lexsort((good, -scores), axis=1)[:, :size]

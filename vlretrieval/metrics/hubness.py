"""Hubs: candidates that answer far more queries than their share, a disease of high dimensions; and a correction.

The correction changes the scores, so its figures are reported beside the others and never mixed in.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from vlretrieval.metrics.ranks import BLOCK, Ranks, rank_both
from vlretrieval.metrics.scores import Embeddings, IntArray, Rows, rows_float32

Floats = npt.NDArray[np.float64]


def occurrences(candidates: IntArray, gallery: int) -> IntArray:
    """(gallery,) in how many queries' lists (Q, k) each candidate stands: N_k of Radovanovic et al., JMLR 11, 2010."""
    return np.bincount(candidates.reshape(-1), minlength=gallery)


def hub_figures(candidates: IntArray, gallery: int) -> dict[str, Any]:
    """How unevenly answers are spread.

    Args:
        candidates: (Q, k) the first k answers of each query.

    Returns:
        k; "skewness" of N_k (0 is even, above 1 is hubby); "most": the largest N_k; "share_of_top_percent": percent of
        all answers that go to the most answered 1 % of candidates; "never": percent of candidates that answer nobody.
    """
    count = occurrences(candidates, gallery)
    spread = count.std()
    top = np.sort(count)[::-1][: max(1, gallery // 100)]
    return {
        "k": candidates.shape[1],
        "skewness": float(((count - count.mean()) ** 3).mean() / spread**3) if spread else 0.0,
        "most": int(count.max()),
        "share_of_top_percent": 100 * float(top.sum() / max(1, count.sum())),
        "never": 100 * float((count == 0).mean()),
    }


def mean_of_best(queries: Embeddings, gallery: Embeddings, k: int = 10, block: int = BLOCK) -> Floats:
    """(Q,) mean score of each query's k best candidates, streamed."""
    k = min(k, len(gallery))
    mean = np.empty(len(queries))
    for top in range(0, len(queries), block):
        rows = rows_float32(queries, top, top + block)
        best = np.empty((len(rows), 0), dtype=np.float32)
        for left in range(0, len(gallery), block):
            best = np.concatenate([best, rows @ rows_float32(gallery, left, left + block).T], axis=1)
            if best.shape[1] > k:
                best = np.partition(best, best.shape[1] - k, axis=1)[:, -k:]
        mean[top : top + block] = best.mean(1, dtype=np.float64)
    return mean


def corrected_ranks(
    text: Embeddings, image: Embeddings, positives: npt.ArrayLike, k: int = 10, block: int = BLOCK
) -> tuple[Ranks, Ranks]:
    """(t2i, i2t) ranks by CSLS: a candidate's score is lowered by half its mean score with its k nearest queries
    (Conneau et al., arXiv:1710.04087, eq. 3; the query's own term moves all of its candidates alike and drops out).

    It uses the other queries of the test set, which a single query in use does not have.
    """
    # one more dimension carries the offset, so that a dot product is still all there is
    one_text, one_image = Rows(text, last=np.ones(len(text))), Rows(image, last=np.ones(len(image)))
    low_text = Rows(text, last=-mean_of_best(text, image, k, block) / 2)
    low_image = Rows(image, last=-mean_of_best(image, text, k, block) / 2)
    return rank_both(one_text, low_image, positives, block)[0], rank_both(low_text, one_image, positives, block)[1]

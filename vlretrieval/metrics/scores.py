"""Embeddings as they are scored: checked once, read in blocks, and scored pair by pair in double precision.

A score is the dot product of two float32 rows (a cosine when the rows are unit vectors). Arrays may be memory-mapped
and of any float type; only the rows of the block at hand are ever converted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Embeddings = npt.NDArray[Any]  # (rows, E), float16 / float32 / float64, in memory or memory-mapped
FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]

ROWS = 1024  # rows read at a time where a whole array is passed over


class NonFiniteEmbedding(ValueError):
    """An embedding holds NaN or infinity; counted, such a row would pass for a perfect one."""


def rows_float32(embeddings: Embeddings, start: int, stop: int) -> npt.NDArray[np.float32]:
    """Rows start..stop as contiguous float32; a view where they already are."""
    return np.ascontiguousarray(embeddings[start:stop], dtype=np.float32)


def row_norms(embeddings: Embeddings, name: str) -> npt.NDArray[np.float64]:
    """(rows,) Euclidean norms, and the check that every value is finite.

    Raises:
        NonFiniteEmbedding: naming the first bad row, how many there are, and ``name``.
        ValueError: when the array is not (rows, E) with at least one row and one column.
    """
    if embeddings.ndim != 2 or 0 in embeddings.shape:
        raise ValueError(f"{name} embeddings have shape {tuple(embeddings.shape)}; wanted (rows, E), neither of them 0")
    squares = np.empty(len(embeddings))
    for start in range(0, len(embeddings), ROWS):
        block = rows_float32(embeddings, start, start + ROWS)
        # double precision: the square of a large but finite float32 must not overflow into a false alarm
        squares[start : start + ROWS] = np.einsum("ij,ij->i", block, block, dtype=np.float64)
    bad = np.flatnonzero(~np.isfinite(squares))
    if len(bad):
        row = int(bad[0])
        column = int(np.flatnonzero(~np.isfinite(rows_float32(embeddings, row, row + 1)[0]))[0])
        value = float(embeddings[row, column])
        raise NonFiniteEmbedding(
            f"{name} embedding {row} of {len(embeddings)} is not finite ({value} in column {column}; "
            f"{len(bad)} such row{'s' if len(bad) > 1 else ''}); a model that gives it cannot be ranked"
        )
    return np.sqrt(squares)


def pair_scores(
    left: Embeddings, right: Embeddings, left_rows: IntArray, right_rows: IntArray, rows: int = 256
) -> npt.NDArray[np.float64]:
    """(n,) dot products of left[left_rows[i]] with right[right_rows[i]], in double precision.

    Products of two float32 numbers are exact in float64, so these scores are true to about 13 digits whatever the
    block, the order or the matrix library: the reference that float32 products are held against.
    """
    scores = np.empty(len(left_rows))
    for start in range(0, len(left_rows), rows):
        a = np.asarray(left[left_rows[start : start + rows]], dtype=np.float32)
        b = np.asarray(right[right_rows[start : start + rows]], dtype=np.float32)
        scores[start : start + rows] = np.einsum("ij,ij->i", a, b, dtype=np.float64)
    return scores


def unit_rows(embeddings: Embeddings, name: str) -> npt.NDArray[np.float32]:
    """The rows scaled to length 1, so that a dot product is a cosine.

    Raises:
        NonFiniteEmbedding: see :func:`row_norms`.
        ValueError: naming the first row of length 0, which has no direction.
    """
    norms = row_norms(embeddings, name)
    zero = np.flatnonzero(norms == 0)
    if len(zero):
        raise ValueError(f"{name} embedding {int(zero[0])} of {len(embeddings)} is all zeros; it has no cosine")
    unit = np.empty(embeddings.shape, dtype=np.float32)
    for start in range(0, len(embeddings), ROWS):
        block = np.asarray(embeddings[start : start + ROWS], dtype=np.float64)
        unit[start : start + ROWS] = block / norms[start : start + ROWS, None]
    return unit

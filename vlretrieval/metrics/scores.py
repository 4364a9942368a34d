"""Embeddings as they are scored: checked once, read in blocks, and scored pair by pair in double precision.

A score is the dot product of two float32 rows (a cosine when the rows are unit vectors). Arrays may be memory-mapped
and of any float type; only the rows of the block at hand are ever converted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]

ROWS = 1024  # rows read at a time where a whole array is passed over


class Rows:
    """Rows of an array in another order and scaled, done for the rows at hand: a memory-mapped array stays on disk.

    Args:
        array: (n, E).
        order: (rows,) which rows, in which order; None for all as they are.
        scale: (rows,) what each is multiplied by, for example 1 / its norm; None for 1.
        last: (rows,) values of one more column; None for no such column.
    """

    ndim = 2

    def __init__(
        self,
        array: npt.NDArray[Any] | Rows,
        order: IntArray | None = None,
        scale: npt.NDArray[np.float64] | None = None,
        last: npt.NDArray[np.float64] | None = None,
    ) -> None:
        self.array, self.order, self.scale, self.last = array, order, scale, last
        self.shape: tuple[int, int] = (len(array) if order is None else len(order), array.shape[1] + (last is not None))

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the array as it is stored."""
        return self.array.dtype

    def __getitem__(self, rows: slice | IntArray) -> npt.NDArray[Any]:
        found = self.array[rows] if self.order is None else self.array[self.order[rows]]
        if self.scale is not None:
            found = (found.astype(np.float64) * self.scale[rows][:, None]).astype(np.float32)
        if self.last is not None:
            found = np.concatenate([found, self.last[rows][:, None]], axis=1).astype(np.float32)
        return found


Embeddings = npt.NDArray[Any] | Rows  # (rows, E), float16 / float32 / float64, in memory or memory-mapped


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
        values = rows_float32(embeddings, row, row + 1)[0]
        column = int(np.flatnonzero(~np.isfinite(values))[0])
        value = float(values[column])
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


def unit_rows(embeddings: npt.NDArray[Any], name: str, order: IntArray | None = None) -> Rows:
    """The rows in the given order and scaled to length 1, so that a dot product is a cosine; nothing is copied.

    Raises:
        NonFiniteEmbedding: see :func:`row_norms`.
        ValueError: naming the first row of length 0, which has no direction.
    """
    norms = row_norms(embeddings, name)
    zero = np.flatnonzero(norms == 0)
    if len(zero):
        raise ValueError(f"{name} embedding {int(zero[0])} of {len(embeddings)} is all zeros; it has no cosine")
    return Rows(embeddings, order, 1 / (norms if order is None else norms[order]))

"""Counting and finding the True entries of a mask, where it must cost little beside a matrix product."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vlretrieval.metrics.scores import IntArray

BoolBlock = npt.NDArray[np.bool_]


def where_few(mask: BoolBlock) -> IntArray:
    """Flat indices of the True entries of a contiguous mask that has few of them: eight bytes looked at at once."""
    flat = mask.reshape(-1)
    if flat.size % 8:
        return np.flatnonzero(flat)
    words = np.flatnonzero(flat.view(np.uint64) != 0)  # of bools: several times faster than of integers
    word, byte = np.nonzero(flat.reshape(-1, 8)[words])
    return words[word] * 8 + byte


def count_true(mask: BoolBlock, axis: int) -> IntArray:
    """How many are True along ``axis`` of a 2-D mask; several times faster than ``mask.sum(axis)``.

    Bytes are added as bytes, at most 255 of them before they are widened, eight to a machine word where rows allow.
    """
    rows, columns = mask.shape
    if not mask.flags.c_contiguous:
        return np.count_nonzero(mask, axis=axis).astype(np.int64)
    if axis == 0:
        total = np.zeros(columns, dtype=np.int64)
        for start in range(0, rows, 255):
            total += np.add.reduce(mask[start : start + 255].view(np.uint8), axis=0, dtype=np.uint8)
        return total
    total = np.zeros(rows, dtype=np.int64)
    if columns % 8:
        return np.count_nonzero(mask, axis=1).astype(np.int64)
    words = mask.view(np.uint64)  # (rows, columns / 8), eight counters of a byte each
    for start in range(0, words.shape[1], 255):
        lanes = np.add.reduce(words[:, start : start + 255], axis=1)
        total += lanes.view(np.uint8).reshape(rows, 8).sum(1, dtype=np.int64)
    return total

"""Pictures that are the same, or nearly, or mirror images: found by a 64-bit hash, confirmed on a small grey print."""

from collections.abc import Iterator

import numpy as np

MAX_BITS = 10  # hashes that differ in more bits are not looked at further
MAX_DIFFERENCE = 7.0  # mean absolute difference of two prints, in grey levels after both are brought to equal contrast
MIN_CONTRAST = 4.0  # standard deviation below which a picture is a plain surface, near to every other


def gradient_hash(prints: np.ndarray) -> np.ndarray:
    """(N,) uint64: bit by bit, whether brightness rises to the right (dHash, on an 8 x 9 grid of means).

    Args:
        prints: (N, 24, 24) uint8.
    """
    grey = prints.astype(np.float32)
    rows = grey.reshape(len(grey), 8, 3, 24).mean(2)  # (N, 8, 24)
    columns = np.stack([rows[:, :, int(i * 8 / 3) : int(i * 8 / 3) + 3].mean(2) for i in range(9)], axis=2)
    rises = columns[:, :, 1:] > columns[:, :, :-1]  # (N, 8, 8)
    return np.packbits(rises.reshape(len(grey), 64), axis=1).view(np.uint64)[:, 0]


def pairs_alike(prints: np.ndarray, block: int = 2048) -> Iterator[tuple[int, int, bool]]:
    """(i, j, mirrored) with i < j of pictures that are nearly the same, or mirror images of each other.

    Args:
        prints: (N, 24, 24) uint8; a picture of (almost) one colour is never paired.
        block: rows compared at once.
    """
    grey = prints.astype(np.float32)
    spread = grey.std((1, 2))
    plain = spread < MIN_CONTRAST
    even = (grey - grey.mean((1, 2), keepdims=True)) * (50 / np.maximum(spread, MIN_CONTRAST))[:, None, None]
    hashes = gradient_hash(prints)
    for mirrored in (False, True):
        others = gradient_hash(prints[:, :, ::-1]) if mirrored else hashes
        compared = even[:, :, ::-1] if mirrored else even
        for start in range(0, len(prints), block):
            rows = slice(start, start + block)
            for first in range(start, len(prints), block):  # the upper triangle of blocks
                bits = np.bitwise_count(hashes[rows, None] ^ others[None, first : first + block])
                for i, j in np.argwhere(bits <= MAX_BITS):
                    a, b = start + int(i), first + int(j)
                    if a < b and not plain[a] and not plain[b]:
                        if np.abs(even[a] - compared[b]).mean() <= MAX_DIFFERENCE:
                            yield a, b, mirrored

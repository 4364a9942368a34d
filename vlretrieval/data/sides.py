"""Captions that name a side: a mirror image makes them false."""

import re
from collections.abc import Iterable

import numpy as np

# Whole words in English; Chinese has no blanks to tell words by. "all right" and "right away" are counted too: a
# picture that is not mirrored costs little, a false caption more.
_SIDE = re.compile(r"\b(left|right|leftmost|rightmost|left-hand|right-hand|clockwise)\b|[左右]", re.IGNORECASE)


def names_a_side(captions: Iterable[str]) -> np.ndarray:
    """(M,) bool, True where a caption says left or right (English or Chinese)."""
    return np.fromiter((_SIDE.search(caption) is not None for caption in captions), dtype=bool)

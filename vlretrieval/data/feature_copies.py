"""Augmented copies of the train pictures, for a frozen tower to see once and training to draw from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from vlretrieval.data.features import FeatureRows, Features, about_images
from vlretrieval.data.ordering import keyed_draw
from vlretrieval.data.pictures import Augment, FilePictures
from vlretrieval.data.sides import names_a_side
from vlretrieval.data.splits import Split
from vlretrieval.data.transforms import EvalTransform

_COPY = 7  # a name for keyed_draw, apart from those of training


class AugmentedCopy:
    """Copy ``number`` (1, 2, ...) of all pictures of a split, each augmented as ``seed`` and number decide.

    Args:
        keep_sides: a picture is mirrored in no copy if one of its captions says left or right.
    """

    def __init__(self, number: int, augment: Augment, seed: int, keep_sides: bool = True) -> None:
        self.number, self.augment, self.seed, self.keep_sides = number, augment, seed, keep_sides

    @property
    def part(self) -> str:
        """Its folder beside ``image``."""
        return copy_part(self.number)

    def about(self, split: Split, transform: EvalTransform) -> dict[str, Any]:
        """What its features are of."""
        settings = {name: value for name, value in sorted(vars(self.augment).items()) if not name.startswith("_")}
        augment = {"kind": type(self.augment).__name__, **settings}
        return about_images(split, transform) | {
            "copy": self.number,
            "augment": augment,
            "augment_seed": self.seed,
            "keep_sides": self.keep_sides,
        }

    def pixels(self, split: Split, transform: EvalTransform, rows: range) -> Tensor:
        """(B, 3, S, S) uint8 of pictures ``rows``."""
        images = np.arange(rows.start, rows.stop)
        keys = keyed_draw(self.seed, self.number, _COPY, images)
        may_flip = np.array([not self.keep_sides or not self._sided(split, image) for image in rows])
        return FilePictures(split, transform, self.augment)(images, keys, may_flip)

    @staticmethod
    def _sided(split: Split, image: int) -> bool:
        first, last = split.captions_of_image[image], split.captions_of_image[image + 1]
        return bool(names_a_side(split.captions[int(i)] for i in range(first, last)).any())


def copy_part(number: int) -> str:
    """``image`` for pictures as they are (0), ``image_1``, ... for the copies."""
    return f"image_{number}" if number else "image"


def gather_copies(copies: Sequence[Features], rows: np.ndarray, which: np.ndarray) -> FeatureRows:
    """Items ``rows`` (B,) int64, each from the copy that ``which`` (B,) names."""
    if len(copies) == 1:
        return copies[0].gather(rows)
    pooled = tokens = None
    for number, features in enumerate(copies):
        at = np.flatnonzero(which == number)
        if not len(at):
            continue
        own = features.gather(rows[at])
        if pooled is None or tokens is None:
            pooled = own.pooled.new_empty(len(rows), *own.pooled.shape[1:])
            tokens = own.tokens.new_empty(len(rows), *own.tokens.shape[1:])
        pooled[at], tokens[at] = own.pooled, own.tokens
    assert pooled is not None and tokens is not None
    return FeatureRows(pooled, tokens, None)

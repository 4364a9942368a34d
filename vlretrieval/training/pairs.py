"""One step's encoded pairs, of this rank and of all."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from vlretrieval.model.encoded import Encoded
from vlretrieval.training.momentum import Teacher


@dataclass
class Pairs:
    """One step's encoded pairs: this rank's B, all ranks' M.

    Attributes:
        image, text: this rank's B rows; row i of one belongs with row i of the other.
        all_image, all_text: M rows of all ranks (the same objects where there is one rank).
        positives: (B, M) bool, pairs that share their picture or caption.
        uniform: (2, B, M) draws from [0, 1) that decide which hard negatives are taken.
        negatives: the data's hard-negative captions of the pairs that are matched, K consecutive rows a pair; or None.
        negative_valid: (B, K) bool for those pairs, False where a caption has fewer than K.
        teacher: what the momentum encoder says of the step; None without one.
    """

    image: Encoded
    text: Encoded
    all_image: Encoded
    all_text: Encoded
    positives: Tensor
    uniform: Tensor
    negatives: Encoded | None = None
    negative_valid: Tensor | None = None
    teacher: Teacher | None = None

    def first(self, count: int) -> Pairs:
        """This rank's first ``count`` pairs, beside everybody's; ``negatives`` are those of the first pairs already."""
        if count == len(self.image):
            return self
        some = slice(0, count)
        return replace(
            self,
            image=self.image.part(some),
            text=self.text.part(some),
            positives=self.positives[some],
            uniform=self.uniform[:, some],
        )

"""The list of pictures a run left out: looked for before training, written to a file, and limited to a share."""

import json
import logging
from collections import Counter
from pathlib import Path

import numpy as np

from vlretrieval.data.images import BadImage
from vlretrieval.data.pictures import for_each
from vlretrieval.data.splits import Split

log = logging.getLogger(__name__)


class BadSamples:
    """Collects bad pictures of ``split``.

    Looking before the first step, and not in the middle of training, keeps the epoch's order fixed: it is the same
    after a resume, on every rank, and for any number of workers.

    Args:
        split: whose pictures.
        max_share: share of the pictures above which the run stops.
        file: JSON lines are written here, {"split", "image_id", "file", "reason"}.
    """

    def __init__(self, split: Split, max_share: float, file: str) -> None:
        self.split, self.max_share, self.file = split, max_share, file
        self.found: dict[int, BadImage] = {}

    def add(self, index: int, bad: BadImage) -> None:
        """Remember picture ``index`` as bad."""
        self.found[index] = bad

    def look_at_all(self) -> None:
        """Decode every picture once."""

        def look(index: int) -> None:
            try:
                self.split.picture(index)
            except BadImage as bad:
                self.add(index, bad)

        for_each(look, range(len(self.split.image_ids)))

    def usable(self) -> np.ndarray:
        """(N,) bool; writes the list.

        Raises:
            ValueError: when more than ``max_share`` are bad; with the share and the most frequent reasons.
        """
        self._write()
        total = len(self.split.image_ids)
        if self.found:
            reasons = Counter(bad.reason for bad in self.found.values()).most_common(3)
            told = "; ".join(f"{count} x {reason}" for reason, count in reasons)
            share = len(self.found) / total
            counted = f"{len(self.found)} of {total} pictures ({100 * share:.2f} %)"
            summary = f"{self.split.name}: {counted} cannot be used: {told}"
            if share > self.max_share:
                raise ValueError(f"{summary}; more than max_bad_share={self.max_share:g}, the list is in {self.file}")
            log.warning("%s; left out, the list is in %s", summary, self.file)
        usable = np.ones(total, dtype=bool)
        usable[list(self.found)] = False
        return usable

    def _write(self) -> None:
        path = Path(self.file)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            for index in sorted(self.found):
                bad = self.found[index]
                line = {"split": self.split.name, "image_id": self.split.image_ids[index]}
                line |= {"file": bad.name, "reason": bad.reason}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")

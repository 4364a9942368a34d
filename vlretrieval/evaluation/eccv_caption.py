"""COCO's test split with the positives that were missing: CxC and ECCV Caption, by the ``eccv-caption`` package.

The package brings the ground truth (arXiv:2204.03359, arXiv:2004.15020); the ranks and figures are ours. A caption's
positives and a picture's are two different lists there, so each direction has its own.
"""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from vlretrieval.data.splits import Split
from vlretrieval.metrics.graded import average_precision_at_r, positive_places, precision_at_r
from vlretrieval.metrics.ranks import rank_both
from vlretrieval.metrics.recall import query_intervals, recall_at
from vlretrieval.metrics.scores import Embeddings, IntArray

SETS = ("original", "cxc", "eccv")


class GroundTruth:
    """The package's lists, as pairs of our rows.

    Attributes:
        image_id: (5000,) COCO ids in the order of Karpathy's test split. caption_id: (25000,) likewise.
        pairs: {set: (t2i pairs, i2t pairs)}, each (P, 2) (caption row, image row).
        absent: {set: (25000 or 5000,) by way} positives that are captions beyond a picture's first five, two in all:
            nobody can find them, and they count as missed, as in the package.

    Raises:
        ValueError: the package is not installed.
    """

    def __init__(self) -> None:
        found = find_spec("eccv_caption")
        if found is None or not found.submodule_search_locations:
            raise ValueError("protocol=eccv_caption needs the package eccv-caption; pip install 'vlretrieval[eccv]'")
        folder = Path(next(iter(found.submodule_search_locations))) / "data"

        def read(name: str) -> dict[int, list[int]]:
            return {int(key): value for key, value in json.loads((folder / name).read_text()).items()}

        self.caption_id: IntArray = np.load(folder / "coco_test_ids.npy")
        owner = read("original_caption_to_image.json")
        self.image_id: IntArray = np.array([owner[caption][0] for caption in self.caption_id[::5].tolist()])
        caption_row = {caption: row for row, caption in enumerate(self.caption_id.tolist())}
        image_row = {image: row for row, image in enumerate(self.image_id.tolist())}
        self.pairs: dict[str, tuple[IntArray, IntArray]] = {}
        self.absent: dict[str, tuple[IntArray, IntArray]] = {}
        for name in SETS:
            t2i = [(c, i) for c, images in read(f"{name}_caption_to_image.json").items() for i in images]
            i2t = [(c, i) for i, captions in read(f"{name}_image_to_caption.json").items() for c in captions]
            ways, missing = [], []
            for way, pairs in enumerate((t2i, i2t)):
                there = [(caption_row[c], image_row[i]) for c, i in pairs if c in caption_row and i in image_row]
                lost = [
                    (caption_row.get(c), image_row.get(i))
                    for c, i in pairs
                    if c not in caption_row or i not in image_row
                ]
                count = np.zeros(len((self.caption_id, self.image_id)[way]), dtype=np.int64)
                for pair in lost:
                    count[pair[way]] += 1
                ways.append(np.array(there))
                missing.append(count)
            self.pairs[name], self.absent[name] = (ways[0], ways[1]), (missing[0], missing[1])

    def check(self, split: Split) -> None:
        """Refuse a split that is not COCO's test split in its order, with five captions each.

        A picture's COCO id is the number at the end of its name.
        """
        found = [int(number[-1]) if (number := re.findall(r"\d+", image)) else -1 for image in split.image_ids]
        if found != self.image_id.tolist():
            wrong = next(
                (i for i, pair in enumerate(zip(found, self.image_id.tolist(), strict=False)) if len(set(pair)) > 1), 0
            )
            raise ValueError(
                f"protocol=eccv_caption measures Karpathy's COCO test split of 5000 images in its order; split "
                f"{split.name!r} has {len(found)}, and image {wrong} is {split.image_ids[wrong]!r}, not COCO "
                f"{self.image_id[wrong]}"
            )
        if len(split.captions) != len(self.caption_id):
            raise ValueError(
                f"protocol=eccv_caption needs 5 captions an image, split {split.name!r} has {len(split.captions)}"
            )

    def figures(
        self,
        text: Embeddings,
        image: Embeddings,
        ks: tuple[int, ...] = (1, 5, 10),
        *,
        replicates: int = 1000,
        seed: int = 0,
    ) -> dict[str, Any]:
        """Recalls under CxC's and ECCV's positives, with 95 % intervals; mAP@R and R-precision under ECCV's. Percent.

        Args:
            text: (25000, E), image: (5000, E) in the order of the split.
        """
        result: dict[str, Any] = {}
        for name in SETS:
            both: dict[str, dict[str, Any]] = {}
            for way, direction in enumerate(("t2i", "i2t")):
                pairs = self.pairs[name][way]
                ranks = rank_both(text, image, pairs)[way]
                both[direction] = {f"R@{k}": recall_at(ranks, k) for k in ks} | {"queries": len(ranks)}
                if replicates:
                    picture = np.arange(len(text)) // 5 if direction == "t2i" else np.arange(len(image))
                    both[direction]["interval"] = query_intervals(ranks, ks, picture, replicates=replicates, seed=seed)
                if name == "eccv":
                    places = positive_places(text, image, pairs)[way]
                    absent = self.absent[name][way][places.query]
                    both[direction]["mAP@R"] = 100 * float(average_precision_at_r(places, absent).mean())
                    both[direction]["R-precision"] = 100 * float(precision_at_r(places, absent).mean())
            result["coco_5k" if name == "original" else name] = both
        return result

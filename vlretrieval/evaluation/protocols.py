"""The field's protocols by name: which pictures, which captions, how many folds. A name that the split cannot bear is
refused, since published figures differ by ten points and more with the gallery."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vlretrieval.data.splits import HardNegatives, Split
from vlretrieval.evaluation.eccv_caption import GroundTruth
from vlretrieval.metrics.scores import IntArray

NOT_TEST = ("train", "val", "dev", "valid", "validation", "restval")


@dataclass(frozen=True)
class Protocol:
    """A way to measure a split.

    Attributes:
        name: what people call it.
        images: pictures the split must have; None for any number.
        captions: of each picture, the first so many are used; None for all. A picture with fewer is refused.
        folds: sequential folds of equal size, each a gallery of its own; the figures are means over them.
        equal_captions: a caption is also true of every picture that has an equal (normalised) caption.
        eccv: also under the positives of CxC and ECCV Caption (see eccv_caption.py).
        hashes: hashes of the published split, by the language of its captions, for those that are known here.
    """

    name: str
    images: int | None = None
    captions: int | None = None
    folds: int = 1
    equal_captions: bool = False
    eccv: bool = False
    hashes: tuple[tuple[str, str], ...] = ()

    def prepare(self, split: Split) -> Split:
        """The split as this protocol measures it.

        Raises:
            ValueError: the split is not of the protocol's size.
        """
        found = len(split.image_ids)
        if self.images is not None and split.name.lower() in NOT_TEST:
            # Flickr8k's and COCO's validation splits have as many images as their test splits: the size tells nothing
            raise ValueError(
                f"protocol={self.name} measures the published test split, not {split.name!r}; set split=test, or "
                "protocol=full for the gallery as it is"
            )
        if self.images is not None and found != self.images:
            raise ValueError(
                f"protocol={self.name} measures {self.images} images, but split {split.name!r} has {found}; "
                "choose the published test split, or protocol=full for the gallery as it is"
            )
        if found % self.folds:
            raise ValueError(f"protocol={self.name} needs {self.folds} equal folds; {found} images do not divide")
        if self.captions is not None:
            counts = np.bincount(split.caption_image, minlength=found)
            if counts.min() < self.captions:
                image = int(np.argmax(counts < self.captions))
                raise ValueError(
                    f"protocol={self.name} uses {self.captions} captions an image, but {split.image_ids[image]!r} has "
                    f"{counts[image]}"
                )
            if counts.max() > self.captions:
                first = np.repeat(np.cumsum(counts) - counts, counts)
                keep = np.flatnonzero(np.arange(len(split.captions)) - first < self.captions)
                split = part(split, np.arange(found), keep)
        if self.eccv:
            GroundTruth().check(split)
        return split.with_equal_captions_positive() if self.equal_captions else split

    def describe(self, split: Split) -> dict[str, object]:
        """For metrics.json; says whether the split is the published one where its hash is known."""
        known = dict((value, language) for language, value in self.hashes)
        said = f"the published one ({known[split.hash]})" if split.hash in known else "not the one known here"
        folds = f", mean of {self.folds} sequential folds of {len(split.image_ids) // self.folds} images"
        return {
            "name": self.name + (folds if self.folds > 1 else ""),
            "captions_used": f"the first {self.captions}" if self.captions else "all",
            **({"split_is": said} if self.hashes else {}),
        }

    def fold_rows(self, split: Split) -> list[tuple[IntArray, IntArray]]:
        """(image rows, caption rows) of each fold, in the split's order."""
        size = len(split.image_ids) // self.folds
        rows = []
        for fold in range(self.folds):
            images = np.arange(fold * size, (fold + 1) * size)
            captions = np.flatnonzero((split.caption_image >= images[0]) & (split.caption_image <= images[-1]))
            rows.append((images, captions))
        return rows


PROTOCOLS = {
    protocol.name: protocol
    for protocol in (
        Protocol("full"),
        Protocol("full_equal_captions", equal_captions=True),
        Protocol("flickr8k_1k", 1000, 5, hashes=(("English", "a8db06aaed8f58b4"), ("Chinese", "88324f5efa73ac8c"))),
        Protocol("flickr30k_1k", 1000, 5),
        Protocol("coco_5k", 5000, 5),
        Protocol("coco_1k", 5000, 5, folds=5),
        Protocol("eccv_caption", 5000, 5, eccv=True),
    )
}


def protocol_named(name: str) -> Protocol:
    """A protocol by its name; ValueError listing those there are."""
    if name not in PROTOCOLS:
        raise ValueError(f"protocol={name!r} is not known; choose {', '.join(PROTOCOLS)}")
    return PROTOCOLS[name]


def part(split: Split, images: IntArray, captions: IntArray) -> Split:
    """The split cut down to the given pictures and captions of theirs (rows, ascending)."""
    new_image = np.full(len(split.image_ids), -1)
    new_image[images] = np.arange(len(images))
    new_caption = np.full(len(split.captions), -1)
    new_caption[captions] = np.arange(len(captions))
    pairs = np.stack([new_caption[split.positives[:, 0]], new_image[split.positives[:, 1]]], axis=1)
    wrong = split.negatives
    kept = np.flatnonzero(new_caption[wrong.caption] >= 0) if len(wrong) else np.arange(0)
    return Split(
        split.name,
        [split.image_ids[image] for image in images.tolist()],
        [split.captions[caption] for caption in captions.tolist()],
        new_image[split.caption_image[captions]],
        lambda index: split.picture(int(images[index])),
        positives=pairs[(pairs >= 0).all(1)],
        negatives=HardNegatives(
            [wrong.texts[row] for row in kept.tolist()],
            [wrong.kinds[row] for row in kept.tolist()],
            new_caption[wrong.caption[kept]],
        ),
        regions=lambda index: split.regions(int(images[index])),
        notes=split.notes,
    )

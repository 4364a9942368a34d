"""Winoground (arXiv:2204.03162): two pictures and two captions of the same words; both must find their own.

A caption is right when it beats the other caption on its picture ("text"), a picture when it beats the other picture
for its caption ("image"), an example when all four hold ("group"). Chance: 25, 25 and 16.7 %.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL.Image import Image

from vlretrieval.data.images import SUFFIXES, open_image
from vlretrieval.data.splits import Split
from vlretrieval.metrics.bootstrap import bootstrap_means, cluster_sums, interval

Floats = npt.NDArray[np.float64]


class PairedSplit(Split):
    """A split of Q examples: pictures and captions 2q and 2q + 1 belong to example q; ``tags`` (Q,) groups examples."""

    tags: list[str]


class Winoground:
    """Winoground's own files as a data source with one split, "test".

    Args:
        files: examples.jsonl. images: the folder of the pictures it names.
    """

    def __init__(self, files: str, images: str) -> None:
        self.files, self.images = str(files), str(images)
        if not Path(files).is_file():
            raise ValueError(f"data.files={files}: no such file; give Winoground's examples.jsonl")
        if not Path(images).is_dir():
            raise ValueError(f"data.images={images}: no such folder")

    def split(self, name: str) -> PairedSplit:
        """The one split, "test"."""
        if name != "test":
            raise ValueError(f"there is no split {name!r} in Winoground; it has test")
        pictures: list[str] = []
        captions: list[str] = []
        tags: list[str] = []
        for number, line in enumerate(Path(self.files).read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            try:
                example = json.loads(line)
                pictures += [str(example["image_0"]), str(example["image_1"])]
                captions += [str(example["caption_0"]), str(example["caption_1"])]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(f"{self.files}:{number}: not an example of Winoground ({error})") from None
            tags.append(str(example.get("collapsed_tag") or example.get("tag") or "untagged"))
        if not tags:
            raise ValueError(f"{self.files} holds no examples")

        def picture(index: int) -> Image:
            return open_image(_file(Path(self.images), pictures[index]))

        ids = [f"{row // 2}.{row % 2}" for row in range(len(pictures))]
        split = PairedSplit("test", ids, captions, np.arange(len(captions)), picture)
        split.tags = tags
        return split

    def fingerprint(self) -> dict[str, Any]:
        """Plain data: which files."""
        return {"suite": "Winoground", "files": self.files, "images": self.images}


def _file(folder: Path, name: str) -> Path:
    """The picture called ``name``, whose suffix the examples leave out."""
    if Path(name).suffix.lower() in SUFFIXES:
        return folder / name
    return next(
        (folder / f"{name}{suffix}" for suffix in SUFFIXES if (folder / f"{name}{suffix}").exists()),
        folder / f"{name}.png",
    )


def paired_figures(
    score: Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64]], Floats],
    tags: list[str],
    *,
    noise: float = 0.0,
    replicates: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """{tag: {"examples", "text", "image", "group"}, "all": ...}, percent with 95 % intervals over examples.

    Args:
        score: (image rows, caption rows) -> scores; image rows never go down.
        noise: a lead of no more than this is none.
    """
    count = len(tags)
    images = np.repeat(np.arange(2 * count), 2)
    captions = np.stack([np.repeat(np.arange(count) * 2, 2), np.repeat(np.arange(count) * 2 + 1, 2)], axis=1).reshape(
        -1
    )
    scores = score(images, captions).reshape(count, 2, 2)  # (example, picture, caption)
    own, other_caption = scores[:, [0, 1], [0, 1]], scores[:, [0, 1], [1, 0]]
    other_picture = scores[:, [1, 0], [0, 1]]
    text, image = (own > other_caption + noise).all(1), (own > other_picture + noise).all(1)
    table = 100.0 * np.stack([text, image, text & image], axis=1)
    result: dict[str, Any] = {}
    for tag in [*sorted(set(tags)), "all"]:
        chosen = np.arange(count) if tag == "all" else np.flatnonzero(np.array(tags) == tag)
        figures: dict[str, Any] = {"examples": len(chosen)}
        figures |= dict(zip(("text", "image", "group"), table[chosen].mean(0).tolist(), strict=True))
        if replicates:
            drawn = bootstrap_means(*cluster_sums(table[chosen], np.arange(len(chosen)), len(chosen)), replicates, seed)
            figures["interval"] = dict(zip(("text", "image", "group"), interval(drawn).tolist(), strict=True))
        result[tag] = figures
    return result

"""A small set of drawn pictures in Karpathy JSON, and splits without files, for the tests of the data."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from vlretrieval.data.readers.karpathy import KarpathyJson
from vlretrieval.data.records import Records
from vlretrieval.data.splits import HardNegatives, Split

COLOURS = ("red", "green", "blue", "black", "orange", "purple", "yellow", "brown", "grey", "pink")


def picture(number: int, size: tuple[int, int] = (24, 20)) -> Image.Image:
    """A picture whose first pixel row tells its number."""
    image = Image.new("RGB", size, COLOURS[number % len(COLOURS)])
    image.paste((number % 256, number // 256, 7), (0, 0, size[0], 10))
    return image


def tiny_split(images: int = 12, captions: int = 5, negatives: int = 0, name: str = "train") -> Split:
    """Image i has ``captions`` captions; caption c has ``negatives`` + c % 2 negatives when there are any."""
    texts = [f"picture {i} said {COLOURS[c % 10]} way {c}" for i in range(images) for c in range(captions)]
    owners = [c for c in range(len(texts)) for _ in range(negatives + c % 2)] if negatives else []
    return Split(
        name,
        [f"image-{i}" for i in range(images)],
        texts,
        np.repeat(np.arange(images), captions),
        picture,
        negatives=HardNegatives([f"false {k} of {c}" for k, c in enumerate(owners)], ["swap"] * len(owners), owners),
    )


def write_karpathy(folder: Path, sizes: dict[str, int], captions: int = 5) -> tuple[Path, Path]:
    """A Karpathy JSON of ``sizes`` pictures a split, and the folder of its pictures."""
    images = folder / "images"
    images.mkdir(parents=True, exist_ok=True)
    entries = []
    for split, count in sizes.items():
        for _ in range(count):
            number = len(entries)
            picture(number).save(images / f"{number:03d}.png")
            sentences = [{"raw": f"picture {number} said way {c}"} for c in range(captions)]
            entries.append({"filename": f"{number:03d}.png", "split": split, "sentences": sentences})
    file = folder / "data.json"
    file.write_text(json.dumps({"dataset": "tiny", "images": entries}))
    return file, images


def tiny_records(folder: Path, sizes: dict[str, int] | None = None, **settings: object) -> Records:
    """A source of drawn pictures."""
    file, images = write_karpathy(folder, sizes or {"train": 12, "val": 4, "test": 4})
    return Records(KarpathyJson(str(file), str(images)), **settings)

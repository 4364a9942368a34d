"""Pictures decoded and resized once, into a file that training maps into memory. A stale cache is refused, never used.

``FOLDER/train-squash-256.npy`` holds (N, 3, 256, 256) uint8 and may be opened with ``numpy.load(..., mmap_mode="r")``;
the ``.json`` beside it says of which pictures, made how.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vlretrieval.data.images import BadImage
from vlretrieval.data.made_of import difference, made_of
from vlretrieval.data.pictures import decode_all
from vlretrieval.data.splits import Split
from vlretrieval.data.transforms import EvalTransform

VERSION = 1  # goes up when the same pictures would be stored with other values


def write_cache(
    split: Split,
    transform: EvalTransform,
    folder: str | Path,
    on_bad: Callable[[int, BadImage], None] | None = None,
) -> Path:
    """Decode every picture of ``split`` into the cache; gives the file.

    The file gets its name only when it is whole.

    Args:
        split: whose pictures.
        transform: how they are resized.
        folder: where the file goes.
        on_bad: see ``decode_all``; pictures that it was told of are named in the .json and left out of training.
    """
    size = transform.image_size
    path = cache_path(split, transform, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    shape = (len(split.image_ids), 3, size, size)
    stored = np.lib.format.open_memmap(part, mode="w+", dtype=np.uint8, shape=shape)
    bad: dict[int, str] = {}

    def remember(index: int, fault: BadImage) -> None:
        assert on_bad is not None
        on_bad(index, fault)
        bad[index] = fault.reason

    decode_all(split, transform, size, remember if on_bad is not None else None, out=stored)
    stored.flush()
    with open(part, "rb") as file:
        os.fsync(file.fileno())
    about = {
        **_about(split, transform),
        "contents": split.stamp(contents=True),
        "bad": {str(index): reason for index, reason in sorted(bad.items())},
    }
    # The description first: a file without one is refused, one with another's is too.
    path.with_suffix(".json").write_text(json.dumps(about, indent=1))
    os.replace(part, path)
    return path


def open_cache(split: Split, transform: EvalTransform, folder: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """(N, 3, S, S) uint8, memory-mapped, and (N,) bool: pictures that could be read.

    Raises:
        ValueError: when there is no such cache, or it is of other pictures or other settings; with the way out.
    """
    path = cache_path(split, transform, folder)
    way_out = (
        f"make it with vlretrieval-data cache ... size={transform.image_size} resize={transform.mode} output={folder}"
    )
    if not path.is_file() or not path.with_suffix(".json").is_file():
        raise ValueError(f"{path}: no such cache; {way_out}")
    try:
        about: dict[str, Any] = json.loads(path.with_suffix(".json").read_text())
        bad = about.pop("bad")
        pixels = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path}: damaged ({error}); {way_out}") from None
    other = difference(about, _about(split, transform), split)
    if other is not None:
        raise ValueError(f"{path}: stale: {other}; remove it, and {way_out}")
    if (
        pixels.shape != (len(split.image_ids), 3, transform.image_size, transform.image_size)
        or pixels.dtype != np.uint8
    ):
        raise ValueError(f"{path}: damaged ({pixels.dtype} {pixels.shape}); remove it, and {way_out}")
    usable = np.ones(len(pixels), dtype=bool)
    usable[[int(index) for index in bad]] = False
    return pixels, usable


def cache_path(split: Split, transform: EvalTransform, folder: str | Path) -> Path:
    """The file of a split in a cache folder."""
    return Path(folder) / f"{split.name}-{transform.mode}-{transform.image_size}.npy"


def _about(split: Split, transform: EvalTransform) -> dict[str, Any]:
    return {"version": VERSION, **made_of(split, transform)}

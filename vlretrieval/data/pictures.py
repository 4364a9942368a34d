"""Where a step's pixels come from: one uint8 tensor in memory, or the files, decoded as they are asked for."""

import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vlretrieval.data.images import BadImage
from vlretrieval.data.splits import Split
from vlretrieval.data.transforms import to_tensor

log = logging.getLogger(__name__)


class Augment(Protocol):
    """Stored or decoded pixels (3, H, W) uint8 to what the model gets, (3, S, S) uint8; all chance is in the key."""

    def __call__(self, pixels: Tensor, key: int, may_flip: bool = True) -> Tensor: ...


class MemoryPictures:
    """All pictures as one uint8 array (N, 3, C, C); a batch is a gather.

    Args:
        pixels: (N, 3, C, C) uint8, in memory or memory-mapped.
        augment: None: as stored.
    """

    def __init__(self, pixels: np.ndarray, augment: Augment | None = None) -> None:
        self.pixels = pixels
        self.augment = augment

    def __call__(self, images: np.ndarray, keys: np.ndarray, may_flip: np.ndarray) -> Tensor:
        # NumPy's gather copies a picture at a time, and is ten times faster than torch's on bytes.
        pixels = torch.from_numpy(np.ascontiguousarray(self.pixels[images]))
        if self.augment is None:
            return pixels
        rows = zip(pixels, keys.tolist(), may_flip.tolist(), strict=True)
        return torch.stack([self.augment(picture, key, flip) for picture, key, flip in rows])


class FilePictures:
    """Pictures opened when they are asked for.

    Args:
        split: opens them.
        transform: RGB picture -> (3, S, S) uint8, when nothing is random.
        augment: takes the picture as it was decoded, and no more pixels of it than its crop needs; None: ``transform``.
    """

    def __init__(
        self, split: Split, transform: Callable[[Image.Image], Tensor], augment: Augment | None = None
    ) -> None:
        self.split, self.transform, self.augment = split, transform, augment

    def __call__(self, images: np.ndarray, keys: np.ndarray, may_flip: np.ndarray) -> Tensor:
        rows = zip(images.tolist(), keys.tolist(), may_flip.tolist(), strict=True)
        return torch.stack([self.one(image, key, flip) for image, key, flip in rows])

    def one(self, image: int, key: int, may_flip: bool = True) -> Tensor:
        """(3, S, S) uint8 of picture ``image``."""
        if self.augment is None:
            return self.transform(self.split.picture(image))
        needed = getattr(self.augment, "shorter_side_needed", None)
        at_least = None if needed is None else lambda width, height: needed(width, height, key)
        return self.augment(to_tensor(self.split.picture(image, at_least)), key, may_flip)


def decode_all(
    split: Split,
    transform: Callable[[Image.Image], Tensor],
    size: int,
    on_bad: Callable[[int, BadImage], None] | None = None,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """(N, 3, size, size) uint8: every picture of ``split``, in order.

    Args:
        split: what to decode.
        transform: RGB picture -> (3, size, size) uint8.
        size: side of the result.
        on_bad: called with the index and the fault of a picture that cannot be read, whose rows stay zero; None: raise.
        out: where to write; None: new memory.
    """
    pixels = np.zeros((len(split.image_ids), 3, size, size), dtype=np.uint8) if out is None else out

    def fill(index: int) -> None:
        try:
            pixels[index] = transform(split.picture(index)).numpy()
        except BadImage as bad:
            if on_bad is None:
                raise
            on_bad(index, bad)

    for_each(fill, range(len(pixels)))
    return pixels


def for_each(work: Callable[[int], None], items: Iterable[int]) -> None:
    """``work`` on every item, in a thread for each core of ours: Pillow decodes outside the interpreter lock."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = min(8, cores)
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(work, items, chunksize=16):
            pass

"""Where a step's pixels come from: one uint8 tensor in memory, or the files, decoded as they are asked for."""

import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vlretrieval.data.images import BadImage
from vlretrieval.data.splits import Split

log = logging.getLogger(__name__)

Augment = Callable[[Tensor, int], Tensor]


class MemoryPictures:
    """All pictures as one uint8 tensor (N, 3, C, C); a batch is a gather.

    Args:
        pixels: (N, 3, C, C) uint8.
        augment: (3, C, C) uint8 and a random key -> (3, S, S) uint8; None: as stored.
    """

    def __init__(self, pixels: Tensor, augment: Augment | None = None) -> None:
        self.pixels = pixels
        self.augment = augment

    def __call__(self, images: np.ndarray, keys: np.ndarray) -> Tensor:
        # NumPy's gather copies a picture at a time, and is ten times faster than torch's on bytes.
        pixels = torch.from_numpy(self.pixels.numpy()[images])
        if self.augment is None:
            return pixels
        return torch.stack([self.augment(picture, int(key)) for picture, key in zip(pixels, keys, strict=True)])


class FilePictures:
    """Pictures opened when they are asked for.

    Args:
        split: opens them.
        transform: RGB picture -> (3, C, C) uint8.
        augment: as for ``MemoryPictures``.
        at_least: side below which decoding may not reduce a picture; None: decode in full.
    """

    def __init__(
        self,
        split: Split,
        transform: Callable[[Image.Image], Tensor],
        augment: Augment | None = None,
        at_least: int | None = None,
    ) -> None:
        self.split, self.transform, self.augment, self.at_least = split, transform, augment, at_least

    def __call__(self, images: np.ndarray, keys: np.ndarray) -> Tensor:
        return torch.stack([self.one(int(image), int(key)) for image, key in zip(images, keys, strict=True)])

    def one(self, image: int, key: int) -> Tensor:
        """(3, S, S) uint8 of picture ``image``."""
        pixels = self.transform(self.split.picture(image, self.at_least))
        return pixels if self.augment is None else self.augment(pixels, key)


def decode_all(
    split: Split,
    transform: Callable[[Image.Image], Tensor],
    size: int,
    on_bad: Callable[[int, BadImage], None] | None = None,
    at_least: int | None = None,
) -> Tensor:
    """(N, 3, size, size) uint8: every picture of ``split``, in order.

    Args:
        split: what to decode.
        transform: RGB picture -> (3, size, size) uint8.
        size: side of the result.
        on_bad: called with the index and the fault of a picture that cannot be read, whose rows stay zero; None: raise.
        at_least: see ``Split.picture``.
    """
    pixels = torch.zeros(len(split.image_ids), 3, size, size, dtype=torch.uint8)

    def fill(index: int) -> None:
        try:
            pixels[index] = transform(split.picture(index, at_least))
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

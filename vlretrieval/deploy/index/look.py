"""Read pictures ahead of the model, and decode those whose content is new."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from PIL import Image

from vlretrieval.data.images import BadImage, open_image
from vlretrieval.deploy.index.at_hand import Rows
from vlretrieval.deploy.index.sources import Entry, Source
from vlretrieval.deploy.index.store import (
    Made,
)
from vlretrieval.deploy.loaded import LoadedModel


@dataclass
class Looked:
    """A picture as it was read: pixels are there if it must be embedded, a reason if it cannot be."""

    entry: Entry
    sha256: str = ""
    pixels: torch.Tensor | None = None
    thumb: bytes | None = None
    broken: str | None = None


class Look:
    """Reads a picture, and decodes it if its content is new."""

    def __init__(self, source: Source, model: LoadedModel, made: Made, at_hand: Rows) -> None:
        self.source, self.model, self.made, self.at_hand = source, model, made, at_hand

    def __call__(self, entry: Entry) -> Looked:
        try:
            entry.id.encode()
            content = self.source.read(entry.id)
            looked = Looked(entry, hashlib.sha256(content).hexdigest())
            if looked.sha256 not in self.at_hand:
                image = open_image(content, name=entry.id)
                looked.pixels = self.model.pixels([image])
                looked.thumb = thumbnail(image, self.made.thumbs) if self.made.thumbs else None
            return looked
        except BadImage as error:
            return Looked(entry, broken=error.reason)
        except UnicodeEncodeError:  # it could not be printed, nor asked for
            return Looked(entry, broken="its name is not UTF-8")


def prefetched(look: Look, groups: Sequence[Sequence[Entry]]) -> Iterator[list[Looked]]:
    """Each group looked at, the next one being read while this one is worked on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(min(8, cores)) as pool:
        ahead = [pool.submit(look, entry) for entry in groups[0]] if groups else []
        for number in range(len(groups)):
            looked = [future.result() for future in ahead]
            following = groups[number + 1] if number + 1 < len(groups) else []
            ahead = [pool.submit(look, entry) for entry in following]
            yield looked


def thumbnail(image: Image.Image, side: int) -> bytes:
    """A JPEG whose longer side is ``side`` pixels at most."""
    small = image.copy()
    small.thumbnail((side, side))
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=80)
    return buffer.getvalue()

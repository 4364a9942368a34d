"""A record is a picture and what is said of it. Readers make records of files; ``Records`` makes splits of records."""

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from PIL.Image import Image

from vlretrieval.data.images import MAX_PIXELS, WHITE, open_image
from vlretrieval.data.known_sets import size_faults
from vlretrieval.data.packed import PackedStrings
from vlretrieval.data.splits import HardNegative, HardNegatives, Region, Split

__all__ = ["HardNegative", "Record", "Records", "Reader", "Region", "merged"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Record:
    """A picture with its captions.

    Attributes:
        image: path, or another reference that the record's reader can open.
        captions: all that is said of it, maybe nothing.
        image_id: the same picture has the same id, wherever it stands.
        split: "train", "val", "test", ...
        language: of the captions, where known ("en", "zh").
        regions: things at places.
        negatives: hard negatives, one tuple for each caption; or empty.
    """

    image: str
    captions: tuple[str, ...]
    image_id: str
    split: str
    language: str | None = None
    regions: tuple[Region, ...] = ()
    negatives: tuple[tuple[HardNegative, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.negatives and len(self.negatives) != len(self.captions):
            raise ValueError(
                f"record {self.image_id!r}: {len(self.captions)} captions, but hard negatives for {len(self.negatives)}"
            )


class Reader(Protocol):
    """A format: files in, records out."""

    def records(self) -> Iterator[Record]:
        """All records, of every split."""
        ...

    def open(self, image: str) -> str | Path | bytes:
        """What ``open_image`` takes for a record's ``image``: a path, or the bytes."""
        ...

    def fingerprint(self) -> dict:
        """Plain data: the settings, and what the files hold."""
        ...


class Records:
    """A source of splits from any reader.

    Args:
        reader: the format.
        exclude: a fix list of the data doctor: records and captions to leave out.
        empty_captions: "drop" leaves out captions of blanks alone, counts them and says so; "error" refuses them;
            "keep" trains on start and end token.
        background: colour under transparent parts.
        max_pixels: width x height allowed.
    """

    def __init__(
        self,
        reader: Reader,
        *,
        exclude: str | None = None,
        empty_captions: Literal["drop", "error", "keep"] = "drop",
        background: tuple[int, int, int] = WHITE,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        if empty_captions not in ("drop", "error", "keep"):
            raise ValueError(f"empty_captions={empty_captions!r} is not known; choose drop, error or keep")
        self.reader = reader
        self.exclude = exclude
        self.empty_captions = empty_captions
        self.background = (background[0], background[1], background[2])
        self.max_pixels = max_pixels
        self._splits: dict[str, Split] | None = None

    def split(self, name: str) -> Split:
        """The split called ``name``.

        Raises:
            ValueError: when there is none, or it has no captions; says which there are, with their sizes.
        """
        splits = self.splits()
        if name not in splits:
            sizes = ", ".join(f"{split.name} ({len(split.image_ids)} images)" for split in splits.values())
            raise ValueError(f"there is no split {name!r} in {self._called()}; it has {sizes or 'no records at all'}")
        return splits[name]

    def splits(self) -> dict[str, Split]:
        """All splits, read once."""
        if self._splits is None:
            by_split: dict[str, list[Record]] = {}
            for record in self.records():
                by_split.setdefault(record.split, []).append(record)
            sizes = {name: len(records) for name, records in by_split.items()}
            for fault in size_faults(getattr(self.reader, "set_name", None), sizes):
                log.warning("%s", fault)
            self._splits = {name: self._flat(name, records) for name, records in by_split.items()}
        return self._splits

    def records(self) -> Iterator[Record]:
        """All records, one for each picture, without what the fix list names."""
        records = merged(self.reader.records())
        if self.exclude is None:
            return records
        from vlretrieval.data.exclude import FixList  # it knows records, so records cannot know it at import

        return FixList(self.exclude)(records)

    def fingerprint(self) -> dict:
        """Plain data: the settings of source and reader."""
        return {
            "exclude": self.exclude,
            "empty_captions": self.empty_captions,
            "background": list(self.background),
            "max_pixels": self.max_pixels,
            "reader": type(self.reader).__name__,
            **self.reader.fingerprint(),
        }

    def _called(self) -> str:
        texts = (value for value in self.reader.fingerprint().values() if isinstance(value, str))
        return next(texts, type(self.reader).__name__)

    def _flat(self, name: str, records: list[Record]) -> Split:
        notes: Counter[str] = Counter()
        captions: list[str] = []
        caption_image: list[int] = []
        negatives: list[tuple[str, str, int]] = []
        for image, record in enumerate(records):
            for place, caption in enumerate(record.captions):
                if not caption.strip() and self._drops_empty(record):
                    notes["captions_empty"] += 1
                    continue
                if record.negatives:
                    negatives += [(n.text, n.kind, len(captions)) for n in record.negatives[place]]
                captions.append(caption)
                caption_image.append(image)
        if notes["captions_empty"]:
            log.warning("%s: %d empty captions left out (empty_captions=drop)", name, notes["captions_empty"])
        if not captions:
            raise ValueError(f"split {name!r} of {self._called()} is empty: {len(records)} images, no captions")
        opener = _Opener(self, PackedStrings(record.image for record in records))
        shard_of = getattr(self.reader, "shard_of", None)
        shards = None if shard_of is None else np.asarray([shard_of(record.image) for record in records])
        regions = {i: record.regions for i, record in enumerate(records) if record.regions}
        return Split(
            name,
            PackedStrings(record.image_id for record in records),
            PackedStrings(captions),
            np.asarray(caption_image, dtype=np.int64),
            opener,
            reduced=opener,
            negatives=_hard_negatives(negatives),
            regions=(lambda index: regions.get(index, ())) if regions else None,
            stamp=opener.stamp,
            notes=dict(notes),
            shards=shards,
        )

    def _drops_empty(self, record: Record) -> bool:
        if self.empty_captions == "error":
            raise ValueError(f"image {record.image_id!r} has an empty caption; mend it, or set empty_captions=drop")
        return self.empty_captions == "drop"

    def open(self, image: str, at_least: int | Callable[[int, int], int] | None = None) -> Image:
        """The picture of a record's ``image``."""
        return open_image(
            self.reader.open(image),
            background=self.background,
            max_pixels=self.max_pixels,
            at_least=at_least,
        )


class _Opener:
    """Opens pictures by index. A class and not a closure, so that a split can be sent to another process."""

    def __init__(self, source: Records, references: PackedStrings) -> None:
        self.source, self.references = source, references

    def __call__(self, index: int, at_least: int | Callable[[int, int], int] | None = None) -> Image:
        return self.source.open(self.references[index], at_least)

    def stamp(self, contents: bool = False) -> str:
        """Names, sizes and times of change of the files, or what is in them; of pictures within other files, their
        sizes, or what is in them.
        """
        digest = hashlib.sha256(json.dumps([list(self.source.background), self.source.max_pixels]).encode())
        for reference in self.references:
            found = self.source.reader.open(reference)
            try:
                if contents:
                    told = hashlib.sha256(found if isinstance(found, bytes) else Path(found).read_bytes()).hexdigest()
                elif isinstance(found, bytes):
                    told = str(len(found))
                else:
                    status = os.stat(found)
                    told = f"{status.st_size} {status.st_mtime_ns}"
            except OSError:
                told = "missing"
            digest.update(f"{reference}\0{told}\n".encode("utf-8", "surrogatepass"))
        return digest.hexdigest()[:16]


def merged(records: Iterable[Record]) -> Iterator[Record]:
    """Records with the same split and image id as one, captions in the order read; the order of first appearance.

    A flat table has a row for each caption, and its five rows of a picture must not count as five pictures.
    """
    whole: dict[tuple[str, str], Record | list[Record]] = {}
    for record in records:
        key = (record.split, record.image_id)
        found = whole.get(key)
        if found is not None and (image := (found[0] if isinstance(found, list) else found).image) != record.image:
            raise ValueError(
                f"image id {record.image_id!r} of split {record.split!r} is {image!r} and {record.image!r}; "
                f"an id is one picture"
            )
        if found is None:
            whole[key] = record
        elif isinstance(found, list):
            found.append(record)
        else:
            whole[key] = [found, record]
    return (_joined(found) if isinstance(found, list) else found for found in whole.values())


def _joined(parts: list[Record]) -> Record:
    first = parts[0]
    captions = tuple(caption for part in parts for caption in part.captions)
    negatives: tuple[tuple[HardNegative, ...], ...] = ()
    if any(part.negatives for part in parts):
        negatives = tuple(n for part in parts for n in (part.negatives or ((),) * len(part.captions)))
    regions = tuple(dict.fromkeys(region for part in parts for region in part.regions))
    return replace(first, captions=captions, negatives=negatives, regions=regions)


def _hard_negatives(found: list[tuple[str, str, int]]) -> HardNegatives:
    if not found:
        return HardNegatives()
    texts, kinds, captions = zip(*found, strict=True)
    return HardNegatives(PackedStrings(texts), PackedStrings(kinds), np.asarray(captions, dtype=np.int64))

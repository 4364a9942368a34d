"""Tar shards as records: every member's place is known, so pictures open in any order."""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vlretrieval.data.images import SUFFIXES
from vlretrieval.data.packed import NameIndex
from vlretrieval.data.readers import files
from vlretrieval.data.records import Record
from vlretrieval.data.shards import BadShard, Member, ShardFile, expand_braces, fetch, read_index, samples
from vlretrieval.data.splits import plain

log = logging.getLogger(__name__)

_PICTURES = tuple(suffix.removeprefix(".") for suffix in SUFFIXES)


class TarShards:
    """Records of WebDataset shards.

    A sample's captions are those of its .json ("captions", or another key found or named), else those of its .txt (a
    line each), .caption, .0.txt, .1.txt, ...

    Args:
        shards: for each split a path, a glob, a name with {000..123}, a URL, or a list of these. A single one is
            ``default_split``.
        cache_dir: where shards from URLs are kept.
        image_key: extension of the picture; None: any picture's.
        caption_key: field of the .json; None: found among the usual names.
        default_split: the split of shards that are given without one.
        incomplete: "error" refuses a sample without picture or caption; "skip" leaves it out and counts it.
    """

    def __init__(
        self,
        shards: str | Sequence[str] | Mapping[str, str | Sequence[str]],
        *,
        cache_dir: str = "shard_cache",
        image_key: str | None = None,
        caption_key: str | None = None,
        default_split: str = "train",
        incomplete: str = "error",
    ) -> None:
        if incomplete not in ("error", "skip"):
            raise ValueError(f"incomplete={incomplete!r} is not known; choose error or skip")
        given = shards if isinstance(shards, Mapping) else {default_split: shards}
        self.shards = plain(shards)
        self._patterns = {
            split: [patterns] if isinstance(patterns, str) else list(patterns)
            for split, patterns in given.items()
            if patterns is not None
        }
        self.cache_dir, self.default_split, self.incomplete = cache_dir, default_split, incomplete
        self.image_key, self.caption_key = image_key, caption_key
        self._files: list[ShardFile] = []
        self._names = NameIndex([])
        self._places = np.zeros((0, 3), dtype=np.int64)  # shard, start, size of each picture

    def records(self) -> Iterator[Record]:
        """All records; BadShard naming shard and sample where one is not as it should be."""
        self._files = []
        places: dict[str, tuple[int, int, int]] = {}
        ignored: Counter[str] = Counter()
        left_out = 0
        found: list[Record] = []
        for split, path in self._paths():
            shard = ShardFile(path)
            self._files.append(shard)
            for key, parts in samples(path, read_index(path)):
                record, picture = self._record(shard, key, parts, split, ignored)
                if record is None or picture is None:
                    left_out += 1
                    continue
                if record.image in places:
                    raise BadShard(f"{path}: sample {key!r}: {record.image!r} stands in the shards twice")
                places[record.image] = (len(self._files) - 1, picture.start, picture.size)
                found.append(record)
        self._names = NameIndex(places)
        self._places = np.asarray(list(places.values()), dtype=np.int64).reshape(-1, 3)
        if left_out:
            log.warning("%d samples without picture or caption left out (incomplete=skip)", left_out)
        if ignored:
            told = ", ".join(f"{name} ({count})" for name, count in ignored.most_common())
            log.warning("shards hold members that are never read: %s", told)
        yield from found

    def _paths(self) -> Iterator[tuple[str, str]]:
        for split, patterns in self._patterns.items():
            for pattern in patterns:
                paths = expand_braces(pattern)
                if not paths:
                    raise ValueError(f"data.shards.{split}={pattern}: no such files")
                for path in paths:
                    local = fetch(path, self.cache_dir)
                    yield split, str(files.need_file(f"data.shards.{split}", local))

    def _record(
        self, shard: ShardFile, key: str, parts: dict[str, Member], split: str, ignored: Counter[str]
    ) -> tuple[Record | None, Member | None]:
        where = f"{shard.path}: sample {key!r}"
        pictures = [
            part for name, part in parts.items() if (name == self.image_key if self.image_key else name in _PICTURES)
        ]
        texts = sorted((name for name in parts if name.rpartition(".")[2] in ("txt", "caption")), key=_by_number)
        used = {part.extension for part in pictures} | set(texts) | {"json"}
        ignored.update(name for name in parts if name not in used)
        if len(pictures) > 1:
            raise BadShard(
                f"{where} has {len(pictures)} pictures; set data.image_key to the extension of the right one"
            )
        fields: dict[str, Any] = {}
        if "json" in parts:
            try:
                fields = json.loads(
                    shard.read(parts["json"].start, parts["json"].size).decode("utf-8", "surrogatepass")
                )
            except ValueError as error:
                raise BadShard(f"{where}: its .json is not JSON ({error})") from None
            if not isinstance(fields, dict):
                raise BadShard(f"{where}: its .json must be an object")
        captions = self._captions(shard, parts, texts, fields, where)
        if not pictures or captions is None:
            if self.incomplete == "skip":
                return None, None
            lacking = "picture" if not pictures else "caption"
            raise BadShard(f"{where} has no {lacking}; mend the shard, or set data.incomplete=skip")
        image = str(fields.get("image") or f"{key}.{pictures[0].extension}")
        record = Record(
            image=image,
            captions=captions,
            image_id=str(fields.get("image_id", image)),
            split=split,
            **files.extras_of(fields, where),
        )
        return record, pictures[0]

    def _captions(
        self, shard: ShardFile, parts: dict[str, Member], texts: list[str], fields: dict[str, Any], where: str
    ) -> tuple[str, ...] | None:
        names = [self.caption_key] if self.caption_key else [key for key in files.CAPTION_KEYS if key in fields]
        if names and names[0] in fields:
            return files.captions_of(fields[names[0]], f"{where}: field {names[0]!r}")
        if not texts:
            return None
        found: list[str] = []
        for name in texts:
            part = parts[name]
            try:
                text = shard.read(part.start, part.size).decode("utf-8-sig")
            except UnicodeDecodeError as error:
                raise BadShard(f"{where}: .{name} is not UTF-8 (byte {error.start})") from None
            lines = text.removesuffix("\n").split("\n")
            found += [files.caption_text(line.removesuffix("\r"), f"{where}: .{name}") for line in lines]
        return tuple(found)

    def open(self, image: str) -> bytes:
        """The bytes of a record's picture."""
        shard, start, size = self._places[self._names[image]]
        return self._files[shard].read(int(start), int(size))

    def shard_of(self, image: str) -> int:
        """The number of the shard that a record's picture lies in."""
        return int(self._places[self._names[image], 0])

    def fingerprint(self) -> dict:
        """Plain data: the settings, and the sha256 over the shards' names and sizes (not their content)."""
        digest = hashlib.sha256()
        for split, path in self._paths():
            digest.update(f"{split} {Path(path).name} {Path(path).stat().st_size}\n".encode())
        settings = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {**settings, "sha256": digest.hexdigest()}


def _by_number(name: str) -> tuple[int, str]:
    first = name.split(".", 1)[0]
    return (int(first) if first.isdigit() else -1, name)

"""Where the pictures of an index come from: a folder, or WebDataset shards. Lists them, and reads them as bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from vlretrieval.data.images import SUFFIXES, BadImage
from vlretrieval.data.shards import BadShard, Member, ShardFile, expand_braces, read_index, samples


@dataclass(frozen=True, slots=True)
class Entry:
    """A picture as it is listed; ``stamp`` is equal as long as its content need not be looked at again."""

    id: str
    stamp: list[int]


class Source(Protocol):
    """Pictures with ids that stay the same from one run to the next."""

    name: str

    def entries(self) -> list[Entry]:
        """All pictures, in a fixed order."""
        ...

    def read(self, id: str) -> bytes:
        """The file's bytes.

        Raises:
            BadImage: it cannot be read, or was never listed.
        """
        ...


class Folder:
    """Picture files in a folder and below; the id is the path below the folder, with slashes.

    Raises:
        ValueError: no such folder, or no picture in it.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.name = str(self.folder.resolve())
        if not self.folder.is_dir():
            raise ValueError(f"images={folder}: no such folder; give a folder of pictures, or shards as PATH.tar")

    def entries(self) -> list[Entry]:
        found = [Entry(path.relative_to(self.folder).as_posix(), stamp(path)) for path in self._files()]
        if not found:
            raise ValueError(f"images={self.folder} holds no picture ({', '.join(SUFFIXES[:5])}, ...)")
        return sorted(found, key=lambda entry: entry.id)

    def _files(self) -> Iterator[Path]:
        for path in self.folder.rglob("*"):
            if path.suffix.lower() in SUFFIXES and path.is_file():
                yield path

    def read(self, id: str) -> bytes:
        # an index may come from anyone, and its ids must not lead out of the folder
        if id.startswith("/") or ".." in id.split("/") or "\0" in id:
            raise BadImage(id, "points out of the folder")
        path = self.folder / id
        try:
            if not path.is_file():  # reading a pipe would wait for ever
                raise BadImage(id, "no such file")
            return path.read_bytes()
        except OSError as error:
            raise BadImage(id, error.strerror or "cannot be read") from None


class Shards:
    """Pictures in WebDataset shards; the id is ``SHARD.tar/KEY``.

    Args:
        pattern: a path, a glob, or ``name-{000..007}.tar``.

    Raises:
        ValueError: no such shard, or one that is damaged.
    """

    def __init__(self, pattern: str) -> None:
        self.name = pattern if "://" in pattern else str(Path(pattern).absolute())
        self.shards = [Path(name) for name in expand_braces(pattern)]
        missing = next((shard for shard in self.shards if not shard.is_file()), None)
        if not self.shards or missing is not None:
            raise ValueError(f"images={missing or pattern}: no such shard")
        self._members: dict[str, tuple[ShardFile, Member]] = {}

    def entries(self) -> list[Entry]:
        found = []
        for shard in self.shards:
            file, state = ShardFile(str(shard)), stamp(shard)
            for key, parts in samples(shard, read_index(shard)):
                member = next((m for extension, m in parts.items() if is_picture(extension)), None)
                if member is not None:
                    id = f"{shard.name}/{key}"
                    if id in self._members:
                        raise BadShard(f"{shard}: two shards give the same id {id!r}")
                    self._members[id] = (file, member)
                    found.append(Entry(id, [*state, member.start]))
        if not found:
            raise ValueError(f"images={self.name} holds no picture")
        return found

    def read(self, id: str) -> bytes:
        if not self._members:
            self.entries()
        if id not in self._members:
            raise BadImage(id, "is not in the shards")
        file, member = self._members[id]
        return file.read(member.start, member.size)


def is_picture(extension: str) -> bool:
    return f".{extension.rpartition('.')[2]}" in SUFFIXES


def stamp(path: Path) -> list[int]:
    """Size in bytes and time of change in nanoseconds: while they are equal, the content is taken to be equal."""
    found = os.stat(path)
    return [found.st_size, found.st_mtime_ns]


def source_of(images: str) -> Source:
    """A folder, or shards if the name ends in .tar."""
    return Shards(images) if str(images).endswith(".tar") else Folder(images)

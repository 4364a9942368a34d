"""WebDataset tar shards: written here, and read by an index of our own.

A shard is a plain tar; the members of a sample stand together and share their name up to the first dot of the file
name: ``a/007.jpg`` with ``a/007.json`` or ``a/007.txt``. Headers are read once; after that a sample is one slice of the
file, in any order, so the whole set is shuffled as one (or, where it is larger than memory, a few shards at a time: see
``ordering.py``) and split over ranks and workers like any other. Nothing is ever
unpacked to disk, no member is ever run or unpickled, and no shard's name is ever given to a shell.
"""

import io
import json
import mmap
import os
import tarfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

BLOCK = 512
_MAGIC = b"ustar"


class BadShard(ValueError):
    """A tar that is not as it should be; the message names the shard and, where it can, the sample."""


class Member(NamedTuple):
    """A file within a shard."""

    name: str
    start: int  # byte where its content begins
    size: int  # bytes

    @property
    def key(self) -> str:
        """The sample's name: up to the first dot of the file name."""
        return _key_and_extension(self.name)[0]

    @property
    def extension(self) -> str:
        """What follows the first dot, in lower case: "jpg", "0.txt", "json"."""
        return _key_and_extension(self.name)[1]


def _key_and_extension(name: str) -> tuple[str, str]:
    dot = name.find(".", name.rfind("/") + 1)
    return (name, "") if dot < 0 else (name[:dot], name[dot + 1 :].lower())


def read_index(shard: str | Path) -> list[Member]:
    """The regular files of a tar, in order, by its headers alone.

    Written out and not left to ``tarfile``: for many small files it is several times faster, and it is strict where
    ``tarfile`` ends quietly (a shard cut at a header looks complete to it).

    Raises:
        BadShard: when the file is no tar, is cut, has a wrong checksum, or holds a link, a device or an unsafe name.
    """
    size = os.path.getsize(shard)
    if size == 0:
        raise BadShard(f"{shard}: empty, 0 bytes")
    with open(shard, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        headers: list[int] = []  # where they begin
        members: list[Member] = []
        fault: BadShard | None = None
        try:
            _walk(data, size, shard, headers, members)
        except BadShard as found:
            fault = found
        # Sums of all headers at once: a damaged header is told as such, and not by what the walk took it for.
        _check_sums(data, shard, headers, members)
        if fault is not None:
            raise fault
    if not members:
        raise BadShard(f"{shard}: a tar without files")
    return members


def _walk(data: mmap.mmap, size: int, shard: str | Path, headers: list[int], members: list[Member]) -> None:
    at, nothing = 0, bytes(BLOCK)
    long_name: str | None = None
    long_size: int | None = None
    while True:
        header = data[at : at + BLOCK]
        if len(header) < BLOCK:
            raise BadShard(f"{shard}: cut at byte {size}, after {_last(members)}")
        if header == nothing:
            return
        headers.append(at)
        kind, length = header[156:157], _length(header, shard, at)
        if long_size is not None:
            length, long_size = long_size, None
        start = at + BLOCK
        at = start + -(-length // BLOCK) * BLOCK
        if start + length > size:
            name, missing = long_name or _name(header), start + length - size
            raise BadShard(f"{shard}: cut within {name!r}, {missing} bytes are missing")
        if kind == b"0" or kind == b"\0" or kind == b"7":
            name = long_name or _name(header)
            long_name = None
            if name[:2] == "./":
                name = name[2:]
            if name[:1] == "/" or (".." in name and ".." in PurePosixPath(name).parts):
                raise BadShard(f"{shard}: {name!r} points out of the shard")
            members.append(Member(name, start, length))
        elif kind == b"L":  # GNU: the next member's name
            long_name = data[start : start + length].rstrip(b"\0").decode("utf-8", "surrogateescape")
        elif kind == b"x":  # pax: the next member's name, size, ...
            fields = _pax(data[start : start + length])
            long_name = fields.get("path", long_name)
            long_size = int(fields["size"]) if "size" in fields else None
        elif kind == b"g" or kind == b"5":  # pax for all members; folders
            long_name = None
        else:
            name = long_name or _name(header)
            raise BadShard(f"{shard}: {name!r} is a link or a device; only plain files belong into a shard")


def _check_sums(data: mmap.mmap, shard: str | Path, headers: list[int], members: list[Member]) -> None:
    if not headers:
        return
    blocks = np.frombuffer(b"".join([data[at : at + BLOCK] for at in headers]), dtype=np.uint8).reshape(-1, BLOCK)
    # The sum is taken with its own field, bytes 148 to 155, as blanks.
    sums = blocks.sum(1, dtype=np.int64) - blocks[:, 148:156].sum(1, dtype=np.int64) + 8 * 32
    for at, total in zip(headers, sums.tolist(), strict=True):
        try:
            told = int(data[at + 148 : at + 156].split(b"\0")[0].strip() or b"0", 8)
        except ValueError:
            told = -1
        if told != total:
            before = [member for member in members if member.start < at]
            raise BadShard(f"{shard}: " + ("not a tar" if at == 0 else f"damaged at byte {at}, after {_last(before)}"))


def _length(header: bytes, shard: str | Path, at: int) -> int:
    field = header[124:136]
    if field[0] & 0x80:  # GNU: a binary number, for more than 8 GB
        return int.from_bytes(field[1:], "big")
    try:
        return int(field.split(b"\0", 1)[0].strip() or b"0", 8)
    except ValueError:
        raise BadShard(f"{shard}: damaged at byte {at}: a member's size is no number") from None


def _name(header: bytes) -> str:
    name = header[:100].split(b"\0", 1)[0]
    if header[257:262] == _MAGIC and header[257:265] != b"ustar  \0":
        prefix = header[345:500].split(b"\0", 1)[0]
        name = prefix + b"/" + name if prefix else name
    return name.decode("utf-8", "surrogateescape")


def _pax(data: bytes) -> dict[str, str]:
    fields: dict[str, str] = {}
    while data:
        length, _, rest = data.partition(b" ")
        record = data[len(length) + 1 : int(length) - 1]
        key, _, value = record.partition(b"=")
        fields[key.decode()] = value.decode("utf-8", "surrogateescape")
        data = data[int(length) :]
    return fields


def _last(members: list[Member]) -> str:
    return f"sample {members[-1].key!r}" if members else "no sample at all"


def samples(shard: str | Path, members: list[Member]) -> Iterator[tuple[str, dict[str, Member]]]:
    """(key, extension -> member) of each sample.

    Raises:
        BadShard: when a sample's members do not stand together, or one occurs twice. Elsewhere such shards give half
            samples without a word.
    """
    done: set[str] = set()
    key: str | None = None
    parts: dict[str, Member] = {}
    for member in members:
        its_key, extension = _key_and_extension(member.name)
        if its_key != key:
            if key is not None:
                yield key, parts
                done.add(key)
            key, parts = its_key, {}
            if key in done:
                raise BadShard(f"{shard}: sample {key!r} occurs twice, or its members do not stand together")
        if extension in parts:
            raise BadShard(f"{shard}: sample {key!r} has two members {extension!r}")
        parts[extension] = member
    if key is not None:
        yield key, parts


class ShardFile:
    """Slices of one shard, memory-mapped when first needed. May be sent to a worker, which maps it anew."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._data: mmap.mmap | None = None

    def __getstate__(self) -> dict[str, str]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, str]) -> None:
        self.__init__(state["path"])  # type: ignore[misc]

    def read(self, start: int, size: int) -> bytes:
        """``size`` bytes from ``start``."""
        if self._data is None:
            with open(self.path, "rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._data[start : start + size]


def write_shard(path: Path, samples: Iterable[tuple[str, dict[str, bytes]]]) -> None:
    """Write samples, (key, extension -> content), as one tar.

    It gets its name only when it is whole: a shard that is there needs not be written again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    with open(part, "wb") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for key, contents in samples:
                for extension, content in contents.items():
                    info = tarfile.TarInfo(f"{key}.{extension}")
                    info.size, info.mtime, info.mode = len(content), 0, 0o644  # equal samples, equal bytes
                    tar.addfile(info, io.BytesIO(content))
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def fetch(url: str, folder: str, attempts: int = 3) -> str:
    """The local copy of a shard at ``url``, fetched with fsspec unless it is there already.

    Args:
        url: "https://...", "s3://...", or a path, which is returned as it is.
        folder: where copies are kept.
        attempts: how often a broken transfer is tried again.
    """
    if url.startswith("pipe:"):
        raise ValueError(f"{url}: a command is never run to get data; give a path or a URL")
    if "://" not in url:
        return url
    import fsspec

    name = url.split("://", 1)[1].replace("/", "_").split("?", 1)[0]
    target = Path(folder) / name
    if target.is_file():
        return str(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{name}.{os.getpid()}.part")
    for attempt in range(1, attempts + 1):
        try:
            with fsspec.open(url, "rb") as source, open(part, "wb") as copy:
                while block := source.read(1 << 20):
                    copy.write(block)
            os.replace(part, target)
            return str(target)
        except (OSError, ValueError, ImportError) as error:
            part.unlink(missing_ok=True)
            if attempt == attempts or isinstance(error, (FileNotFoundError, ValueError, ImportError)):
                raise ValueError(f"{url}: cannot be fetched ({error or type(error).__name__})") from None
            time.sleep(2**attempt / 4)
    raise AssertionError("unreachable")


def expand_braces(pattern: str) -> list[str]:
    """ "a-{000..002}.tar" -> three names; a glob of local files -> those there are, sorted; else the name itself."""
    import glob
    import re

    found = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if found:
        first, last = found.groups()
        numbers = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
        return [name for n in numbers for name in expand_braces(pattern[: found.start()] + n + pattern[found.end() :])]
    if "://" not in pattern and glob.has_magic(pattern):
        return sorted(glob.glob(pattern))
    return [pattern]


def sample_json(fields: dict) -> bytes:
    """The .json member of a sample that we write."""
    return json.dumps(fields, ensure_ascii=False, sort_keys=True).encode("utf-8", "surrogatepass")

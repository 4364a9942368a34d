"""An index on disk: rows appended to flat files, and one small file that says how many of them count.

``index.json`` is replaced in one step, after what it speaks of is on the disk; bytes beyond what it counts are those of
a run that was killed, and are cut off by the next one. Rows never change once they are counted, so a reader goes on
with what it has opened while a writer appends. What became of a picture (a row, a new row, gone, unreadable) is a line
of a log; the last line of an id is what holds.

    index.json      what the rows were made of and with, and how many count
    items.jsonl     the log
    embeddings.bin  (rows, E) float32, float16 or int8; scales.bin (rows,) float32 beside int8
    kept.bin        (rows, ...) what the cross-modal heads keep of a picture
    thumbs.bin      JPEGs end to end
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

COMMIT, LOG, EMBEDDINGS, SCALES, KEPT, THUMBS, LOCK = (
    "index.json",
    "items.jsonl",
    "embeddings.bin",
    "scales.bin",
    "kept.bin",
    "thumbs.bin",
    ".lock",
)
FORMAT = 1
EMBEDDING_TYPES = ("float32", "float16", "int8")
KEPT_TYPES = ("float16", "float32", "none")

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Made:
    """What all rows of an index have in common. Rows of two indexes belong together only if it is equal.

    Attributes:
        model: hash of weights, model config, preprocessing and tokenizer.
        width: E of the embeddings.
        embeddings: "float32", "float16" or "int8".
        kept: type of what the heads keep, or "none".
        kept_shape: shapes that follow each other in a row of kept.bin: (L, G, D) of the keys and of the values of each
            text-to-image layer, then (P, dim) of the tokens if those are kept.
        thumbs: longer side of the thumbnails in pixels, 0 for none.
    """

    model: str
    width: int
    embeddings: str
    kept: str
    kept_shape: tuple[tuple[int, ...], ...]
    thumbs: int

    @property
    def kept_values(self) -> int:
        """Numbers kept of a picture."""
        return sum(int(np.prod(shape)) for shape in self.kept_shape) if self.kept != "none" else 0

    def row_bytes(self) -> dict[str, int]:
        """Bytes of a row in each file of rows that there is."""
        sizes = {EMBEDDINGS: self.width * np.dtype(self.embeddings).itemsize}
        if self.embeddings == "int8":
            sizes[SCALES] = 4
        if self.kept_values:
            sizes[KEPT] = self.kept_values * np.dtype(self.kept).itemsize
        return sizes


@dataclass
class Commit:
    """The content of index.json."""

    made: Made
    sources: dict[str, Any]  # where the pictures came from, and where the model was
    rows: int = 0
    log_bytes: int = 0
    thumb_bytes: int = 0
    complete: bool = False  # False while a run is under way, or after one was killed
    format: int = FORMAT


@dataclass
class Item:
    """A picture of the index."""

    id: str
    row: int
    sha256: str
    stamp: list[int]
    thumb: tuple[int, int] | None = None  # start and size in thumbs.bin


@dataclass
class State:
    """What the log amounts to: pictures by id, and those that could not be read with (stamp, reason)."""

    items: dict[str, Item] = field(default_factory=dict)
    broken: dict[str, tuple[list[int], str]] = field(default_factory=dict)

    def take(self, line: dict[str, Any], row: int) -> int:
        """One line of the log, ``row`` being the next free one; gives the next free one after it."""
        if "gone" in line:
            self.items.pop(line["gone"], None)
            self.broken.pop(line["gone"], None)
            return row
        name, stamp = line["id"], line["stamp"]
        self.broken.pop(name, None)
        if "broken" in line:
            self.items.pop(name, None)
            self.broken[name] = (stamp, line["broken"])
            return row
        if "sha256" not in line:  # the same content, touched
            self.items[name].stamp = stamp
            return row
        thumb = line.get("thumb")
        self.items.pop(name, None)  # so that the order of ids is the order of their rows
        self.items[name] = Item(name, row, line["sha256"], stamp, None if thumb is None else (thumb[0], thumb[1]))
        return row + 1

    def row_by_content(self) -> dict[str, Item]:
        return {item.sha256: item for item in self.items.values()}


def read_commit(folder: Path) -> Commit:
    """What counts of an index.

    Raises:
        ValueError: no index, one of another format, or a file shorter than what counts of it.
    """
    path = folder / COMMIT
    if not path.is_file():
        raise ValueError(f"{folder} is no index: it has no {COMMIT}; make one with vlretrieval-index")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.get("format") != FORMAT:
            raise ValueError(f"format {data.get('format')}, and this version reads {FORMAT}")
        made = data.pop("made")
        shape = tuple(tuple(int(n) for n in one) for one in made.pop("kept_shape"))
        commit = Commit(Made(kept_shape=shape, **made), **data)
        known = commit.made.embeddings in EMBEDDING_TYPES and commit.made.kept in KEPT_TYPES
        if not known or min(commit.rows, commit.log_bytes, commit.thumb_bytes, commit.made.width - 1) < 0:
            raise ValueError("values that no index has")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); build the index anew in another folder") from None
    for name, needed in needed_bytes(commit).items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else 0
        if found < needed:
            raise ValueError(
                f"{folder / name} is damaged: {found} bytes of {needed}; remove {folder} and build the index anew"
            )
    return commit


def needed_bytes(commit: Commit) -> dict[str, int]:
    """Bytes of each file that count."""
    rows = {name: size * commit.rows for name, size in commit.made.row_bytes().items()}
    return {LOG: commit.log_bytes, THUMBS: commit.thumb_bytes, **rows}


def read_state(folder: Path, commit: Commit) -> State:
    """The log, replayed.

    Raises:
        ValueError: naming the line that cannot be read.
    """
    state, row = State(), 0
    if not commit.log_bytes:
        return state
    with (folder / LOG).open("rb") as file:
        content = file.read(commit.log_bytes)
    for number, line in enumerate(content.splitlines(), 1):
        try:
            row = state.take(json.loads(line), row)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            raise ValueError(f"{folder / LOG}: line {number} is damaged; build the index anew") from None
    if row != commit.rows:
        raise ValueError(f"{folder / LOG} tells of {row} rows, {COMMIT} of {commit.rows}; build the index anew")
    return state


def map_rows(folder: Path, commit: Commit, name: str) -> Array:
    """One file of rows, memory-mapped, (rows, numbers)."""
    made = commit.made
    kind = {EMBEDDINGS: made.embeddings, SCALES: "float32", KEPT: made.kept}[name]
    width = {EMBEDDINGS: made.width, SCALES: 1, KEPT: made.kept_values}[name]
    if not commit.rows:
        return np.empty((0, width), dtype=kind)
    return np.memmap(folder / name, dtype=kind, mode="r", shape=(commit.rows, width))


class Writer:
    """Appends to an index; what it appended counts after :meth:`commit`. One at a time, see :func:`writing`."""

    def __init__(self, folder: Path, commit: Commit, state: State) -> None:
        self.folder, self.now, self.state = folder, commit, state
        self._files = {}
        for name, size in needed_bytes(commit).items():
            path = folder / name
            path.touch()
            os.truncate(path, size)  # what a killed run left beyond it
            self._files[name] = path.open("ab")

    def append(self, line: dict[str, Any], arrays: dict[str, Array] | None = None, thumb: bytes | None = None) -> None:
        """One line of the log, with its row (a vector for each file of rows) where it has one."""
        if thumb is not None:
            line = {**line, "thumb": [self.now.thumb_bytes, len(thumb)]}
            self._files[THUMBS].write(thumb)
            self.now.thumb_bytes += len(thumb)
        for name, values in (arrays or {}).items():
            self._files[name].write(values.tobytes())
        written = json.dumps(line, ensure_ascii=True, separators=(",", ":")).encode() + b"\n"
        self._files[LOG].write(written)
        self.now.log_bytes += len(written)
        self.now.rows = self.state.take(line, self.now.rows)

    def flush(self) -> None:
        """What was appended can be read from the files."""
        for file in self._files.values():
            file.flush()

    def commit(self, complete: bool = False) -> None:
        """From now on all that was appended counts, come what may."""
        self.flush()
        for file in self._files.values():
            os.fsync(file.fileno())
        self.now.complete = complete
        write_commit(self.folder, self.now)

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def write_commit(folder: Path, commit: Commit) -> None:
    """Replace index.json in one step."""
    part = folder / f"{COMMIT}.part"
    with part.open("w", encoding="utf-8") as file:
        json.dump(asdict(commit), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, folder / COMMIT)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """The names in a folder are on the disk, too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def writing(folder: Path, made: Made, sources: dict[str, Any]) -> Iterator[Writer]:
    """The only writer of an index, which is made if it is not there.

    Raises:
        ValueError: another process writes it; it was made of or with something else; the folder holds other files.
    """
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        if (folder / COMMIT).is_file():
            commit = read_commit(folder)
            check_made(folder, commit.made, made)
            commit.sources = {**commit.sources, **sources}
        else:
            commit = Commit(made, sources)
        writer = Writer(folder, commit, read_state(folder, commit))
        try:
            yield writer
        finally:
            writer.close()


def check_folder(folder: Path) -> None:
    """Refuse to write an index among other things."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output={folder} is a file; give a folder")
    ours = {COMMIT, LOG, EMBEDDINGS, SCALES, KEPT, THUMBS, LOCK, f"{COMMIT}.part"}
    if folder.is_dir() and not (folder / COMMIT).is_file():
        others = [path.name for path in folder.iterdir() if path.name not in ours and not path.name.startswith("part-")]
        if others:
            raise ValueError(f"output={folder} holds other files ({sorted(others)[0]}); give another output=")


def check_made(folder: Path, found: Made, wanted: Made) -> None:
    """Refuse rows that do not belong together."""
    for name, value in asdict(wanted).items():
        there = asdict(found)[name]
        if there != value:
            what = (
                "was made with another model" if name == "model" else f"has {name}={short(there)}, not {short(value)}"
            )
            raise ValueError(
                f"{folder} is stale: it {what}" + (f" ({there} there, {value} here)" if name == "model" else "") + "; "
                "give another output=, or remove it and build it anew"
            )


def short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 60 else text[:57] + "..."


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One writer at a time. The lock goes with its process, however that ends."""
    import fcntl

    with (folder / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{folder} is being written by another process; wait for it, or end it") from None
        yield


def remove(folders: Sequence[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)

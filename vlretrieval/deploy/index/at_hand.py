"""Rows that need no forward pass: of content that the index, or a part of it, holds already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vlretrieval.deploy.index.store import (
    THUMBS,
    Array,
    Item,
    Writer,
    read_commit,
    read_state,
)


@dataclass
class Row:
    """A picture that is ready to be appended: its row in each file, and its thumbnail."""

    arrays: dict[str, Array]
    thumb: bytes | None


class Rows:
    """Rows by content: those of the index, which grow as it is written, and of parts that other processes made."""

    def __init__(self, writer: Writer, parts: Sequence[Path]) -> None:
        self._writer, self._made = writer, writer.now.made
        self._at: dict[str, tuple[Path, Item]] = {}
        for part in parts:
            commit = read_commit(part)
            if commit.made == self._made:
                for sha256, item in read_state(part, commit).row_by_content().items():
                    self._at.setdefault(sha256, (part, item))
        for sha256, item in writer.state.row_by_content().items():
            self._at[sha256] = (writer.folder, item)

    def __contains__(self, sha256: str) -> bool:
        return sha256 in self._at

    def remember(self, item: Item) -> None:
        """A row of this run; from now on it counts as the index's own, and no longer as a part's."""
        at = self._at.get(item.sha256)
        if at is None or at[0] != self._writer.folder:
            self._at[item.sha256] = (self._writer.folder, item)

    def is_own(self, sha256: str) -> bool:
        """Whether the index itself has the row, and not only a part."""
        return self._at[sha256][0] == self._writer.folder

    def row(self, sha256: str) -> Row:
        folder, item = self._at[sha256]
        self._writer.flush()
        arrays = {
            name: np.frombuffer(_read(folder / name, item.row * size, size), dtype=np.uint8)
            for name, size in self._made.row_bytes().items()
        }
        return Row(arrays, None if item.thumb is None else _read(folder / THUMBS, *item.thumb))


def _read(path: Path, start: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(size)

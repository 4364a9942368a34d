"""Strings and token lists in one flat array each: a million of them is two NumPy arrays, not a million objects.

Python lists of small objects are copied page by page into every forked loader worker, because touching an object
writes its reference count. A packed array is only read, so workers share one copy.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np


class PackedStrings(Sequence[str]):
    """An immutable sequence of texts: one UTF-8 buffer and (N + 1) offsets.

    Lone surrogates (broken file names) survive the round trip.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        buffer = bytearray()
        ends = [0]
        for text in texts:
            buffer += text.encode("utf-8", "surrogatepass")
            ends.append(len(buffer))
        self._bytes = np.frombuffer(bytes(buffer), dtype=np.uint8)
        self._ends = np.asarray(ends, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is outside of {len(self)} texts")
        index = int(index) % len(self)
        return self._bytes[self._ends[index] : self._ends[index + 1]].tobytes().decode("utf-8", "surrogatepass")

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PackedStrings):
            return np.array_equal(self._ends, other._ends) and np.array_equal(self._bytes, other._bytes)
        return list(self) == list(other) if isinstance(other, (list, tuple)) else NotImplemented

    def __hash__(self) -> int:
        return hash((self._bytes.tobytes(), self._ends.tobytes()))

    def __repr__(self) -> str:
        return f"PackedStrings({len(self)} texts, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        """Bytes of the two arrays."""
        return self._bytes.nbytes + self._ends.nbytes


class PackedTokens:
    """N token lists of different lengths, read back as one padded rectangle.

    Args:
        rows: N lists of token ids.
        pad_id: id written beyond a row's end.
    """

    def __init__(self, rows: Iterable[Sequence[int]], pad_id: int) -> None:
        flat: list[np.ndarray] = []
        ends = [0]
        for row in rows:
            flat.append(np.asarray(row, dtype=np.int32))
            ends.append(ends[-1] + len(row))
        self.pad_id = pad_id
        self._ids = np.concatenate(flat) if flat else np.zeros(0, dtype=np.int32)
        self._ends = np.asarray(ends, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self._ids[self._ends[index] : self._ends[index + 1]]

    def lengths(self) -> np.ndarray:
        """(N,) int64, tokens in each row."""
        return np.diff(self._ends)

    def gather(self, index: np.ndarray, multiple: int = 4, limit: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Rows ``index``, padded to the longest of them rounded up to ``multiple`` (and to no more than ``limit``).

        Args:
            index: (...) int64; -1 stands for an empty row.
            multiple: lengths are rounded up to it, so that few shapes occur.
            limit: longest length allowed, the context length.

        Returns:
            ids (..., L) int64 and mask (..., L) bool, True where there is a token.
        """
        index = np.asarray(index)
        start = self._ends[index]
        length = np.where(index < 0, 0, self._ends[index + 1] - start)
        width = padded_length(int(length.max(initial=0)), multiple, limit)
        steps = np.arange(width)
        mask = steps < length[..., None]
        if not len(self._ids):
            return np.full(mask.shape, self.pad_id, dtype=np.int64), mask
        at = np.minimum(np.where(index < 0, 0, start)[..., None] + steps, len(self._ids) - 1)
        return np.where(mask, self._ids[at], self.pad_id).astype(np.int64), mask

    @property
    def nbytes(self) -> int:
        """Bytes of the two arrays."""
        return self._ids.nbytes + self._ends.nbytes


def padded_length(longest: int, multiple: int, limit: int | None = None) -> int:
    """``longest`` rounded up to ``multiple``, at least one token, at most ``limit``."""
    length = max(1, -(-longest // multiple) * multiple)
    return length if limit is None else max(min(length, limit), longest, 1)


class NameIndex:
    """name -> number, as two arrays that forked workers share (a dict would be copied into each)."""

    def __init__(self, names: Iterable[str]) -> None:
        keys = np.fromiter((_name_key(name) for name in names), dtype=np.uint64)
        self._order = np.argsort(keys, kind="stable")
        self._keys = keys[self._order]
        if (self._keys[1:] == self._keys[:-1]).any():
            raise ValueError("a name occurs twice")

    def __getitem__(self, name: str) -> int:
        key = np.uint64(_name_key(name))
        place = int(np.searchsorted(self._keys, key))
        if place == len(self._keys) or self._keys[place] != key:
            raise KeyError(name)
        return int(self._order[place])


def _name_key(name: str) -> int:
    # 64 bits: two of a million names collide with a chance of 3 in 100 million, and that is found when it is built.
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")

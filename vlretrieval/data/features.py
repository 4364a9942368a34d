"""What a frozen tower says of a split, computed once: half-precision files that training maps into memory.

``FOLDER/train/image/`` holds raw little-endian arrays: ``pooled.f16`` (N, dim), ``lengths.i32`` (N,) tokens of each
item, ``tokens.f16`` (their sum, token dim). ``about.json`` says of what they are and which tower made them, and
``blocks.jsonl`` has a checksum for each run of items. The folder gets its name when it is whole; until then it is
``.image.partial``, where a run that was killed goes on. Features of anything but what is asked for are refused.

Knows arrays and splits, no models: ``training/frozen_features.py`` computes, and holds a tower against ``about.json``.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vlretrieval.data.made_of import difference, made_of
from vlretrieval.data.packed import padded_length
from vlretrieval.data.splits import Split
from vlretrieval.data.tokenizers import Tokenizer, tokenizer_hash
from vlretrieval.data.transforms import EvalTransform

VERSION = 1  # goes up when the same tower's output would be stored in other bytes
PARTS = ("image", "text", "negatives")  # negatives: the data's hard negatives, by the text tower
SUMMED_BYTES = 1 << 30  # so much is held against its checksums when it is opened; of more, blocks from all over it
_FILES = {"pooled": ("pooled.f16", "<f2"), "lengths": ("lengths.i32", "<i4"), "tokens": ("tokens.f16", "<f2")}


class FeatureRows(NamedTuple):
    """A tower's output of B items: pooled (B, dim), tokens (B, T, dim), mask (B, T) bool or None (all real)."""

    pooled: Tensor
    tokens: Tensor
    mask: Tensor | None

    def mapped(self, change: Callable[[Tensor], Tensor]) -> FeatureRows:
        """``change`` of each tensor."""
        return FeatureRows(change(self.pooled), change(self.tokens), None if self.mask is None else change(self.mask))


def about_images(split: Split, transform: EvalTransform) -> dict[str, Any]:
    """What image features are of: pictures, their files, and how they are resized."""
    return {"version": VERSION, "part": "image", "items": len(split.image_ids), **made_of(split, transform)}


def about_texts(split: Split, tokenizer: Tokenizer, part: str = "text") -> dict[str, Any]:
    """What text features are of: captions (or hard negatives), and how they are tokenised."""
    texts = split.captions if part == "text" else split.negatives.texts
    return {
        "version": VERSION,
        "part": part,
        "items": len(texts),
        "split": split.name,
        "texts": _digest(texts),
        "tokenizer": tokenizer_hash(tokenizer),
    }


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        raw = text.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()[:16]


def features_path(folder: str | Path, split: str, part: str) -> Path:
    """Where a part of a split lies in a folder of features."""
    return Path(folder) / split / part


class FeatureWriter:
    """Writes one part in runs of items, in order; goes on after the runs that a killed writer finished.

    Args:
        path: see ``features_path``.
        about: of what, by whom. A beginning of anything else is thrown away.
    """

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path, self.partial = path, path.with_name(f".{path.name}.partial")
        self.about = json.loads(json.dumps(about))
        self.partial.mkdir(parents=True, exist_ok=True)
        blocks = self._finished()
        self.done = blocks[-1]["items"] if blocks else 0
        self._tokens = blocks[-1]["tokens"] if blocks else 0
        # Beyond the last finished run may lie half of the next one.
        with open(self.partial / "blocks.jsonl", "w", encoding="utf-8") as file:
            file.writelines(json.dumps(block) + "\n" for block in blocks)
        for name, size in _sizes(self.about, self.done, self._tokens).items():
            with open(self.partial / _FILES[name][0], "ab") as file:
                file.truncate(size)

    def _finished(self) -> list[dict[str, int]]:
        begun = self.partial / "about.json"
        if not begun.is_file() or json.loads(begun.read_text()) != self.about:
            (self.partial / "blocks.jsonl").unlink(missing_ok=True)
            part = begun.with_suffix(".part")
            part.write_text(json.dumps(self.about, indent=1))
            os.replace(part, begun)
            return []
        return _blocks(self.partial)

    def write(self, pooled: np.ndarray, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """The next items: (B, dim) and (sum of ``lengths``, dim) float32, (B,) int."""
        arrays = {"pooled": half(pooled), "lengths": np.ascontiguousarray(lengths, "<i4"), "tokens": half(tokens)}
        crc = 0
        for name, array in arrays.items():
            data = array.tobytes()
            crc = zlib.crc32(data, crc)
            with open(self.partial / _FILES[name][0], "ab") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        self.done, self._tokens = self.done + len(pooled), self._tokens + len(tokens)
        with open(self.partial / "blocks.jsonl", "a", encoding="utf-8") as file:  # after its bytes: they are whole
            file.write(json.dumps({"items": self.done, "tokens": self._tokens, "crc32": crc}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def finish(self) -> Path:
        """Give the folder its name; an older cache of that name goes."""
        assert self.done == self.about["items"]
        old = self.path.with_name(f".{self.path.name}.old")
        _remove(old)
        if self.path.exists():
            self.path.rename(old)
        self.partial.rename(self.path)
        _remove(old)
        return self.path


def half(values: np.ndarray) -> np.ndarray:
    """float32 as float16.

    Raises:
        OverflowError: a value beyond what half precision holds; with the row that it stands in.
    """
    with np.errstate(over="ignore"):
        halved = np.ascontiguousarray(values).astype("<f2")
    bad = ~np.isfinite(halved)
    if bad.any():
        row = int(np.flatnonzero(bad.any(axis=1))[0])
        raise OverflowError(row, float(np.abs(values[row]).max()))
    return halved


def _remove(folder: Path) -> None:
    if folder.is_dir():
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


def _sizes(about: dict[str, Any], items: int, tokens: int) -> dict[str, int]:
    return {
        "pooled": 2 * about["pooled_dim"] * items,
        "lengths": 4 * items,
        "tokens": 2 * about["token_dim"] * tokens,
    }


def _blocks(folder: Path) -> list[dict[str, int]]:
    blocks: list[dict[str, int]] = []
    path = folder / "blocks.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            block = json.loads(line)
        except ValueError:  # the line that a killed writer did not finish
            break
        blocks.append(block)
    return blocks


class Features:
    """One part of a split, memory-mapped.

    Attributes:
        about: what was written of it, the tower's ``weights`` and ``answer`` among it.
    """

    def __init__(self, path: Path, about: dict[str, Any], lengths: np.ndarray) -> None:
        self.path, self.about = path, about
        self.lengths = lengths.astype(np.int64)
        self.ends = np.concatenate([[0], np.cumsum(self.lengths)])
        self._same = bool((self.lengths == self.lengths[0]).all())
        self._map()

    def _map(self) -> None:
        pooled, tokens = (len(self), self.about["pooled_dim"]), (int(self.ends[-1]), self.about["token_dim"])
        # np.asarray: a plain view of the map spares its bookkeeping in each gather.
        self._pooled = np.asarray(np.memmap(self.path / _FILES["pooled"][0], "<f2", "r", shape=pooled))
        self._tokens = np.asarray(np.memmap(self.path / _FILES["tokens"][0], "<f2", "r", shape=tokens))

    def __getstate__(self) -> dict[str, Any]:  # a worker maps the files anew
        return {key: value for key, value in self.__dict__.items() if key not in ("_pooled", "_tokens")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum((self.path / name).stat().st_size for name, _ in _FILES.values())

    def gather(self, rows: np.ndarray, multiple: int = 4) -> FeatureRows:
        """Items ``rows`` (...) int64, float16, padded to the longest of them; -1 stands for an item of no tokens."""
        if self._same and self.about["part"] == "image":
            tokens = self._tokens.reshape(len(self), -1, self._tokens.shape[1])[rows]
            return FeatureRows(torch.from_numpy(self._pooled[rows]), torch.from_numpy(tokens), None)
        lengths = np.where(rows < 0, 0, self.lengths[rows])
        steps = np.arange(padded_length(int(lengths.max(initial=0)), multiple))
        mask = steps < lengths[..., None]
        at = np.minimum(self.ends[np.maximum(rows, 0)][..., None] + steps, max(0, int(self.ends[-1]) - 1))
        tokens = self._tokens[at]
        tokens[~mask] = 0  # never another item's hidden states, though the mask hides them anyway
        pooled = self._pooled[rows]
        pooled[rows < 0] = 0
        return FeatureRows(torch.from_numpy(pooled), torch.from_numpy(tokens), torch.from_numpy(mask))


def open_features(path: Path, expected: dict[str, Any], split: Split) -> Features:
    """The features of ``split`` at ``path``, held against what they should be of (``about_images``, ``about_texts``).

    Raises:
        ValueError: there are none, they are of something else, or a file is damaged; one line with both ways out.
    """
    if not (path / "about.json").is_file():
        begun = path.with_name(f".{path.name}.partial").is_dir()
        raise refusal(path, "not finished" if begun else "no such features")
    try:
        about: dict[str, Any] = json.loads((path / "about.json").read_text(encoding="utf-8"))
        other = difference(about, json.loads(json.dumps(expected)), split)
        if other is not None:
            raise refusal(path, f"stale: {other}")
        lengths = np.fromfile(path / _FILES["lengths"][0], "<i4")
        for name, size in _sizes(about, about["items"], int(lengths.sum())).items():
            found = (path / _FILES[name][0]).stat().st_size
            if found != size:
                raise refusal(path, f"damaged: {_FILES[name][0]} has {found} bytes in place of {size}")
        features = Features(path, about, lengths)
        _check_sums(features, _blocks(path))
    except (OSError, KeyError, TypeError, AttributeError) as error:
        raise refusal(path, f"damaged ({type(error).__name__}: {error})") from None
    except json.JSONDecodeError as error:
        raise refusal(path, f"damaged (about.json: {error})") from None
    return features


def refusal(path: Path, fault: str) -> ValueError:
    """The error for features that cannot be used, with both ways out."""
    part = "text" if path.name == "negatives" else path.name
    command = f"vlretrieval-data features checkpoint=... parts=[{part}] output={path.parent.parent}"
    return ValueError(f"{path}: {fault}; make it anew with {command}, or leave out data.{part}_features")


def _check_sums(features: Features, blocks: list[dict[str, int]]) -> None:
    """Compare the checksums of all blocks, or of a gigabyte of them from all over a larger cache."""
    if not blocks or blocks[-1]["items"] != len(features) or blocks[-1]["tokens"] != int(features.ends[-1]):
        raise refusal(features.path, "damaged: blocks.jsonl does not cover it")
    share = min(1.0, SUMMED_BYTES / max(1, features.nbytes))
    looked_at = np.unique(np.linspace(0, len(blocks) - 1, max(2, int(len(blocks) * share))).astype(np.int64))
    for number in looked_at.tolist():
        first = blocks[number - 1] if number else {"items": 0, "tokens": 0}
        items, tokens = slice(first["items"], blocks[number]["items"]), slice(first["tokens"], blocks[number]["tokens"])
        crc = 0
        for array in (features._pooled[items], features.lengths[items].astype("<i4"), features._tokens[tokens]):
            crc = zlib.crc32(np.ascontiguousarray(array).data, crc)
        if crc != blocks[number]["crc32"]:
            raise refusal(features.path, f"damaged: items {items.start} to {items.stop} fail their checksum")

"""Anybody's embeddings: a .npz file, or a folder of .npy files that stay on disk.

Arrays: ``image_embeddings`` (N, E), ``text_embeddings`` (M, E), ``image_ids`` (N,), ``text_image_ids`` (M,) the id of
each text's image. Optional: ``texts`` (M,), ``positives`` (P, 2) pairs (row of a text, row of an image) that are true
beyond those. Ids are numbers or texts. Rows need not be unit vectors: they are scaled, so that scores are cosines.
"""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from PIL.Image import Image

from vlretrieval.data.packed import PackedStrings
from vlretrieval.data.splits import Split
from vlretrieval.metrics.scores import IntArray, Rows, unit_rows

NEEDED = ("image_embeddings", "text_embeddings", "image_ids", "text_image_ids")
OPTIONAL = ("texts", "positives")


@dataclass
class EmbeddingSet:
    """Two galleries of unit vectors and the truth about them, as a split without pictures."""

    image: Rows
    text: Rows
    split: Split


def load_embeddings(path: str | Path) -> EmbeddingSet:
    """Read and check a file or folder of embeddings.

    Raises:
        ValueError: naming the file and the array: missing, of the wrong shape, an id that occurs twice or is unknown,
            a row that is not finite or all zeros.
    """
    path = Path(path)
    arrays = read_arrays(path)
    image, text = arrays["image_embeddings"], arrays["text_embeddings"]
    for name, ids, rows in (
        ("image_ids", arrays["image_ids"], image),
        ("text_image_ids", arrays["text_image_ids"], text),
    ):
        if ids.shape != (len(rows),):
            raise ValueError(f"{path}: {name} has shape {ids.shape}; wanted one id a row, ({len(rows)},)")
    image_ids = [str(value) for value in arrays["image_ids"].tolist()]
    row_of = {image_id: row for row, image_id in enumerate(image_ids)}
    if len(row_of) < len(image_ids):
        twice = next(image_id for row, image_id in enumerate(image_ids) if row_of[image_id] != row)
        raise ValueError(f"{path}: image_ids holds {twice!r} twice; one row an image")
    owner = np.empty(len(text), dtype=np.int64)
    for row, value in enumerate(arrays["text_image_ids"].tolist()):
        if str(value) not in row_of:
            types = [str(arrays[name].dtype) for name in ("image_ids", "text_image_ids")]
            hint = f" (image_ids are {types[0]}, text_image_ids {types[1]})" if types[0][:2] != types[1][:2] else ""
            raise ValueError(f"{path}: text_image_ids[{row}] is {value!r}, which is not among image_ids{hint}")
        owner[row] = row_of[str(value)]
    order = None if (np.diff(owner) >= 0).all() else np.argsort(owner, kind="stable")
    positives = arrays.get("positives")
    if positives is not None:
        check_pairs(path, positives, len(text), len(image))
    if "texts" in arrays and arrays["texts"].shape != (len(text),):
        raise ValueError(f"{path}: texts has shape {arrays['texts'].shape}; wanted one a row, ({len(text)},)")
    if image.shape[1] != text.shape[1]:
        raise ValueError(f"{path}: image_embeddings are {image.shape[1]} wide, text_embeddings {text.shape[1]}")
    texts = [str(value) for value in arrays["texts"].tolist()] if "texts" in arrays else _numbers(len(text))
    if order is not None:
        new_row = np.argsort(order)
        owner, texts = owner[order], [texts[row] for row in order.tolist()]
        if positives is not None:
            positives = np.stack([new_row[positives[:, 0]], positives[:, 1]], axis=1)
    split = Split(path.name, PackedStrings(image_ids), PackedStrings(texts), owner, no_picture, positives=positives)
    return EmbeddingSet(unit_rows(image, f"{path}: image"), unit_rows(text, f"{path}: text", order), split)


def check_pairs(path: Path, positives: npt.NDArray[Any], texts: int, images: int) -> None:
    """ValueError unless these are (P, 2) rows of a text and of an image."""
    if positives.ndim != 2 or positives.shape[1] != 2 or not np.issubdtype(positives.dtype, np.integer):
        found = f"shape {positives.shape} of {positives.dtype}"
        raise ValueError(f"{path}: positives has {found}; wanted (P, 2) whole numbers, rows of a text and of an image")
    outside = np.flatnonzero(((positives < 0) | (positives >= (texts, images))).any(1))
    if len(outside):
        pair = positives[outside[0]].tolist()
        raise ValueError(f"{path}: positives[{outside[0]}] is {pair}; there are {texts} texts and {images} images")


def files_hash(path: str | Path) -> str:
    """First 16 hex digits of the sha256 over a file, or over the arrays of a folder."""
    path = Path(path)
    files = [path / f"{name}.npy" for name in (*NEEDED, *OPTIONAL)] if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        if file.exists():
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:16]


def read_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a .npz, or of a folder's .npy files, memory-mapped; objects (pickles) are never read."""
    if path.is_dir():
        files = {name: path / f"{name}.npy" for name in (*NEEDED, *OPTIONAL)}
        arrays = {name: _map(file) for name, file in files.items() if file.exists()}
    elif path.suffix == ".npz" and path.is_file():
        try:
            with np.load(path, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files if name in (*NEEDED, *OPTIONAL)}
        except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} is not a .npz that can be read safely: {_first_line(error)}") from None
    else:
        what = "no such file or folder" if not path.exists() else "not a .npz file or a folder of .npy files"
        raise ValueError(f"embeddings={path}: {what}")
    missing = [name for name in NEEDED if name not in arrays]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}; it has {', '.join(sorted(arrays)) or 'nothing of it'}")
    for name in ("image_embeddings", "text_embeddings"):
        if arrays[name].ndim != 2 or not np.issubdtype(arrays[name].dtype, np.floating):
            found = f"shape {arrays[name].shape} of {arrays[name].dtype}"
            raise ValueError(f"{path}: {name} has {found}; wanted (rows, E) of a float type")
    return arrays


def _map(file: Path) -> npt.NDArray[Any]:
    try:
        return np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{file} is not a .npy that can be read safely: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _numbers(count: int) -> list[str]:
    return [f"text {row}" for row in range(count)]


def no_picture(index: int) -> Image:
    """Stands where a split's pictures would: embeddings come without them."""
    _refuse(index)


def _refuse(index: int) -> NoReturn:
    raise ValueError(f"picture {index} is not there: these are embeddings without pictures")


def positives_beyond(split: Split) -> IntArray:
    """(P, 2) pairs that are true beyond the own pairs; what is written beside embeddings."""
    own = split.positives[:, 1] == split.caption_image[split.positives[:, 0]]
    return split.positives[~own]

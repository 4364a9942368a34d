"""Check and lay out a downloaded copy of a known data set. Nothing is ever downloaded: what is missing is named, with
where it is had and under which terms.

Afterwards ``FOLDER/dataset.json`` is the Karpathy split file and ``FOLDER/images`` holds the pictures, as the reader
``data=karpathy`` takes them.
"""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlretrieval.data.known_sets import KNOWN_SIZES

SPLIT_FILES = "the zip of Karpathy's split files, caption_datasets.zip (cs.stanford.edu/people/karpathy/deepimagesent)"


@dataclass(frozen=True)
class Download:
    """Where a known set is had.

    Attributes:
        json: usual name of its split file.
        pictures: what holds the pictures, as its owners call it, and from whom.
        terms: what its owners allow.
        archives: usual names of the archives.
        folders: where its pictures lie, below ``images``; "" for one folder.
    """

    json: str
    pictures: str
    terms: str
    archives: tuple[str, ...]
    folders: tuple[str, ...] = ("",)


DOWNLOADS = {
    "flickr8k": Download(
        "dataset_flickr8k.json",
        "Flickr8k_Dataset.zip, by the request form of the University of Illinois (Hodosh, Young, Hockenmaier 2013)",
        "the pictures belong to their Flickr users; for research, not to be passed on",
        ("Flickr8k_Dataset.zip", "flickr8k-images.zip"),
    ),
    "flickr30k": Download(
        "dataset_flickr30k.json",
        "flickr30k-images.tar.gz, by the request form of the University of Illinois (Young et al. 2014)",
        "the pictures belong to their Flickr users; for research, not to be passed on",
        ("flickr30k-images.tar.gz", "flickr30k-images.tar", "flickr30k-images.zip"),
    ),
    "coco": Download(
        "dataset_coco.json",
        "train2014.zip and val2014.zip from cocodataset.org",
        "the captions are under CC BY 4.0; the pictures are under the terms of their Flickr users",
        ("train2014.zip", "val2014.zip"),
        ("train2014", "val2014"),
    ),
}


@dataclass(frozen=True)
class Prepared:
    """What was found: the split file, the folder of pictures, and pictures of each split."""

    json: Path
    images: Path
    counts: dict[str, int]


class NotReady(ValueError):
    """What is missing, and what to do about it."""


def prepare(name: str, folder: str | Path, tell: Callable[[str], None] = print) -> Prepared:
    """Check ``folder``, unpack archives that lie in it, and lay it out.

    Args:
        name: "flickr8k", "flickr30k" or "coco".
        tell: told each thing that is done.

    Raises:
        NotReady: (a ValueError) something is missing, of another size, or not whole; in one line each.
    """
    if name not in DOWNLOADS:
        raise ValueError(f"dataset={name!r} is not known; choose from {', '.join(DOWNLOADS)}")
    known, folder = DOWNLOADS[name], Path(folder)
    if not folder.is_dir():
        raise NotReady(f"folder={folder}: no such folder; make it, and put into it {known.pictures}, and {SPLIT_FILES}")
    images, split_file = folder / "images", folder / "dataset.json"
    if not split_file.is_file():
        found = _find(folder, known.json) or _unpack_one(folder, known.json, tell)
        if found is None:
            raise NotReady(f"{folder}: no {known.json}. Fetch {SPLIT_FILES} into it. Terms: {known.terms}")
        shutil.copyfile(found, split_file)
        tell(f"{split_file}: a copy of {found}")
    entries = _entries(split_file)
    wanted = {_place(entry) for entry in entries}
    counts = dict(Counter("train" if e.get("split") == "restval" else str(e.get("split")) for e in entries))
    if counts != KNOWN_SIZES[name]:
        raise NotReady(f"{split_file}: pictures by split are {counts}, and {name} has {KNOWN_SIZES[name]}")
    if not images.exists():
        _lay_out(folder, images, known, next(iter(wanted)), tell)
    missing = sorted(place for place in wanted if not (images / place).is_file())
    if missing:
        raise NotReady(
            f"{images} lacks {len(missing)} of {len(wanted)} pictures ({missing[0]}, ...). Fetch {known.pictures} into "
            f"{folder}, remove {images}, and run this again. Terms: {known.terms}"
        )
    empty = sorted(place for place in wanted if (images / place).stat().st_size == 0)
    if empty:
        raise NotReady(f"{images / empty[0]} and {len(empty) - 1} more are empty: unpack the archive again")
    return Prepared(split_file, images, counts)


def _place(entry: dict) -> str:
    return str(Path(entry.get("filepath") or "") / str(entry.get("filename")))


def _entries(path: Path) -> list[dict]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["images"]
    except (ValueError, KeyError, TypeError) as error:
        raise NotReady(f"{path} is no Karpathy split file ({type(error).__name__}: {error}); fetch it again") from None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise NotReady(f'{path} is no Karpathy split file: "images" is no list of objects; fetch it again')
    return entries


def _find(folder: Path, name: str) -> Path | None:
    return next(iter(sorted(folder.rglob(name))), None)


def _unpack_one(folder: Path, name: str, tell: Callable[[str], None]) -> Path | None:
    """``name`` out of any zip in the folder."""
    for archive in sorted(folder.glob("*.zip")):
        with _opened(archive) as zipped:
            inside = next((member for member in zipped.namelist() if Path(member).name == name), None)
            if inside is not None:
                (folder / name).write_bytes(zipped.read(inside))
                tell(f"{folder / name}: out of {archive}")
                return folder / name
    return None


def _opened(archive: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(archive)
    except zipfile.BadZipFile as error:
        raise NotReady(f"{archive} is not whole ({error}): fetch it again") from None


def _below(folder: Path, name: str) -> bool:
    return (folder / name).resolve().is_relative_to(folder.resolve())


def _lay_out(folder: Path, images: Path, known: Download, example: str, tell: Callable[[str], None]) -> None:
    """Make ``images``: a link to where the pictures lie unpacked, or the content of the archives."""
    found = _find(folder, Path(example).name)
    if found is not None:
        base = found.parents[len(Path(example).parts) - 1]
        images.symlink_to(os.path.relpath(base, folder), target_is_directory=True)
        tell(f"{images}: a link to {base}")
        return
    archives = [folder / name for name in known.archives if (folder / name).is_file()]
    if not archives:
        raise NotReady(
            f"{folder}: neither the pictures nor an archive of them. Fetch {known.pictures} into it. "
            f"Terms: {known.terms}"
        )
    partial = folder / ".images.partial"
    shutil.rmtree(partial, ignore_errors=True)
    for archive in archives:
        tell(f"unpacking {archive}")
        if archive.suffix == ".zip":
            with _opened(archive) as zipped:
                zipped.extractall(partial)
        else:
            try:
                with tarfile.open(archive) as tarred:
                    # files alone, none outside the folder; Python 3.11.3 and older know no filter
                    inside_it = [member for member in tarred if member.isfile() and _below(partial, member.name)]
                    known_filter: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
                    tarred.extractall(partial, inside_it, **known_filter)
            except (tarfile.TarError, EOFError, OSError) as error:
                raise NotReady(f"{archive} is not whole ({error}): fetch it again") from None
    inside = _find(partial, Path(example).name)
    if inside is None:
        raise NotReady(f"{', '.join(a.name for a in archives)}: no {example} in it; is it the archive of another set?")
    base = inside.parents[len(Path(example).parts) - 1]
    base.rename(images)
    shutil.rmtree(partial, ignore_errors=True)
    tell(f"{images}: unpacked")

"""Published suites of a true and a false caption a picture, read from their own files: SugarCrepe, ARO, VALSE.

Each is a data source with one split, "test", whose hard negatives are the false captions. Pictures are not in those
files: ``images`` is the folder of COCO's, Visual Genome's or the others' pictures.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL.Image import Image

from vlretrieval.data.images import open_image
from vlretrieval.data.splits import HardNegatives, Split


@dataclass(frozen=True, slots=True)
class Trial:
    """One question: which caption is true of the picture (or of the box cut out of it)."""

    image: str
    true: str
    false: str
    kind: str
    box: tuple[int, int, int, int] | None = None  # left, top, right, bottom


class Suite(ABC):
    """A source made of trials.

    Args:
        files: a file of the suite, or the folder that holds them.
        images: folder of the pictures.
    """

    none_left = "the files hold no trial"

    def __init__(self, files: str, images: str) -> None:
        self.files, self.images = str(files), str(images)
        if not Path(images).is_dir():
            raise ValueError(f"data.images={images}: no such folder")

    @abstractmethod
    def trials(self) -> Iterator[Trial]:
        """All trials, in the order of the files."""

    def split(self, name: str) -> Split:
        """The one split, "test"."""
        if name != "test":
            raise ValueError(f"there is no split {name!r} in a suite; it has test")
        pictures: dict[tuple[str, tuple[int, int, int, int] | None], list[Trial]] = {}
        for trial in self.trials():
            pictures.setdefault((trial.image, trial.box), []).append(trial)
        if not pictures:
            raise ValueError(f"data.files={self.files}: {self.none_left}")
        keys = list(pictures)
        captions: list[str] = []
        owner: list[int] = []
        wrong: list[tuple[str, str, int]] = []
        for image, trials in enumerate(pictures.values()):
            mine: dict[str, int] = {}
            for trial in sorted(trials, key=lambda t: t.true):  # the trials of one caption together
                if trial.true not in mine:
                    mine[trial.true] = len(captions)
                    captions.append(trial.true)
                    owner.append(image)
                wrong.append((trial.false, trial.kind, mine[trial.true]))

        def picture(index: int) -> Image:
            file, box = keys[index]
            opened = open_image(Path(self.images) / file)
            return opened if box is None else cut_out(opened, box, file)

        return Split(
            "test",
            [file if box is None else f"{file}@{','.join(map(str, box))}" for file, box in keys],
            captions,
            owner,
            picture,
            negatives=HardNegatives([w[0] for w in wrong], [w[1] for w in wrong], np.array([w[2] for w in wrong])),
        )

    def fingerprint(self) -> dict[str, Any]:
        """Plain data: which suite, which files."""
        return {"suite": type(self).__name__, "files": self.files, "images": self.images}

    def json_files(self, pattern: str = "*.json") -> list[Path]:
        """The suite's files; ValueError when there is none."""
        path = Path(self.files)
        found = sorted(path.glob(pattern)) if path.is_dir() else [path] if path.is_file() else []
        if not found:
            raise ValueError(f"data.files={path}: no file, and no folder with {pattern}")
        return found


class SugarCrepe(Suite):
    """SugarCrepe (arXiv:2306.14610): one file a kind, {key: {filename, caption, negative_caption}}, COCO val2017."""

    def trials(self) -> Iterator[Trial]:
        for file in self.json_files():
            for key, entry in _entries(file):
                filename, true, false = _fields(file, key, entry, "filename", "caption", "negative_caption")
                yield Trial(filename, true, false, file.stem)


class Aro(Suite):
    """ARO (arXiv:2210.01936): visual_genome_relation.json, visual_genome_attribution.json, pictures cut to their box.

    ``by``: "file" makes a kind of each file, "relation" of each relation or pair of attributes, as the paper averages.
    """

    def __init__(self, files: str, images: str, by: str = "file") -> None:
        super().__init__(files, images)
        if by not in ("file", "relation"):
            raise ValueError(f"by={by!r} is not known; choose file or relation")
        self.by = by

    def trials(self) -> Iterator[Trial]:
        for file in self.json_files("visual_genome_*.json"):
            for key, entry in _entries(file):
                image, true, false = _fields(file, key, entry, "image_path", "true_caption", "false_caption")
                kind = file.stem
                if self.by == "relation":
                    kind = entry.get("relation_name") or "_".join(entry.get("attributes", [])) or kind
                yield Trial(image, true, false, kind, _box(file, key, entry))


class Valse(Suite):
    """VALSE (arXiv:2112.07566): one file a phenomenon, {key: {image_file, caption, foil, mturk}}.

    ``valid_only``: only those where at least two of three annotators chose the caption and not the foil, as in the
    paper.
    """

    none_left = "no trial was confirmed by two of three annotators; data.source.valid_only=false keeps all"

    def __init__(self, files: str, images: str, valid_only: bool = True) -> None:
        super().__init__(files, images)
        self.valid_only = valid_only

    def trials(self) -> Iterator[Trial]:
        for file in self.json_files():
            for key, entry in _entries(file):
                image, true, false = _fields(file, key, entry, "image_file", "caption", "foil")
                votes = entry.get("mturk")
                given = votes.get("caption") if isinstance(votes, dict) else None
                if self.valid_only and not isinstance(given, int):
                    raise ValueError(f"{file}: {key} has no mturk.caption votes; set data.source.valid_only=false")
                if not self.valid_only or (given is not None and given >= 2):
                    yield Trial(self._where(image, entry), true, false, file.stem)

    def _where(self, image: str, entry: dict[str, Any]) -> str:
        """The picture in ``images`` itself, or in the folder named after its data set."""
        inside = f"{entry.get('dataset')}/{image}"
        return inside if not (Path(self.images) / image).exists() and (Path(self.images) / inside).exists() else image


def cut_out(picture: Image, box: tuple[int, int, int, int], name: str) -> Image:
    """The part of a picture inside the box, whose edges may lie a little beyond the picture's.

    Raises:
        ValueError: nothing of the picture is inside.
    """
    left, top, right, bottom = box
    inside = max(left, 0), max(top, 0), min(right, picture.width), min(bottom, picture.height)
    if inside[0] >= inside[2] or inside[1] >= inside[3]:
        raise ValueError(f"{name}: the box {box} holds nothing of the picture of {picture.width} x {picture.height}")
    return picture.crop(inside)


def _entries(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file}: not JSON ({error})") from None
    pairs = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    empty = True
    for key, entry in pairs:
        empty = False
        if not isinstance(entry, dict):
            raise ValueError(f"{file}: entry {key} is a {type(entry).__name__}, not an object")
        yield str(key), entry
    if empty:
        raise ValueError(f"{file} holds no entries")


def _fields(file: Path, key: str, entry: dict[str, Any], *names: str) -> list[str]:
    for name in names:
        if not isinstance(entry.get(name), str) or not entry[name].strip():
            raise ValueError(f"{file}: entry {key} has no text {name!r}; it has {', '.join(sorted(entry))}")
    return [entry[name] for name in names]


def _box(file: Path, key: str, entry: dict[str, Any]) -> tuple[int, int, int, int]:
    try:
        left, top, width, height = (int(entry[f"bbox_{name}"]) for name in "xywh")
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{file}: entry {key} has no box bbox_x, bbox_y, bbox_w, bbox_h") from None
    return left, top, left + width, top + height

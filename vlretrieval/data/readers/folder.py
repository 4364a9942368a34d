"""A folder of pictures, each with a side-car text of the same name: a caption a line."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from vlretrieval.data.images import SUFFIXES
from vlretrieval.data.readers import files
from vlretrieval.data.records import Record


class Folder:
    """Records of ``folder``/SPLIT/**/name.jpg with name.txt beside it.

    Args:
        folder: the top.
        splits: True: folders directly below the top are the splits; False: all is ``default_split``.
        default_split: see ``splits``.
        text_suffix: of the side-car files.
    """

    def __init__(
        self, folder: str, *, splits: bool = True, default_split: str = "train", text_suffix: str = ".txt"
    ) -> None:
        files.need_folder("data.folder", folder)
        self.folder, self.splits, self.default_split, self.text_suffix = str(folder), splits, default_split, text_suffix

    def records(self) -> Iterator[Record]:
        """All records, in the order of their paths. A picture without a side-car has no captions.

        Raises:
            ValueError: naming a text that has no picture, or a picture outside of every split.
        """
        pictures, texts = self._walk()
        for text in texts:
            if text not in pictures:
                raise ValueError(f"{self.folder}/{text}{self.text_suffix}: no picture of that name beside it")
        for stem, name in pictures.items():
            split = name.split("/", 1)[0] if self.splits else self.default_split
            if self.splits and "/" not in name:
                raise ValueError(
                    f"{self.folder}/{name} is in no split; put it into {self.folder}/train, or set data.splits=false"
                )
            captions = self._captions(stem) if stem in texts else ()
            yield Record(image=name, captions=captions, image_id=name, split=split)

    def _walk(self) -> tuple[dict[str, str], set[str]]:
        pictures: dict[str, str] = {}
        texts: set[str] = set()
        for folder, below, names in os.walk(self.folder):
            below.sort()
            for name in sorted(names):
                path = (Path(folder) / name).relative_to(self.folder)
                stem = path.with_suffix("").as_posix()
                if path.suffix.lower() in SUFFIXES:
                    if stem in pictures:
                        raise ValueError(
                            f"{self.folder}: {pictures[stem]} and {path.as_posix()} share one side-car text"
                        )
                    pictures[stem] = path.as_posix()
                elif path.suffix == self.text_suffix:
                    texts.add(stem)
        return pictures, texts

    def _captions(self, stem: str) -> tuple[str, ...]:
        path = f"{self.folder}/{stem}{self.text_suffix}"
        lines = files.read_text(path).removesuffix("\n").split("\n")
        return tuple(files.caption_text(line.removesuffix("\r"), f"{path}:{n}") for n, line in enumerate(lines, 1))

    def open(self, image: str) -> Path:
        """The path of a record's picture."""
        return Path(self.folder) / image

    def fingerprint(self) -> dict:
        """Plain data: the settings, and the sha256 over names and texts (pictures are not read for it)."""
        digest = hashlib.sha256()
        pictures, texts = self._walk()
        for stem, name in pictures.items():
            digest.update(name.encode("utf-8", "surrogateescape") + b"\0")
            if stem in texts:
                digest.update(Path(f"{self.folder}/{stem}{self.text_suffix}").read_bytes() + b"\0")
        return {**vars(self), "sha256": digest.hexdigest()}

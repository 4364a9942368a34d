"""Karpathy JSON: the split files of Flickr8k, Flickr30k and COCO, and of sets that imitate them (Flickr8k-CN).

{"images": [{"filename", "split", "sentences": [{"raw"}, ...], "filepath"?, "imgid"?, "cocoid"?}, ...]}
"""

import hashlib
import json as jsonlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from vlretrieval.data.records import Record


class KarpathyJson:
    """Records of a Karpathy JSON file.

    Args:
        json: the file.
        images: folder of the pictures; an entry's ``filepath`` and ``filename`` are below it.
        restval: the split in which COCO's "restval" images count; the field trains on them. "restval" keeps them apart.
        language: of the captions, where known.
    """

    def __init__(self, json: str, images: str, *, restval: str = "train", language: str | None = None) -> None:
        self.json, self.images, self.restval, self.language = str(json), str(images), restval, language
        if not Path(self.json).is_file():
            raise ValueError(f"data.json={self.json}: no such file; give the Karpathy JSON of the set")
        if not Path(self.images).is_dir():
            raise ValueError(f"data.images={self.images}: no such folder; give the folder that holds the pictures")

    def records(self) -> Iterator[Record]:
        """All records; ValueError naming file, entry and field where one is not as it should be."""
        entries = self._entries()
        for place, entry in enumerate(entries):
            filename = self._field(entry, place, "filename", str)
            split = self._field(entry, place, "split", str)
            sentences = self._field(entry, place, "sentences", list)
            image = str(PurePosixPath(entry.get("filepath") or "") / filename)
            yield Record(
                image=image,
                captions=tuple(self._caption(sentence, place) for sentence in sentences),
                image_id=image,
                split=self.restval if split == "restval" else split,
                language=self.language,
            )

    def open(self, image: str) -> Path:
        """The path of a record's picture."""
        return Path(self.images) / image

    def fingerprint(self) -> dict:
        """Plain data: the settings, and the sha256 of the file."""
        digest = hashlib.sha256(Path(self.json).read_bytes()).hexdigest()
        return {
            "json": self.json,
            "images": self.images,
            "restval": self.restval,
            "language": self.language,
            "sha256": digest,
        }

    def _entries(self) -> list[Any]:
        try:
            data = jsonlib.loads(Path(self.json).read_text(encoding="utf-8-sig"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.json}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
        except jsonlib.JSONDecodeError as error:
            raise ValueError(f"{self.json}:{error.lineno}: not JSON ({error.msg})") from None
        entries = data.get("images") if isinstance(data, dict) else None
        if not isinstance(entries, list):
            raise ValueError(f'{self.json}: no list "images" at the top; is it Karpathy JSON?')
        return entries

    def _field(self, entry: Any, place: int, name: str, kind: type) -> Any:
        value = entry.get(name) if isinstance(entry, dict) else None
        if not isinstance(value, kind):
            raise ValueError(f'{self.json}: images[{place}] has no {kind.__name__} "{name}"')
        return value

    def _caption(self, sentence: Any, place: int) -> str:
        raw = sentence.get("raw") if isinstance(sentence, dict) else sentence
        if not isinstance(raw, str):
            raise ValueError(f'{self.json}: images[{place}] has a sentence without a text "raw"')
        return raw

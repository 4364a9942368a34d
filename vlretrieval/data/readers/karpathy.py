"""Karpathy JSON: the split files of Flickr8k, Flickr30k and COCO, and of sets that imitate them (Flickr8k-CN).

{"images": [{"filename", "split", "sentences": [{"raw"}, ...], "filepath"?, "imgid"?, "cocoid"?}, ...]}
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from vlretrieval.data.readers import files
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
        self.set_name: str | None = None  # what the file calls itself, once read
        files.need_file("data.json", self.json)
        files.need_folder("data.images", self.images)

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
                captions=files.captions_of(sentences, f"{self.json}: images[{place}].sentences"),
                image_id=str(entry.get("image_id", image)),
                split=self.restval if split == "restval" else split,
                **{"language": self.language, **files.extras_of(entry, f"{self.json}: images[{place}]")},
            )

    def open(self, image: str) -> Path:
        """The path of a record's picture."""
        return Path(self.images) / image

    def fingerprint(self) -> dict:
        """Plain data: the settings, and the sha256 of the file."""
        return {
            "json": self.json,
            "images": self.images,
            "restval": self.restval,
            "language": self.language,
            "sha256": files.file_hash(self.json),
        }

    def _entries(self) -> list[Any]:
        data = files.read_json(self.json)
        entries = data.get("images") if isinstance(data, dict) else None
        self.set_name = data.get("dataset") if isinstance(data, dict) else None
        if not isinstance(entries, list):
            raise ValueError(f'{self.json}: no list "images" at the top; is it Karpathy JSON?')
        return entries

    def _field(self, entry: Any, place: int, name: str, kind: type) -> Any:
        value = entry.get(name) if isinstance(entry, dict) else None
        if not isinstance(value, kind):
            raise ValueError(f'{self.json}: images[{place}] has no {kind.__name__} "{name}"')
        return value

"""JSON lines: an object a line, for a picture with its captions (or with one of them). It holds all of a record."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vlretrieval.data.readers import files
from vlretrieval.data.records import Record


class JsonLines:
    """Records of a JSONL file.

        {"image": "a.jpg", "captions": ["a dog", "a brown dog"], "image_id"?: "a", "split"?: "train", "language"?: "en",
         "regions"?: [{"label", "box": [x0, y0, x1, y1]}], "negatives"?: [[{"text", "kind"}], ...]}

    Args:
        jsonl: the file.
        images: folder that images are relative to; by default the file's own.
        image_key, caption_key: names of the fields; None: found among the usual names in the first line.
        split_key, id_key: likewise, where there are such fields.
        default_split: the split of every line where there is no such field.
    """

    def __init__(
        self,
        jsonl: str,
        images: str | None = None,
        *,
        image_key: str | None = None,
        caption_key: str | None = None,
        split_key: str | None = None,
        id_key: str | None = None,
        default_split: str = "train",
    ) -> None:
        files.need_file("data.jsonl", jsonl)
        self.jsonl, self.images, self.default_split = str(jsonl), images, default_split
        self.image_key, self.caption_key, self.split_key, self.id_key = image_key, caption_key, split_key, id_key
        self._folder = files.need_folder("data.images", images) if images else Path(jsonl).parent

    def records(self) -> Iterator[Record]:
        """A record a line; ValueError naming file, line and field where one is not as it should be."""
        keys: tuple[str, str, str | None, str | None] | None = None
        ids = files.SameIdSameImage()
        for line, text in files.numbered_lines(self.jsonl):
            where = f"{self.jsonl}:{line}"
            try:
                entry = json.loads(text)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where}: not JSON ({error.msg})") from None
            if not isinstance(entry, dict):
                raise ValueError(f"{where}: an object is needed, got {type(entry).__name__}")
            keys = keys or self._keys(list(entry))
            record = self._record(entry, keys, where)
            ids.check(record.split, record.image_id, record.image, where)
            yield record
        if keys is None:
            raise ValueError(f"{self.jsonl}: empty")

    def _keys(self, there: list[str]) -> tuple[str, str, str | None, str | None]:
        return (
            files.find_key(self.image_key, files.IMAGE_KEYS, there, "image_key", self.jsonl),
            files.find_key(self.caption_key, files.CAPTION_KEYS, there, "caption_key", self.jsonl),
            files.find_optional_key(self.split_key, files.SPLIT_KEYS, there, "split_key", self.jsonl),
            files.find_optional_key(self.id_key, files.ID_KEYS, there, "id_key", self.jsonl),
        )

    def _record(self, entry: dict[str, Any], keys: tuple[str, str, str | None, str | None], where: str) -> Record:
        image_key, caption_key, split_key, id_key = keys
        for key in (image_key, caption_key):
            if key not in entry:
                raise ValueError(f"{where}: no field {key!r}; there are {', '.join(entry)}")
        image = entry[image_key]
        if not isinstance(image, str) or not image:
            raise ValueError(f"{where}: field {image_key!r} must be the picture's path")
        return Record(
            image=image,
            captions=files.captions_of(entry[caption_key], f"{where}: field {caption_key!r}"),
            image_id=str(entry[id_key]) if id_key and entry.get(id_key) is not None else image,
            split=str(entry[split_key]) if split_key and entry.get(split_key) is not None else self.default_split,
            **files.extras_of(entry, where),
        )

    def open(self, image: str) -> Path:
        """The path of a record's picture."""
        return self._folder / image

    def fingerprint(self) -> dict:
        """Plain data: the settings, and the sha256 of the file."""
        settings = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {**settings, "sha256": files.file_hash(self.jsonl)}

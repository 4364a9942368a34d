"""COCO captions JSON: pictures and captions in two lists joined by number, a file for each split.

{"images": [{"id", "file_name"}, ...], "annotations": [{"image_id", "caption"}, ...]}
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vlretrieval.data.readers import files
from vlretrieval.data.records import Record
from vlretrieval.data.splits import plain


class CocoCaptions:
    """Records of COCO captions files.

    Args:
        json: file of each split, {"train": captions_train2017.json, "val": ...}.
        images: the folder of the pictures, or one for each split.
    """

    def __init__(self, json: Mapping[str, str], images: str | Mapping[str, str]) -> None:
        self.json, self.images = plain(json), plain(images)
        given = {split: str(path) for split, path in json.items() if path is not None}
        if not given:
            raise ValueError("data.json is empty; give the file of a split at least, as data.json.train=FILE")
        self._files = given
        for split, path in given.items():
            files.need_file(f"data.json.{split}", path)
            if not isinstance(self.images, str) and split not in self.images:
                raise ValueError(f"data.images has no folder for split {split!r}, only for {', '.join(self.images)}")
        for folder in [self.images] if isinstance(self.images, str) else self.images.values():
            files.need_folder("data.images", folder)

    def records(self) -> Iterator[Record]:
        """All records; ValueError naming file, list and entry where one is not as it should be."""
        for split, path in self._files.items():
            data = files.read_json(path)
            captions: dict[Any, list[str]] = {}
            for place, entry in enumerate(_list(data, "images", path)):
                number = _field(entry, "id", f"{path}: images[{place}]")
                if number in captions:
                    raise ValueError(f"{path}: images[{place}] repeats id {number}")
                captions[number] = []
            for place, entry in enumerate(_list(data, "annotations", path)):
                where = f"{path}: annotations[{place}]"
                number = _field(entry, "image_id", where)
                if number not in captions:
                    raise ValueError(f"{where} is of image {number}, which is not among the images")
                captions[number].append(files.caption_text(_field(entry, "caption", where), where))
            for place, entry in enumerate(data["images"]):
                where = f"{path}: images[{place}]"
                name = str(_field(entry, "file_name", where))
                yield Record(
                    image=name if isinstance(self.images, str) else f"{split}:{name}",
                    captions=tuple(captions[entry["id"]]),
                    image_id=str(entry.get("image_id", name)),
                    split=split,
                    **files.extras_of(entry, where),
                )

    def open(self, image: str) -> Path:
        """The path of a record's picture."""
        if isinstance(self.images, str):
            return Path(self.images) / image
        split, name = image.split(":", 1)
        return Path(self.images[split]) / name

    def fingerprint(self) -> dict:
        """Plain data: the settings, and the sha256 of each file."""
        digests = {split: files.file_hash(path) for split, path in self._files.items()}
        return {"json": self.json, "images": self.images, "sha256": digests}


def _list(data: Any, name: str, path: str) -> list[Any]:
    found = data.get(name) if isinstance(data, dict) else None
    if not isinstance(found, list):
        raise ValueError(f'{path}: no list "{name}" at the top; is it COCO captions JSON?')
    return found


def _field(entry: Any, name: str, where: str) -> Any:
    if not isinstance(entry, dict) or entry.get(name) is None:
        raise ValueError(f'{where} has no "{name}"')
    return entry[name]

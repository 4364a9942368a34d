"""What every reader asks of its files, and how it says no: the file, the line, the field, the way out."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vlretrieval.data.records import HardNegative, Region

# More text than any model reads. A caption beyond it is a file that was cut wrongly: a missing quote, say.
MAX_CAPTION = 100_000

IMAGE_KEYS = ("image", "filepath", "file_path", "image_path", "file_name", "filename", "file", "path", "img", "jpg")
CAPTION_KEYS = ("captions", "caption", "text", "texts", "title", "sentence", "sentences", "raw", "txt")
SPLIT_KEYS = ("split", "partition", "subset")
ID_KEYS = ("image_id", "imgid", "img_id")


def need_file(setting: str, path: str) -> Path:
    """``path``, which must be a file."""
    if not Path(path).is_file():
        raise ValueError(f"{setting}={path}: {'a folder, not a file' if Path(path).is_dir() else 'no such file'}")
    return Path(path)


def need_folder(setting: str, path: str) -> Path:
    """``path``, which must be a folder."""
    if not Path(path).is_dir():
        raise ValueError(f"{setting}={path}: {'a file, not a folder' if Path(path).exists() else 'no such folder'}")
    return Path(path)


def read_text(path: str | Path) -> str:
    """The file as text, with any line end left as it is.

    Raises:
        ValueError: naming the line and byte where it is not UTF-8.
    """
    raw = Path(path).read_bytes()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}:{line}: not UTF-8 (byte {error.start}); save the file as UTF-8") from None


def read_json(path: str | Path) -> Any:
    """What the JSON file holds; ValueError naming the line where it is not JSON."""
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not JSON ({error.msg})") from None


def file_hash(path: str | Path) -> str:
    """sha256 of the file, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def caption_text(value: object, where: str) -> str:
    """``value`` as it is, when it is a text that can be a caption. An empty one is: the source has a policy for it."""
    if not isinstance(value, str):
        raise ValueError(f"{where}: a caption must be text, got {type(value).__name__}")
    if "\0" in value:
        raise ValueError(f"{where}: a NUL character; the file is damaged or not text")
    if len(value) > MAX_CAPTION:
        raise ValueError(f"{where}: {len(value)} characters in one caption; a quote or a line end is missing before it")
    return value


def captions_of(value: object, where: str) -> tuple[str, ...]:
    """One caption, or a list of captions (texts, or {"raw": text} as in Karpathy JSON)."""
    if not isinstance(value, list):
        return (caption_text(value, where),)
    texts = (item.get("raw", item.get("text")) if isinstance(item, dict) else item for item in value)
    return tuple(caption_text(text, f"{where}[{place}]") for place, text in enumerate(texts))


def extras_of(entry: dict[str, Any], where: str) -> dict[str, Any]:
    """The fields of a record that only some JSON files hold: language, regions, negatives."""
    found: dict[str, Any] = {}
    if entry.get("language") is not None:
        found["language"] = str(entry["language"])
    try:
        if entry.get("regions"):
            found["regions"] = tuple(Region(str(r["label"]), _box(r["box"])) for r in entry["regions"])
        if entry.get("negatives"):
            found["negatives"] = tuple(
                tuple(HardNegative(caption_text(n["text"], where), str(n["kind"])) for n in group)
                for group in entry["negatives"]
            )
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{where}: regions are [{{label, box}}] and negatives a list for each caption of [{{text, kind}}] ({error})"
        ) from None
    return found


def _box(values: Any) -> tuple[float, float, float, float]:
    x0, y0, x1, y1 = (float(value) for value in values)
    return x0, y0, x1, y1


def extras_as_json(record: Any) -> dict[str, Any]:
    """The other way round: what ``extras_of`` reads."""
    extras: dict[str, Any] = {}
    if record.language is not None:
        extras["language"] = record.language
    if record.regions:
        extras["regions"] = [{"label": region.label, "box": list(region.box)} for region in record.regions]
    if record.negatives:
        extras["negatives"] = [[{"text": n.text, "kind": n.kind} for n in group] for group in record.negatives]
    return extras


def find_key(wanted: str | None, known: tuple[str, ...], there: list[str], setting: str, where: str) -> str:
    """The column or key to read: the one wanted, else the first known name that is there (case does not matter).

    Raises:
        ValueError: listing what there is, and the setting that names the right one.
    """
    if wanted is not None:
        if wanted in there:
            return wanted
        raise ValueError(
            f"{where}: no {setting.rsplit('_', 1)[-1]} {wanted!r}; there are {', '.join(there)}; set data.{setting}"
        )
    lowered = {name.strip().lower(): name for name in reversed(there)}
    for name in known:
        if name in lowered:
            return lowered[name]
    raise ValueError(
        f"{where}: cannot tell which of {', '.join(there)} is the {setting.split('_')[0]}; set data.{setting}"
    )


def find_optional_key(
    wanted: str | None, known: tuple[str, ...], there: list[str], setting: str, where: str
) -> str | None:
    """As ``find_key``, but None where nothing was wanted and nothing known is there."""
    if wanted is None and not any(name.strip().lower() in known for name in there):
        return None
    return find_key(wanted, known, there, setting, where)


class SameIdSameImage:
    """Refuses an image id that stands for two pictures, naming both lines."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], tuple[str, str]] = {}

    def check(self, split: str, image_id: str, image: str, where: str) -> None:
        """Remember the record at ``where``."""
        before_image, before_where = self._seen.setdefault((split, image_id), (image, where))
        if before_image != image:
            raise ValueError(
                f"{where}: image id {image_id!r} is {image!r} here and {before_image!r} at {before_where}; "
                f"an id is one picture"
            )


def numbered_lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers from 1; blank ones are left out."""
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            yield number, line

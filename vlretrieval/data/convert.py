"""From any format to any other: pictures byte for byte, records as the format can hold them, what is lost counted.

A conversion that was stopped goes on where it was when it is started again: what is finished has its final name, and
only that.
"""

import csv
import io
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from vlretrieval.data.readers.files import extras_as_json
from vlretrieval.data.records import Record, Records
from vlretrieval.data.shards import sample_json, write_shard

log = logging.getLogger(__name__)

FORMATS = ("jsonl", "csv", "tsv", "karpathy", "coco", "folder", "shards", "huggingface")
_STATE = "convert.json"


@dataclass(frozen=True)
class Converted:
    """What a conversion did."""

    records: int
    lost: dict[str, int]  # what the format cannot hold -> in how many records


def convert(
    source: Records,
    to: str,
    output: str,
    *,
    per_shard: int = 1000,
    progress: Callable[[Iterable[Record], int], Iterable[Record]] = lambda records, total: records,
) -> Converted:
    """Write all records of ``source``, and their pictures, as format ``to`` into the folder ``output``.

    Args:
        source: any; its fix list is applied, its policy for empty captions is not: they are written as they are.
        to: one of FORMATS.
        output: a folder, new, empty, or of the same conversion stopped before.
        per_shard: samples a tar shard.
        progress: shows how far it is: given the records and their number, hands them through.
    """
    if to not in FORMATS:
        raise ValueError(f"to={to!r} is not a known format; choose {', '.join(FORMATS)}")
    if per_shard < 1:
        raise ValueError(f"per_shard={per_shard} must be at least 1")
    folder = Path(output)
    _claim(folder, {"to": to, "per_shard": per_shard if to == "shards" else None, "source": source.fingerprint()})
    lost: Counter[str] = Counter()
    originals: dict[str, str] = {}  # the name written -> the name the reader knows
    records: list[Record] = []
    for record in source.records():
        records.append(_placed(record, to))
        originals[records[-1].image] = record.image
    _check_names(records)

    def read(record: Record) -> bytes:
        found = source.reader.open(originals[record.image])
        return found if isinstance(found, bytes) else Path(found).read_bytes()

    for record in records:
        lost.update(_cannot_hold(record, to))
    if to == "shards":
        _to_shards(records, folder, per_shard, read, progress)
    elif to == "huggingface":
        _to_hugging_face(records, folder, read, progress)
    else:
        below = folder if to == "folder" else folder / "images"
        for record in progress(records, len(records)):
            _write_if_new(below / record.image, lambda record=record: read(record))  # type: ignore[misc]
        _ANNOTATIONS[to](records, folder)
    for what, count in lost.items():
        log.warning("%s cannot hold %s: lost in %d records", to, what, count)
    return Converted(len(records), dict(lost))


def _claim(folder: Path, settings: dict[str, Any]) -> None:
    """Refuse a folder that holds something else: half of one set and half of another look whole."""
    state, text = folder / _STATE, json.dumps(settings, indent=1, sort_keys=True, default=str)
    if folder.exists() and any(folder.iterdir()):
        if not state.is_file():
            raise ValueError(f"output={folder} is not empty; give another folder")
        if state.read_text() != text:
            raise ValueError(f"output={folder} holds another conversion ({state}); give another folder, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    state.write_text(text)


def _placed(record: Record, to: str) -> Record:
    """The record under a name that stays below the output: relative, without ".."."""
    parts = [part for part in PurePosixPath(record.image.replace(":", "/")).parts if part not in ("..", "/", ".")]
    name = "/".join(parts)
    if not PurePosixPath(name).suffix:
        name += ".jpg"  # whatever is inside: pictures are told by their content
    if to == "folder" and parts[0] != record.split:
        name = f"{record.split}/{name}"
    return record if name == record.image else replace(record, image=name)


def _check_names(records: list[Record]) -> None:
    seen: dict[str, str] = {}
    for record in records:
        if seen.setdefault(record.image, record.image_id) != record.image_id:
            raise ValueError(
                f"images {seen[record.image]!r} and {record.image_id!r} would both be written as {record.image!r}"
            )


def _cannot_hold(record: Record, to: str) -> Iterator[str]:
    if to in ("csv", "tsv", "folder"):
        if record.regions:
            yield "regions"
        if record.negatives:
            yield "hard negatives"
    if to in ("csv", "tsv") and not record.captions:
        yield "pictures without captions"
    if to == "folder":
        if record.language is not None:
            yield "languages"
        if record.image_id != record.image:
            yield "image ids of their own"
        if any("\n" in caption or "\r" in caption for caption in record.captions):
            raise ValueError(
                f"image {record.image_id!r} has a caption with a line end, which a folder's .txt cannot hold"
            )


def _write_if_new(path: Path, content: Callable[[], bytes]) -> None:
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(content())
    os.replace(part, path)


def _write_text(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8", newline="")
    os.replace(part, path)


def _fields(record: Record) -> dict[str, Any]:
    fields = {"image": record.image, "image_id": record.image_id, "captions": list(record.captions)}
    return {**fields, "split": record.split, **extras_as_json(record)}


def _to_jsonl(records: list[Record], folder: Path) -> None:
    _write_text(folder / "data.jsonl", "".join(json.dumps(_fields(r), ensure_ascii=False) + "\n" for r in records))


def _to_table(records: list[Record], folder: Path, separator: str, name: str) -> None:
    text = io.StringIO()
    # Every cell in quotes: then no cell's own text can be taken for a quote, a separator or an end of line.
    writer = csv.writer(text, delimiter=separator, quoting=csv.QUOTE_ALL, lineterminator="\n")
    with_language = any(record.language is not None for record in records)
    writer.writerow(["image", "caption", "split", "image_id", *(["language"] if with_language else [])])
    for record in records:
        for caption in record.captions:
            row = [record.image, caption, record.split, record.image_id]
            writer.writerow([*row, *([record.language or ""] if with_language else [])])
    _write_text(folder / name, text.getvalue())


def _to_karpathy(records: list[Record], folder: Path) -> None:
    images = []
    for number, record in enumerate(records):
        path = PurePosixPath(record.image)
        entry: dict[str, Any] = {"filename": path.name, "split": record.split, "imgid": number}
        if path.parent != PurePosixPath("."):
            entry["filepath"] = str(path.parent)
        if record.image_id != record.image:
            entry["image_id"] = record.image_id
        entry["sentences"] = [{"raw": caption, "imgid": number} for caption in record.captions]
        images.append({**entry, **extras_as_json(record)})
    _write_text(folder / "data.json", json.dumps({"dataset": "converted", "images": images}, ensure_ascii=False))


def _to_coco(records: list[Record], folder: Path) -> None:
    for split in dict.fromkeys(record.split for record in records):
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for number, record in enumerate(records):
            if record.split != split:
                continue
            own = {"image_id": record.image_id} if record.image_id != record.image else {}
            images.append({"id": number, "file_name": record.image, **own, **extras_as_json(record)})
            for caption in record.captions:
                annotations.append({"id": len(annotations), "image_id": number, "caption": caption})
        data = json.dumps({"images": images, "annotations": annotations}, ensure_ascii=False)
        _write_text(folder / f"captions_{split}.json", data)


def _to_folder(records: list[Record], folder: Path) -> None:
    for record in records:
        if record.captions:
            text = "".join(caption + "\n" for caption in record.captions)
            _write_text((folder / record.image).with_suffix(".txt"), text)


_ANNOTATIONS: dict[str, Callable[[list[Record], Path], None]] = {
    "jsonl": _to_jsonl,
    "csv": lambda records, folder: _to_table(records, folder, ",", "data.csv"),
    "tsv": lambda records, folder: _to_table(records, folder, "\t", "data.tsv"),
    "karpathy": _to_karpathy,
    "coco": _to_coco,
    "folder": _to_folder,
}


def _to_shards(
    records: list[Record],
    folder: Path,
    per_shard: int,
    read: Callable[[Record], bytes],
    progress: Callable[[Iterable[Record], int], Iterable[Record]],
) -> None:
    by_split: dict[str, list[Record]] = {}
    for record in records:
        by_split.setdefault(record.split, []).append(record)
    todo: list[tuple[str, int, list[Record]]] = []
    for split, group in by_split.items():
        for number, start in enumerate(range(0, len(group), per_shard)):
            if not (folder / f"{split}-{number:06d}.tar").exists():
                todo.append((split, number, group[start : start + per_shard]))
    shown = iter(progress((record for _, _, part in todo for record in part), sum(len(part) for _, _, part in todo)))
    for split, number, part in todo:
        write_shard(folder / f"{split}-{number:06d}.tar", (_sample(next(shown), read) for _ in part))


def _sample(record: Record, read: Callable[[Record], bytes]) -> tuple[str, dict[str, bytes]]:
    stem, dot, extension = record.image.rpartition(".")
    # A sample's key ends at the first dot of the file name: further dots in the name would split it wrongly.
    folder, slash, file = stem.rpartition("/")
    key = folder + slash + file.replace(".", "_")
    return key, {extension.lower(): read(record), "json": sample_json({**_fields(record)})}


def _to_hugging_face(
    records: list[Record],
    folder: Path,
    read: Callable[[Record], bytes],
    progress: Callable[[Iterable[Record], int], Iterable[Record]],
) -> None:
    try:
        import datasets
    except ImportError:
        raise ValueError("writing Hugging Face data sets needs: pip install 'vlretrieval[huggingface]'") from None
    datasets.disable_progress_bars()  # there is one of ours
    columns: dict[str, dict[str, list[Any]]] = {}
    extras = [name for name in ("language", "regions", "negatives") if any(name in extras_as_json(r) for r in records)]
    for record in progress(records, len(records)):
        rows = columns.setdefault(
            record.split, {n: [] for n in ("image", "file_name", "captions", "image_id", *extras)}
        )
        rows["image"].append({"bytes": read(record), "path": record.image})
        rows["file_name"].append(record.image)  # the library keeps a path's last part only
        rows["captions"].append(list(record.captions))
        rows["image_id"].append(record.image_id)
        for name in extras:
            rows[name].append(extras_as_json(record).get(name))
    made = {}
    for split, rows in columns.items():
        made[split] = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image(decode=False))
    datasets.DatasetDict(made).save_to_disk(str(folder))

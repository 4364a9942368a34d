"""Hugging Face data sets, from disk or by name: rows of a picture with its caption or captions."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vlretrieval.data.packed import NameIndex
from vlretrieval.data.readers import files
from vlretrieval.data.records import Record
from vlretrieval.data.splits import plain

_EXTRAS = ("language", "regions", "negatives")


class HuggingFaceDataset:
    """Records of a Hugging Face data set.

    Args:
        path: a folder of ``save_to_disk``, a folder of data files, or a name on the hub.
        name: configuration, for sets that have several.
        image_column, caption_column: None: found among the usual names.
        split_column, id_column: likewise, where there are such columns.
        splits: our name -> theirs, as {"val": "validation"}; None: theirs, with "validation" called "val".
        revision: version on the hub, so that the same set is read next year.
    """

    def __init__(
        self,
        path: str,
        name: str | None = None,
        *,
        image_column: str | None = None,
        caption_column: str | None = None,
        split_column: str | None = None,
        id_column: str | None = None,
        splits: Mapping[str, str] | None = None,
        revision: str | None = None,
    ) -> None:
        self.path, self.name, self.revision = path, name, revision
        self.image_column, self.caption_column = image_column, caption_column
        self.split_column, self.id_column = split_column, id_column
        self.splits = plain(splits)
        self._tables: list[Any] = []
        self._names, self._rows = NameIndex([]), np.zeros(0, dtype=np.int64)
        self._starts: list[int] = []

    def records(self) -> Iterator[Record]:
        """A record a row; ValueError naming split, row and column where a row is not as it should be."""
        self._tables, self._starts = [], []
        rows: dict[str, int] = {}  # a picture's name -> the first of its rows, counted through all splits
        found: list[Record] = []
        done = 0
        for split, table in self._load().items():
            image, caption, split_key, id_key = self._columns(table.column_names)
            self._starts.append(done)
            self._tables.append(_undecoded(table, image))
            # The library keeps a path's last part only, so a column may hold the whole.
            name_key = "file_name" if "file_name" in table.column_names and image != "file_name" else None
            wanted = dict.fromkeys((caption, split_key, id_key, name_key, *_EXTRAS))
            texts = table.select_columns([column for column in wanted if column in table.column_names])
            for row in range(len(table)):
                where = f"{self.path}: {split}[{row}]"
                entry, cell = texts[row], self._tables[-1][row]["image"]
                if cell is None:
                    raise ValueError(f"{where}: column {image!r} is empty")
                name = (entry[name_key] if name_key else cell.get("path")) or f"{split}/{row:08d}"
                if name in rows and self._cell(rows[name]) != cell:
                    name = f"{split}/{row:08d}/{name}"  # another picture of the same file name
                rows.setdefault(name, done + row)
                found.append(
                    Record(
                        image=name,
                        captions=files.captions_of(entry[caption], f"{where}: column {caption!r}"),
                        image_id=str(entry[id_key]) if id_key else name,
                        split=str(entry[split_key]) if split_key else split,
                        **files.extras_of(entry, where),
                    )
                )
            done += len(table)
        self._names, self._rows = NameIndex(rows), np.fromiter(rows.values(), dtype=np.int64)
        yield from found

    def _cell(self, row: int) -> dict[str, Any]:
        table = max(i for i, start in enumerate(self._starts) if start <= row)
        return self._tables[table][row - self._starts[table]]["image"]

    def _load(self) -> dict[str, Any]:
        try:
            import datasets
        except ImportError:
            raise ValueError("reading Hugging Face data sets needs: pip install 'vlretrieval[huggingface]'") from None
        local = Path(self.path)
        if (local / "dataset_dict.json").is_file() or (local / "state.json").is_file():
            loaded = datasets.load_from_disk(self.path)
        else:
            # Never any code of the data set's own: current versions of the library have no way to ask for it.
            loaded = datasets.load_dataset(self.path, self.name, revision=self.revision)
        tables = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
        if self.splits is None:
            return {"val" if name == "validation" else name: table for name, table in tables.items()}
        for theirs in self.splits.values():
            if theirs not in tables:
                raise ValueError(f"{self.path} has no split {theirs!r}; it has {', '.join(tables)}")
        return {ours: tables[theirs] for ours, theirs in self.splits.items()}

    def _columns(self, there: list[str]) -> tuple[str, str, str | None, str | None]:
        return (
            files.find_key(self.image_column, files.IMAGE_KEYS, there, "image_column", self.path),
            files.find_key(self.caption_column, files.CAPTION_KEYS, there, "caption_column", self.path),
            files.find_optional_key(self.split_column, files.SPLIT_KEYS, there, "split_column", self.path),
            files.find_optional_key(self.id_column, files.ID_KEYS, there, "id_column", self.path),
        )

    def open(self, image: str) -> bytes | str:
        """The bytes of a record's picture, or its path where the set holds paths."""
        cell = self._cell(int(self._rows[self._names[image]]))
        return cell["bytes"] if cell.get("bytes") is not None else cell["path"]

    def fingerprint(self) -> dict:
        """Plain data: the settings."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}


def _undecoded(table: Any, column: str) -> Any:
    """The picture column alone, as stored: our own ``open_image`` decodes it."""
    import datasets

    only = (
        table.select_columns([column]).rename_column(column, "image")
        if column != "image"
        else table.select_columns(["image"])
    )
    if isinstance(only.features["image"], datasets.Image):
        return only.cast_column("image", datasets.Image(decode=False))
    raise ValueError(f"column {column!r} holds {only.features['image']}, not pictures; cast it to datasets.Image")

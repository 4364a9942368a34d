"""Hugging Face data sets, from disk or by name: rows of a picture with its caption or captions."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vlretrieval.data.packed import NameIndex
from vlretrieval.data.readers import files
from vlretrieval.data.records import Record


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
        self.splits = dict(splits) if splits is not None else None
        self._tables: list[Any] = []
        self._names = NameIndex([])
        self._starts: list[int] = []

    def records(self) -> Iterator[Record]:
        """A record a row; ValueError naming split, row and column where a row is not as it should be."""
        self._tables, self._starts = [], []
        names: list[str] = []
        found: list[Record] = []
        for split, table in self._load().items():
            image, caption, split_key, id_key = self._columns(table.column_names)
            self._starts.append(len(names))
            self._tables.append(_undecoded(table, image))
            texts = table.select_columns([c for c in dict.fromkeys((caption, split_key, id_key)) if c])
            paths = self._tables[-1]
            extra = [c for c in ("language", "regions", "negatives") if c in table.column_names]
            extras = table.select_columns(extra) if extra else None
            for row in range(len(table)):
                where = f"{self.path}: {split}[{row}]"
                entry = texts[row]
                own = paths[row]["image"].get("path") if paths[row]["image"] else None
                if paths[row]["image"] is None:
                    raise ValueError(f"{where}: column {image!r} is empty")
                name = own or f"{split}/{row:08d}"
                names.append(name)
                found.append(
                    Record(
                        image=name,
                        captions=files.captions_of(entry[caption], f"{where}: column {caption!r}"),
                        image_id=str(entry[id_key]) if id_key else name,
                        split=str(entry[split_key]) if split_key else split,
                        **(files.extras_of(extras[row], where) if extras is not None else {}),
                    )
                )
        if len(set(names)) < len(names):  # file names without their folders: number them by row
            found = [
                Record(
                    f"{r.split}/{i:08d}",
                    r.captions,
                    r.image_id if id_key else f"{r.split}/{i:08d}",
                    r.split,
                    r.language,
                )
                for i, r in enumerate(found)
            ]
            names = [record.image for record in found]
        self._names = NameIndex(names)
        yield from found

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
        row = self._names[image]
        table = max(i for i, start in enumerate(self._starts) if start <= row)
        cell = self._tables[table][row - self._starts[table]]["image"]
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

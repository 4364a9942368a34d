"""CSV and TSV: a row for each caption (or for each picture), columns found by name or named.

The text of a cell is taken literally. "NA", "null" and "nan" are words; an empty cell is an empty caption.
"""

import csv
import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from vlretrieval.data.readers import files
from vlretrieval.data.records import Record

log = logging.getLogger(__name__)

_SEPARATORS = ("\t", ",", ";", "|")


class Table:
    """Records of a CSV or TSV file.

    Args:
        table: the file.
        images: folder that the image column is relative to; by default the table's own.
        image_column, caption_column: names of the columns; None: found among the usual names. Without a header,
            columns are called "0", "1", ...
        split_column, id_column, language_column: likewise, where there are such columns.
        separator: one character; None: told from the first line.
        quote: the character around cells that hold a separator; null for files that know no quoting.
        header: whether the first line names the columns.
        default_split: the split of every row where there is no split column.
    """

    def __init__(
        self,
        table: str,
        images: str | None = None,
        *,
        image_column: str | None = None,
        caption_column: str | None = None,
        split_column: str | None = None,
        id_column: str | None = None,
        language_column: str | None = None,
        separator: str | None = None,
        quote: str | None = '"',
        header: bool = True,
        default_split: str = "train",
    ) -> None:
        files.need_file("data.table", table)
        if separator is not None and len(separator) != 1:
            raise ValueError(f"separator={separator!r} must be one character")
        self.table, self.images = str(table), images
        self.image_column, self.caption_column = image_column, caption_column
        self.split_column, self.id_column, self.language_column = split_column, id_column, language_column
        self.separator, self.quote, self.header, self.default_split = separator, quote, header, default_split
        self._folder = files.need_folder("data.images", images) if images else Path(table).parent

    def records(self) -> Iterator[Record]:
        """A record a row; ValueError naming file, line and column where a row is not as it should be."""
        text = files.read_text(self.table)
        first = text.lstrip("\n").split("\n", 1)[0].rstrip("\r")
        if not first:
            raise ValueError(f"{self.table}: empty")
        separator = self.separator or _sniff(first, self.table)
        rows = self._rows(text, separator)
        line, names = next(rows)
        if not self.header:
            rows = self._rows(text, separator)
            names = [str(place) for place in range(len(names))]
        elif len(set(names)) < len(names):
            raise ValueError(f"{self.table}:{line}: two columns have the same name: {', '.join(names)}")
        image, caption, split, image_id, language = self._columns(names, separator)
        ids = files.SameIdSameImage()
        for line, row in rows:
            if len(row) != len(names):
                raise ValueError(
                    f"{self.table}:{line}: {len(row)} cells, but {len(names)} columns ({', '.join(names)})"
                )
            where = f"{self.table}:{line}"
            reference = row[image]
            if not reference:
                raise ValueError(f"{where}: column {names[image]!r} is empty")
            record = Record(
                image=reference,
                captions=(files.caption_text(row[caption], f"{where}: column {names[caption]!r}"),),
                image_id=row[image_id] if image_id is not None else reference,
                split=row[split] if split is not None else self.default_split,
                language=(row[language] or None) if language is not None else None,
            )
            ids.check(record.split, record.image_id, record.image, where)
            yield record

    def _rows(self, text: str, separator: str) -> Iterator[tuple[int, list[str]]]:
        csv.field_size_limit(max(csv.field_size_limit(), 4 * files.MAX_CAPTION))
        quoting: Literal[0, 3] = csv.QUOTE_NONE if self.quote is None else csv.QUOTE_MINIMAL
        # newline="": a line end inside quotes belongs to the cell. strict: a quote in the wrong place is an error.
        opened = io.StringIO(text, newline="")
        reader = csv.reader(opened, delimiter=separator, quotechar=self.quote, quoting=quoting, strict=True)
        line = 1
        while True:
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise ValueError(
                    f"{self.table}:{line}: {error}; if quotes are plain text in this file, set data.quote=null"
                ) from None
            if row:
                yield line, row
            line = reader.line_num + 1

    def _columns(self, names: list[str], separator: str) -> tuple[int, int, int | None, int | None, int | None]:
        if self.header:
            image = files.find_key(self.image_column, files.IMAGE_KEYS, names, "image_column", self.table)
            caption = files.find_key(self.caption_column, files.CAPTION_KEYS, names, "caption_column", self.table)
        else:
            image = files.find_key(self.image_column or "0", (), names, "image_column", self.table)
            caption = files.find_key(self.caption_column or "1", (), names, "caption_column", self.table)
        split = files.find_optional_key(self.split_column, files.SPLIT_KEYS, names, "split_column", self.table)
        image_id = files.find_optional_key(self.id_column, files.ID_KEYS, names, "id_column", self.table)
        language = files.find_optional_key(self.language_column, ("language",), names, "language_column", self.table)
        log.info(
            "%s: separator=%r image_column=%s caption_column=%s split_column=%s id_column=%s; "
            "set data.separator, data.image_column, ... to change",
            self.table, separator, image, caption, split, image_id,
        )  # fmt: skip
        places = [None if name is None else names.index(name) for name in (split, image_id, language)]
        return names.index(image), names.index(caption), places[0], places[1], places[2]

    def open(self, image: str) -> Path:
        """The path of a record's picture."""
        return self._folder / image

    def fingerprint(self) -> dict:
        """Plain data: the settings, and the sha256 of the file."""
        settings = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {**settings, "sha256": files.file_hash(self.table)}


def _sniff(line: str, called: str) -> str:
    counts = {separator: line.count(separator) for separator in _SEPARATORS}
    # A tab counts first: commas stand in captions, tabs hardly ever do.
    best = "\t" if counts["\t"] else max(_SEPARATORS, key=counts.__getitem__)
    if not counts[best]:
        raise ValueError(
            f"{called}:1: one column only, {line[:60]!r}; set data.separator to the character between columns"
        )
    return best

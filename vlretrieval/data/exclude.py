"""The fix list: pictures and captions to leave out, a JSON object a line. The doctor writes it, Records read it."""

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from vlretrieval.data.readers import files
from vlretrieval.data.records import Record

log = logging.getLogger(__name__)


class FixList:
    """What to leave out.

        {"split": "train", "image_id": "a.jpg", "reason": "..."}                        the picture with its captions
        {"split": "train", "image_id": "a.jpg", "caption": "a dog", "reason": "..."}    one of its captions

    ``split`` may be missing: every split is meant. A list of bad samples that a training run wrote is a fix list too.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._images: dict[tuple[str | None, str], int] = {}
        self._captions: dict[tuple[str | None, str, str], int] = {}
        files.need_file("data.exclude", path)
        for line, text in files.numbered_lines(path):
            try:
                entry = json.loads(text)
                split, image_id, caption = entry.get("split"), str(entry["image_id"]), entry.get("caption")
            except (ValueError, KeyError, AttributeError):
                raise ValueError(f'{path}:{line}: not {{"split", "image_id", ...}}; is it a fix list?') from None
            if caption is None:
                self._images[split, image_id] = 0
            else:
                self._captions[split, image_id, caption] = 0

    def __call__(self, records: Iterable[Record]) -> Iterator[Record]:
        """``records`` without what is on the list; says how many went, and how many entries met nothing."""
        for record in records:
            if any(self._met(self._images, (split, record.image_id)) for split in (record.split, None)):
                continue
            yield self._without_captions(record)
        entries = [*self._images.values(), *self._captions.values()]
        log.warning("%s: %d entries of the fix list left out", self.path, sum(count > 0 for count in entries))
        if unmet := sum(count == 0 for count in entries):
            log.warning("%s: %d entries name nothing that is there; is it the list of another set?", self.path, unmet)

    def _without_captions(self, record: Record) -> Record:
        if not self._captions:
            return record
        keep = [
            not any(self._met(self._captions, (split, record.image_id, caption)) for split in (record.split, None))
            for caption in record.captions
        ]
        if all(keep):
            return record
        return replace(
            record,
            captions=tuple(caption for caption, kept in zip(record.captions, keep, strict=True) if kept),
            negatives=tuple(n for n, kept in zip(record.negatives, keep, strict=True) if kept)
            if record.negatives
            else (),
        )

    @staticmethod
    def _met(entries: dict, key: tuple) -> bool:
        if key not in entries:
            return False
        entries[key] += 1
        return True


def write_fix_list(path: str | Path, entries: Iterable[dict[str, str]]) -> None:
    """Entries of {"split", "image_id", "caption"?, "reason"}, a line each."""
    Path(path).write_text("".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries), encoding="utf-8")

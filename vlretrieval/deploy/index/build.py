"""Bring an index in line with its pictures: what is new is embedded, what is gone is taken out, all else is left alone.

What a picture is, its content says: a file that was only touched, moved or copied costs a read, no forward pass. The
work is cut into batches that follow from the list alone, so an index that was killed and finished holds the same bits
as one that was built in one go.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vlretrieval.deploy.index.at_hand import Row, Rows
from vlretrieval.deploy.index.look import Look, Looked, prefetched
from vlretrieval.deploy.index.made import Settings, flat, made_of, stored
from vlretrieval.deploy.index.sources import Entry, Source
from vlretrieval.deploy.index.store import (
    COMMIT,
    KEPT,
    Item,
    Made,
    Writer,
    read_commit,
    read_state,
    remove,
    writing,
)
from vlretrieval.deploy.loaded import LoadedModel

Tell = Callable[[int, int], None]  # pictures done, pictures to do

COMMIT_EVERY_S = 2.0


@dataclass
class Report:
    """What a run did, in pictures."""

    added: int = 0  # new ids that were embedded
    changed: int = 0  # known ids with another content, embedded anew
    copied: int = 0  # content that was already there under some id
    touched: int = 0  # another time stamp, the same content
    gone: int = 0
    unchanged: int = 0
    broken: list[tuple[str, str]] = field(default_factory=list)  # of this run: id, reason
    total: int = 0  # pictures in the index now

    @property
    def embedded(self) -> int:
        """Pictures that went through the model."""
        return self.added + self.changed


@dataclass(frozen=True)
class Share:
    """Which of several processes this one is, and how it waits for the others."""

    rank: int = 0
    count: int = 1
    wait: Callable[[], None] = lambda: None


def build(
    model: LoadedModel,
    model_hash: str,
    source: Source,
    output: str | Path,
    settings: Settings = Settings(),  # noqa: B008  (frozen)
    *,
    sources: dict[str, Any] | None = None,
    batch_size: int = 64,
    verify: bool = False,
    share: Share = Share(),  # noqa: B008  (frozen)
    tell: Tell = lambda done, total: None,
) -> Report:
    """Make an index, finish one that was killed, or bring one up to date. All three are the same.

    Args:
        model_hash: of the model, see :func:`identity`.
        sources: what is remembered of where things came from ("model" and "images" as paths).
        batch_size: pictures of a forward pass.
        verify: read every picture, whatever its time stamp says.
        share: with several processes each embeds its share of the batches into a part of its own, and the first one
            then puts them together in order.

    Raises:
        ValueError: the index there is of another model or other settings, or is being written.
    """
    output = Path(output)
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} is below 1")
    made = made_of(model, model_hash, settings)
    origin = {"images": source.name, **(sources or {})}
    entries = source.entries()
    if share.count > 1:
        embed_share(model, made, source, entries, output, origin, batch_size, verify, share, tell)
        share.wait()
    report = Report()
    if share.rank == 0:
        with writing(output, made, origin) as writer:
            parts = sorted(path for path in output.glob("part-*") if path.is_dir())
            report = bring_up_to_date(writer, model, source, entries, parts, batch_size, verify, tell)
            remove(parts)
    share.wait()
    return report


def embed_share(
    model: LoadedModel,
    made: Made,
    source: Source,
    entries: Sequence[Entry],
    output: Path,
    origin: dict[str, Any],
    batch_size: int,
    verify: bool,
    share: Share,
    tell: Tell,
) -> None:
    """This process's batches, as an index of their own in output/part-RANK. Others' parts and the index are read."""
    output.mkdir(parents=True, exist_ok=True)
    known: dict[str, Item] = {}
    if (output / COMMIT).is_file():
        known = read_state(output, read_commit(output)).items
    todo = [entry for entry in entries if verify or entry.id not in known or known[entry.id].stamp != entry.stamp]
    mine = [e for batch in list(batches(todo, batch_size))[share.rank :: share.count] for e in batch]
    part = output / f"part-{share.rank:04d}"
    if (part / COMMIT).is_file() and read_commit(part).made != made:
        remove([part])
    with writing(part, made, origin) as writer:
        add(writer, model, source, mine, [], batch_size, verify, tell, Report())
        writer.commit(complete=True)


def bring_up_to_date(
    writer: Writer,
    model: LoadedModel,
    source: Source,
    entries: Sequence[Entry],
    parts: Sequence[Path],
    batch_size: int,
    verify: bool,
    tell: Tell,
) -> Report:
    """All changes since the last run; ``parts`` are indexes whose rows are taken over where the content is the same."""
    report, state = Report(), writer.state
    add(writer, model, source, entries, parts, batch_size, verify, tell, report)
    listed = {entry.id for entry in entries}
    for name in [*state.items, *state.broken]:  # last, so that a picture that was moved finds its row
        if name not in listed:
            writer.append({"gone": name})
            report.gone += 1
    if not writer.now.complete or report.embedded + report.copied + report.touched + report.gone + len(report.broken):
        writer.commit(complete=True)
    report.total = len(state.items)
    return report


def add(
    writer: Writer,
    model: LoadedModel,
    source: Source,
    entries: Sequence[Entry],
    parts: Sequence[Path],
    batch_size: int,
    verify: bool,
    tell: Tell,
    report: Report,
) -> None:
    """Append what ``entries`` have that the index lacks."""
    state, made = writer.state, writer.now.made
    todo = [entry for entry in entries if verify or not up_to_date(entry, writer)]
    report.unchanged += len(entries) - len(todo)
    at_hand = Rows(writer, parts)
    committed_at, done = time.monotonic(), 0
    look = Look(source, model, made, at_hand)
    for looked in prefetched(look, list(batches(todo, batch_size))):
        fresh = embed(new_content(looked, at_hand), model, made)
        for one in looked:
            append(writer, one, fresh, at_hand, state.items.get(one.entry.id), report)
        done += len(looked)
        if time.monotonic() - committed_at > COMMIT_EVERY_S:
            writer.commit()
            committed_at = time.monotonic()
        tell(done, len(todo))


def up_to_date(entry: Entry, writer: Writer) -> bool:
    item, broken = writer.state.items.get(entry.id), writer.state.broken.get(entry.id)
    return (item is not None and item.stamp == entry.stamp) or (broken is not None and broken[0] == entry.stamp)


def append(
    writer: Writer, one: Looked, fresh: dict[str, Row], at_hand: Rows, before: Item | None, report: Report
) -> None:
    """What was found of one picture, into the log and the rows."""
    line = {"id": one.entry.id, "stamp": one.entry.stamp}
    if one.broken is not None:
        writer.append({**line, "broken": one.broken})
        report.broken.append((one.entry.id, one.broken))
        return
    if before is not None and before.sha256 == one.sha256:
        if before.stamp != one.entry.stamp:
            writer.append(line)
            report.touched += 1
        else:
            report.unchanged += 1
        return
    row = fresh.pop(one.sha256, None)
    if row is None and at_hand.is_own(one.sha256):
        report.copied += 1
    elif before is None:
        report.added += 1
    else:
        report.changed += 1
    row = at_hand.row(one.sha256) if row is None else row
    writer.append({**line, "sha256": one.sha256}, row.arrays, row.thumb)
    at_hand.remember(writer.state.items[one.entry.id])


def new_content(looked: Sequence[Looked], at_hand: Rows) -> list[Looked]:
    """The first of each content that no earlier batch had. A picture may have been read before that one was done."""
    seen: set[str] = set()
    found = []
    for one in looked:
        if one.pixels is not None and one.sha256 not in at_hand and one.sha256 not in seen:
            seen.add(one.sha256)
            found.append(one)
    return found


def batches(entries: Sequence[Entry], size: int) -> Iterator[Sequence[Entry]]:
    for start in range(0, len(entries), size):
        yield entries[start : start + size]


@torch.inference_mode()
def embed(pictures: Sequence[Looked], model: LoadedModel, made: Made) -> dict[str, Row]:
    """Rows by content of those pictures that have pixels."""
    if not pictures:
        return {}
    pixels = torch.cat([one.pixels for one in pictures if one.pixels is not None])
    encoded = model.model.encode_image(pixels.to(model.device))
    arrays = stored(encoded.embedding.float().cpu().numpy(), made.embeddings)
    if made.kept_values:
        arrays[KEPT] = flat(model.model.keep_image(encoded), made.kept)
    return {
        one.sha256: Row({name: rows[number] for name, rows in arrays.items()}, one.thumb)
        for number, one in enumerate(pictures)
    }

"""The examination itself: every picture and caption of a source once, and what was found in order of weight."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from vlretrieval.data.doctor.captions import faults_of
from vlretrieval.data.doctor.duplicates import pairs_alike
from vlretrieval.data.doctor.pictures import Look, look_at, prints_of, thumbnail, unreadable
from vlretrieval.data.images import BadImage
from vlretrieval.data.known_sets import size_faults
from vlretrieval.data.pictures import for_each
from vlretrieval.data.records import Record, Records
from vlretrieval.data.splits import text_groups
from vlretrieval.data.tokenizers import Tokenizer

_EXAMPLES = 12  # of each finding, on the page
_KEPT_FIRST = ("test", "val")  # of two copies, the one in these splits stays


@dataclass(frozen=True)
class Finding:
    """One kind of thing that was found.

    Attributes:
        title: what it is.
        count: how many pictures, captions or pairs.
        weight: "fault" makes numbers wrong or a run stop; "note" is worth knowing.
        examples: lines of text, each with the pictures (indices into ``Report.records``) it speaks of.
    """

    title: str
    count: int
    weight: str
    examples: list[tuple[str, tuple[int, ...]]]


@dataclass
class Report:
    """What the doctor found.

    Attributes:
        sizes: split -> (pictures, captions).
        findings: faults first.
        fixes: entries of a fix list, see ``exclude``.
        records: what was examined.
        thumbnails: index of a record -> a small JPEG, for those that findings show.
    """

    sizes: dict[str, tuple[int, int]]
    findings: list[Finding]
    fixes: list[dict[str, str]]
    records: list[Record] = field(repr=False)
    thumbnails: dict[int, bytes] = field(default_factory=dict, repr=False)

    @property
    def faults(self) -> int:
        """Findings that are faults."""
        return sum(finding.weight == "fault" for finding in self.findings)


def examine(
    source: Records,
    *,
    tokenizer: Tokenizer | None = None,
    longest_words: int = 60,
    progress: Callable[[Iterable[int], int], Iterable[int]] = lambda items, total: items,
) -> Report:
    """Look at every picture and caption of ``source`` once.

    Args:
        source: its fix list is applied, its policy for empty captions is not.
        tokenizer: captions longer than its context are found; None, or one that is not fitted: those of more than
            ``longest_words`` words.
        longest_words: see ``tokenizer``.
        progress: shows how far it is: given the indices and their number, hands them through.
    """
    records = list(source.records())
    looks = _look_at_all(source, records, progress)
    found = _Findings(records)
    sizes: dict[str, tuple[int, int]] = {}
    for record in records:
        pictures, captions = sizes.get(record.split, (0, 0))
        sizes[record.split] = (pictures + 1, captions + len(record.captions))
    set_name = getattr(source.reader, "set_name", None)
    for fault in size_faults(set_name, {name: size[0] for name, size in sizes.items()}):
        found.add("split sizes that are not the published ones", "fault", fault, ())
    _pictures(found, looks)
    _copies(found, looks)
    _captions(found, tokenizer, longest_words)
    report = Report(sizes, found.in_order(), found.fixes, records)
    shown = {index for finding in report.findings for _, indices in finding.examples for index in indices}
    for index in sorted(shown):
        if looks[index].fault is None:
            report.thumbnails[index] = thumbnail(source.open(records[index].image, at_least=112))
    return report


class _Findings:
    def __init__(self, records: list[Record]) -> None:
        self.records = records
        self.fixes: list[dict[str, str]] = []
        self._fixed: set[tuple[str, str, str | None]] = set()
        self._found: dict[tuple[str, str], list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
        self._counts: dict[tuple[str, str], int] = defaultdict(int)

    def add(self, title: str, weight: str, line: str, indices: tuple[int, ...]) -> None:
        self._counts[title, weight] += 1
        if len(self._found[title, weight]) < _EXAMPLES:
            self._found[title, weight].append((line, indices))

    def fix(self, index: int, reason: str, caption: str | None = None) -> None:
        record = self.records[index]
        key = (record.split, record.image_id, caption)
        if key not in self._fixed:
            self._fixed.add(key)
            own = {} if caption is None else {"caption": caption}
            self.fixes.append({"split": record.split, "image_id": record.image_id, **own, "reason": reason})

    def name(self, index: int) -> str:
        return f"{self.records[index].split}: {self.records[index].image_id}"

    def in_order(self) -> list[Finding]:
        made = [Finding(title, self._counts[title, w], w, lines) for (title, w), lines in self._found.items()]
        return sorted(made, key=lambda finding: finding.weight != "fault")


def _look_at_all(
    source: Records, records: list[Record], progress: Callable[[Iterable[int], int], Iterable[int]]
) -> list[Look]:
    looks: list[Look] = [Look("not looked at")] * len(records)

    def look(index: int) -> None:
        try:
            picture = source.open(records[index].image, at_least=128)  # enough to know a picture again by
            looks[index] = look_at(picture, source.reader.open(records[index].image))
        except BadImage as bad:
            looks[index] = unreadable(bad)

    for_each(look, progress(range(len(records)), len(records)))
    return looks


def _pictures(found: _Findings, looks: list[Look]) -> None:
    for index, look in enumerate(looks):
        if look.fault is not None:
            found.add("pictures that cannot be opened", "fault", f"{found.name(index)}: {look.fault}", ())
            found.fix(index, look.fault)
        for kind in look.kinds:
            title = f"pictures {kind}" if not kind.startswith(("smaller", "longer")) else f"pictures {kind}"
            found.add(title, "note", f"{found.name(index)} ({look.size[0]} x {look.size[1]})", (index,))
        if not found.records[index].captions:
            found.add("pictures without captions", "note", found.name(index), (index,) if look.fault is None else ())


def _copies(found: _Findings, looks: list[Look]) -> None:
    groups: dict[bytes, list[int]] = defaultdict(list)
    for index, look in enumerate(looks):
        if look.fault is None:
            groups[look.digest].append(index)
    equal = {group[i]: group[0] for group in groups.values() for i in range(len(group))}
    for group in groups.values():
        for other in group[1:]:
            _copy(found, group[0], other, "the same picture")
    good = np.array([index for index, look in enumerate(looks) if look.fault is None])
    if not len(good):
        return
    for a, b, mirrored in sorted(pairs_alike(prints_of([looks[i] for i in good]))):
        first, other = int(good[a]), int(good[b])
        if equal[first] != equal[other]:
            _copy(found, first, other, "a mirror image" if mirrored else "nearly the same picture")


def _copy(found: _Findings, first: int, other: int, what: str) -> None:
    splits = {found.records[first].split, found.records[other].split}
    line = f"{found.name(first)} and {found.name(other)}"
    if len(splits) == 2:
        found.add(f"{what} in two splits", "fault", line, (first, other))
        for keep in _KEPT_FIRST:
            if keep in splits:
                gone, kept = (other, first) if found.records[first].split == keep else (first, other)
                found.fix(gone, f"{what} as {found.name(kept)}")
                return
    found.add(f"{what} twice in a split", "note", line, (first, other))
    if splits == {"train"} and what == "the same picture":
        found.fix(other, f"{what} as {found.name(first)}")


def _captions(found: _Findings, tokenizer: Tokenizer | None, longest_words: int) -> None:
    texts = [caption for record in found.records for caption in record.captions]
    owners = [index for index, record in enumerate(found.records) for _ in record.captions]
    measured = tokenizer if tokenizer is not None and tokenizer.fitted else None
    for text, owner in zip(texts, owners, strict=True):
        line = f"{found.name(owner)}: {text!r}"
        for fault in faults_of(text):
            found.add(fault, "fault", line, (owner,))
            if not text.strip():
                found.fix(owner, "empty caption", caption=text)
        if measured is None and len(text.split()) > longest_words:
            found.add(f"captions of more than {longest_words} words", "note", line, (owner,))
        if measured is not None and measured.count_truncated([text]):
            found.add(f"captions longer than {measured.context_length} tokens", "note", line, (owner,))
    groups = text_groups(texts)
    members: dict[int, list[int]] = defaultdict(list)
    for caption, group in enumerate(groups.tolist()):
        members[group].append(caption)
    for group in members.values():
        own = [owners[caption] for caption in group]
        text = texts[group[0]]
        if len(group) == 1 or not text.strip():
            continue
        if len(set(own)) < len(own):
            twice = next(owner for owner in own if own.count(owner) > 1)
            found.add("captions twice at one picture", "note", f"{found.name(twice)}: {text!r}", (twice,))
        pictures = tuple(dict.fromkeys(own))
        if len(pictures) > 1:
            splits = sorted({found.records[index].split for index in pictures})
            line = f"{text!r}: {len(pictures)} pictures ({', '.join(splits)})"
            where = "pictures of two splits" if len(splits) > 1 else "several pictures of a split"
            found.add(f"captions shared by {where}", "note", line, pictures[:4])

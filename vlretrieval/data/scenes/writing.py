"""Captions and hard negatives for a row of scenes: meanings drawn, checked against the truth, put into words."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

import numpy as np

from vlretrieval.data.scenes import captions, negatives
from vlretrieval.data.scenes.captions import Draft
from vlretrieval.data.scenes.layout import Rules, Scene
from vlretrieval.data.scenes.query import Query, QueryTable, stacked, tabulate
from vlretrieval.data.scenes.truth import Truth
from vlretrieval.data.scenes.wording import Grammar
from vlretrieval.data.splits import HardNegatives

_BLOCK = 1000  # scenes at once: the meanings of negatives are many, and are let go as soon as they have words


@dataclass(frozen=True)
class Written:
    """M captions of N scenes (M / N each), and their K negatives.

    ``grammars[c](drafts[c].query, forms[c], False)`` is caption c; ``kinds`` are the captions' kinds;
    ``negative_table`` holds the meanings of the negatives, row for row.
    """

    texts: list[str]
    drafts: list[Draft]
    kinds: list[str]
    forms: list[int]
    grammars: list[Grammar]
    negatives: HardNegatives
    negative_table: QueryTable


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A million small tuples are made, in no cycles: looking through them again and again takes a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_no_garbage_collection()
def write(
    scenes: Sequence[Scene], wanted: Sequence[str], rules: Rules, grammars: Sequence[Grammar], rng: Random
) -> Written:
    """Captions of the wanted kinds for each scene, all different, in turn by the grammars; and negatives for each.

    A negative is false of its scene even if the least difference in place made a relation.
    """
    out = Written([], [], [], [], [], HardNegatives(), tabulate([], rules.max_objects + 1))
    texts: list[str] = []
    kinds: list[str] = []
    owners: list[np.ndarray] = []
    tables: list[QueryTable] = [out.negative_table]
    for start in range(0, len(scenes), _BLOCK):
        block = scenes[start : start + _BLOCK]
        proposed: list[tuple[str, Query]] = []
        proposed_for: list[int] = []
        for scene in block:
            said: set[str] = set()
            for number, kind in enumerate(wanted):
                proposals = _caption(scene, kind, rules, grammars[number % len(grammars)], rng, said, out)
                proposed += proposals
                proposed_for += [len(out.texts) - 1] * len(proposals)
        owner = np.array(proposed_for, dtype=np.int64)
        table = tabulate([query for _, query in proposed], rules.max_objects + 1)
        true = Truth(block, margin=0.0).holds(table, np.arange(len(table)), owner // len(wanted) - start)
        for k in np.flatnonzero(~true).tolist():
            kind, query = proposed[k]
            texts.append(out.grammars[proposed_for[k]](query, out.forms[proposed_for[k]], False))
            kinds.append(kind)
        owners.append(owner[~true])
        tables.append(QueryTable(table.things[~true], table.relation[~true], table.exhaustive[~true]))
    false_ones = HardNegatives(texts, kinds, np.concatenate(owners))
    return Written(out.texts, out.drafts, out.kinds, out.forms, out.grammars, false_ones, stacked(tables))


def _caption(
    scene: Scene, wanted: str, rules: Rules, grammar: Grammar, rng: Random, said: set[str], out: Written
) -> list[tuple[str, Query]]:
    """Adds one caption, unlike those ``said`` of the scene before; gives proposals for its negatives."""
    kind, draft = captions.draft(scene, wanted, rng)
    form = int(rng.random() * 10_000)
    while (text := grammar(draft.query, form, False)) in said:
        form += 1
    said.add(text)
    out.texts.append(text)
    out.drafts.append(draft)
    out.kinds.append(kind)
    out.forms.append(form)
    out.grammars.append(grammar)
    return negatives.propose(draft.query, scene, rules, rng, like_only=kind == "only")

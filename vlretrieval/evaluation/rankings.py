"""Ranked lists in TREC's format: anybody's read and measured, ours written.

A run has lines ``query Q0 document rank score tag``, a truth (qrels) lines ``query 0 document relevance``. The order is
that of the scores, as in trec_eval; the rank column is not looked at. What a list does not name has no place in it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vlretrieval.data.splits import Split
from vlretrieval.metrics.bootstrap import bootstrap_means, cluster_sums, interval
from vlretrieval.metrics.scores import IntArray

Run = dict[str, dict[str, float]]  # query -> document -> score
Truth = dict[str, set[str]]  # query -> its true documents


def read_run(path: str | Path) -> Run:
    """A TREC run; ValueError names the line that is not one, a score that is not finite, a document named twice."""
    run: Run = {}
    for number, fields in _lines(path, 6, "query Q0 document rank score tag"):
        query, _, document, _, score_text, _ = fields
        try:
            score = float(score_text)
        except ValueError:
            raise ValueError(f"{path}:{number}: the score {score_text!r} is not a number") from None
        if not math.isfinite(score):
            raise ValueError(f"{path}:{number}: the score of {document!r} for {query!r} is {score_text}, not finite")
        if document in run.setdefault(query, {}):
            raise ValueError(f"{path}:{number}: {document!r} is named twice for {query!r}")
        run[query][document] = score
    if not run:
        raise ValueError(f"{path} holds no ranking")
    return run


def read_truth(path: str | Path) -> Truth:
    """TREC qrels; a relevance of 0 or less is no positive."""
    truth: Truth = {}
    for number, fields in _lines(path, 4, "query 0 document relevance"):
        query, _, document, relevance = fields
        try:
            relevant = int(relevance) > 0
        except ValueError:
            raise ValueError(f"{path}:{number}: the relevance {relevance!r} is not a whole number") from None
        if relevant:
            truth.setdefault(query, set()).add(document)
    if not truth:
        raise ValueError(f"{path} names no relevant document")
    return truth


def truth_of(split: Split) -> dict[str, Truth]:
    """{"t2i", "i2t"}: a split's positives under the names that :func:`write_run` uses."""
    captions, images = caption_names(split), image_names(split)
    truths: dict[str, Truth] = {"t2i": {}, "i2t": {}}
    for caption, image in split.positives.tolist():
        truths["t2i"].setdefault(captions[caption], set()).add(images[image])
        truths["i2t"].setdefault(images[image], set()).add(captions[caption])
    return truths


def caption_names(split: Split) -> list[str]:
    """image#0, image#1, ...: a caption has no id of its own."""
    first, images = split.captions_of_image[:-1], image_names(split)
    return [f"{images[image]}#{row - first[image]}" for row, image in enumerate(split.caption_image.tolist())]


def image_names(split: Split) -> list[str]:
    """The images' ids with _ for each blank, which the format cannot hold.

    Raises:
        ValueError: two ids that differ in their blanks alone.
    """
    names = [re.sub(r"\s", "_", image_id) for image_id in split.image_ids]
    if len(set(names)) < len(names):
        twice = next(name for name, times in Counter(names).items() if times > 1)
        raise ValueError(f"two images are called {twice!r} once blanks are replaced; TREC cannot tell them apart")
    return names


def ranking_figures(
    run: Run, truth: Truth, ks: Sequence[int] = (1, 5, 10), *, replicates: int = 1000, seed: int = 0
) -> dict[str, Any]:
    """Figures of a run, ties against it; a query of the truth that the run lacks is a miss, and is counted.

    Returns:
        "R@k" (hit rate), "mAP@R", "mAP", "R-precision" in percent, "MRR" and "nDCG" from 0 to 1, each with a 95 %
        interval over queries; "queries", "without_list", "unknown_queries", "shortest_list".
    """
    names = [*[f"R@{k}" for k in ks], "MRR", "mAP@R", "mAP", "R-precision", "nDCG"]
    rows = []
    for query, good in truth.items():
        places = places_of(run.get(query, {}), good)
        total = len(good)
        precision = [(i + 1) / place for i, place in enumerate(places)]
        within = [p for p, place in zip(precision, places, strict=True) if place <= total]
        ideal = sum(1 / math.log2(i + 2) for i in range(total))
        rows.append(
            [100.0 * any(place <= k for place in places) for k in ks]
            + [1 / places[0] if places else 0.0, 100 * sum(within) / total, 100 * sum(precision) / total]
            + [100 * len(within) / total, sum(1 / math.log2(place + 1) for place in places) / ideal]
        )
    table = np.array(rows)
    figures: dict[str, Any] = dict(zip(names, table.mean(0).tolist(), strict=True))
    if replicates:
        drawn = bootstrap_means(*cluster_sums(table, np.arange(len(table)), len(table)), replicates, seed)
        figures["interval"] = dict(zip(names, interval(drawn).tolist(), strict=True))
    return figures | {
        "queries": len(truth),
        "without_list": sum(query not in run for query in truth),
        "unknown_queries": sum(query not in truth for query in run),
        "shortest_list": min(len(documents) for documents in run.values()),
    }


def places_of(scores: Mapping[str, float], good: set[str]) -> list[int]:
    """Places of the true documents of one list, ascending; at an equal score they come after the others."""
    order = sorted(scores, key=lambda document: (-scores[document], document in good))
    return [place for place, document in enumerate(order, 1) if document in good]


def write_run(
    path: str | Path, queries: Sequence[str], documents: Sequence[str], candidates: IntArray, tag: str = "vlretrieval"
) -> None:
    """Write lists (Q, K), best first. The score is the place from below, since two stages' scores have no one scale."""
    depth = candidates.shape[1]
    partial = Path(path).with_name(Path(path).name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        for query, row in zip(queries, candidates.tolist(), strict=True):
            file.writelines(
                f"{query} Q0 {documents[at]} {place} {depth - place + 1} {tag}\n" for place, at in enumerate(row, 1)
            )
    partial.replace(path)


def write_truth(path: str | Path, truth: Truth) -> None:
    """Write qrels."""
    with Path(path).open("w", encoding="utf-8") as file:
        for query, documents in truth.items():
            file.writelines(f"{query} 0 {document} 1\n" for document in sorted(documents))


def _lines(path: str | Path, fields: int, form: str) -> Any:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 at byte {error.start}") from None
    for number, line in enumerate(text.splitlines(), 1):
        found = line.split()
        if found and len(found) != fields:
            raise ValueError(f"{path}:{number}: {len(found)} fields; a line is: {form}")
        if found:
            yield number, found

"""Whether one run is better than another on the same queries: a paired bootstrap over pictures, and over seeds.

Two intervals that overlap say little, since both runs fail on the same hard queries. Here each draw of pictures is the
same for all runs, and the difference has the interval. Runs under unlike protocols are refused.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vlretrieval.metrics.bootstrap import bootstrap_means, cluster_sums, interval
from vlretrieval.metrics.ranks import Ranks
from vlretrieval.metrics.recall import query_figures
from vlretrieval.metrics.scores import IntArray

Floats = npt.NDArray[np.float64]

# What must be equal before two figures may be compared, and how it is called. Preprocessing, tokenizer, top_k and the
# weight belong to what is compared.
ALIKE = {
    "split hash": ("split", "hash"),
    "images": ("split", "images"),
    "captions": ("split", "captions"),
    "positives": ("positives",),
    "ties": ("ties",),
    "recall": ("recall",),
    "ks": ("ks",),
    "protocol": ("name",),
    "hard negatives a kind": ("hard_negatives_per_kind",),
}
LOWER_IS_BETTER = ("mean_rank",)


@dataclass
class Run:
    """One evaluation on disk: its figures, and what each query gave."""

    path: Path
    figures: dict[str, Any]
    queries: dict[str, npt.NDArray[Any]]

    @property
    def stages(self) -> list[str]:
        return [stage for stage in ("first_stage", "reranked") if stage in self.figures]

    def ranks(self, stage: str, way: str) -> Ranks:
        query, above, tied, good = (
            self.queries[f"{stage}/{way}/{name}"] for name in ("query", "above", "tied", "good")
        )
        return Ranks(query, above, tied, good, self.figures[stage][way]["gallery"])


@dataclass(frozen=True)
class Difference:
    """One figure of two groups of runs: B - A in the figure's own unit, with its 95 % interval."""

    name: str
    first: float
    second: float
    low: float
    high: float

    @property
    def value(self) -> float:
        return self.second - self.first

    @property
    def verdict(self) -> str:
        """ "better", "worse", or "noise" where the interval holds 0."""
        if self.low <= 0 <= self.high:
            return "noise"
        return "better" if (self.value > 0) != self.name.endswith(LOWER_IS_BETTER) else "worse"

    def __str__(self) -> str:
        said = f"difference {self.value:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"
        return said if self.verdict != "noise" else f"noise: {said}"


def load_run(path: str | Path) -> Run:
    """An evaluation's folder (or its metrics.json).

    Raises:
        ValueError: naming the file that is missing or no evaluation of ours.
    """
    folder = Path(path)
    folder = folder.parent if folder.name == "metrics.json" else folder
    for name in ("metrics.json", "queries.npz"):
        if not (folder / name).is_file():
            nested = sorted(folder.glob(f"**/{name}"))[:3]
            hint = f"; did you mean {nested[0].parent}?" if nested else "; vlretrieval-evaluate writes it"
            raise ValueError(f"{folder / name}: no such file{hint}")
    try:
        figures = json.loads((folder / "metrics.json").read_text())
        if not isinstance(figures, dict) or not isinstance(_at(figures, ("protocol", "split")), dict):
            raise ValueError("metrics.json says nothing of its protocol and split")
        with np.load(folder / "queries.npz", allow_pickle=False) as stored:
            queries = dict(stored)
        run = Run(folder, figures, queries)
        for stage in run.stages:
            run.ranks(stage, "t2i"), run.ranks(stage, "i2t")
    except (ValueError, KeyError, OSError, TypeError, EOFError, zipfile.BadZipFile) as error:
        said = "queries.npz cannot be read" if "pickle" in str(error) else error
        raise ValueError(f"{folder} is not an evaluation that can be compared: {said}") from None
    return run


def check_alike(runs: Sequence[Run]) -> None:
    """Refuse runs that were not measured in the same way on the same queries."""
    first = runs[0]
    for run in runs[1:]:
        for what, keys in ALIKE.items():
            one, other = (_at(r.figures["protocol"], keys) for r in (first, run))
            if one != other:
                raise ValueError(
                    f"{first.path} and {run.path} differ in {what} ({one} against {other}); "
                    "only figures of one protocol can be compared"
                )


def compare(
    first: Sequence[Run], second: Sequence[Run], *, replicates: int = 2000, seed: int = 0
) -> dict[str, list[Difference]]:
    """Differences second - first, by stage (and "hard negatives").

    Args:
        first, second: runs of one model each; several are its seeds, whose mean is compared.

    Returns:
        {"first_stage": [...], "reranked": [...], "hard negatives": [...]}, those that all runs have.
    """
    runs = [*first, *second]
    check_alike(runs)
    result = {}
    for stage in ("first_stage", "reranked"):
        if all(stage in run.stages for run in runs):
            tables = [_stage_table(run, stage) for run in runs]
            result[stage] = _differences(tables, len(first), replicates, seed)
    if all("negatives/kind" in run.queries for run in runs):
        hashes = {run.figures["protocol"].get("hard_negatives_hash") for run in runs}
        drawn = ("negatives/kind", "negatives/image")
        if len(hashes) > 1 or not all(
            np.array_equal(run.queries[name], runs[0].queries[name]) for run in runs for name in drawn
        ):
            raise ValueError("the runs scored different hard negatives; evaluate them with the same seed")
        result["hard negatives"] = _differences([_negative_table(run) for run in runs], len(first), replicates, seed)
    return result


@dataclass
class _Table:
    """One run's figures as sums and counts per picture, (clusters, m); plus sums of columns, such as rsum."""

    names: list[str]
    sums: Floats
    counts: Floats
    totals: dict[str, list[int]]


def _stage_table(run: Run, stage: str) -> _Table:
    ks = run.figures["protocol"]["ks"]
    owner: IntArray = run.queries["caption_image"]
    images = run.figures["protocol"]["split"]["images"]
    names: list[str] = []
    sums, counts = [], []
    for way in ("t2i", "i2t"):
        ranks = run.ranks(stage, way)
        columns, table = query_figures(ranks, ks)
        cluster = owner[ranks.query] if way == "t2i" else ranks.query
        part_sums, part_counts = cluster_sums(table, cluster, images)
        names += [f"{way}/{name}" for name in columns]
        sums.append(part_sums)
        counts.append(part_counts)
    recalls = [place for place, name in enumerate(names) if "/R@" in name]
    return _Table(names, np.hstack(sums), np.hstack(counts), {"rsum": recalls})


def _negative_table(run: Run) -> _Table:
    kind, image = run.queries["negatives/kind"], run.queries["negatives/image"]
    images = run.figures["protocol"]["split"]["images"]
    names, sums, counts = [], [], []
    for score in ("cosine", "match"):
        if f"negatives/{score}" not in run.queries:
            continue
        for name in [*sorted(set(kind.tolist())), "all"]:
            chosen = np.ones(len(kind), dtype=bool) if name == "all" else kind == name
            part = cluster_sums(100.0 * run.queries[f"negatives/{score}"][chosen], image[chosen], images)
            names.append(f"{name}/{score}")
            sums.append(part[0])
            counts.append(part[1])
    return _Table(names, np.hstack(sums), np.hstack(counts), {})


def _differences(tables: Sequence[_Table], split_at: int, replicates: int, seed: int) -> list[Difference]:
    names = [name for name in tables[0].names if all(name in table.names for table in tables)]
    columns = [[table.names.index(name) for name in names] for table in tables]
    stacked = np.hstack([table.sums[:, c] for table, c in zip(tables, columns, strict=True)])
    counted = np.hstack([table.counts[:, c] for table, c in zip(tables, columns, strict=True)])
    # one draw of pictures serves all runs: (replicates, runs, figures)
    drawn = bootstrap_means(stacked, counted, replicates, seed).reshape(replicates, len(tables), len(names))
    points = (stacked.sum(0) / counted.sum(0)).reshape(len(tables), len(names))
    for name, parts in tables[0].totals.items():
        at = [names.index(tables[0].names[part]) for part in parts]
        names.append(name)
        drawn = np.concatenate([drawn, drawn[:, :, at].sum(2, keepdims=True)], axis=2)
        points = np.concatenate([points, points[:, at].sum(1, keepdims=True)], axis=1)
    # seeds are drawn anew as well, within each group: what another seed would have given
    rng = np.random.default_rng(seed + 1)
    groups = []
    for low, high in ((0, split_at), (split_at, len(tables))):
        chosen = rng.integers(low, high, (replicates, high - low))
        groups.append(np.take_along_axis(drawn, chosen[:, :, None], axis=1).mean(1))
    bounds = interval(groups[1] - groups[0])
    before, after = points[:split_at].mean(0), points[split_at:].mean(0)
    return [
        Difference(name, float(before[i]), float(after[i]), float(bounds[i, 0]), float(bounds[i, 1]))
        for i, name in enumerate(names)
    ]


def _at(node: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        node = node.get(key) if isinstance(node, dict) else None
    return node

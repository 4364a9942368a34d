"""The outcome of an evaluation: the figures, what they were computed from, and the files they are written to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vlretrieval.data.splits import Split
from vlretrieval.evaluation.encode import Images, Texts
from vlretrieval.evaluation.hard_negatives import NegativePairs
from vlretrieval.metrics.ranks import Ranks
from vlretrieval.metrics.scores import IntArray

Floats = npt.NDArray[np.float64]


@dataclass
class Shortlists:
    """What re-ranking works on, both directions: candidates and cosines (Q, K), and matching logits (Q, K)."""

    t2i: tuple[IntArray, Floats, Floats]
    i2t: tuple[IntArray, Floats, Floats]


@dataclass
class Gallery:
    """One gallery, encoded: the whole split, or a fold of it; with its shortlists where the model re-ranks."""

    images: Images
    texts: Texts
    split: Split
    shortlists: Shortlists | None = None


Stages = dict[str, tuple[Ranks, Ranks]]  # "first_stage", "reranked" -> (t2i, i2t)


@dataclass
class Evaluation:
    """The outcome: ``figures`` is metrics.json; the rest is what it was computed from, a query at a time.

    Attributes:
        figures: plain data. {"protocol", "first_stage", "reranked"?, "by_image_id"?, "hard_negatives"?}.
        ranks: {"first_stage": (t2i, i2t), "reranked": ...} under the split's truth.
        images, texts: the embeddings.
        galleries: the whole split or its folds, with their shortlists where the model re-ranked.
        negatives: where the split has hard negatives.
    """

    figures: dict[str, Any]
    ranks: dict[str, tuple[Ranks, Ranks]]
    images: Images
    texts: Texts
    galleries: Sequence[Gallery]
    negatives: NegativePairs | None = None

    @property
    def caption_image(self) -> IntArray:
        """(M,) picture of each caption of the whole split."""
        before = np.cumsum([0] + [len(gallery.split.image_ids) for gallery in self.galleries])
        return np.concatenate([g.split.caption_image + at for g, at in zip(self.galleries, before, strict=False)])

    def scalars(self, prefix: str = "") -> dict[str, float]:
        """The headline figures under flat names: "t2i/R@1", "rsum", "reranked/i2t/R@5", "negatives/all/match"."""
        flat: dict[str, float] = {}
        for stage, lead in (("first_stage", ""), ("reranked", "reranked/")):
            if stage not in self.figures:
                continue
            for way in ("t2i", "i2t"):
                for name, value in self.figures[stage][way].items():
                    if name.startswith("R@") or name in ("median_rank", "mean_rank", "MRR"):
                        flat[f"{lead}{way}/{name}"] = value
            flat[f"{lead}rsum"] = self.figures[stage]["rsum"]
        for kind, scores in self.figures.get("hard_negatives", {}).items():
            for name in ("cosine", "match"):
                if name in scores:
                    flat[f"negatives/{kind}/{name}"] = scores[name]["accuracy"]
        return {prefix + name: value for name, value in flat.items()}

    def write(self, folder: str | Path) -> Path:
        """Write metrics.json and queries.npz (each query's rank, for paired comparisons) and give the former's path."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, Any] = {"caption_image": self.caption_image}
        for stage, ways in self.ranks.items():
            for way, ranks in zip(("t2i", "i2t"), ways, strict=True):
                for name in ("query", "above", "tied", "good"):
                    arrays[f"{stage}/{way}/{name}"] = getattr(ranks, name)
        if self.negatives is not None:
            arrays |= {"negatives/kind": self.negatives.kind, "negatives/image": self.negatives.image}
            arrays |= {f"negatives/{name}": right for name, right in self.negatives.correct.items()}
        path = folder / "metrics.json"
        for target, save in (
            (folder / "queries.npz", lambda file: np.savez_compressed(file, **arrays)),
            (path, lambda file: file.write((json.dumps(self.figures, indent=2) + "\n").encode())),
        ):
            partial = target.with_name(target.name + ".partial")
            with partial.open("wb") as file:
                save(file)
            partial.replace(target)  # whole or not at all
        return path


def joined(ranks: Sequence[Stages], rows: Sequence[tuple[IntArray, IntArray]]) -> Stages:
    """The folds' ranks as one, queries by their number in the whole split."""
    if len(ranks) == 1:
        return ranks[0]

    def join(stage: str, way: int) -> Ranks:
        parts = [stages[stage][way] for stages in ranks]
        numbers = [(fold[1] if way == 0 else fold[0])[part.query] for part, fold in zip(parts, rows, strict=True)]
        above, tied, good = (
            np.concatenate([getattr(part, name) for part in parts]) for name in ("above", "tied", "good")
        )
        left_out = sum(part.left_out for part in parts)
        return Ranks(np.concatenate(numbers), above, tied, good, parts[0].gallery, left_out)

    return {stage: (join(stage, 0), join(stage, 1)) for stage in ranks[0]}

"""One examination of a model's heads: figures, roles, likeness, closures, a pruning curve and a few pairs looked at."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vlretrieval.data.splits import Split
from vlretrieval.data.tokenizers import Tokenizer
from vlretrieval.evaluation.encode import Tell, silent
from vlretrieval.evaluation.inputs import Inputs
from vlretrieval.evaluation.protocols import part
from vlretrieval.heads.ablate import Drop, Probe, closures_of
from vlretrieval.heads.diversity import Copies, Diversity, diversity, warnings
from vlretrieval.heads.examples import Example, examples_of, telling_captions
from vlretrieval.heads.figures import LayerStatistics
from vlretrieval.heads.layers import Head, heads_of, layers_of
from vlretrieval.heads.passes import draw_captions
from vlretrieval.heads.pruning_curve import Importance, Point, by_drops, by_gradient, by_recall, greedy_curve
from vlretrieval.heads.roles import Rule
from vlretrieval.heads.statistics import head_statistics


@dataclass(frozen=True)
class Ablation:
    """How closures are measured.

    Args:
        pictures, captions: of the gallery, and of each picture; 0 pictures leaves closures and the curve out.
        top_k: candidates a query that the cross-modal heads re-rank.
        k: of the recall@k that is followed.
        weight: of the matching logit beside the scaled cosine; None: the logit alone.
        replicates: draws for the intervals.
        points: of the pruning curve; 0 leaves it out.
        by: what decides which head goes next: "drops" (what each costs alone), "recall" (asked anew at each point, a
            measurement a head), "gradient" (cheap and poor).
    """

    pictures: int = 120
    captions: int = 2
    top_k: int = 8
    k: int = 1
    weight: float | None = 1.0
    replicates: int = 1000
    points: int = 10
    by: str = "drops"

    def __post_init__(self) -> None:
        if self.by not in ("drops", "recall", "gradient"):
            raise ValueError(f"by={self.by!r} is not known; choose drops, recall or gradient")
        if min(self.pictures, self.points) < 0 or self.replicates < 1:
            raise ValueError(
                f"pictures={self.pictures}, points={self.points}, replicates={self.replicates}: the first two may not "
                "be negative, and intervals need a draw"
            )


@dataclass(frozen=True)
class Plan:
    """What is examined.

    Args:
        pictures: on which the figures are measured, one caption each.
        alike_pictures: on which likeness is, a part of them.
        examples: pairs that are kept whole for the report.
        seed: of the draws.
    """

    pictures: int = 300
    alike_pictures: int = 64
    examples: int = 4
    rule: Rule = field(default_factory=Rule)
    copies: Copies = field(default_factory=Copies)
    ablation: Ablation = field(default_factory=Ablation)
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.pictures, self.alike_pictures) < 1 or self.examples < 0:
            raise ValueError(
                f"pictures={self.pictures}, alike_pictures={self.alike_pictures}: at least 1; "
                f"examples={self.examples}: at least 0"
            )


@dataclass
class Findings:
    """What an examination found.

    Attributes:
        name: of the model. parameters: learnt numbers. split: {"name", "images", "captions", "hash"}.
        layers: figures by module name, in the model's order.
        roles: of every head.
        drops: what closures cost; empty if left out. curve: the pruning curve; empty if left out.
        recall: recall@k of the last stage with all heads open, on the gallery of the closures, percent.
        seconds: what each part took.
    """

    name: str
    parameters: int
    split: dict[str, Any]
    plan: Plan
    layers: dict[str, LayerStatistics]
    roles: dict[Head, str]
    alike: dict[str, Diversity]
    warnings: list[str]
    drops: list[Drop] = field(default_factory=list)
    curve: list[Point] = field(default_factory=list)
    recall: float = math.nan
    examples: list[Example] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def heads(self) -> list[Head]:
        return [(layer.name, head) for layer in self.layers.values() for head in range(layer.heads)]

    def title(self, head: Head) -> str:
        """ "text-to-image, layer 1, head 2"."""
        return f"{self.layers[head[0]].title}, head {head[1] + 1}"

    def drop_of(self, head: Head) -> Drop | None:
        """What closing this head alone costs."""
        return next((d for d in self.drops if d.closure.scope == "head" and d.closure.heads == (head,)), None)


def examine(
    model: Any,
    split: Split,
    tokenizer: Tokenizer,
    transform: Any,
    plan: Plan = Plan(),  # noqa: B008  (frozen)
    *,
    name: str = "model",
    only_figures: bool = False,
    tell: Tell = silent,
) -> Findings:
    """Examine every head of a model on a split. The model comes back as it was.

    Args:
        only_figures: leave out likeness, closures and examples (for many checkpoints of one run).
    """
    clock = _Clock()
    layers = layers_of(model)
    captions = draw_captions(split, plan.pictures, plan.seed)
    shown = Inputs(seen_part(split, captions), tokenizer, transform)
    rows = np.arange(len(captions))
    figures = head_statistics(model, shown, rows)
    tell("head figures", 1, 1)
    clock.stop("figures")
    found = Findings(
        name=name,
        parameters=sum(p.numel() for p in model.parameters()),
        split={"name": split.name, "images": len(split.image_ids), "captions": len(split.captions)},
        plan=plan,
        layers=figures,
        roles={head: plan.rule.role(figures[head[0]], head[1]) for head in heads_of(layers) if head[0] in figures},
        alike={},
        warnings=[],
        seconds=clock.seconds,
    )
    if only_figures:
        return found
    found.alike = diversity(model, shown, rows[:: max(1, len(rows) // plan.alike_pictures)][: plan.alike_pictures])
    found.warnings = warnings(found.alike.values(), plan.copies)
    clock.stop("likeness")
    if plan.examples:
        found.examples = examples_of(model, shown, telling_captions(shown, rows, plan.examples))
        clock.stop("examples")
    if plan.ablation.pictures:
        _close(found, model, split, tokenizer, transform, shown, tell)
        clock.stop("closures")
    if plan.ablation.pictures and plan.ablation.points:
        _prune(found, model, split, tokenizer, transform, shown, tell)
        clock.stop("pruning")
    return found


def probe_of(model: Any, split: Split, tokenizer: Tokenizer, transform: Any, plan: Plan) -> Probe:
    """The gallery of the closures."""
    how = plan.ablation
    return Probe(
        model,
        split,
        tokenizer,
        transform,
        pictures=how.pictures,
        captions=how.captions,
        top_k=how.top_k,
        k=how.k,
        weight=how.weight,
        seed=plan.seed,
    )


def _close(
    found: Findings, model: Any, split: Split, tokenizer: Tokenizer, transform: Any, shown: Inputs, tell: Tell
) -> None:
    probe = probe_of(model, split, tokenizer, transform, found.plan)
    found.recall = probe.recall(probe.open())
    found.drops = probe.drops(
        closures_of(model), replicates=found.plan.ablation.replicates, seed=found.plan.seed, tell=tell
    )


def _prune(
    found: Findings, model: Any, split: Split, tokenizer: Tokenizer, transform: Any, shown: Inputs, tell: Tell
) -> None:
    how = found.plan.ablation
    probe = probe_of(model, split, tokenizer, transform, found.plan)
    found.curve = greedy_curve(probe, importance_of(probe, how.by, shown, found.drops), points=how.points, tell=tell)


def importance_of(probe: Probe, by: str, shown: Inputs, drops: list[Drop]) -> Importance:
    """What decides which head is closed next.

    Args:
        by: as in :class:`Ablation`. drops: of single heads; measured here if there are none.
    """
    if by == "recall":
        return by_recall(probe)
    if by == "gradient":
        return by_gradient(probe.model, shown, np.arange(len(shown.split.captions))[:128], batch_size=64)
    single = [closure for closure in closures_of(probe.model) if closure.scope == "head"]
    return by_drops(drops or probe.drops(single, replicates=1))


def seen_part(split: Split, captions: Any) -> Split:
    """The split cut down to these captions and their pictures, so that no other picture is read."""
    images = np.unique(split.caption_image[captions])
    cut = part(split, images, captions)
    if hasattr(split, "mentions"):
        # a drawn scene's captions know what they speak of; the cut split asks for its own rows
        cut.mentions = lambda caption: split.mentions(int(captions[caption]))  # type: ignore[attr-defined]
    return cut


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._at = time.perf_counter()

    def stop(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = round(now - self._at, 2)
        self._at = now

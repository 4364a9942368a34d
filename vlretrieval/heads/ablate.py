"""What recall loses when heads are closed, on the same queries, so that a difference is not the luck of a draw."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vlretrieval.data.splits import Split
from vlretrieval.data.tokenizers import Tokenizer
from vlretrieval.evaluation.encode import encode_images, encode_texts, evaluating
from vlretrieval.evaluation.evaluate import reranked
from vlretrieval.evaluation.inputs import Inputs
from vlretrieval.evaluation.matching import match_shortlists
from vlretrieval.evaluation.outcome import Gallery
from vlretrieval.evaluation.protocols import part
from vlretrieval.heads.layers import CROSS, KINDS, Head, Layer, heads_of, layers_of
from vlretrieval.metrics.bootstrap import bootstrap_means, cluster_sums, interval
from vlretrieval.metrics.ranks import Ranks, rank_both
from vlretrieval.metrics.scores import IntArray

Floats = npt.NDArray[np.float64]


@contextmanager
def closed(model: nn.Module, heads: Iterable[Head]) -> Iterator[None]:
    """The model with these heads closed: what they find is exactly 0, W_O and its bias stay.

    Raises:
        ValueError: a head that the model does not have.
    """
    with gated(model, closing(model, heads)):
        yield


@contextmanager
def gated(model: nn.Module, gates: Mapping[str, Tensor]) -> Iterator[None]:
    """The model with (H,) gates on some layers, by module name; on top of gates that were there before."""
    layers = {layer.name: layer.module for layer in layers_of(model)}
    before = {name: layers[name].gate for name in gates}
    try:
        for name, gate in gates.items():
            earlier, own = before[name], gate.to(layers[name].out.weight.device)
            layers[name].gate = own if earlier is None else own * earlier
        yield
    finally:
        for name, earlier in before.items():
            layers[name].gate = earlier


def closing(model: nn.Module, heads: Iterable[Head]) -> dict[str, Tensor]:
    """Gates of 1 and 0 that close these heads, for the layers that have any of them."""
    layers = {layer.name: layer for layer in layers_of(model)}
    gates: dict[str, Tensor] = {}
    for name, head in heads:
        if name not in layers:
            raise ValueError(f"the model has no attention called {name!r}; there are {', '.join(layers)}")
        if not 0 <= head < layers[name].heads:
            raise ValueError(f"{name} has heads 0 to {layers[name].heads - 1}, not {head}")
        gates.setdefault(name, torch.ones(layers[name].heads))[head] = 0
    return gates


@dataclass(frozen=True)
class Closure:
    """Heads that are closed together, and how to call them."""

    title: str
    scope: str  # "head", "layer", "kind" or "direction"
    heads: tuple[Head, ...]


@dataclass(frozen=True)
class Drop:
    """What recall@k loses, in points, by a closure; each (value, low, high), the interval of the paired difference.

    Attributes:
        first_stage: of the dual encoder's ranks; None where only cross-modal heads are closed, which it has not.
        final: of the re-ranked ranks, the first stage's without cross-modal heads. Means over both directions.
        t2i, i2t: the final drop of each direction.
    """

    closure: Closure
    first_stage: tuple[float, float, float] | None
    final: tuple[float, float, float]
    t2i: tuple[float, float, float]
    i2t: tuple[float, float, float]

    @property
    def matters(self) -> bool:
        """Whether the whole interval of the final drop lies above 0."""
        return self.final[1] > 0


def closures_of(model: nn.Module) -> list[Closure]:
    """Every head, every layer, every kind, and the directions of the cross-modal heads."""
    layers = layers_of(model)
    found = [
        Closure(layer.head_title(head), "head", ((layer.name, head),))
        for layer in layers
        for head in range(layer.heads)
        if len(heads_of(layers)) > 1
    ]
    found += [Closure(layer.title, "layer", tuple(heads_of([layer]))) for layer in layers]
    for kind in KINDS:
        of_kind = [layer for layer in layers if layer.kind == kind]
        if of_kind:
            found.append(Closure(f"all {KINDS[kind][2]} heads", "kind", tuple(heads_of(of_kind))))
    for direction in ("text_to_image", "image_to_text"):
        of_direction = [layer for layer in layers if layer.name.startswith(f"crossmodal.{direction}.")]
        if of_direction:
            called = f"everything in {KINDS[direction][2]}"
            found.append(Closure(called, "direction", tuple(heads_of(of_direction))))
    return found


class Probe:
    """A fixed gallery on which a model is measured with heads open and closed.

    What a closure cannot change is computed once: image heads leave texts alone, cross-modal heads leave both.

    Args:
        split: what to draw from.
        pictures: of the gallery, with ``captions`` captions each.
        top_k: candidates a query that the cross-modal heads re-rank; fewer cost less and lose less.
        k: of the recall@k.
        weight: of the matching logit beside the scaled cosine; None: the logit alone orders a shortlist.
        seed: of the draw.
    """

    def __init__(
        self,
        model: Any,
        split: Split,
        tokenizer: Tokenizer,
        transform: Any,
        *,
        pictures: int = 200,
        captions: int = 2,
        top_k: int = 8,
        k: int = 1,
        weight: float | None = 1.0,
        seed: int = 0,
    ):
        if min(pictures, captions, k) < 1 or top_k < 0:
            raise ValueError(f"pictures={pictures}, captions={captions}, k={k}: at least 1; top_k={top_k}: at least 0")
        self.model, self.top_k, self.k, self.weight = model, top_k, k, weight
        self.inputs = Inputs(small_gallery(split, pictures, captions, seed), tokenizer, transform)
        self._images: Any = None
        self._texts: Any = None
        self._open: dict[str, tuple[Ranks, Ranks]] | None = None

    @property
    def split(self) -> Split:
        return self.inputs.split

    @property
    def reranks(self) -> bool:
        return self.model.crossmodal is not None and self.top_k > 0

    def open(self) -> dict[str, tuple[Ranks, Ranks]]:
        """Ranks (t2i, i2t) of the model as it is, by stage."""
        if self._open is None:
            self._open = self.ranks(())
        return self._open

    def ranks(self, heads: Sequence[Head]) -> dict[str, tuple[Ranks, Ranks]]:
        """Ranks with these heads closed: {"first_stage": (t2i, i2t), "reranked": ...}."""
        with closed(self.model, heads):
            return self._measure({name.partition(".")[0] for name, _ in heads})

    def ranks_gated(self, gates: Mapping[str, Tensor]) -> dict[str, tuple[Ranks, Ranks]]:
        """The same with gates of any value."""
        with gated(self.model, gates):
            return self._measure({name.partition(".")[0] for name in gates})

    def _measure(self, changed: set[str]) -> dict[str, tuple[Ranks, Ranks]]:
        """Ranks of the model as it stands, of which only these parts differ from the open one."""
        tokens = self.reranks
        with evaluating(self.model) as device:
            images, texts = self._images, self._texts
            if images is None or "image_encoder" in changed:
                images = encode_images(self.model, self.inputs, device, tokens=tokens)
            if texts is None or "text_encoder" in changed:
                texts = encode_texts(self.model, self.inputs, self.inputs.captions, device, tokens=tokens)
            if not changed:
                self._images, self._texts = images, texts
            gallery = Gallery(images, texts, self.split)
            first = rank_both(texts.embedding, images.embedding, self.split.positives)
            if not tokens:
                return {"first_stage": first}
            shortlists = match_shortlists(self.model, gallery, self.top_k, device)
            scale = float(self.model.logit_scale)
        return {
            "first_stage": first,
            "reranked": reranked(first, shortlists, self.split.positives, scale, self.weight),
        }

    def recall(self, stages: Mapping[str, tuple[Ranks, Ranks]]) -> float:
        """Recall@k of the last stage, percent, mean of both directions."""
        return 50 * sum(float(ranks.hits(self.k).mean()) for ranks in final(stages))

    def drops(
        self, closures: Sequence[Closure], *, replicates: int = 1000, seed: int = 0, tell: Any = None
    ) -> list[Drop]:
        """What each closure costs, with 95 % intervals: the pictures of the gallery are drawn, for all alike."""
        base = self.open()
        columns = []
        for closure in closures:
            stages = self.ranks(closure.heads)
            columns.append([lost(base[stage], stages[stage], self.k) for stage in base])
            if tell is not None:
                tell("closures", 1, len(closures))
        return [self._drop(closure, parts, replicates, seed) for closure, parts in zip(closures, columns, strict=True)]

    def _drop(self, closure: Closure, parts: list[tuple[Floats, Floats]], replicates: int, seed: int) -> Drop:
        count = len(self.split.image_ids)
        base = final(self.open())
        owner = (self.split.caption_image[base[0].query], base[1].query)
        found = []
        for ways in (parts[0], parts[-1]):
            sums = [cluster_sums(values, cluster, count) for values, cluster in zip(ways, owner, strict=True)]
            summed, counts = (np.hstack(both) for both in zip(*sums, strict=True))
            drawn = bootstrap_means(summed, counts, replicates, seed)
            drawn = np.column_stack([drawn, drawn.mean(1)])
            means = [float(values.mean()) for values in ways]
            bounds = interval(drawn).tolist()
            found.append(
                [(value, low, high) for value, (low, high) in zip([*means, sum(means) / 2], bounds, strict=True)]
            )
        towers = any(not name.startswith("crossmodal") for name, _ in closure.heads)
        return Drop(closure, found[0][2] if towers else None, found[1][2], found[1][0], found[1][1])


def final(stages: Mapping[str, tuple[Ranks, Ranks]]) -> tuple[Ranks, Ranks]:
    """The last stage's ranks."""
    return stages.get("reranked", stages["first_stage"])


def lost(before: tuple[Ranks, Ranks], after: tuple[Ranks, Ranks], k: int) -> tuple[Floats, Floats]:
    """Points of recall@k that each query loses, text to image and image to text: 100, 0 or -100 each."""
    first, second = (100 * (a.hits(k) - b.hits(k)) for a, b in zip(before, after, strict=True))
    return first, second


def small_gallery(split: Split, pictures: int, captions: int, seed: int = 0) -> Split:
    """So many pictures of the split that have captions, drawn by ``seed``, with the first captions of each."""
    offsets = split.captions_of_image
    having = np.flatnonzero(np.diff(offsets))
    rng = np.random.default_rng(seed)
    images: IntArray = np.sort(rng.permutation(having)[:pictures])
    rows = np.concatenate([np.arange(offsets[i], min(offsets[i] + captions, offsets[i + 1])) for i in images])
    return part(split, images, rows)


def is_cross(layer: Layer) -> bool:
    """Whether one modality looks at the other in it."""
    return layer.kind in CROSS

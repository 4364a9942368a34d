"""Each head's figures over a data set, streamed: sums are kept, maps are not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlretrieval.evaluation.inputs import Inputs
from vlretrieval.heads import measures
from vlretrieval.heads.figures import Figure, LayerStatistics, Running
from vlretrieval.heads.layers import Layer
from vlretrieval.heads.passes import Shown, View, from_the_end, grid_of, show_pairs, view_of
from vlretrieval.heads.places import Places, locate, padded, separators, words_of
from vlretrieval.heads.position_sums import PositionSums
from vlretrieval.heads.record import observing
from vlretrieval.metrics.scores import IntArray

RARE = 5  # a word that occurs less often is not said to be one that a head answers to
WORDS = 6  # of each head


def head_statistics(
    model: Any, inputs: Inputs, captions: IntArray, *, batch_size: int = 32
) -> dict[str, LayerStatistics]:
    """Measure every head on the pairs of these captions and their pictures; by module name.

    Args:
        captions: rows of the split's captions (:func:`~vlretrieval.heads.passes.draw_captions`).
    """
    sums = Sums(inputs, captions)
    with observing(model, sums.see) as layers:
        show_pairs(model, inputs, captions, batch_size=batch_size, before=sums.begin)
    return {layer.name: sums.layers[layer.name].statistics(layer, sums.words) for layer in layers
            if layer.name in sums.layers}  # fmt: skip


class Sums:
    """All layers' sums while the pairs go by; ``see`` is the observer."""

    def __init__(self, inputs: Inputs, captions: IntArray):
        self.inputs = inputs
        self.layers: dict[str, LayerSums] = {}
        self.words: list[str] = []
        self._numbers: dict[str, int] = {}
        self._offsets = {int(c): inputs.tokenizer.offsets(inputs.split.captions[c]) for c in captions}
        self._word_of = {caption: self._number_words(caption) for caption in self._offsets}
        self.shown: Shown | None = None
        self.places: Places | None = None
        self.separators = self.word_ids = torch.zeros(0)

    def begin(self, shown: Shown) -> None:
        """A batch is about to be shown."""
        length = shown.token_ids.shape[1]
        texts = [(self._offsets[int(c)], self.inputs.split.captions[c]) for c in shown.captions]
        self.separators = torch.from_numpy(
            np.stack([padded(separators(offsets, text), length) for offsets, text in texts])
        )
        self.word_ids = torch.full(shown.token_ids.shape, -1, dtype=torch.int64)
        for row, caption in enumerate(shown.captions):
            numbers = self._word_of[int(caption)][:length]
            self.word_ids[row, : len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
        self.shown, self.places = shown, None

    def see(self, layer: Layer, weights: Tensor) -> None:
        """A layer's maps of the batch."""
        assert self.shown is not None
        if self.places is None and shown_to_both(self.shown):
            self.places = self._locate(self.shown)
        own = self.layers.setdefault(layer.name, LayerSums(len(self.words)))
        own.add(layer, view_of(layer, weights, self.shown), self)

    def _locate(self, shown: Shown) -> Places:
        side, prefix = grid_of(shown.image_tokens)
        return locate(
            self.inputs.split,
            [int(c) for c in shown.captions],
            self.inputs.tokenizer,
            self.inputs.transform,
            shown.token_ids.shape[1],
            (side, side),
            prefix,
        )

    def _number_words(self, caption: int) -> list[int]:
        """For each token the number of its word, -1 for start and end."""
        offsets = self._offsets[caption]
        numbers = [-1] * len(offsets)
        for word, tokens in words_of(offsets, self.inputs.split.captions[caption])[1:-1]:
            if not word.strip():
                continue
            number = self._numbers.setdefault(word.casefold(), len(self._numbers))
            if number == len(self.words):
                self.words.append(word.casefold())
            for token in tokens:
                numbers[token] = number
        return numbers


def shown_to_both(shown: Shown) -> bool:
    """Whether the image encoder has run, so that the number of patches is known."""
    return shown.image_tokens > 0


class LayerSums:
    """One layer's sums."""

    def __init__(self, words: int):
        self.running: dict[str, Running] = {}
        self.chance: dict[str, Running] = {}
        self.scope: str | None = None
        self._words = words
        self.word_total: Tensor | None = None  # (W, H)
        self.word_count = torch.zeros(words, dtype=torch.float64)
        self.start, self.end = PositionSums(), PositionSums()

    def add(self, layer: Layer, view: View, batch: Sums) -> None:
        """One batch's maps."""
        weights, rows, keys = view.weights, view.rows, view.keys
        self._add("entropy", measures.entropy(weights, rows, keys))
        if view.distance is not None:
            self._add("distance", measures.mean_distance(weights, rows, view.distance))
            self._add("neighbours", measures.share_near(weights, rows, view.distance, view.reach))
            even = measures.share_near_by_chance(rows, keys, view.distance, view.reach)
            self._add_chance("neighbours", even)
        for name, chosen in self._sinks(layer, view, batch).items():
            self._add(name, measures.share_on(weights, rows, chosen))
        self._add("column", measures.largest_column(weights, rows))
        self._add_positions(layer, view, batch)
        if batch.places is not None and len(batch.places) and layer.kind in ("text_to_image", "image_to_text", "joint"):
            self._add_grounding(layer, view, batch.places)
        self._add_words(layer, view, batch)

    def _add(self, name: str, values: Tensor) -> None:
        self.running.setdefault(name, Running()).add(values)

    def _add_chance(self, name: str, values: Tensor) -> None:
        self.chance.setdefault(name, Running()).add(values[:, None])

    def _sinks(self, layer: Layer, view: View, batch: Sums) -> dict[str, Tensor]:
        """The keys that draw idle attention, by name: (B, Lk) bool each."""
        assert batch.shown is not None
        keys, width = view.keys, view.weights.shape[-1]
        place = torch.arange(width, device=keys.device)
        text = batch.shown.text_mask.to(keys.device)
        _, prefix = grid_of(batch.shown.image_tokens)
        if layer.keys == "image":
            return {"first": (place < prefix).expand_as(keys)} if prefix else {}
        offset = width - text.shape[1]  # of the text in a joint stream; 0 else
        if offset < 0:
            return {}
        at = place - offset
        last = text.sum(1, keepdim=True) - 1
        stops = batch.separators.to(keys.device)
        first = (at == 0).expand_as(keys)
        if layer.kind == "joint" and prefix:
            first = first | (place < prefix)
        found = {"first": first, "last": at == last}
        if stops.shape[1] == text.shape[1]:
            wide = torch.cat([stops.new_zeros(len(stops), offset), stops], dim=1)
            found["separators"] = wide & ~found["last"] & ~found["first"]
        return found

    def _add_positions(self, layer: Layer, view: View, batch: Sums) -> None:
        assert batch.shown is not None
        entropies = measures.row_entropy(view.weights)
        self.start.add(view.weights, view.rows, view.keys, entropies)
        text = batch.shown.text_mask.to(view.weights.device)
        with_text = [side in ("text", "joint") for side in (layer.queries, layer.keys)]
        if any(with_text):
            # a head may keep to the end of a text, wherever that is
            turned = from_the_end(view.weights, text, *with_text)
            rows_turned = from_the_end(view.rows[:, None, :, None].float(), text, with_text[0], False)[:, 0, :, 0] > 0
            entropies = from_the_end(entropies[..., None], text, with_text[0], False)[..., 0]
            self.end.add(turned, rows_turned, view.keys, entropies)

    def _add_grounding(self, layer: Layer, view: View, places: Places) -> None:
        device, weights = view.weights.device, view.weights
        pair, tokens, patches, other_patches, other_tokens = (value.to(device) for value in places)
        if layer.kind == "joint":  # image tokens first: text queries look at patches
            weights = weights[:, :, patches.shape[1] :, :]
            none = patches.new_zeros(len(patches), view.weights.shape[-1] - patches.shape[1])
            patches, other_patches = torch.cat([patches, none], 1), torch.cat([other_patches, none], 1)
        queries, inside, others = tokens, patches, other_patches
        if layer.kind == "image_to_text":
            queries, inside, others = patches, tokens, other_tokens
        self.scope = "words"
        if weights.shape[2] == 1:  # the start token speaks for the whole caption
            self.scope = "caption"
            pair, places_of = torch.unique(pair, return_inverse=True)
            inside = _any_of(inside, places_of, len(pair))
            others = _any_of(others, places_of, len(pair)) & ~inside
            queries = torch.ones(len(pair), 1, dtype=torch.bool, device=device)
        if queries.shape[1] != weights.shape[2] or inside.shape[1] != weights.shape[3]:
            return  # an encoder with tokens of its own, whose places are not known
        maps = measures.named_map(weights, pair, queries)
        mass = measures.mass_on(maps, inside)
        keys = view.keys.index_select(0, pair)
        size = inside.sum(-1, keepdim=True).double()
        # as much of the others as the thing itself is large
        spread = others.sum(-1, keepdim=True)
        density = measures.mass_on(maps, others) / spread.clamp(min=1) * size
        allowed = keys & (inside | _pointable(layer, keys))
        found = {
            "grounding": mass,
            "others": density.masked_fill(spread == 0, math.nan),
            "pointing": measures.points_at(maps, inside, allowed),
        }
        chances = {"grounding": size / keys.sum(-1, keepdim=True), "pointing": size / allowed.sum(-1, keepdim=True)}
        for name, values in found.items():
            self._add(name, _mean_of_pairs(values, pair, len(weights)))
        for name, values in chances.items():
            self._add_chance(name, _mean_of_pairs(values, pair, len(weights))[:, 0])

    def _add_words(self, layer: Layer, view: View, batch: Sums) -> None:
        """How narrowly a word looks (text-to-image); else how much it is looked at, 1 for an even share."""
        weights, ids = view.weights, batch.word_ids.to(view.weights.device)
        length = ids.shape[1]
        if layer.kind == "text_to_image":
            if weights.shape[2] != length:
                return
            scores = 1 - measures.row_entropy(weights) / math.log(max(2, weights.shape[3]))
        elif layer.keys == "text" and weights.shape[3] == length:
            mean = (weights * view.rows[:, None, :, None]).sum(2) / view.rows.sum(1)[:, None, None].clamp(min=1)
            scores = mean * view.keys.sum(1)[:, None, None]
        else:
            return
        real = ids >= 0
        if self.word_total is None:
            self.word_total = torch.zeros(self._words, weights.shape[1], dtype=torch.float64)
        self.word_total.index_add_(0, ids[real].cpu(), scores.transpose(1, 2)[real].double().cpu())
        self.word_count.index_add_(0, ids[real].cpu(), torch.ones(int(real.sum()), dtype=torch.float64))

    def statistics(self, layer: Layer, words: Sequence[str]) -> LayerStatistics:
        """What the sums say."""
        figures = {name: running.figure() for name, running in self.running.items()}
        explained = [sums.explained() for sums in (self.start, self.end) if sums.queries]
        with np.errstate(all="ignore"):
            position = np.fmax.reduce(explained)
        nothing = np.full_like(position, np.nan)
        figures["position"] = Figure(position, nothing, nothing, figures["entropy"].count)
        chance = {name: float(running.figure().mean[0]) for name, running in self.chance.items()}
        return LayerStatistics(
            layer.name,
            layer.kind,
            layer.depth,
            layer.heads,
            layer.title,
            figures,
            chance,
            self.scope,
            self._top_words(layer.heads, words),
            self.start.common_map(layer.queries == layer.keys == "text"),
        )

    def _top_words(self, heads: int, words: Sequence[str]) -> list[list[tuple[str, float]]]:
        if self.word_total is None:
            return [[] for _ in range(heads)]
        common = torch.nonzero(self.word_count >= RARE).flatten()
        scores = self.word_total[common] / self.word_count[common, None]
        found = []
        for head in range(heads):
            order = scores[:, head].argsort(descending=True, stable=True)[:WORDS]
            found.append([(words[int(common[at])], float(scores[at, head])) for at in order])
        return found


def _any_of(masks: Tensor, group: Tensor, groups: int) -> Tensor:
    """(M, K) bool and (M,) group of each -> (groups, K), True where one of the group's is."""
    total = torch.zeros(groups, masks.shape[1], device=masks.device)
    return total.index_add_(0, group, masks.float()) > 0


def _pointable(layer: Layer, keys: Tensor) -> Tensor:
    """Keys that a head can be said to point at: patches and words, not the class, start or end token."""
    place = torch.arange(keys.shape[1], device=keys.device)
    if layer.keys == "text":
        return keys & (place > 0) & (place < keys.sum(1, keepdim=True) - 1)
    if layer.keys == "image":
        return keys & (place >= grid_of(keys.shape[1])[1])
    return keys


def _mean_of_pairs(values: Tensor, pair: Tensor, pairs: int) -> Tensor:
    """(M, H) figures of mentions -> (pairs, H) means of each pair's own, NaN entries left out, NaN without any."""
    there = ~values.isnan()
    total = torch.zeros(pairs, values.shape[1], dtype=values.dtype, device=values.device)
    count = torch.zeros_like(total)
    total.index_add_(0, pair, values.nan_to_num())
    count.index_add_(0, pair, there.to(values.dtype))
    return total / count.masked_fill(count == 0, math.nan)

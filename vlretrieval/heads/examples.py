"""A few pairs looked at closely: their picture, their words, and every head's map of them, by words and patches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from vlretrieval.evaluation.inputs import Inputs
from vlretrieval.heads.layers import Layer, layers_of
from vlretrieval.heads.passes import grid_of, show_pairs
from vlretrieval.heads.places import named_things, seen_box, words_of
from vlretrieval.heads.record import record_attention
from vlretrieval.metrics.scores import IntArray

Float32 = npt.NDArray[np.float32]

SEEN_SIDE = 288  # pixels of a picture in the report, at most
WHOLE = 64  # patches up to which every patch's own map is kept; beyond, the class token's alone


@dataclass
class HeadMaps:
    """One layer's maps of one pair.

    Attributes:
        rows, columns: "words", "patches", "caption" (one row: the start token) or "class" (one row: the class token).
        maps: (H, rows, columns) shares of the weight. Of words with several tokens: what the mean of them looks at, and
            the sum of what is looked at. Patches are those of the picture; the class token is left out.
    """

    layer: str
    rows: str
    columns: str
    maps: Float32


@dataclass
class Example:
    """A pair with its maps.

    Attributes:
        words: in the order of the caption, "[start]" and "[end]" among them.
        named: (word numbers, boxes as shares of the square that the model sees) of things with known places.
        picture: the square that the model sees.
        side: of the grid of patches.
    """

    caption: str
    image_id: str
    words: list[str]
    named: list[tuple[list[int], list[tuple[float, float, float, float]]]]
    picture: Image.Image
    side: int
    layers: dict[str, HeadMaps] = field(default_factory=dict)

    @property
    def telling_word(self) -> int:
        """A word to begin with: the last of the first named thing, else the longest."""
        if self.named:
            return self.named[0][0][-1]
        inner = range(1, len(self.words) - 1)
        return max(inner, key=lambda number: len(self.words[number]), default=0)


def examples_of(model: Any, inputs: Inputs, captions: IntArray) -> list[Example]:
    """The pairs of these captions, each by itself."""
    found = []
    for caption in captions.tolist():
        with record_attention(model) as maps:
            show_pairs(model, inputs, np.array([caption]))
        found.append(_example(model, inputs, caption, maps))
    return found


def telling_captions(inputs: Inputs, captions: IntArray, count: int) -> IntArray:
    """``count`` of the captions, those with named things first, and of these the ones with most."""
    things = np.array([len(named_things(inputs.split, int(caption))) for caption in captions])
    order = np.argsort(-np.minimum(things, 3), kind="stable")
    return captions[np.sort(order[:count])]


def _example(model: Any, inputs: Inputs, caption: int, maps: dict[str, Tensor]) -> Example:
    split = inputs.split
    image, text = int(split.caption_image[caption]), split.captions[caption]
    words = words_of(inputs.tokenizer.offsets(text), text)
    pixels = inputs.pixels(np.array([image]))[0]
    picture = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    side = _side_of(maps, layers_of(model))
    original = split.picture(image).size
    named = []
    for thing in named_things(split, caption):
        spans = _word_spans(inputs.tokenizer.offsets(text), words)
        numbers = [n for n, (start, end) in enumerate(spans) if start < thing.end and end > thing.start]
        boxes = [_share(seen_box(box, original, inputs.transform)) for box in thing.boxes]
        if numbers:
            named.append((numbers, boxes))
    example = Example(text, str(split.image_ids[image]), [word for word, _ in words], named, picture, side)
    tokens = [numbers for _, numbers in words]
    for layer in layers_of(model):
        if layer.name in maps:
            found = _by_words(layer, maps[layer.name][0].float().cpu(), tokens, side)
            if found is not None:
                example.layers[layer.name] = found
    return example


def _side_of(maps: dict[str, Tensor], layers: list[Layer]) -> int:
    for layer in layers:
        if layer.name in maps and layer.keys == "image":
            return grid_of(maps[layer.name].shape[-1])[0]
        if layer.name in maps and layer.queries == "image":
            return grid_of(maps[layer.name].shape[-2])[0]
    return 0


def _word_spans(offsets: list[tuple[int, int]], words: list[tuple[str, list[int]]]) -> list[tuple[int, int]]:
    return [(offsets[numbers[0]][0], offsets[numbers[-1]][1]) for _, numbers in words]


def _share(seen: tuple[tuple[float, float, float, float], float]) -> tuple[float, float, float, float]:
    (x0, y0, x1, y1), side = seen
    return (x0 / side, y0 / side, x1 / side, y1 / side)


def _by_words(layer: Layer, weights: Tensor, tokens: list[list[int]], side: int) -> HeadMaps | None:
    """(H, Lq, Lk) weights of one pair by words and patches."""
    length = max(max(numbers) for numbers in tokens) + 1
    if layer.kind == "joint":  # text first in the model: keep what words look at in the picture
        patches = side * side if side else grid_of(weights.shape[-1] - length)[0] ** 2
        weights = weights[:, :, -patches:]
        rows, columns = "words", "patches"
    else:
        rows, columns = ("words" if of == "text" else "patches" for of in (layer.queries, layer.keys))
        if columns == "patches":
            weights = weights[:, :, grid_of(weights.shape[-1])[1] :]
    if rows == "words":
        if weights.shape[1] == 1:
            rows = "caption"
        elif weights.shape[1] < length:
            return None
        else:
            weights = torch.stack([weights[:, numbers].mean(1) for numbers in tokens], dim=1)
    else:
        before = grid_of(weights.shape[1])[1]
        if weights.shape[1] - before > WHOLE and before and columns == "patches":
            rows, weights = "class", weights[:, :1]
        else:
            weights = weights[:, before:]
    if columns == "words":
        if weights.shape[2] < length:
            return None
        weights = torch.stack([weights[:, :, numbers].sum(2) for numbers in tokens], dim=2)
    return HeadMaps(layer.name, rows, columns, weights.numpy().astype(np.float32))

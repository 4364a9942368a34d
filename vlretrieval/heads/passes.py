"""Pairs shown to a model, caption and own picture, and what each layer's maps mean: which queries and keys are real."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vlretrieval.data.splits import Split
from vlretrieval.evaluation.encode import evaluating
from vlretrieval.evaluation.inputs import Inputs
from vlretrieval.heads.layers import Layer
from vlretrieval.metrics.scores import IntArray


@dataclass
class Shown:
    """A batch of pairs on its way through the model.

    Attributes:
        captions: (B,) rows of the split's captions.
        token_ids, text_mask: (B, L); the mask is the text encoder's own once it has run.
        image_tokens: P, once the image encoder has run.
    """

    captions: IntArray
    token_ids: Tensor
    text_mask: Tensor
    image_tokens: int = 0


class View(NamedTuple):
    """A layer's maps with their meaning. A joint stream is turned to image tokens first, then text.

    Attributes:
        weights: (B, H, Lq, Lk).
        rows: (B, Lq) bool, real queries. keys: (B, Lk) bool, real keys.
        distance: (Lq, Lk) in tokens or patches, NaN where one has no place; None across modalities.
        reach: up to which distance two are neighbours.
    """

    weights: Tensor
    rows: Tensor
    keys: Tensor
    distance: Tensor | None
    reach: float


def draw_captions(split: Split, pictures: int, seed: int = 0) -> IntArray:
    """Rows of captions, one each of at most so many pictures drawn by ``seed``, in the split's order."""
    rng = np.random.default_rng(seed)
    offsets = split.captions_of_image
    having = np.flatnonzero(np.diff(offsets))
    chosen = np.sort(rng.permutation(having)[:pictures])
    return offsets[chosen] + rng.integers(0, np.diff(offsets)[chosen])


def show_pairs(
    model: Any,
    inputs: Inputs,
    captions: IntArray,
    *,
    batch_size: int = 32,
    before: Callable[[Shown], None] = lambda shown: None,
) -> None:
    """Each caption with its own picture through both encoders and the cross-modal heads; who observes sees them all.

    Args:
        captions: rows of the split's captions.
        before: told of each batch before the model sees it.
    """
    for start in range(0, len(captions), batch_size):
        rows = captions[start : start + batch_size]
        ids, mask = inputs.token_rows(inputs.captions, rows)
        shown = Shown(rows, ids, mask)
        before(shown)
        with evaluating(model) as device:
            image = model.encode_image(inputs.pixels(inputs.split.caption_image[rows]).to(device))
            shown.image_tokens = image.tokens.shape[1]
            text = model.encode_text(ids.to(device), mask.to(device))
            if text.mask is not None:
                shown.text_mask = text.mask
            if model.crossmodal is not None:
                model.match(image, text)


def grid_of(tokens: int) -> tuple[int, int]:
    """(side of the square of patches, tokens before the first patch) of so many image tokens."""
    side = math.isqrt(tokens)
    return side, tokens - side * side


def view_of(layer: Layer, weights: Tensor, shown: Shown) -> View:
    """What the maps (B, H, Lq, Lk) of a layer mean, for the batch that is on its way."""
    device = weights.device
    text = shown.text_mask.to(device)
    if layer.kind == "joint":  # text first in the model; here last, so that patches stand at the same places always
        patches = weights.shape[-1] - text.shape[1]
        order = torch.cat([torch.arange(patches) + text.shape[1], torch.arange(text.shape[1])]).to(device)
        weights = weights.index_select(2, order).index_select(3, order)
        real = torch.cat([text.new_ones(len(text), patches), text], dim=1)
        return View(weights, real, real, None, 0.0)

    def real_tokens(of: str, count: int) -> Tensor:
        if of == "image" or count != text.shape[1]:
            if of == "text" and count == 1:  # the last block before pooling computes the first token alone
                return text[:, :1]
            return torch.ones(len(weights), count, dtype=torch.bool, device=device)
        return text

    queries, keys = weights.shape[2:]
    distance, reach = None, 0.0
    if layer.queries == layer.keys == "text":
        places = torch.arange(keys, device=device).float()
        distance, reach = (places[:queries, None] - places).abs(), 1.0
    elif layer.queries == layer.keys == "image":
        distance, reach = patch_distance(keys, device)[:queries], 1.5
    return View(weights, real_tokens(layer.queries, queries), real_tokens(layer.keys, keys), distance, reach)


def patch_distance(tokens: int, device: torch.device) -> Tensor:
    """(P, P) distance of patches in patch sides; NaN for tokens before the first patch, which have no place."""
    side, prefix = grid_of(tokens)
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    at = torch.stack([rows.flatten(), columns.flatten()], dim=1).float()
    distance = torch.full((tokens, tokens), math.nan)
    distance[prefix:, prefix:] = torch.cdist(at, at)
    return distance.to(device)


def from_the_end(weights: Tensor, text: Tensor, queries: bool, keys: bool) -> Tensor:
    """The same maps with text counted from its last token: place 0 is the end token's; what is no text keeps its place.

    Args:
        weights: (B, H, Lq, Lk), text last where an axis holds both.
        text: (B, L) bool. queries, keys: whether that axis holds text.
    """
    batch, heads, rows, columns = weights.shape
    length = text.sum(1, keepdim=True)  # (B, 1)
    place = torch.arange(text.shape[1], device=weights.device)
    turned = torch.where(place < length, length - 1 - place, place)  # (B, L)

    def along(axis: int, count: int) -> Tensor:
        before = torch.arange(count - text.shape[1], device=weights.device).expand(batch, -1)
        return torch.cat([before, turned + before.shape[1]], dim=1)

    if queries and rows >= text.shape[1]:
        at = along(2, rows)[:, None, :, None].expand(batch, heads, rows, columns)
        weights = weights.gather(2, at)
    if keys and columns >= text.shape[1]:
        at = along(3, columns)[:, None, None, :].expand(batch, heads, rows, columns)
        weights = weights.gather(3, at)
    return weights

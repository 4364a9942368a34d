"""Where the deciding cross-modal head looks: the map of the head that tells a right answer from a wrong one.

A head decides if the difference between the right pair's logit and the wrong pair's falls most when the head is
switched off. Maps and switches are set on the attention from outside, and taken off again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vlretrieval.evaluation.encode import Images, Texts
from vlretrieval.metrics.scores import IntArray


def text_to_image_layers(model: Any) -> list[Any]:
    """The cross-attention of each text-to-image block, none for a model without such heads."""
    head = getattr(model.crossmodal, "text_to_image", None)
    return [] if head is None else [block.cross for block in head.blocks]


@contextmanager
def one_head_off(layer: Any, head: int) -> Iterator[None]:
    """Switch off one head of a layer for a while."""
    before = layer.gate
    gate = torch.ones(layer.num_heads) if before is None else before.detach().clone()
    gate[head] = 0
    layer.gate = gate
    try:
        yield
    finally:
        layer.gate = before


@contextmanager
def maps_of(layers: list[Any]) -> Iterator[list[Tensor]]:
    """Collect each layer's attention weights (B, H, L, P), one entry a layer."""
    found: list[Tensor] = []
    before = [layer.observer for layer in layers]
    for layer in layers:
        layer.observer = found.append
    try:
        yield found
    finally:
        for layer, observer in zip(layers, before, strict=True):
            layer.observer = observer


@torch.inference_mode()
def deciding_head(
    model: Any, images: Images, texts: Texts, text: int, right: int, wrong: int
) -> tuple[str, npt.NDArray[np.float32]] | None:
    """("layer 2, head 1 of 4", map (side, side) of the right picture), or None without text-to-image heads.

    Args:
        text: row of the caption. right, wrong: rows of its picture and of the answer it was mistaken for.

    The map is the mean over the tokens that query in that layer, scaled to 0..1; a class patch is left out.
    """
    layers = text_to_image_layers(model)
    if not layers:
        return None
    pair: IntArray = np.array([right, wrong])
    device = next(model.parameters()).device
    kept = model.keep_image(_on(images.rows(pair), device))
    words = _on(texts.rows(np.array([text, text])), device)
    logits = model.match_kept(kept, words)
    lead = float(logits[0] - logits[1])
    falls = {}
    for depth, layer in enumerate(layers):
        for head in range(layer.num_heads):
            with one_head_off(layer, head):
                without = model.match_kept(kept, words)
            falls[depth, head] = lead - float(without[0] - without[1])
    depth, head = max(falls, key=lambda key: falls[key])
    with maps_of(layers) as found:
        model.match_kept(kept, words)
    weights = found[depth][0, head].mean(0)  # (P,)
    side = int(len(weights) ** 0.5)
    grid = weights[len(weights) - side * side :].reshape(side, side).float().cpu().numpy()
    spread = float(np.ptp(grid))
    return (
        f"layer {depth + 1}, head {head + 1} of {layers[depth].num_heads}",
        (grid - grid.min()) / (spread if spread > 0 else 1),
    )


def _on(encoded: Any, device: torch.device) -> Any:
    mask = None if encoded.mask is None else encoded.mask.to(device)
    return type(encoded)(encoded.embedding.to(device), encoded.tokens.to(device), mask)

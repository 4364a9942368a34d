"""Where each cross-modal head looks for one picture and one caption, as maps over the picture."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vlretrieval.evaluation.overlays import maps_of

Map = npt.NDArray[np.float32]


@torch.inference_mode()
def head_maps(model: Any, pixels: Tensor, token_ids: Tensor, token_mask: Tensor) -> list[tuple[str, Map]]:
    """("text-to-image, layer 1, head 2", (side, side) map in 0..1) of every cross-modal head; none without such heads.

    Args:
        pixels: (1, 3, S, S) uint8. token_ids, token_mask: (1, L).

    A text-to-image head's map is the mean of its words' weights on each patch; an image-to-text head's is how far each
    patch is from looking at all words alike (its largest weight). Each is scaled to 0..1, the class patch left out.
    """
    crossmodal = model.crossmodal
    if crossmodal is None:
        return []
    kinds = [(name, getattr(crossmodal, name)) for name in ("text_to_image", "image_to_text")]
    layers = [
        (name, depth, block.cross)
        for name, head in kinds
        if head is not None
        for depth, block in enumerate(head.blocks)
    ]
    if not layers:
        return []
    device = next(model.parameters()).device
    image = model.encode_image(pixels.to(device))
    text = model.encode_text(token_ids.to(device), token_mask.to(device))
    with maps_of([layer for _, _, layer in layers]) as found:
        model.match(image, text)
    return [
        (
            f"{name.replace('_', '-')}, layer {depth + 1}, head {head + 1}",
            _scaled(_over_patches(name, weights[0, head])),
        )
        for (name, depth, _), weights in zip(layers, found, strict=True)
        for head in range(weights.shape[1])
    ]


def _over_patches(name: str, weights: Tensor) -> Tensor:
    """(P,) of one head's (L, P), or (P, L), weights."""
    return weights.mean(0) if name == "text_to_image" else weights.amax(1)


def _scaled(over_patches: Tensor) -> Map:
    side = int(len(over_patches) ** 0.5)
    grid = over_patches[len(over_patches) - side * side :].view(side, side).float().cpu().numpy()
    spread = float(np.ptp(grid))
    return (grid - grid.min()) / (spread if spread > 0 else 1)

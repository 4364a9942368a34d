"""Fewer key/value heads in a trained model, by mean pooling (GQA, arXiv:2305.13245, sec. 2.1); then it trains on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vlretrieval.heads.layers import KINDS, layers_of
from vlretrieval.heads.surgery import Weights, projections, rebuilt, with_layers
from vlretrieval.model.attention import MultiHeadAttention

CONVERTED = ("text", "image", "text_to_image", "image_to_text")  # the kinds that heads.kv of a config is about


def shared_kv(model: nn.Module, num_kv_heads: int, kinds: Sequence[str] = CONVERTED) -> nn.Module:
    """A copy whose heads of these kinds share keys and values in ``num_kv_heads`` groups, each the mean of its heads'.

    Not equal to the model: recall falls, and comes back with some training (``init_from``).

    Raises:
        ValueError: a kind that there is not, or heads that cannot be shared out evenly.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise ValueError(f"kind {unknown[0]!r} is not known; the kinds of heads are {', '.join(KINDS)}")
    layers = [layer for layer in layers_of(model) if layer.kind in kinds]
    for layer in layers:
        groups = layer.module.num_kv_heads
        if num_kv_heads < 1 or groups % num_kv_heads:
            fits = ", ".join(str(n) for n in range(1, groups + 1) if groups % n == 0)
            raise ValueError(f"kv={num_kv_heads} does not divide the {groups} K/V heads of {layer.name}; choose {fits}")
    return with_layers(model, {layer.name: pooled(layer.module, num_kv_heads) for layer in layers})


@torch.no_grad()
def pooled(layer: MultiHeadAttention, num_kv_heads: int) -> MultiHeadAttention:
    """One layer with fewer key/value heads."""
    weights: Weights = projections(layer)
    for name in ("k", "v"):
        weight, bias = weights[name]
        weights[name] = (
            mean_of_runs(weight, layer.num_kv_heads, num_kv_heads),
            None if bias is None else mean_of_runs(bias, layer.num_kv_heads, num_kv_heads),
        )
    return rebuilt(layer, weights, layer.num_heads, num_kv_heads)


def mean_of_runs(rows: Tensor, heads: int, groups: int) -> Tensor:
    """(heads * D, ...) -> (groups * D, ...), each group the mean of heads / groups consecutive heads."""
    return rows.unflatten(0, (groups, heads // groups, -1)).mean(1).flatten(0, 1)

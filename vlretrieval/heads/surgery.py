"""A model's heads changed for good, and a config that says so: what removing heads and sharing K/V have in common."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vlretrieval.heads.layers import Layer, layers_of
from vlretrieval.model.attention import MultiHeadAttention
from vlretrieval.model.crossmodal import CROSSED

Weights = dict[str, tuple[Tensor, Tensor | None]]  # "q", "k", "v", "out" -> weight and bias


def projections(layer: MultiHeadAttention) -> Weights:
    """The layer's four projections apart: q (H D, dim), k and v (G D, context), out (dim, H D), with their biases."""
    merged = [layer.qkv] if layer.context_dim is None else [layer.q, layer.kv]
    rows = [layer.inner, layer.inner_kv, layer.inner_kv]
    weight = torch.cat([linear.weight for linear in merged]) if layer.context_dim is None else None
    if weight is not None:
        weights = weight.split(rows)
    else:
        weights = (layer.q.weight, *layer.kv.weight.split(rows[1:]))
    biases: Sequence[Tensor | None] = [None] * 3
    if merged[0].bias is not None:
        biases = torch.cat([linear.bias for linear in merged]).split(rows)
    named = dict(zip("qkv", zip(weights, biases, strict=True), strict=True))
    return {**named, "out": (layer.out.weight, layer.out.bias)}


@torch.no_grad()
def rebuilt(layer: MultiHeadAttention, weights: Weights, num_heads: int, num_kv_heads: int) -> MultiHeadAttention:
    """A layer like this one with other counts of heads and these projections."""
    made = MultiHeadAttention(
        layer.dim,
        num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=layer.head_dim,
        context_dim=layer.context_dim,
        bias=layer.out.bias is not None,
        qk_norm=layer.q_norm is not None,
        dropout=layer.dropout,
        causal=layer.causal,
    ).to(layer.out.weight)
    parts = [("q", "k", "v")] if layer.context_dim is None else [("q",), ("k", "v")]
    linears = [made.qkv] if layer.context_dim is None else [made.q, made.kv]
    for linear, names in zip([*linears, made.out], [*parts, ("out",)], strict=True):
        linear.weight.copy_(torch.cat([weights[name][0] for name in names]))
        if linear.bias is not None:
            linear.bias.copy_(torch.cat([bias for name in names if (bias := weights[name][1]) is not None]))
    for name in ("q_norm", "k_norm"):
        norm = getattr(layer, name)
        if norm is not None:
            getattr(made, name).load_state_dict(norm.state_dict())
    return made.train(layer.training)


def with_layers(model: nn.Module, layers: Mapping[str, MultiHeadAttention]) -> nn.Module:
    """A copy of the model with some attention layers in the place of its own; the model itself stays."""
    made = copy.deepcopy(model)
    for name, layer in layers.items():
        parent, _, own = name.rpartition(".")
        setattr(made.get_submodule(parent), own, layer)
    return made


def config_with_counts(config: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """The resolved config of a run, with the head counts and widths that the model has.

    Counts that are equal in all blocks stay one number, others become one a block.

    Raises:
        ValueError: the config's towers are not this project's own, and say nothing of heads.
    """
    made: dict[str, Any] = copy.deepcopy(dict(config))
    layers = layers_of(model)
    for kind, block in (("text", "text_encoder"), ("image", "image_encoder")):
        of_kind = [layer for layer in layers if layer.kind == kind]
        if of_kind:
            if "num_heads" not in made["model"][block]:
                raise ValueError(f"model.{block} has no num_heads in this config; its heads cannot be written down")
            made["model"][block].update(
                num_heads=heads_in(of_kind), num_kv_heads=kv_in(of_kind), head_dim=width_in(of_kind)
            )
    crossmodal = made["model"].get("crossmodal")
    if crossmodal is not None:
        _count_crossmodal(crossmodal, layers)
    _count_heads_block(made)
    return made


def _count_crossmodal(crossmodal: dict[str, Any], layers: Sequence[Layer]) -> None:
    kinds = {
        "text_to_image": "text_to_image",
        "image_to_text": "image_to_text",
        "joint": "joint",
        "between": "text_self",
    }
    shared: dict[str, Any] = {}
    widths: dict[str, int] = {}
    for kind, called in kinds.items():
        of_kind = [layer for layer in layers if layer.kind == kind]
        if not of_kind:
            continue
        crossmodal["text_self_heads" if kind == "between" else kind] = heads_in(of_kind)
        if kind in CROSSED:
            shared[called] = kv_in(of_kind)
        width = width_in(of_kind)
        if width is not None:
            widths[called] = width
    alike = len({str(value) for value in shared.values()}) <= 1
    first = next(iter(shared.values()), None)
    crossmodal["num_kv_heads"] = first if alike and not isinstance(first, list) else shared
    crossmodal["head_dim"] = widths or None


def _count_heads_block(config: dict[str, Any]) -> None:
    """The ``heads`` block, from which a config's own interpolations started; for who reads it."""
    heads, model = config.get("heads"), config["model"]
    if not isinstance(heads, dict):
        return
    crossmodal = model.get("crossmodal") or {}
    counts = {"text": model["text_encoder"].get("num_heads"), "image": model["image_encoder"].get("num_heads")}
    counts |= {kind: crossmodal.get(kind, 0) for kind in CROSSED}
    heads.update({name: value for name, value in counts.items() if name in heads and value is not None})
    kv = [model["text_encoder"].get("num_kv_heads"), model["image_encoder"].get("num_kv_heads")]
    kv += [crossmodal.get("num_kv_heads")] if any(counts[kind] for kind in CROSSED) else []
    if "kv" in heads:
        heads["kv"] = kv[0] if all(value == kv[0] for value in kv) else None


def heads_in(layers: Sequence[Layer]) -> int | list[int]:
    """One number, or one a block."""
    return _one_or_all([layer.module.num_heads for layer in layers])


def kv_in(layers: Sequence[Layer]) -> int | list[int] | None:
    """The same of key/value heads; None where every head has its own."""
    if all(layer.module.num_kv_heads == layer.module.num_heads for layer in layers):
        return None
    return _one_or_all([layer.module.num_kv_heads for layer in layers])


def width_in(layers: Sequence[Layer]) -> int | None:
    """The width of their heads; None where it is dim / heads in every block alike."""
    module, counts = layers[0].module, {layer.module.num_heads for layer in layers}
    if len(counts) == 1 and module.dim == module.num_heads * module.head_dim:
        return None
    return module.head_dim


def _one_or_all(counts: list[int]) -> int | list[int]:
    return counts[0] if len(set(counts)) == 1 else counts

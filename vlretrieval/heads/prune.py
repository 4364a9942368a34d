"""Heads removed for good: a smaller model that computes what the one with closed gates does, and is faster."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from vlretrieval.heads.layers import layers_of
from vlretrieval.heads.surgery import Weights, projections, rebuilt, with_layers
from vlretrieval.model.attention import MultiHeadAttention


def pruned(model: nn.Module, gates: Mapping[str, Tensor]) -> nn.Module:
    """A copy without the heads whose gate is 0; other gates are multiplied into W_O. Equal to the gated model.

    A layer keeps one head at least, and groups that share keys and values keep equally many: where that asks for a
    head whose gate is 0, it stays with zeros in W_O, and still puts out nothing.

    Args:
        gates: (H,) by module name (:func:`vlretrieval.heads.ablate.closing` makes them of heads).

    Raises:
        ValueError: a name that the model does not have, or a gate of another size.
    """
    layers = {layer.name: layer for layer in layers_of(model)}
    for name, gate in gates.items():
        if name not in layers:
            raise ValueError(f"the model has no attention called {name!r}; there are {', '.join(layers)}")
        if tuple(gate.shape) != (layers[name].heads,):
            raise ValueError(f"the gate of {name} is {tuple(gate.shape)} for {layers[name].heads} heads")
    return with_layers(model, {name: without_closed(layers[name].module, gate) for name, gate in gates.items()})


@torch.no_grad()
def without_closed(layer: MultiHeadAttention, gate: Tensor) -> MultiHeadAttention:
    """One layer without the heads whose gate (H,) is 0."""
    groups = kept_heads(gate.tolist(), layer.num_kv_heads)
    heads = [head for members in groups.values() for head in members]
    weights: Weights = {}
    for name, (weight, bias) in projections(layer).items():
        if name == "out":
            own = gate.to(weight)[heads].repeat_interleave(layer.head_dim)
            weights[name] = (_rows(weight.T, heads, layer.head_dim).T * own, bias)
        else:
            chosen = heads if name == "q" else list(groups)
            weights[name] = (
                _rows(weight, chosen, layer.head_dim),
                None if bias is None else _rows(bias, chosen, layer.head_dim),
            )
    return rebuilt(layer, weights, len(heads), len(groups))


def kept_heads(gate: list[float], num_kv_heads: int) -> dict[int, list[int]]:
    """Which heads stay, by key/value group: those that are open, filled up where groups must have equally many."""
    each = len(gate) // num_kv_heads
    members = {group: list(range(group * each, (group + 1) * each)) for group in range(num_kv_heads)}
    open_heads = {group: [head for head in heads if gate[head] != 0] for group, heads in members.items()}
    groups = [group for group, heads in open_heads.items() if heads] or [0]
    most = max(1, *(len(open_heads[group]) for group in groups))
    return {
        group: sorted([*open_heads[group], *(h for h in members[group] if gate[h] == 0)][:most]) for group in groups
    }


def _rows(tensor: Tensor, heads: list[int], width: int) -> Tensor:
    """The rows of some heads, ``width`` to a head, end to end."""
    return tensor.unflatten(0, (-1, width))[heads].flatten(0, 1)


def parameters_of_heads(layer: MultiHeadAttention, heads: int, groups: int) -> int:
    """Learnt numbers in so many query heads and key/value groups of a layer; W_O's bias belongs to none."""
    bias = layer.out.bias is not None
    context = layer.context_dim or layer.dim
    return layer.head_dim * (heads * (2 * layer.dim + bias) + 2 * groups * (context + bias))

"""How different the heads of a layer are: in where they look, in what they find, in their weights; and near copies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vlretrieval.evaluation.inputs import Inputs
from vlretrieval.heads.layers import Layer
from vlretrieval.heads.measures import js_divergence, over_rows
from vlretrieval.heads.passes import Shown, show_pairs, view_of
from vlretrieval.heads.record import observing, observing_outputs
from vlretrieval.metrics.scores import IntArray
from vlretrieval.model.attention import MultiHeadAttention

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Diversity:
    """Of one layer, (H, H) each.

    Attributes:
        maps: Jensen-Shannon divergence of the heads' maps in bits, 0 the same map, 1 nothing in common.
        outputs: CKA of what they find, 1 the same up to a rotation and a scale.
        weights: cosine of what their weights do (the products Q K and V O), 1 the same, 0 unrelated.
    """

    name: str
    title: str
    maps: Matrix
    outputs: Matrix
    weights: Matrix


@dataclass(frozen=True)
class Copies:
    """From which likeness two heads count as copies.

    Args:
        maps: divergence of their maps in bits, at most.
        outputs: CKA of their outputs, at least.
    """

    maps: float = 0.02
    outputs: float = 0.95

    def __post_init__(self) -> None:
        if not 0 <= self.maps <= 1 or not 0 < self.outputs <= 1:
            raise ValueError(f"maps={self.maps}, outputs={self.outputs}: bits from 0 to 1 and a CKA above 0, at most 1")


def diversity(model: Any, inputs: Inputs, captions: IntArray, *, batch_size: int = 32) -> dict[str, Diversity]:
    """Measure the layers of more than one head on the pairs of these captions; by module name."""
    sums = PairSums()
    with observing(model, sums.see_maps), observing_outputs(model, sums.see_outputs) as layers:
        show_pairs(model, inputs, captions, batch_size=batch_size, before=sums.begin)
    return {
        layer.name: Diversity(
            layer.name,
            layer.title,
            (sums.divergence[layer.name] / sums.pairs[layer.name]).numpy(),
            sums.outputs[layer.name].cka().numpy(),
            weight_likeness(layer.module).numpy(),
        )
        for layer in layers
        if layer.heads > 1 and layer.name in sums.divergence
    }


class PairSums:
    """Sums over the data of what pairs of heads have in common."""

    def __init__(self) -> None:
        self.divergence: dict[str, Tensor] = {}
        self.pairs: dict[str, int] = {}
        self.outputs: dict[str, OutputSums] = {}
        self.shown: Shown | None = None
        self._rows: dict[str, Tensor] = {}

    def begin(self, shown: Shown) -> None:
        """A batch is about to be shown."""
        self.shown = shown

    def see_maps(self, layer: Layer, weights: Tensor) -> None:
        """A layer's maps of the batch; only rows of real tokens count, here and in their outputs."""
        assert self.shown is not None
        view = view_of(layer, weights, self.shown)
        self._rows[layer.name] = view.rows
        if layer.heads < 2:
            return
        found = torch.stack(
            [
                over_rows(js_divergence(view.weights[:, head, None], view.weights), view.rows).double().sum(0).cpu()
                for head in range(layer.heads)
            ]
        )
        self.divergence[layer.name] = self.divergence.get(layer.name, torch.zeros(())) + found
        self.pairs[layer.name] = self.pairs.get(layer.name, 0) + len(weights)

    def see_outputs(self, layer: Layer, outputs: Tensor) -> None:
        """What the heads found for the same queries, (B, Lq, H, D); comes after the maps."""
        rows = self._rows[layer.name]
        if layer.kind == "joint":  # its outputs are text first
            patches = outputs.shape[1] - self.shown.text_mask.shape[1] if self.shown is not None else 0
            rows = torch.cat([rows[:, patches:], rows[:, :patches]], dim=1)
        self.outputs.setdefault(layer.name, OutputSums(layer.heads)).add(outputs[rows.to(outputs.device)])


class OutputSums:
    """Sums from which linear CKA between heads follows exactly, however many rows there were."""

    def __init__(self, heads: int):
        self.heads = heads
        self.count = 0
        self.total: Tensor | float = 0.0
        self.products: Tensor | float = 0.0

    def add(self, outputs: Tensor) -> None:
        """(n, H, D) outputs of n queries."""
        flat = outputs.flatten(1).double().cpu()
        self.count += len(flat)
        self.total = self.total + flat.sum(0)
        self.products = self.products + flat.T @ flat

    def cka(self) -> Tensor:
        """(H, H) linear CKA (arXiv:1905.00414, eq. 3); 0 for a head whose output never changes."""
        assert isinstance(self.total, Tensor)
        covariance = self.products - torch.outer(self.total, self.total) / max(1, self.count)
        width = len(self.total) // self.heads
        blocks = covariance.unflatten(0, (self.heads, width)).unflatten(2, (self.heads, width))  # (H, D, H, D)
        common = blocks.square().sum((1, 3))  # (H, H) squared Frobenius norms
        own = common.diagonal().sqrt()
        return torch.where(own[:, None] * own > 0, common / (own[:, None] * own).clamp(min=1e-30), 0.0)


@torch.no_grad()
def weight_likeness(layer: MultiHeadAttention) -> Tensor:
    """(H, H) mean cosine of two heads' W_Q W_K^T and W_V W_O, which no turn of a head's own axes changes."""
    q, k, v, out = head_weights(layer)

    def cosine(left: Tensor, right: Tensor) -> Tensor:
        """Of the products A_h = left_h^T right_h, by traces: <A, B> = sum (left_a left_b^T) * (right_a right_b^T)."""
        inner = (torch.einsum("adx,bex->abde", left, left) * torch.einsum("adx,bex->abde", right, right)).sum((2, 3))
        own = inner.diagonal().clamp(min=1e-30).sqrt()
        return inner / (own[:, None] * own)

    return ((cosine(q, k) + cosine(v, out)) / 2).double().cpu()


def head_weights(layer: MultiHeadAttention) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Each query head's (H, D, width) W_Q, W_K, W_V and transposed W_O; shared keys and values stand at each head."""
    if layer.context_dim is None:
        q, k, v = layer.qkv.weight.split([layer.inner, layer.inner_kv, layer.inner_kv])
    else:
        q, (k, v) = layer.q.weight, layer.kv.weight.chunk(2)
    shared = layer.num_heads // layer.num_kv_heads
    width = (-1, layer.head_dim)
    k, v = (weight.unflatten(0, width).repeat_interleave(shared, dim=0) for weight in (k, v))
    return q.unflatten(0, width), k, v, layer.out.weight.T.unflatten(0, width)


def copies(found: Diversity, when: Copies = Copies()) -> list[tuple[int, int]]:  # noqa: B008  (frozen)
    """Pairs of heads that look at the same and find the same."""
    alike = (found.maps <= when.maps) & (found.outputs >= when.outputs)
    return [(i, j) for i in range(len(alike)) for j in range(i + 1, len(alike)) if alike[i, j]]


def clusters(pairs: Iterable[tuple[int, int]], heads: int) -> list[list[int]]:
    """Groups of heads joined by pairs, those of one head left out."""
    group = list(range(heads))
    for i, j in pairs:
        old, new = max(group[i], group[j]), min(group[i], group[j])
        group = [new if number == old else number for number in group]
    found = [[head for head in range(heads) if group[head] == number] for number in sorted(set(group))]
    return [members for members in found if len(members) > 1]


def warnings(found: Iterable[Diversity], when: Copies = Copies()) -> list[str]:  # noqa: B008  (frozen)
    """A line for each layer with near copies, with what to do about it."""
    lines = []
    for layer in found:
        pairs = copies(layer, when)
        for members in clusters(pairs, len(layer.maps)):
            named = _joined([str(head + 1) for head in members])
            within = [(i, j) for i, j in pairs if i in members]
            bits = max(layer.maps[i, j] for i, j in within)
            cka = min(layer.outputs[i, j] for i, j in within)
            born = min(layer.weights[i, j] for i, j in within) > 0.95
            advice = (
                "even their weights are alike, the sign of a bad start: train anew with head_seed=1, which draws each "
                "head by itself"
                if born
                else "one of them would do: fewer heads, or prune.heads to remove what is closed at no loss"
            )
            lines.append(
                f"{layer.title}: heads {named} are near copies (maps {bits:.3f} bits apart, outputs' CKA {cka:.2f}); "
                f"{advice}"
            )
    return lines


def _joined(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"

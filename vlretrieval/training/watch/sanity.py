"""Signs that a training run cannot work, as pure measures: each takes plain values or a model and gives a finding.

Nothing here trains, draws or logs; :mod:`check` and :mod:`first_steps` bring the values together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vlretrieval.model.attention import MultiHeadAttention
from vlretrieval.model.retrieval_model import MAX_LOGIT_SCALE

LEARNT = 0.7  # of the loss is left after overfitting one batch, at most
AT_CHANCE = 0.98  # of the chance loss: above it nothing has been learnt
COLLAPSED = 0.98  # mean cosine of different items above which they are one point
COPIES = 0.99  # cosine of two heads above which one is the other
AT_RAIL = 0.01  # distance from a bound of the logit scale, as a share of it
LOADER_BOUND = 0.3  # share of a step spent waiting for its batch


@dataclass(frozen=True)
class Finding:
    """One thing looked at: what was seen, and what to do about it (empty: nothing, it is fine)."""

    seen: str
    to_do: str = ""

    @property
    def good(self) -> bool:
        return not self.to_do

    def __str__(self) -> str:
        return f"ok       {self.seen}" if self.good else f"WARNING  {self.seen}: {self.to_do}"


def overfitting(first: float, last: float, steps: int, name: str = "loss") -> Finding:
    """Whether a loss fell on a batch that was trained on alone: ``first`` before, ``last`` after ``steps`` steps."""
    seen = f"one batch, {steps} steps: {name} {first:.3g} -> {last:.3g}"
    if math.isfinite(last) and last <= LEARNT * first:
        return Finding(seen)
    return Finding(
        seen,
        "it does not overfit a single batch; raise optimizer.lr if it only falls slowly, otherwise look at freeze, the "
        "loss weights, and whether captions belong to their pictures (vlretrieval-data doctor)",
    )


def chance(loss: float, candidates: int, name: str = "contrastive loss") -> Finding:
    """Whether an InfoNCE loss (nats a query) is stuck at ln(candidates), what equal scores for all give."""
    bound = math.log(candidates)
    seen = f"{name} {loss:.3f}, chance is ln({candidates}) = {bound:.3f}"
    if candidates < 2 or loss < AT_CHANCE * bound:
        return Finding(seen)
    return Finding(
        seen,
        "nothing is learnt; raise optimizer.lr, lower it if the loss rose first, and see whether captions belong to "
        "their pictures (vlretrieval-data doctor)",
    )


def mean_cosine(embedding: Tensor) -> float:
    """Mean cosine of different rows of (B, E) unit vectors, from their sum alone: O(B E)."""
    rows = len(embedding)
    total = embedding.double().sum(0).square().sum() - embedding.double().square().sum()
    return float(total) / (rows * (rows - 1))


def collapse(embedding: Tensor, name: str) -> Finding:
    """Whether (B, E) unit embeddings of B different items are dead (0), or all the same point."""
    if len(embedding) < 2:
        return Finding(f"{name} embeddings: one row, nothing to compare")
    dead = int((embedding.norm(dim=-1) < 0.5).sum())
    if dead:
        return Finding(
            f"{dead} of {len(embedding)} {name} embeddings are 0", f"the {name} encoder is dead; lower optimizer.lr"
        )
    cosine = mean_cosine(embedding)
    spread = float(embedding.float().var(0, correction=0).sum())  # 1 - |mean|^2, of 1 at most
    seen = f"{name} embeddings: mean cosine {cosine:.3f}, variance {spread:.3g}"
    if cosine < COLLAPSED:
        return Finding(seen)
    return Finding(
        seen,
        f"all {name} embeddings are one point; lower optimizer.lr or raise the warmup, and see that the {name}s of a "
        "batch differ",
    )


def most_alike(heads: Tensor) -> tuple[float, int, int]:
    """The highest cosine between two rows of (H, N), and which: (cosine, i, j) with i < j; H at least 2.

    Rows of zeros are like nothing.
    """
    unit = nn.functional.normalize(heads.detach().flatten(1).double(), dim=-1)
    cosines = (unit @ unit.T).fill_diagonal_(-math.inf)
    flat = int(cosines.argmax())
    i, j = divmod(flat, len(heads))
    return float(cosines[i, j]), min(i, j), max(i, j)


def copied_projections(layer: MultiHeadAttention) -> tuple[float, int, int]:
    """The two heads of a layer whose projections are most alike: (cosine, i, j).

    Two heads are copies if queries, keys and values all are; heads that share keys and values differ by queries alone.
    """
    inner, shared, width = layer.inner, layer.inner_kv, layer.head_dim
    if layer.context_dim is None:
        query, key, value = whole(layer.qkv.weight).split([inner, shared, shared])
    else:
        query, (key, value) = whole(layer.q.weight), whole(layer.kv.weight).chunk(2)
    each = layer.num_heads // layer.num_kv_heads
    lowest: Tensor | None = None
    for weight, repeats in ((query, 1), (key, each), (value, each)):
        heads = nn.functional.normalize(weight.unflatten(0, (-1, width)).flatten(1).double(), dim=-1)  # (H or G, D dim)
        cosines = (heads @ heads.T).repeat_interleave(repeats, 0).repeat_interleave(repeats, 1)
        lowest = cosines if lowest is None else torch.minimum(lowest, cosines)
    assert lowest is not None
    i, j = divmod(int(lowest.fill_diagonal_(-math.inf).argmax()), layer.num_heads)
    return float(lowest[i, j]), min(i, j), max(i, j)


def copied_heads(model: nn.Module, outputs: dict[str, Tensor] | None = None) -> Finding:
    """Whether two heads of one layer are the same, by their projections and, where given, by what they put out.

    Args:
        outputs: by layer, (H, N): each head's output over some tokens, as :func:`head_outputs` collects it.
    """
    worst, where, by = -math.inf, "", ""
    for name, layer in attention_layers(model):
        found = [("projections", copied_projections(layer))]
        if outputs and name in outputs:
            found.append(("outputs", most_alike(outputs[name])))
        for kind, (cosine, i, j) in found:
            if cosine > worst:
                worst, where, by = cosine, f"heads {i + 1} and {j + 1} of {name}", kind
    if not where:
        return Finding("no layer has two heads to compare")
    seen = f"most alike: {where}, cosine of their {by} {worst:.3f}"
    if worst < COPIES:
        return Finding(seen)
    return Finding(seen, "they are copies of each other; see how they were initialised (head_seed, init_from)")


def attention_layers(model: nn.Module) -> Iterator[tuple[str, MultiHeadAttention]]:
    """Layers with at least two heads, by name."""
    for name, module in model.named_modules():
        if isinstance(module, MultiHeadAttention) and module.num_heads > 1:
            yield name, module


@contextmanager
def head_outputs(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Within, each layer's last call leaves its heads' outputs, (H, B * L * D), before W_O mixes them."""
    found: dict[str, Tensor] = {}

    def keep(name: str, heads: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            found[name] = inputs[0].detach().unflatten(-1, (heads, -1)).movedim(-2, 0).flatten(1)

        return hook

    handles = [
        layer.out.register_forward_pre_hook(keep(name, layer.num_heads)) for name, layer in attention_layers(model)
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def without_gradient(model: nn.Module) -> list[str]:
    """The parts to none of whose trainable parameters a gradient came, each as the largest such part.

    To be asked after a backward pass. A single bias without one is no part: a mathematically flat direction.
    """
    reached: dict[str, bool] = {}  # of each module with trainable parameters, whether any got a gradient
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    gradients = [p.grad for _, p in named if p.grad is not None]
    # a sum, as a rank of a sharded run may hold no row of a weight, and an empty maximum is an error
    sums = iter(
        torch.stack([whole(torch.linalg.vector_norm(g, 1)).float() for g in gradients]).tolist() if gradients else []
    )
    alive_by_name = {name: parameter.grad is not None and next(sums) != 0 for name, parameter in named}
    for name, alive in alive_by_name.items():
        # an adapter's second matrix starts at 0, which leaves the first without a gradient at its first step
        alive = alive or ("lora_A" in name and alive_by_name.get(name.replace("lora_A", "lora_B"), False))
        parts = name.split(".")
        for end in range(1, len(parts)):
            module = ".".join(parts[:end])
            reached[module] = reached.get(module, False) or alive
    dead = [name for name, alive in reached.items() if not alive]
    return [name for name in dead if not any(name.startswith(f"{other}.") for other in dead)]


def gradients(model: nn.Module, ignored: tuple[str, ...] = ()) -> Finding:
    """:func:`without_gradient` as a finding; parts below ``ignored`` are not in training yet."""
    dead = [name for name in without_gradient(model) if not name.startswith(ignored or ("\0",))]
    if not dead:
        return Finding("gradients reach every part that is trained")
    named = ", ".join(dead[:5]) + (f" and {len(dead) - 5} more" if len(dead) > 5 else "")
    return Finding(
        f"no gradient reaches {named}",
        "it will not be trained; freeze it (freeze=[...]) if that is meant, otherwise give the loss that trains it a "
        "weight",
    )


def rail(scale: float) -> Finding:
    """Whether the logit scale has run into one of its bounds, 1 and 100."""
    seen = f"logit scale {scale:.2f}, bounds 1 and {MAX_LOGIT_SCALE:g}"
    if scale >= MAX_LOGIT_SCALE * (1 - AT_RAIL):
        return Finding(seen, "it is at its upper bound; lower optimizer.lr, or its rate (optimizer.rates)")
    if scale <= 1 + AT_RAIL:
        return Finding(seen, "it is at its lower bound: pairs cannot be told apart; lower optimizer.lr")
    return Finding(seen)


def loader_bound(waited_s: float, elapsed_s: float) -> Finding:
    """Whether steps wait for their batches: ``waited_s`` of ``elapsed_s`` seconds."""
    share = waited_s / elapsed_s if elapsed_s > 0 else 0.0
    seen = f"{100 * share:.0f} % of a step waits for its batch"
    if share < LOADER_BOUND:
        return Finding(seen)
    return Finding(
        seen, "raise data.num_workers, or keep small pictures (vlretrieval-data cache, data.cache_in_memory=true)"
    )


def whole(tensor: Tensor) -> Tensor:
    """A weight or gradient without its history; one that is sharded over ranks is put together, so all must call."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def distinct(ids: Tensor) -> Tensor:
    """Rows (int64, ascending) of the first of each id."""
    _, inverse = torch.unique(ids, return_inverse=True)
    rows = torch.arange(len(ids), device=ids.device)
    first = torch.full((int(inverse.max()) + 1,), len(ids), device=ids.device)
    return first.scatter_reduce(0, inverse, rows, "amin").sort().values

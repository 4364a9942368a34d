"""Who is measured beside our attention: the plain form, torch's, timm's, open_clip's, and the bare matrix products.

A form is a module ``form(x, context, key_mask=...) -> tensor`` with ``context`` None for self-attention; :func:`forms`
builds those that can do a case.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from timing import Ratio, Work, paired
from torch import Tensor, nn

from vlretrieval.model.attention import MultiHeadAttention


@dataclass(frozen=True)
class Case:
    """A shape: ``batch`` items of ``queries`` tokens, ``keys`` context tokens (None: self-attention)."""

    name: str
    batch: int
    queries: int
    keys: int | None
    dim: int
    heads: int

    def __str__(self) -> str:
        length = str(self.queries) if self.keys is None else f"{self.queries} -> {self.keys}"
        return f"{self.name}: {length} tokens, {self.dim} wide, {self.heads} heads, batch {self.batch}"


CASES = [
    Case("short text", 64, 32, None, 512, 8),
    Case("text", 32, 77, None, 512, 8),
    Case("patches", 32, 197, None, 768, 12),
    Case("text to patches", 32, 77, 197, 512, 8),
]


class Plain(nn.Module):
    """The form of the textbooks: three linear layers, matmul, softmax, matmul, a linear layer."""

    def __init__(self, dim: int, heads: int, *, contiguous: bool = False):
        super().__init__()
        self.heads, self.contiguous = heads, contiguous
        self.w_q, self.w_k, self.w_v, self.w_o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor, context: Tensor | None = None, key_mask: Tensor | None = None) -> Tensor:
        context = x if context is None else context
        q, k, v = (self.split(w, t) for w, t in ((self.w_q, x), (self.w_k, context), (self.w_v, context)))
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
        if key_mask is not None:
            scores = scores.masked_fill(~key_mask[:, None, None], -math.inf)
        heads = torch.matmul(torch.softmax(scores, dim=-1), v)
        return self.w_o(heads.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))

    def split(self, linear: nn.Linear, x: Tensor) -> Tensor:
        heads = linear(x).view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)
        return heads.contiguous() if self.contiguous else heads


class ContiguousHeads(MultiHeadAttention):
    """Ours, but Q, K and V copied to contiguous (B, H, L, D) first: what the layout of the reshape costs."""

    def _heads(self, *arguments: Any) -> Tensor:
        return super()._heads(*arguments).contiguous()


class RepeatedKeyValues(MultiHeadAttention):
    """Ours, but shared K/V repeated in memory for every query head: what reading them in place saves."""

    def _heads(self, flat: Tensor, *arguments: Any) -> Tensor:
        heads = super()._heads(flat, *arguments)
        return heads.repeat_interleave(self.num_heads // heads.shape[1], dim=1)


class Floor(nn.Module):
    """The matrix products of the same shapes and nothing else: no softmax, no heads to split, no mask.

    Operands lie ready in the best layout. In training each product has its two products of the backward pass besides,
    without the recomputing that fused kernels do.
    """

    def __init__(self, case: Case, dtype: torch.dtype, device: torch.device):
        super().__init__()
        b, lq, lk, dim, h = case.batch, case.queries, case.keys or case.queries, case.dim, case.heads
        d = dim // h

        def make(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=dtype, device=device)

        if case.keys is None:  # (inputs, weight)
            self.products = [(make(b * lq, dim), make(dim, 3 * dim))]
        else:
            self.products = [(make(b * lq, dim), make(dim, dim)), (make(b * lk, dim), make(dim, 2 * dim))]
        self.products += [(make(b * h, lq, d), make(b * h, d, lk)), (make(b * h, lq, lk), make(b * h, lk, d))]
        self.products.append((make(b * lq, dim), make(dim, dim)))
        self.gradients = [a @ w for a, w in self.products]

    def forward(self, x: Tensor, context: Tensor | None = None, key_mask: Tensor | None = None) -> Tensor:
        out = x
        for a, w in self.products:
            out = a @ w
        return out

    def backward(self) -> None:
        for (a, w), gradient in zip(self.products, self.gradients, strict=True):
            gradient @ w.mT  # noqa: B018
            a.mT @ gradient  # noqa: B018


class Torchs(nn.Module):
    """nn.MultiheadAttention. With ``length_first`` it is given (L, B, dim), as a program would that keeps to it."""

    def __init__(self, case: Case, *, length_first: bool = False, weights: bool = False):
        super().__init__()
        self.length_first, self.weights = length_first, weights
        self.theirs = nn.MultiheadAttention(case.dim, case.heads, batch_first=not length_first)

    def forward(self, x: Tensor, context: Tensor | None = None, key_mask: Tensor | None = None) -> Tensor:
        context = x if context is None else context
        padding = None if key_mask is None else ~key_mask
        return self.theirs(x, context, context, padding, need_weights=self.weights)[0]


class Timms(nn.Module):
    """timm's Attention."""

    def __init__(self, case: Case):
        from timm.layers.attention import Attention

        super().__init__()
        self.theirs = Attention(case.dim, case.heads, qkv_bias=True)

    def forward(self, x: Tensor, context: Tensor | None = None, key_mask: Tensor | None = None) -> Tensor:
        return self.theirs(x, None if key_mask is None else key_mask[:, None, None])


class OpenClips(nn.Module):
    """The attention of open_clip's residual block, without the block's norms and MLP."""

    def __init__(self, case: Case):
        from open_clip.transformer import ResidualAttentionBlock

        super().__init__()
        self.theirs = ResidualAttentionBlock(case.dim, case.heads, is_cross_attention=case.keys is not None)

    def forward(self, x: Tensor, context: Tensor | None = None, key_mask: Tensor | None = None) -> Tensor:
        return self.theirs.attention(x, context, context)


def ours(case: Case, kind: type[MultiHeadAttention] = MultiHeadAttention, **options: Any) -> MultiHeadAttention:
    return kind(case.dim, case.heads, context_dim=None if case.keys is None else case.dim, **options)


def forms(case: Case, masked: bool) -> dict[str, nn.Module]:
    """All that can do the case, ours first. Their weights differ: speed is compared here, results in the tests."""
    found: dict[str, nn.Module] = {
        "ours": ours(case),
        "plain": Plain(case.dim, case.heads),
        "nn.MHA": Torchs(case),
        "nn.MHA, weights": Torchs(case, weights=True),
        "nn.MHA, length first": Torchs(case, length_first=True),
    }
    others: list[tuple[str, type, bool]] = [
        ("timm", Timms, case.keys is None),  # it has self-attention only
        ("open_clip", OpenClips, not masked),  # its block takes no padding mask
    ]
    for name, build, fits in others:
        if fits:
            try:
                found[name] = build(case)
            except ImportError as error:
                print(f"  {name} is left out: {error}")
    return found


def tensors(case: Case, dtype: torch.dtype, device: torch.device, masked: bool = False) -> list[Tensor | None]:
    """x, context and key_mask; masked items are padded at the end, to half of their length and more."""
    torch.manual_seed(0)
    keys = case.keys or case.queries
    x = torch.randn(case.batch, case.queries, case.dim, dtype=dtype, device=device)
    context = torch.randn(case.batch, keys, case.dim, dtype=dtype, device=device) if case.keys else None
    lengths = torch.randint(keys // 2, keys + 1, (case.batch, 1), device=device)
    return [x, context, torch.arange(keys, device=device) < lengths if masked else None]


def inference(form: nn.Module, x: Tensor, context: Tensor | None, key_mask: Tensor | None) -> Work:
    form.eval()
    if getattr(form, "length_first", False):
        x, context = (None if t is None else t.transpose(0, 1).contiguous() for t in (x, context))

    def work() -> None:
        with torch.inference_mode():
            form(x, context, key_mask=key_mask)

    return work


def training(form: nn.Module, x: Tensor, context: Tensor | None, key_mask: Tensor | None) -> Work:
    """Forward and backward, to weights and inputs. Gradients lie ready and are added to, as in accumulation."""
    form.train()
    if isinstance(form, Floor):
        return lambda: (form(x), form.backward())
    if getattr(form, "length_first", False):
        x, context = (None if t is None else t.transpose(0, 1).contiguous() for t in (x, context))
    x, context = (None if t is None else t.detach().clone().requires_grad_() for t in (x, context))
    gradient = torch.randn_like(x)

    def work() -> None:
        form(x, context, key_mask=key_mask).backward(gradient)

    return work


MODES: dict[str, Callable[..., Work]] = {"inference": inference, "training": training}


class Bench:
    """Runs cases and remembers what the goals ask about."""

    def __init__(self, device: torch.device, rounds: int, quick: bool):
        self.device, self.rounds, self.quick = device, rounds, quick
        self.found: dict[str, dict[str, Any]] = {}
        self.goals: list[tuple[bool, str]] = []

    def case(self, case: Case, share: int = 8) -> Case:
        """A smaller batch for a quick run."""
        return replace(case, batch=max(1, case.batch // share)) if self.quick else case

    def goal(self, value: float, bound: float, what: str, at_most: bool = False) -> None:
        met = value <= bound if at_most else value >= bound
        self.goals.append((met, f"{what}: {value:.2f} (goal {'at most' if at_most else 'at least'} {bound:.2f})"))

    def compare(self, title: str, works: dict[str, Work], rounds: int | None = None) -> dict[str, Ratio]:
        seconds, ratios = paired(works, rounds or self.rounds, self.device, warm_up=1 if self.quick else 2)
        print(f"  {title}: {next(iter(works))} {1e3 * seconds:.1f} ms")
        print("    " + "   ".join(f"{name} {ratio}" for name, ratio in ratios.items()))
        values = {name: (ratio.median, ratio.low, ratio.high) for name, ratio in ratios.items()}
        self.found[title] = {"ms": 1e3 * seconds, **values}
        return ratios

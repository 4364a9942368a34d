"""Who is measured beside our attention: the plain form, torch's, timm's, open_clip's, and the bare matrix products.

A form is a module ``form(x, context, key_mask=...) -> tensor`` with ``context`` None for self-attention; :func:`forms`
builds those that can do a case.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
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

"""The one attention core: multi-head, grouped-query and multi-query, self and cross.

It knows nothing of text, pictures or positions. Encoders and cross-modal heads stand on it; whoever wants to look at a
head or close it sets :attr:`MultiHeadAttention.observer` or :attr:`MultiHeadAttention.gate` from outside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Rotate = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class KeyValue:
    """Projected keys and values of one context, ready to be attended to again and again.

    Both are (B, G, L, D) with G the number of key/value heads.
    """

    key: Tensor
    value: Tensor

    def index(self, rows: Tensor) -> KeyValue:
        """The K/V of the given batch rows (int64), (len(rows), G, L, D)."""
        return KeyValue(self.key.index_select(0, rows), self.value.index_select(0, rows))

    @property
    def nbytes(self) -> int:
        return self.key.nbytes + self.value.nbytes


def join_masks(key_mask: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """One bool mask that broadcasts to (B, H, Lq, Lk); True = may attend.

    Args:
        key_mask: (B, Lk), True on the keys that are there (False on padding).
        mask: (Lq, Lk), (B, Lq, Lk) or (B, H or 1, Lq, Lk).
    """
    if mask is not None:
        if mask.dtype != torch.bool:
            raise ValueError(f"mask is {mask.dtype}; give a bool mask, True where a query may attend")
        mask = mask[:, None] if mask.ndim == 3 else mask
    if key_mask is None:
        return mask
    if key_mask.dtype != torch.bool:
        raise ValueError(f"key_mask is {key_mask.dtype}; give a bool mask, True on the keys that are there")
    key_mask = key_mask[:, None, None, :]  # (B, 1, 1, Lk)
    return key_mask if mask is None else key_mask & mask


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, dropout: float = 0.0, causal: bool = False
) -> Tensor:
    """softmax(Q K^T / sqrt(D)) V, per head (Vaswani et al. 2017, arXiv:1706.03762, eq. 1).

    Args:
        query: (B, H, Lq, D).
        key, value: (B, G, Lk, D); G divides H, and query heads share K/V in G runs of H / G (GQA, arXiv:2305.13245).
            They are read in place, never repeated in memory.
        mask: bool, broadcasts to (B, H, Lq, Lk), True = may attend.
        dropout: probability with which a weight is dropped.
        causal: query i sees keys 0 .. i only; on top of ``mask``.

    Returns:
        (B, H, Lq, D). A row that may attend to no key is 0, and passes no gradient.
    """
    if causal and mask is not None:  # the fused kernels take one or the other
        mask, causal = mask & _causal(query.shape[-2], key.shape[-2], query.device), False
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal, enable_gqa=grouped
    )


def attention_weights(query: Tensor, key: Tensor, mask: Tensor | None = None, *, causal: bool = False) -> Tensor:
    """The weights that :func:`attend` uses, written out: (B, H, Lq, Lk) float32, every row sums to 1.

    A row that may attend to no key is 0, as in :func:`attend`. Memory O(B H Lq Lk): for looking, not for training.
    """
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    with full_precision(query.device):
        scores = (query.float() @ key.float().mT) / math.sqrt(query.shape[-1])
    if causal:
        allowed = _causal(query.shape[-2], key.shape[-2], query.device)
        mask = allowed if mask is None else mask & allowed
    if mask is None:
        return scores.softmax(-1)
    # softmax over a row of -inf is NaN; the fused kernels give 0 there, and looking must not change what is seen
    return scores.masked_fill(~mask, -math.inf).softmax(-1).masked_fill(~mask, 0.0)


def full_precision(device: torch.device) -> AbstractContextManager:
    """No autocast inside; nothing where there is none (the meta device)."""
    available = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if available else nullcontext()


def _causal(queries: int, keys: int, device: torch.device) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril()


class MultiHeadAttention(nn.Module):
    """Multi-head attention with merged projections: MHA, GQA or MQA, self or cross.

    With ``context_dim=None`` it is self-attention and Q, K, V come from one matrix product; with a ``context_dim`` it
    is cross-attention and K, V come from one product over the context. Weights: (H D + 2 G D) dim for the projections
    and (H D) dim for W_O, so 4 dim^2 for MHA with head_dim = dim / H, whatever H is.

    Args:
        dim: width of the queries and of the output.
        num_heads: query heads H.
        num_kv_heads: key/value heads G, shared by runs of H / G query heads. None = H (MHA), 1 = MQA
            (arXiv:1911.02150), in between GQA (arXiv:2305.13245).
        head_dim: width D of a head; None = dim / H. Free, so that two cross-modal heads can keep a width of 64.
        context_dim: width of the context; None for self-attention.
        bias: whether the four projections have a bias.
        qk_norm: RMS-normalise queries and keys per head (arXiv:2302.05442), which bounds the scores.
        dropout: probability of dropping an attention weight, in training only.
        causal: query i sees keys 0 .. i only.
        head_seeds: one seed per key/value group, from which that group's projections are drawn; None draws all
            from torch's global state.

    Raises:
        ValueError: if a head count does not divide what it has to.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        context_dim: int | None = None,
        bias: bool = True,
        qk_norm: bool = False,
        dropout: float = 0.0,
        causal: bool = False,
        head_seeds: Sequence[int] | None = None,
    ):
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or num_kv_heads < 1:
            raise ValueError(f"num_heads={num_heads}, num_kv_heads={num_kv_heads}: both must be at least 1")
        if head_dim is None:
            if dim % num_heads:
                fit = _nearest_divisor(dim, num_heads)
                raise ValueError(f"num_heads={num_heads} does not divide dim={dim}; the nearest that does is {fit}")
            head_dim = dim // num_heads
        if num_heads % num_kv_heads:
            fit = _nearest_divisor(num_heads, num_kv_heads)
            raise ValueError(
                f"num_kv_heads={num_kv_heads} does not divide num_heads={num_heads}; the nearest that does is {fit}"
            )
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout={dropout} is not a probability below 1")
        self.dim, self.context_dim = dim, context_dim
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.dropout, self.causal = dropout, causal

        self.inner, self.inner_kv = num_heads * head_dim, num_kv_heads * head_dim
        if context_dim is None:
            self.qkv = nn.Linear(dim, self.inner + 2 * self.inner_kv, bias=bias)
        else:
            self.q = nn.Linear(dim, self.inner, bias=bias)
            self.kv = nn.Linear(context_dim, 2 * self.inner_kv, bias=bias)
        self.q_norm = nn.RMSNorm(head_dim) if qk_norm else None
        self.k_norm = nn.RMSNorm(head_dim) if qk_norm else None
        self.out = nn.Linear(self.inner, dim, bias=bias)  # W_O mixes the heads

        self.gate: Tensor | None = None  # (H,) multiplies each head's output; ablation closes heads with exact zeros
        self.observer: Callable[[Tensor], None] | None = None  # is handed the (B, H, Lq, Lk) weights of each call
        self.reset_parameters(head_seeds)

    def reset_parameters(self, head_seeds: Sequence[int] | None = None) -> None:
        """Glorot-uniform for each of Q, K, V and W_O on its own (the merged matrix has another fan), biases 0."""
        if head_seeds is not None and len(head_seeds) != self.num_kv_heads:
            raise ValueError(f"head_seeds has {len(head_seeds)} seeds for {self.num_kv_heads} key/value groups")
        if self.context_dim is None:
            q, k, v = self.qkv.weight.split([self.inner, self.inner_kv, self.inner_kv])
        else:
            q, (k, v) = self.q.weight, self.kv.weight.chunk(2)
        with torch.no_grad():
            for number, weight in enumerate((q, k, v)):
                bound = math.sqrt(6.0 / sum(weight.shape))
                for group, rows in enumerate(weight.chunk(self.num_kv_heads)):
                    if head_seeds is None:
                        rows.uniform_(-bound, bound)
                    else:  # drawn on the CPU, so that a seed means the same head on every device
                        generator = torch.Generator().manual_seed(3 * head_seeds[group] + number)
                        drawn = torch.empty(rows.shape, device="cpu").uniform_(-bound, bound, generator=generator)
                        rows.copy_(drawn)
            nn.init.xavier_uniform_(self.out.weight)
            for module in self.children():
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(
        self,
        x: Tensor,
        context: Tensor | KeyValue | None = None,
        *,
        key_mask: Tensor | None = None,
        mask: Tensor | None = None,
        rotate: Rotate | None = None,
    ) -> Tensor:
        """
        Args:
            x: (B, Lq, dim), where the queries come from. May have fewer rows than the context, by a whole factor: each
                is then projected once, and meets as many consecutive contexts.
            context: where keys and values come from: (B, Lk, context_dim), or what :meth:`project_context` kept of it.
                None = ``x`` itself (self-attention only). A self-attention also takes a (B, Lk, dim) context, of
                which ``x`` may be a few rows: then only those rows are computed.
            key_mask: (B, Lk) bool, True on the keys that are there.
            mask: (Lq, Lk), (B, Lq, Lk) or (B, H or 1, Lq, Lk) bool, True = may attend.
            rotate: applied to queries and keys, (B, L, H or G, D) -> same shape (rotary positions).

        Returns:
            (B, Lq, dim). A query that may attend to nothing finds 0 in every head, and so gets W_O's bias alone, the
            constant that every token of the layer gets (0 without bias); no gradient passes through it.
        """
        query, kept = self._project(x, context, rotate)
        mask = join_masks(key_mask, mask)
        if len(query) < len(kept.key):
            query = query.repeat_interleave(len(kept.key) // len(query), dim=0)
        heads = attend(
            query, kept.key, kept.value, mask, dropout=self.dropout if self.training else 0.0, causal=self.causal
        )  # (B, H, Lq, D)
        if self.observer is not None:  # computed beside, so that looking cannot change the output
            self.observer(attention_weights(query, kept.key, mask, causal=self.causal))
        del query, kept  # outside training their memory is free for W_O's output
        if self.gate is not None:
            heads = heads * self.gate.to(heads.dtype)[:, None, None]
        return self.out(heads.transpose(1, 2).flatten(2))  # (B, Lq, H * D) -> (B, Lq, dim)

    def project_context(self, context: Tensor, *, rotate: Rotate | None = None) -> KeyValue:
        """Keys and values of a context (B, Lk, context_dim or dim), to be passed as ``context`` any number of times."""
        kv = self.kv(context) if self.context_dim is not None else _part(self.qkv, slice(self.inner, None), context)
        key, value = kv.chunk(2, dim=-1)
        return KeyValue(self._heads(key, self.k_norm, rotate), self._heads(value))

    def _project(self, x: Tensor, context: Tensor | KeyValue | None, rotate: Rotate | None) -> tuple[Tensor, KeyValue]:
        if context is None:
            if self.context_dim is not None:
                raise ValueError("cross-attention needs a context: (B, Lk, context_dim), or what project_context gave")
            query, key, value = self.qkv(x).split([self.inner, self.inner_kv, self.inner_kv], dim=-1)
            kept = KeyValue(self._heads(key, self.k_norm, rotate), self._heads(value))
        else:
            query = self.q(x) if self.context_dim is not None else _part(self.qkv, slice(self.inner), x)
            kept = context if isinstance(context, KeyValue) else self.project_context(context, rotate=rotate)
        return self._heads(query, self.q_norm, rotate), kept

    def _heads(self, flat: Tensor, norm: nn.Module | None = None, rotate: Rotate | None = None) -> Tensor:
        heads = flat.unflatten(-1, (-1, self.head_dim))  # (B, L, H, D)
        heads = heads if norm is None else norm(heads)
        heads = heads if rotate is None else rotate(heads)
        # (B, H, L, D), a view: a contiguous copy costs more than the kernels gain by it, and as the heads' output is
        # laid out like the queries, it would have to be copied back before W_O
        return heads.transpose(1, 2)

    def extra_repr(self) -> str:
        kind = "self" if self.context_dim is None else "cross"
        return f"{kind}, dim={self.dim}, heads={self.num_heads}, kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"


def _part(linear: nn.Linear, rows: slice, x: Tensor) -> Tensor:
    """A product with some output rows of a merged projection; the slice is a view, nothing is copied."""
    return F.linear(x, linear.weight[rows], None if linear.bias is None else linear.bias[rows])


def _nearest_divisor(of: int, to: int) -> int:
    return min((n for n in range(1, of + 1) if of % n == 0), key=lambda n: (abs(n - to), n))

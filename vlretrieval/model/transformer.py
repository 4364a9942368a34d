"""Blocks and stacks over the attention core: pre-norm Transformer with optional cross-attention, and pooling."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vlretrieval.model.attention import KeyValue, MultiHeadAttention, Rotate


def per_block(count: int | Sequence[int] | None, depth: int, name: str) -> list[int | None]:
    """A head count for each of ``depth`` blocks: one number is that of all, several are one a block (a pruned stack).

    Raises:
        ValueError: several, but not one a block.
    """
    if count is None or isinstance(count, int):
        return [count] * depth
    if len(count) != depth:
        raise ValueError(f"{name}={list(count)} has {len(count)} numbers for {depth} blocks; give one, or one a block")
    return list(count)


def width_of_heads(dim: int, num_heads: int | Sequence[int], head_dim: int | None, name: str = "num_heads") -> int:
    """``head_dim``, or dim / heads where it is None.

    Raises:
        ValueError: it is None, and blocks differ in their heads: each would have a width of its own.
    """
    if head_dim:
        return head_dim
    if not isinstance(num_heads, int):
        raise ValueError(f"{name}={list(num_heads)} differs from block to block: give the heads' width (head_dim) too")
    return dim // max(1, num_heads)


class Mlp(nn.Sequential):
    """Two linear layers with a GELU between: 2 * ratio * dim^2 weights."""

    def __init__(self, dim: int, ratio: float = 4.0, dropout: float = 0.0):
        hidden = int(dim * ratio)
        super().__init__(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim), nn.Dropout(dropout))


class Block(nn.Module):
    """Pre-norm residual block: self-attention, optional cross-attention to a context, MLP (arXiv:2002.04745).

    Args:
        dim: token width.
        num_heads, num_kv_heads, head_dim, qk_norm, causal: of the self-attention; ``num_heads=0`` leaves it out.
        mlp_ratio: hidden width of the MLP over ``dim``.
        dropout: on each residual branch; ``attention_dropout`` on attention weights.
        cross: the cross-attention of this block, ready made, or None.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        qk_norm: bool = False,
        causal: bool = False,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        cross: MultiHeadAttention | None = None,
    ):
        super().__init__()
        if num_heads:
            self.attention_norm = nn.LayerNorm(dim)
            self.attention: MultiHeadAttention | None = MultiHeadAttention(
                dim,
                num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                qk_norm=qk_norm,
                causal=causal,
                dropout=attention_dropout,
            )
        else:
            self.attention = None
        self.cross = cross
        if cross is not None:
            self.cross_norm = nn.LayerNorm(dim)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, mlp_ratio, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        *,
        key_mask: Tensor | None = None,
        rotate: Rotate | None = None,
        context: Tensor | KeyValue | None = None,
        context_mask: Tensor | None = None,
        first: int | None = None,
    ) -> Tensor:
        """
        Args:
            x: (B, L, dim).
            key_mask: (B, L) bool, True on real tokens of ``x``.
            rotate: turns queries and keys of the self-attention.
            context: (C, Lc, context_dim) or its kept K/V. With C < B, each context serves B / C consecutive rows of
                ``x``, whose queries are laid side by side, so that its K/V are read in place. With C > B, each row of
                ``x`` meets C / B consecutive contexts, its queries projected once, and C rows come out.
            context_mask: (C, Lc) bool.
            first: compute only this many leading rows of the output (the last layer before pooling needs one).
        """
        rows = self.self_attended(x, key_mask=key_mask, rotate=rotate, first=first)
        return self.after_self_attention(rows, context, context_mask)

    def self_attended(
        self, x: Tensor, *, key_mask: Tensor | None = None, rotate: Rotate | None = None, first: int | None = None
    ) -> Tensor:
        """The first part of ``forward``: rows of ``x`` with their self-attention added, (B, L or ``first``, dim)."""
        rows = x if first is None else x[:, :first]
        if self.attention is None:
            return rows
        normed = self.attention_norm(x)
        if first is None:
            return rows + self.dropout(self.attention(normed, key_mask=key_mask, rotate=rotate))
        return rows + self.dropout(self.attention(normed[:, :first], normed, key_mask=key_mask, rotate=rotate))

    def after_self_attention(
        self, rows: Tensor, context: Tensor | KeyValue | None = None, context_mask: Tensor | None = None
    ) -> Tensor:
        """The rest of it: cross-attention, where the block has one, and MLP."""
        if self.cross is not None:
            if context is None:
                raise ValueError("this block has a cross-attention and needs a context")
            batch, length, dim = rows.shape
            contexts = len(context.key if isinstance(context, KeyValue) else context)
            normed = self.cross_norm(rows)
            if contexts > batch:
                crossed = self.cross(normed, context, key_mask=context_mask)  # (contexts, L, dim)
                rows = rows.repeat_interleave(contexts // batch, dim=0) + self.dropout(crossed)
            else:
                side_by_side = normed.reshape(contexts, batch // contexts * length, dim)
                crossed = self.cross(side_by_side, context, key_mask=context_mask)
                rows = rows + self.dropout(crossed.reshape(batch, length, dim))
        return rows + self.mlp(self.mlp_norm(rows))


class Transformer(nn.Module):
    """``depth`` self-attention blocks and a final LayerNorm.

    Args:
        dim, depth: as they say; further arguments go to every :class:`Block`.
        num_heads, num_kv_heads: of every block, or one number a block (then with a ``head_dim``).
        activation_checkpointing: recompute a block's activations in the backward pass instead of keeping them.
    """

    def __init__(
        self,
        dim: int,
        depth: int,
        num_heads: int | Sequence[int],
        *,
        num_kv_heads: int | Sequence[int] | None = None,
        activation_checkpointing: bool = False,
        **block,
    ):
        super().__init__()
        width_of_heads(dim, num_heads, block.get("head_dim"))
        heads, shared = per_block(num_heads, depth, "num_heads"), per_block(num_kv_heads, depth, "num_kv_heads")
        self.blocks = nn.ModuleList(
            Block(dim, own or 0, num_kv_heads=kv, **block) for own, kv in zip(heads, shared, strict=True)
        )
        self.norm = nn.LayerNorm(dim)
        self.activation_checkpointing = activation_checkpointing

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None, rotate: Rotate | None = None) -> Tensor:
        """(B, L, dim) -> (B, L, dim); padding (``key_mask`` False) is never attended to."""
        for block in self.blocks:
            if self.activation_checkpointing and self.training:
                x = checkpoint(block, x, key_mask=key_mask, rotate=rotate, use_reentrant=False)
            else:
                x = block(x, key_mask=key_mask, rotate=rotate)
        return self.norm(x)


POOLS = ("first", "mean", "last")


def pool_tokens(tokens: Tensor, mask: Tensor | None, how: str) -> Tensor:
    """(B, L, dim) -> (B, dim): the first token, the last real one, or the mean over real ones."""
    if how == "first":
        return tokens[:, 0]
    if how == "last":
        if mask is None:
            return tokens[:, -1]
        last = mask.sum(1) - 1
        return tokens[torch.arange(len(tokens), device=tokens.device), last.clamp(min=0)]
    if how == "mean":
        if mask is None:
            return tokens.mean(1)
        weight = mask.to(tokens.dtype)
        return torch.einsum("bld,bl->bd", tokens, weight) / weight.sum(1, keepdim=True).clamp(min=1)
    raise ValueError(f"pool={how!r} is not known; choose one of {', '.join(POOLS)}")

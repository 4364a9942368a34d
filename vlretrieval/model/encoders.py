"""The two encoders trained from scratch: token ids -> text tokens, pixels -> patches -> image tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vlretrieval.model.positions import Positions
from vlretrieval.model.transformer import Transformer, pool_tokens, width_of_heads

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class Hidden(NamedTuple):
    """What an encoder gives: pooled (B, dim), tokens (B, T, dim), mask (B, T) bool or None (all real)."""

    pooled: Tensor
    tokens: Tensor
    mask: Tensor | None


class TextEncoder(nn.Module):
    """Text self-attention over token ids.

    Args:
        vocab_size: rows of the embedding table.
        context_length: longest text in tokens.
        dim, depth, num_heads, num_kv_heads, head_dim: the Transformer's; head counts may be one a block.
        position: "learned", "sinusoidal", "rotary" or "none".
        pool: "first" (the start token), "last" (the end token) or "mean".
        causal: each token sees only those before it (CLIP's text tower); needs ``pool`` "last" or "mean".
    """

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        dim: int,
        depth: int,
        num_heads: int | Sequence[int],
        *,
        num_kv_heads: int | Sequence[int] | None = None,
        head_dim: int | None = None,
        mlp_ratio: float = 4.0,
        position: str = "learned",
        pool: str = "first",
        causal: bool = False,
        qk_norm: bool = False,
        dropout: float = 0.0,
        activation_checkpointing: bool = False,
    ):
        super().__init__()
        if causal and pool == "first":
            raise ValueError("causal=true with pool=first: the first token sees nothing of the text; set pool=last")
        self.dim, self.context_length, self.vocab_size, self.pool = dim, context_length, vocab_size, pool
        self.embedding = nn.Embedding(vocab_size, dim)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.transformer = Transformer(
            dim,
            depth,
            num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            mlp_ratio=mlp_ratio,
            causal=causal,
            qk_norm=qk_norm,
            dropout=dropout,
            activation_checkpointing=activation_checkpointing,
        )
        self.positions = Positions(position, dim, width_of_heads(dim, num_heads, head_dim), (context_length,))

    def forward(self, token_ids: Tensor, token_mask: Tensor | None = None) -> Hidden:
        """(B, L) ids and (B, L) bool, True on real tokens -> :class:`Hidden` with T = L <= context_length."""
        if token_ids.shape[1] > self.context_length:
            raise ValueError(
                f"a text of {token_ids.shape[1]} tokens is longer than context_length={self.context_length}; "
                "let the tokenizer cut it (it keeps the end token)"
            )
        x = self.positions.add(self.embedding(token_ids))
        rotate = self.positions.rotate((token_ids.shape[1],), x.device)
        tokens = self.transformer(x, key_mask=token_mask, rotate=rotate)
        return Hidden(pool_tokens(tokens, token_mask, self.pool), tokens, token_mask)


class ImageEncoder(nn.Module):
    """Patch self-attention: a vision transformer (arXiv:2010.11929).

    Args:
        image_size: side of the square picture in pixels that it is trained at; other multiples of ``patch_size`` are
            taken too (positions are interpolated).
        patch_size: side of a patch in pixels; must divide ``image_size``.
        dim, depth, num_heads, num_kv_heads, head_dim: the Transformer's; head counts may be one a block.
        position: "learned", "sinusoidal", "rotary" or "none".
        position_std: of learned positions at the start. Patches come in with a std of 1 to 3, beside which a place at
            the usual 0.02 is learnt only if much asks for it.
        pool: "first" (a class token is put in front) or "mean" (no class token).
        patch_dropout: share of the patches left out of each training step (arXiv:2212.00794).
        mean, std: per channel, of pixels scaled to 0 .. 1.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        image_size: int,
        patch_size: int,
        dim: int,
        depth: int,
        num_heads: int | Sequence[int],
        *,
        num_kv_heads: int | Sequence[int] | None = None,
        head_dim: int | None = None,
        mlp_ratio: float = 4.0,
        position: str = "learned",
        position_std: float = 0.02,
        pool: str = "first",
        qk_norm: bool = False,
        dropout: float = 0.0,
        patch_dropout: float = 0.0,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        activation_checkpointing: bool = False,
    ):
        super().__init__()
        if image_size % patch_size:
            raise ValueError(f"patch_size={patch_size} does not divide image_size={image_size}")
        if not 0.0 <= patch_dropout < 1.0:
            raise ValueError(f"patch_dropout={patch_dropout} is not a share below 1")
        if patch_dropout and position == "rotary":
            # the turns go by reading order, and every picture loses other patches
            raise ValueError(f"patch_dropout={patch_dropout} and position=rotary; take learned or sinusoidal positions")
        if pool not in ("first", "mean"):
            raise ValueError(f"pool={pool!r} is not known for pictures; choose first (a class token) or mean")
        self.dim, self.image_size, self.patch_size, self.pool = dim, image_size, patch_size, pool
        self.patch_dropout = patch_dropout
        self.register_buffer("mean", torch.tensor(tuple(mean)).view(3, 1, 1) * 255, persistent=False)
        self.register_buffer("std", torch.tensor(tuple(std)).view(3, 1, 1) * 255, persistent=False)
        self.patches = nn.Linear(3 * patch_size**2, dim)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim)) if pool == "first" else None
        side = image_size // patch_size
        prefix = int(pool == "first")
        self.positions = Positions(
            position, dim, width_of_heads(dim, num_heads, head_dim), (side, side), prefix=prefix, std=position_std
        )
        self.transformer = Transformer(
            dim,
            depth,
            num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            mlp_ratio=mlp_ratio,
            qk_norm=qk_norm,
            dropout=dropout,
            activation_checkpointing=activation_checkpointing,
        )

    def forward(self, pixels: Tensor) -> Hidden:
        """(B, 3, H, W) -> :class:`Hidden` with T = class token + patches.

        uint8 pixels are normalised here, in float32, by ``mean`` and ``std``; float pixels are taken as normalised.
        """
        if not pixels.is_floating_point():
            pixels = (pixels.to(self.mean.dtype) - self.mean) / self.std
        size = self.patch_size
        if pixels.shape[-2] % size or pixels.shape[-1] % size:
            raise ValueError(f"a picture of {tuple(pixels.shape[-2:])} pixels is no whole number of {size} px patches")
        grid = (pixels.shape[-2] // size, pixels.shape[-1] // size)
        # a stride-p convolution is a product over flattened patches, and as a product needs no change of layout
        x = pixels.unflatten(-1, (grid[1], size)).unflatten(-3, (grid[0], size))  # (B, 3, rows, p, columns, p)
        x = self.patches(x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2))  # (B, P, dim)
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(len(x), -1, -1).to(x.dtype), x], dim=1)
        x = self.positions.add(x, grid)
        rotate = self.positions.rotate(grid, x.device)
        if self.training and self.patch_dropout:
            x = self._drop_patches(x)
        tokens = self.transformer(x, rotate=rotate)
        return Hidden(pool_tokens(tokens, None, self.pool), tokens, None)

    def _drop_patches(self, x: Tensor) -> Tensor:
        prefix = self.positions.prefix
        patches = x.shape[1] - prefix
        keep = max(1, round(patches * (1 - self.patch_dropout)))
        # another draw for each picture; sorted, so that reading order stays
        rows = torch.rand(len(x), patches, device=x.device).topk(keep, dim=1).indices.sort(dim=1).values + prefix
        rows = rows[..., None].expand(-1, -1, x.shape[-1])
        return torch.cat([x[:, :prefix], x.gather(1, rows)], dim=1)

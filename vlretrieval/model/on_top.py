"""Own self-attention on a pretrained tower's tokens; without any blocks, the tower as it is, tokens in our width."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlretrieval.model.encoders import Hidden
from vlretrieval.model.lora import add_lora
from vlretrieval.model.positions import Positions
from vlretrieval.model.transformer import Transformer


class OnTop(nn.Module):
    """An encoder of a tower and what stands on it: a summary token in front of its tokens, and self-attention blocks.

    The tower's pooled vector becomes the summary token. After the blocks it is added to the pooled vector through a
    matrix that starts near zero, so that training starts from what the tower itself says. Without blocks the pooled
    vector stays as it is.

    Args:
        base: the tower: gives :class:`Hidden`, and has ``dim`` (of pooled), ``token_dim``, ``aligned``, and for
            pictures ``grid`` (rows, columns of its tokens) and ``image_size``.
        dim: width of the tokens that come out.
        depth, num_heads, num_kv_heads, head_dim, mlp_ratio, qk_norm, dropout: of the blocks; ``depth=0`` has none.
        merge: side of the squares of patches that are averaged into one token: 2 makes a quarter as many.
        position: "none" (the tower has put places in), or for the blocks' own: "learned", "sinusoidal", "rotary".
        lora: arguments of :func:`vlretrieval.model.lora.add_lora`: adapters are trained in place of the tower.
        image_size: side of the pictures, repeated from the tower for what reads a config; None for texts.

    Attributes:
        dim: width of ``tokens``; ``pooled_dim``: of ``pooled``.
        aligned: the pooled vectors lie in a joint space already, with those of the tower they were trained with.
    """

    def __init__(
        self,
        base: nn.Module,
        dim: int,
        depth: int = 0,
        num_heads: int = 8,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        mlp_ratio: float = 4.0,
        merge: int = 1,
        position: str = "none",
        qk_norm: bool = False,
        dropout: float = 0.0,
        image_size: int | None = None,
        lora: Mapping[str, Any] | None = None,
        activation_checkpointing: bool = False,
    ):
        super().__init__()
        own_size = getattr(base, "image_size", None)
        if image_size != own_size:
            raise ValueError(f"image_size={image_size}, but the tower below takes {own_size}; set both alike")
        if lora is not None:
            add_lora(base, **lora)
        self.base, self.dim, self.image_size = base, dim, image_size
        self.pooled_dim, self.aligned = int(base.dim), bool(base.aligned)  # type: ignore[arg-type]
        self.pooled_norm = nn.Identity() if self.aligned else nn.LayerNorm(self.pooled_dim)
        self.summary = _fitted(self.pooled_dim, dim)
        self.input = _fitted(base.token_dim, dim)  # type: ignore[arg-type]
        grid: tuple[int, int] | None = getattr(base, "grid", None)
        if merge < 1 or (merge > 1 and grid is None):
            raise ValueError(f"merge={merge} must be 1, or for a tower of pictures a number of patches above it")
        self.merge, self.grid = merge, grid
        places = (int(base.context_length),) if grid is None else tuple(-(-side // merge) for side in grid)  # type: ignore[arg-type]
        self.positions = Positions(position if depth else "none", dim, head_dim or dim // num_heads, places, prefix=1)
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
        self.tokens_used = True
        self.added = nn.Linear(dim, self.pooled_dim) if depth else None
        if self.added is not None:
            nn.init.normal_(self.added.weight, std=1e-4)  # not 0: then the blocks below had no gradient at first
            nn.init.zeros_(self.added.bias)

    def leave_out_tokens(self) -> None:
        """Tells that nothing looks at the tokens. Without blocks they then are neither computed nor trained."""
        if self.added is None:
            self.tokens_used = False
            for part in (self.summary, self.input, self.transformer):
                part.requires_grad_(False)

    def forward(self, *inputs: Tensor) -> Hidden:
        """Pixels, or token ids and their mask, as the tower takes them -> :class:`Hidden` with T = 1 + its tokens.

        T = 0 after :meth:`leave_out_tokens` without blocks.
        """
        return self.on(*self.base(*inputs))

    def on(self, pooled: Tensor, tokens: Tensor, mask: Tensor | None = None) -> Hidden:
        """As ``forward``, from what the tower gave, whenever it did: pooled (B, base dim), tokens (B, T, token dim)."""
        if not self.tokens_used:
            none = pooled.new_zeros(len(pooled), 0, self.dim)
            return Hidden(self.pooled_norm(pooled), none, None if mask is None else mask[:, :0])
        if self.merge > 1 and self.grid is not None:
            maps = tokens.transpose(1, 2).unflatten(2, self.grid)
            tokens = F.avg_pool2d(maps, self.merge, ceil_mode=True).flatten(2).transpose(1, 2)
        x = torch.cat([self.summary(pooled)[:, None], self.input(tokens)], dim=1)
        if mask is not None:
            mask = F.pad(mask, (1, 0), value=True)
        shape = self.positions.shape if len(self.positions.shape) == 2 else (tokens.shape[1],)
        x = self.positions.add(x, shape)
        x = self.transformer(x, key_mask=mask, rotate=self.positions.rotate(shape, x.device))
        pooled = self.pooled_norm(pooled)
        if self.added is not None:
            pooled = pooled + self.added(x[:, 0])
        return Hidden(pooled, x, mask)


def _fitted(width: int, dim: int) -> nn.Sequential:
    # towers come with tokens of any scale
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, dim))

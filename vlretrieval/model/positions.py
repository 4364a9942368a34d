"""Position information, outside the attention core: added to tokens (learned, sinusoidal) or turning heads (rotary).

One-dimensional for text, two-dimensional for a grid of patches. ``prefix`` tokens (a class token) have no place.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KINDS = ("learned", "sinusoidal", "rotary", "none")


def sinusoid(places: Tensor, dim: int, base: float = 10000.0) -> Tensor:
    """(L,) places -> (L, dim), dim even: sines and cosines of falling frequency (arXiv:1706.03762, sec. 3.5)."""
    angles = places[:, None] * base ** (-torch.arange(0, dim, 2, device=places.device) / dim)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def grid_places(height: int, width: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Row and column of every patch in reading order: two (height * width,) float tensors."""
    rows, columns = torch.meshgrid(
        torch.arange(height, device=device), torch.arange(width, device=device), indexing="ij"
    )
    return rows.flatten().float(), columns.flatten().float()


class Positions(nn.Module):
    """Positions of a sequence or of a patch grid, by a word in the config.

    Args:
        kind: "learned", "sinusoidal", "rotary" or "none".
        dim: token width (learned and sinusoidal).
        head_dim: head width (rotary); a multiple of 2 in one dimension, of 4 on a grid.
        shape: (length,) for text or (rows, columns) for patches, the size it is trained for.
        prefix: leading tokens without a place; rotary leaves them unturned, the others add a learned offset or none.
        std: of learned positions at the start.
    """

    def __init__(
        self, kind: str, dim: int, head_dim: int, shape: tuple[int, ...], *, prefix: int = 0, std: float = 0.02
    ):
        super().__init__()
        if kind not in KINDS:
            raise ValueError(f"position={kind!r} is not known; choose one of {', '.join(KINDS)}")
        turned = 2 * len(shape)
        if kind == "rotary" and head_dim % turned:
            raise ValueError(f"position=rotary needs a head_dim that is a multiple of {turned}, not {head_dim}")
        if kind == "sinusoidal" and dim % turned:
            raise ValueError(f"position=sinusoidal needs a dim that is a multiple of {turned}, not {dim}")
        self.kind, self.dim, self.head_dim, self.shape, self.prefix = kind, dim, head_dim, tuple(shape), prefix
        if kind == "learned":
            self.weight = nn.Parameter(torch.empty(prefix + math.prod(shape), dim))
            nn.init.normal_(self.weight, std=std)

    def add(self, tokens: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
        """Adds positions to (B, prefix + L, dim) tokens; a learned grid is interpolated to another ``shape``."""
        if self.kind in ("rotary", "none"):
            return tokens
        shape = shape or (tokens.shape[1] - self.prefix, *self.shape[1:])
        if self.kind == "learned":
            return tokens + self._learned(shape).to(tokens.dtype)
        places = self._places(shape, tokens.device)
        table = torch.cat([sinusoid(axis, self.dim // len(places)) for axis in places], dim=-1)
        return tokens + F.pad(table, (0, 0, self.prefix, 0)).to(tokens.dtype)

    def rotate(self, shape: tuple[int, ...], device: torch.device) -> Callable[[Tensor], Tensor] | None:
        """The turn of queries and keys (B, prefix + L, H, D) by their places (RoFormer, arXiv:2104.09864), or None.

        On a grid one half of a head turns with the row and the other with the column.
        """
        if self.kind != "rotary":
            return None
        places = self._places(shape, device)
        width = self.head_dim // len(places)
        frequency = 10000.0 ** (-torch.arange(0, width, 2, device=device) / width)
        angles = torch.cat([axis[:, None] * frequency for axis in places], dim=-1)  # (L, D / 2)
        angles = F.pad(angles, (0, 0, self.prefix, 0))  # angle 0: a prefix token is not turned
        cos, sin = angles.cos(), angles.sin()

        def turn(heads: Tensor) -> Tensor:
            first, second = heads.chunk(2, dim=-1)  # pairs (i, i + D / 2) turn, in float32 at least by type promotion
            c, s = cos[: heads.shape[1], None], sin[: heads.shape[1], None]  # (L, 1, D / 2)
            return torch.cat([first * c - second * s, second * c + first * s], dim=-1).to(heads.dtype)

        return turn

    def _places(self, shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
        if len(shape) == 1:
            return (torch.arange(shape[0], device=device).float(),)
        rows, columns = grid_places(shape[0], shape[1], device)
        # another grid than the trained one is stretched onto it, so that a place in the picture keeps its code
        return rows * (self.shape[0] / shape[0]), columns * (self.shape[1] / shape[1])

    def _learned(self, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:  # the full length is no case of its own: an exported graph has a length that varies
            if shape[0] > self.shape[0]:
                raise ValueError(f"a text of {shape[0]} tokens is longer than the context of {self.shape[0]}")
            return self.weight[: self.prefix + shape[0]]
        if tuple(shape) == self.shape:
            return self.weight
        return self._interpolated(self.weight, self.shape, shape)

    def _interpolated(self, weight: Tensor, before: tuple[int, ...], after: tuple[int, ...]) -> Tensor:
        prefix, grid = weight[: self.prefix], weight[self.prefix :]
        grid = grid.unflatten(0, before).permute(2, 0, 1)[None]  # (1, dim, rows, columns)
        grid = F.interpolate(grid, size=tuple(after), mode="bicubic", align_corners=False, antialias=True)
        return torch.cat([prefix, grid[0].permute(1, 2, 0).flatten(0, 1)])

    def fitted(self, weight: Tensor) -> Tensor | None:
        """Another model's learned positions for this one's ``shape``; None where they cannot be.

        A square grid of (prefix + rows^2, dim) is interpolated; of a longer text the first places are taken.
        """
        if self.kind != "learned" or weight.ndim != 2 or weight.shape[1] != self.dim:
            return None
        if len(self.shape) == 1:
            return weight[: len(self.weight)] if len(weight) > len(self.weight) else None
        side = math.isqrt(max(0, len(weight) - self.prefix))
        if not side or side**2 != len(weight) - self.prefix:
            return None
        return self._interpolated(weight.float(), (side, side), self.shape).to(weight.dtype)

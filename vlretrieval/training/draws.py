"""Random draws for a rank's rows of a table over all ranks' pairs, without the rest of the table.

Each draw is a hash of its own place, so that it does not depend on how many ranks share a step, and no rank makes
those of another: a generator would have to go through all of M x M.
"""

from __future__ import annotations

import torch
from torch import Tensor

# constants of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), as int64
GAMMA, FIRST, SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685
BITS = 24  # what a float32 in [0, 1) holds exactly


def uniform_rows(seed: int, rows: range, columns: int, device: torch.device | str = "cpu") -> Tensor:
    """(2, len(rows), columns) float32 draws from [0, 1): those rows of two tables that ``seed`` stands for."""
    numbers = torch.arange(rows.start, rows.stop, device=device)
    tables = torch.arange(2, device=device)
    start = _mixed(torch.tensor(seed, device=device) + tables * GAMMA)[:, None] + numbers * GAMMA  # (2, rows)
    draws = _mixed(_mixed(start)[..., None] + torch.arange(columns, device=device) * GAMMA)
    return _shifted(draws, 64 - BITS) * 2.0**-BITS


def _mixed(state: Tensor) -> Tensor:
    """SplitMix64's finaliser: every bit of the state moves half of the bits that come out."""
    state = (state ^ _shifted(state, 30)) * FIRST
    state = (state ^ _shifted(state, 27)) * SECOND
    return state ^ _shifted(state, 31)


def _shifted(state: Tensor, places: int) -> Tensor:
    """To the right, zeros coming in: torch's own shift of int64 brings in the sign."""
    return (state >> places) & (2 ** (64 - places) - 1)

"""Round numbers along an axis."""

from __future__ import annotations

import math


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """At most about ``most`` round numbers (1, 2 or 5 times a power of ten apart) that span low .. high."""
    spread = (high - low) or max(1.0, abs(high))
    rough = spread / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step * power for step in (1, 2, 5, 10) if step * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 10) for number in range(first, max(last, first + 1) + 1)]


def apart(wanted: list[float], step: float, lowest: float) -> list[float]:
    """Places (going up) near the wanted ones for labels at least ``step`` apart, none beyond ``lowest`` if they fit."""
    placed: list[float] = []
    for y in wanted:
        placed.append(max([y, *(before + step for before in placed[-1:])]))
    limit = lowest
    for number in reversed(range(len(placed))):
        placed[number] = min(placed[number], limit)
        limit = placed[number] - step
    return placed

"""Charts of the report as SVG texts: bars with intervals, curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from vlretrieval.heads.page.scale import apart, ticks


class Bar(NamedTuple):
    """A value with its interval."""

    name: str
    value: float
    low: float
    high: float


NAMES, ROW, PLOT, RIGHT = 250, 24, 460, 150  # pixels: names, a row, the plot, the numbers beside it


def bars(rows: Sequence[Bar], unit: str) -> str:
    """Horizontal bars from 0 with whiskers; those whose interval holds 0 in a quieter colour."""
    low = min([0.0, *(bar.low for bar in rows)])
    high = max([0.1, *(bar.high for bar in rows)])
    marks = [mark for mark in ticks(low, high) if low <= mark <= high]

    def x(value: float) -> float:
        return NAMES + PLOT * (value - low) / (high - low)

    height = ROW * len(rows) + 30
    parts = [
        f'<svg role="img" width="{NAMES + PLOT + RIGHT}" height="{height}" '
        f'viewBox="0 0 {NAMES + PLOT + RIGHT} {height}" aria-label="{escape(unit)}">'
    ]
    for mark in marks:
        parts.append(f'<line class="axis" x1="{x(mark):.1f}" x2="{x(mark):.1f}" y1="0" y2="{height - 24}"/>')
        parts.append(f'<text class="soft" text-anchor="middle" x="{x(mark):.1f}" y="{height - 8}">{mark:g}</text>')
    for number, bar in enumerate(rows):
        top = ROW * number + 4
        left, right = sorted((x(0), x(bar.value)))
        unsure = "" if bar.low > 0 or bar.high < 0 else " unsure"
        middle = top + 8
        parts += [
            f'<text text-anchor="end" x="{NAMES - 10}" y="{top + 13}">{escape(bar.name)}</text>',
            f'<rect class="bar{unsure}" x="{left:.1f}" width="{max(1.0, right - left):.1f}" y="{top}" height="16"/>',
            f'<line class="whisker" x1="{x(bar.low):.1f}" x2="{x(bar.high):.1f}" y1="{middle}" y2="{middle}"/>',
            f'<text x="{NAMES + PLOT + 10}" y="{top + 13}">{bar.value:.1f} [{bar.low:.1f}, {bar.high:.1f}]</text>',
        ]
    return "".join([*parts, "</svg>"])


def curves(lines: Mapping[str, Sequence[tuple[float, float]]], across: str, up: str, width: int = 640) -> str:
    """Lines through points, each named at its end; ``across`` and ``up`` name the axes."""
    left, bottom, top, right, tall = 60, 44, 26, 190, 300
    every = [point for line in lines.values() for point in line]
    marks = [ticks(min(p[axis] for p in every), max(p[axis] for p in every)) for axis in (0, 1)]
    bounds = [
        (min(marks[axis][0], *(p[axis] for p in every)), max(marks[axis][-1], *(p[axis] for p in every)))
        for axis in (0, 1)
    ]

    def at(point: tuple[float, float]) -> tuple[float, float]:
        shares = [(value - low) / ((high - low) or 1) for value, (low, high) in zip(point, bounds, strict=True)]
        return left + shares[0] * (width - left - right), tall - bottom - shares[1] * (tall - bottom - top)

    parts = [f'<svg role="img" width="{width}" height="{tall}" viewBox="0 0 {width} {tall}" aria-label="{escape(up)}">']
    for mark in marks[1]:
        y = at((bounds[0][0], mark))[1]
        parts.append(f'<line class="axis" x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="soft" text-anchor="end" x="{left - 8}" y="{y + 4:.1f}">{mark:g}</text>')
    for mark in marks[0]:
        x = at((mark, bounds[1][0]))[0]
        parts.append(f'<text class="soft" text-anchor="middle" x="{x:.1f}" y="{tall - bottom + 18}">{mark:g}</text>')
    parts.append(f'<text class="soft" x="4" y="14">{escape(up)}</text>')
    parts.append(
        f'<text class="soft" text-anchor="middle" x="{(left + width - right) / 2}" y="{tall - 6}">'
        f"{escape(across)}</text>"
    )
    drawn = sorted(((name, [at(point) for point in line]) for name, line in lines.items()), key=lambda d: d[1][-1][1])
    labels = apart([places[-1][1] for _, places in drawn], 15, tall - bottom)
    for (name, places), y in zip(drawn, labels, strict=True):
        parts.append(f'<polyline class="curve" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>')
        parts += [f'<circle class="dot" r="3.5" cx="{x:.1f}" cy="{y:.1f}"/>' for x, y in places]
        if len(lines) > 1:
            parts.append(f'<text x="{width - right + 8}" y="{y + 4:.1f}">{escape(name)}</text>')
    return "".join([*parts, "</svg>"])

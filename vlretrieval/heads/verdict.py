"""An examination's findings, in sentences."""

from __future__ import annotations

import math
from collections import Counter

from vlretrieval.heads.figures import LayerStatistics
from vlretrieval.heads.laboratory import Findings
from vlretrieval.heads.layers import DIRECTIONS, Head
from vlretrieval.heads.roles import ROLES

NEAR = 1.0  # points of recall that a pruned model may lose and still count as level


def best_grounded(found: Findings, kind: str) -> Head | None:
    """The head of a kind whose grounding is most above chance; None where no places are known."""
    heads = [head for head in found.heads if found.layers[head[0]].kind == kind]
    rated = [(lift(found.layers[name], head), (name, head)) for name, head in heads]
    rated = [item for item in rated if not math.isnan(item[0])]
    return max(rated)[1] if rated else None


def lift(layer: LayerStatistics, head: int) -> float:
    """Grounding as a multiple of chance; NaN where no places are known."""
    return layer.of("grounding", head) / layer.chance["grounding"] if "grounding" in layer.chance else math.nan


def verdict(found: Findings) -> list[str]:
    """What the examination says, in sentences."""
    count = Counter(found.roles.values())
    shares = ", ".join(f"{count[role]} {role}" for role in ROLES if count[role])
    lines = [f"{len(found.heads)} heads in {len(found.layers)} layers: {shares}."]
    for kind, called in DIRECTIONS.items():
        best = best_grounded(found, kind)
        if best is None:
            continue
        layer, head = found.layers[best[0]], best[1]
        low, high = layer.interval("grounding", head)
        what = "patches of the thing a word names" if kind == "text_to_image" else "words that name what a patch shows"
        others = layer.of("others", head)
        beside = "" if math.isnan(others) else f"; as much of the other things gets {others:.2f}"
        lines.append(
            f"The best grounded {called} head is {found.title(best)}: {layer.of('grounding', head):.2f} of its weight "
            f"[{low:.2f}, {high:.2f}] lies on the {what}, {lift(layer, head):.1f} times chance "
            f"({layer.chance['grounding']:.2f}){beside}."
        )
    aligning = [head for head, role in found.roles.items() if role == "aligning"]
    if aligning:
        named = [
            f"{found.title((name, head))} ({found.layers[name].of('grounding', head):.2f} on what is named, "
            f"{found.layers[name].of('others', head):.2f} on as much of the other things)"
            for name, head in aligning
        ]
        lines.append(f"Aligning: {'; '.join(named)}.")
    single = [drop for drop in found.drops if drop.closure.scope == "head"]
    if single:
        k = found.plan.ablation.k
        needed = sorted((drop for drop in single if drop.matters), key=lambda drop: -drop.final[0])
        lines.append(
            f"All heads open, R@{k} is {found.recall:.1f} % (mean of both directions). Closing one head loses recall "
            f"beyond doubt (the whole 95 % interval above 0) for {len(needed)} of {len(single)} heads"
            + (": " + "; ".join(f"{d.closure.title} {points(d.final)}" for d in needed[:3]) if needed else "")
            + "."
        )
    level = [point for point in found.curve if found.curve[0].recall - point.recall <= NEAR]
    if len(found.curve) > 1:
        least = min(level, key=lambda point: point.left)
        lines.append(
            f"Closed one after another, the least needed first: {least.left} of {found.curve[0].left} heads keep "
            f"recall within {NEAR:g} point ({least.recall:.1f} %)."
        )
    return lines + [f"Near copies: {line}." for line in found.warnings]


def points(drop: tuple[float, float, float]) -> str:
    """A drop with its interval: "-4.3 points [-6.1, -2.4]" (of recall)."""
    value, low, high = drop
    return f"{-value:+.1f} points [{-high:+.1f}, {-low:+.1f}]"

"""What a head is called: one stated rule over its figures, the thresholds open to the config."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vlretrieval.heads.figures import LayerStatistics

ROLES = {
    "aligning": "looks at the patches of what a word names, or at the words that name what a patch shows",
    "sink": "rests on the first, last or separating tokens, or on one key whatever asks",
    "local": "looks at its neighbours",
    "global": "looks at everything nearly alike",
    "positional": "looks at places, whatever is there",
    "semantic": "looks at what is there, wherever it is",
}


@dataclass(frozen=True)
class Rule:
    """The first line that holds names the head.

    Args:
        aligning: cross-modal; the odds of its weight on the named thing are so many times those of an even spread
            (odds, since a share of 0.4 cannot be three times as large), and
        contrast: so many times what it gives as much of the picture's other known things (left out if there are none).
        sink: share of the weight on first, last and separating tokens together; of self-attention also on the one
            busiest key (that many words look at one thing of a picture is no rest).
        local: share on neighbours, of what is above an even spread: 0 as by chance, 1 all of it.
        spread: entropy as a share of the highest, from which a head is global.
        positional: share of its maps that place alone explains; below it the head is semantic.
    """

    aligning: float = 3.0
    contrast: float = 1.5
    sink: float = 0.5
    local: float = 0.5
    spread: float = 0.9
    positional: float = 0.5

    def __post_init__(self) -> None:
        if self.aligning < 1 or self.contrast < 1:
            raise ValueError(f"aligning={self.aligning}, contrast={self.contrast}: both are factors of at least 1")
        for name in ("sink", "local", "spread", "positional"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must be a share above 0, at most 1")

    def lines(self) -> list[tuple[str, str]]:
        """The rule in words, in its order: (role, condition)."""
        return [
            ("aligning", f"odds of grounding {self.aligning:g} x chance's, and {self.contrast:g} x the other things'"),
            ("sink", f"first + last + separators, or in self-attention one key, at least {self.sink:g} of the weight"),
            ("local", f"neighbours at least {self.local:g} of the way from chance to all"),
            ("global", f"entropy at least {self.spread:g} of the highest"),
            ("positional", f"place alone explains at least {self.positional:g}"),
            ("semantic", "none of these"),
        ]

    def role(self, layer: LayerStatistics, head: int) -> str:
        """The role of one head."""
        if self._aligns(layer, head):
            return "aligning"
        busiest = 0.0 if layer.kind in ("text_to_image", "image_to_text") else _or(layer.of("column", head), 0)
        if max(resting(layer, head), busiest) >= self.sink:
            return "sink"
        if local_excess(layer, head) >= self.local:
            return "local"
        if layer.of("entropy", head) >= self.spread:
            return "global"
        # a flat map has no position to be explained; it was global above, or it is no map at all
        return "positional" if _or(layer.of("position", head), 1) >= self.positional else "semantic"

    def _aligns(self, layer: LayerStatistics, head: int) -> bool:
        mass, others = layer.of("grounding", head), layer.of("others", head)
        if math.isnan(mass) or odds(mass) < self.aligning * odds(layer.chance["grounding"]):
            return False
        return math.isnan(others) or mass >= self.contrast * others


def odds(share: float) -> float:
    """share / (1 - share); infinite for 1."""
    return share / (1 - share) if share < 1 else math.inf


def resting(layer: LayerStatistics, head: int) -> float:
    """Share of a head's weight on first, last and separating tokens together."""
    return sum(_or(layer.of(name, head), 0) for name in ("first", "last", "separators"))


def local_excess(layer: LayerStatistics, head: int) -> float:
    """How far the share on neighbours goes from an even spread's (0) to all (1); 0 where there are no neighbours."""
    share, even = layer.of("neighbours", head), layer.chance.get("neighbours", math.nan)
    if math.isnan(share) or math.isnan(even) or even >= 1:
        return 0.0
    return (share - even) / (1 - even)


def _or(value: float, otherwise: float) -> float:
    return otherwise if math.isnan(value) else value

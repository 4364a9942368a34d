"""Which objects stand where in each scene of a split: a pure function of seed, split and settings.

Scenes are drawn one after another, so a longer split begins with the scenes of a shorter one.
"""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from random import Random
from typing import NamedTuple

from vlretrieval.data.scenes.vocabulary import DIAMETERS

# The content of a scene decides which split may hold it, so no content can be in two: tenths of all contents.
TENTHS = {"train": range(0, 8), "val": range(8, 9), "test": range(9, 10)}
PATIENCE = 20_000  # draws without a new scene before we say that there are no more


class Placed(NamedTuple):
    """One object: numbers of shape, colour, size and cell (0..8, row by row), and its centre as shares of the side."""

    shape: int
    colour: int
    size: int
    cell: int
    x: float
    y: float


Scene = tuple[Placed, ...]


@dataclass(frozen=True)
class Rules:
    """How scenes are laid out; see ``Scenes`` for the meaning, which also checks the values."""

    shapes: tuple[int, ...]
    colours: tuple[int, ...]
    min_objects: int
    max_objects: int
    placement: str
    jitter: float
    repeat: float


def tenth(kinds: Iterable[tuple[int, int, int]]) -> int:
    """0..9 for a scene's content: the shape, colour and size of its objects, whatever their order and places."""
    return zlib.crc32(bytes(chain.from_iterable(sorted(kinds)))) % 10


def draw_scenes(rules: Rules, seed: int, split: str, count: int) -> list[Scene]:
    """``count`` scenes, no two with equal objects in equal cells.

    Raises:
        ValueError: when the rules do not give so many different scenes.
    """
    # Only random() is used of the generator: its stream is promised to stay the same in later versions of Python.
    rng = Random(f"scenes/{seed}/{split}/layout")
    allowed = TENTHS[split]
    scenes: list[Scene] = []
    seen: set[tuple] = set()
    misses = 0
    while len(scenes) < count:
        kinds = _draw_kinds(rules, rng)
        if tenth(kinds) in allowed:
            scene = _place(rules, kinds, rng)
            full = tuple(sorted(placed[:4] for placed in scene))
            if full not in seen:
                seen.add(full)
                scenes.append(scene)
                misses = 0
                continue
        misses += 1
        if misses > PATIENCE:
            raise ValueError(
                f"{split}={count} scenes asked for, but these settings give about {len(scenes)} different ones in the "
                f"{split} split; ask for fewer, or allow more shapes, colours or objects"
            )
    return scenes


def _draw_kinds(rules: Rules, rng: Random) -> list[tuple[int, int, int]]:
    random = rng.random
    count = rules.min_objects + int(random() * (rules.max_objects - rules.min_objects + 1))
    kinds: list[tuple[int, int, int]] = []
    for _ in range(count):
        if kinds and random() < rules.repeat:
            shape, colour, _ = kinds[int(random() * len(kinds))]
        else:
            shape = rules.shapes[int(random() * len(rules.shapes))]
            colour = rules.colours[int(random() * len(rules.colours))]
        kinds.append((shape, colour, int(random() * 2)))
    return kinds


def _place(rules: Rules, kinds: list[tuple[int, int, int]], rng: Random) -> Scene:
    if rules.placement == "free":
        return _place_freely(kinds, rng)
    random = rng.random
    cells = list(range(9))
    scene = []
    for shape, colour, size in kinds:
        cell = cells.pop(int(random() * len(cells)))
        slack = (1 / 3 - DIAMETERS[size]) * rules.jitter
        x = (cell % 3 + 0.5) / 3 + (random() - 0.5) * slack
        y = (cell // 3 + 0.5) / 3 + (random() - 0.5) * slack
        scene.append(Placed(shape, colour, size, cell, x, y))
    return tuple(scene)


def _place_freely(kinds: list[tuple[int, int, int]], rng: Random) -> Scene:
    """Anywhere, but wholly inside, apart from each other, and with centres off the grid's lines, so that every
    object is clearly in one cell."""
    random = rng.random
    gap, off_line = 0.02, 0.04
    scene: list[Placed] = []
    tries = 0
    while len(scene) < len(kinds):
        shape, colour, size = kinds[len(scene)]
        half = DIAMETERS[size] / 2
        x = half + random() * (1 - 2 * half)
        y = half + random() * (1 - 2 * half)
        clear = all(abs(c - line) >= off_line for c in (x, y) for line in (1 / 3, 2 / 3))
        if clear and all(
            max(abs(x - other.x), abs(y - other.y)) >= half + DIAMETERS[other.size] / 2 + gap for other in scene
        ):
            scene.append(Placed(shape, colour, size, int(x * 3) + 3 * int(y * 3), x, y))
        tries += 1
        if tries % 200 == 0:  # the first ones stand in the way of the rest
            scene.clear()
    return tuple(scene)

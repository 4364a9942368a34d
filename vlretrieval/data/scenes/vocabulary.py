"""What a scene can hold and what a caption can say of it: shapes, colours, sizes, places, relations.

Everything is counted by its place in these tables; the words for it stand in the grammars.
"""

from collections.abc import Sequence

SHAPES = ("circle", "square", "triangle", "star", "cross", "diamond", "ring", "heart", "crescent", "arrow")

COLOURS = {
    "red": (214, 32, 38),
    "green": (34, 150, 60),
    "blue": (28, 84, 214),
    "yellow": (240, 200, 0),
    "purple": (124, 44, 168),
    "orange": (242, 120, 16),
    "black": (24, 24, 28),
    "pink": (250, 130, 186),
    "brown": (122, 74, 34),
    "cyan": (60, 196, 220),
}

SIZES = ("small", "large")
DIAMETERS = (0.19, 0.30)  # share of the picture's side; the large one fits a cell of the 3 x 3 grid

# A place is a set of cells of the 3 x 3 grid (row by row), as bits: "at the top" holds for the whole top row.
PLACES = {
    "top left": 0b000_000_001,
    "top right": 0b000_000_100,
    "bottom left": 0b001_000_000,
    "bottom right": 0b100_000_000,
    "middle": 0b000_010_000,
    "top": 0b000_000_111,
    "bottom": 0b111_000_000,
    "left": 0b001_001_001,
    "right": 0b100_100_100,
}
CORNERS_AND_MIDDLE = 5  # the first five places are one cell each
# of each place, the one with left and right exchanged, and the one with top and bottom exchanged
MIRRORED = ((1, 0, 3, 2, 4, 5, 6, 8, 7), (2, 3, 0, 1, 4, 6, 5, 7, 8))

RELATIONS = ("left", "right", "above", "below")
OPPOSITE = (1, 0, 3, 2)

ANY = -1  # in a Thing: this property is left open


def choose(what: str, given: int | Sequence[str], names: Sequence[str]) -> tuple[int, ...]:
    """The numbers of the shapes or colours asked for: the first ``given`` of them, or those named."""
    if isinstance(given, int):
        if not 1 <= given <= len(names):
            raise ValueError(f"{what}={given} must be from 1 to {len(names)}, or a list of names out of {list(names)}")
        return tuple(range(given))
    if isinstance(given, str):
        raise ValueError(f"{what}={given!r} must be a list of names, or how many; write {what}=[{given}]")
    unknown = [name for name in given if name not in names]
    if unknown or len(set(given)) != len(given) or not given:
        raise ValueError(f"{what}={list(given)} must be different names out of {list(names)}")
    return tuple(names.index(name) for name in given)

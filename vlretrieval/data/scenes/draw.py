"""Pictures of scenes: an outline is drawn once at eightfold size, reduced, kept, and pasted in the object's colour."""

import math
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw

from vlretrieval.data.scenes.layout import Scene
from vlretrieval.data.scenes.vocabulary import COLOURS, DIAMETERS, SHAPES

_OVERSAMPLE = 8
_PHASES = 4  # centres are rounded to quarters of a pixel, so that few stencils serve all places
_RGB = tuple(COLOURS.values())

Outline = list[tuple[float, float]]


def _turn(radii: list[float], start: float = -math.pi / 2) -> Outline:
    step = 2 * math.pi / len(radii)
    return [(r * math.cos(start + k * step), r * math.sin(start + k * step)) for k, r in enumerate(radii)]


def _heart() -> Outline:
    points = []
    for k in range(64):
        t = 2 * math.pi * k / 64
        x = 16 * math.sin(t) ** 3
        y = -(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t))
        points.append((x / 16.5, (y - 2.5) / 15.5))
    return points


def _crescent() -> Outline:
    # The part of the disc outside a second disc, moved to the right: two arcs between the same tips.
    tip = math.acos(0.35)
    outer = [(math.cos(a), math.sin(a)) for a in np.linspace(tip, 2 * math.pi - tip, 48)]
    radius = math.hypot(0.35 - 0.6, math.sin(tip))
    inner_tip = math.atan2(math.sin(tip), 0.35 - 0.6)
    angles = np.linspace(2 * math.pi - inner_tip, inner_tip, 48)
    inner = [(0.6 + radius * math.cos(a), radius * math.sin(a)) for a in angles]
    return [(x + 0.15, y) for x, y in outer + inner]


_BAR = 0.36
# Outlines in the square from -1 to 1, y down; areas are kept near each other, so that size is not read as shape.
_OUTLINES: dict[str, Outline] = {
    "circle": _turn([0.96] * 64),
    "square": [(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)],
    "triangle": [(0, -0.95), (1, 0.8), (-1, 0.8)],
    "star": [(x, y + 0.06) for x, y in _turn([1.0, 0.5] * 5)],
    "cross": [
        (-_BAR, -1), (_BAR, -1), (_BAR, -_BAR), (1, -_BAR), (1, _BAR), (_BAR, _BAR),
        (_BAR, 1), (-_BAR, 1), (-_BAR, _BAR), (-1, _BAR), (-1, -_BAR), (-_BAR, -_BAR),
    ],
    "diamond": [(0, -1), (0.8, 0), (0, 1), (-0.8, 0)],
    "ring": _turn([0.98] * 64),
    "heart": _heart(),
    "crescent": _crescent(),
    "arrow": [(0, -1), (0.95, -0.05), (0.36, -0.05), (0.36, 1), (-0.36, 1), (-0.36, -0.05), (-0.95, -0.05)],
}  # fmt: skip
_RING_HOLE = 0.52
assert tuple(_OUTLINES) == SHAPES

# (x0, y0, x1, y1) of each outline, in units of half a diameter.
_BOUNDS = [
    (min(x for x, _ in line), min(y for _, y in line), max(x for x, _ in line), max(y for _, y in line))
    for line in _OUTLINES.values()
]


@lru_cache(maxsize=4096)
def _stencil(shape: int, diameter: float, phase_x: int, phase_y: int) -> tuple[Image.Image, int]:
    """Coverage (mode L) of a shape, and the pixels from the stencil's corner to the one that holds the centre."""
    reach = math.ceil(diameter / 2) + 1
    side = (2 * reach + 1) * _OVERSAMPLE
    x0 = (reach + phase_x / _PHASES) * _OVERSAMPLE
    y0 = (reach + phase_y / _PHASES) * _OVERSAMPLE
    half = diameter / 2 * _OVERSAMPLE
    name = SHAPES[shape]
    image = Image.new("L", (side, side), 0)
    draw = ImageDraw.Draw(image)
    # Half a fine pixel less: PIL counts a polygon's border pixels to its inside.
    draw.polygon([(x0 + x * half - 0.5, y0 + y * half - 0.5) for x, y in _OUTLINES[name]], fill=255)
    if name == "ring":
        hole = [(x0 + x * half * _RING_HOLE - 0.5, y0 + y * half * _RING_HOLE - 0.5) for x, y in _OUTLINES["circle"]]
        draw.polygon(hole, fill=0)
    return image.reduce(_OVERSAMPLE), reach


def draw_scene(scene: Scene, image_size: int, tint: tuple[int, int, int], shades: np.ndarray) -> Image.Image:
    """The scene as an RGB picture.

    Args:
        scene: the objects; none overlaps another.
        image_size: side in pixels.
        tint: RGB of the ground.
        shades: (objects, 3) small int offsets to each object's colour.
    """
    picture = Image.new("RGB", (image_size, image_size), tint)
    for placed, shade in zip(scene, shades.tolist(), strict=False):
        fine_x = round(placed.x * image_size * _PHASES)
        fine_y = round(placed.y * image_size * _PHASES)
        stencil, reach = _stencil(placed.shape, DIAMETERS[placed.size] * image_size, fine_x % _PHASES, fine_y % _PHASES)
        corner = (fine_x // _PHASES - reach, fine_y // _PHASES - reach)
        red, green, blue = (min(max(c + s, 0), 255) for c, s in zip(_RGB[placed.colour], shade, strict=True))
        picture.paste((red, green, blue), corner, stencil)
    return picture


def box_of(shape: int, size: int, x: float, y: float, image_size: int) -> tuple[float, float, float, float]:
    """The object's bounds (x0, y0, x1, y1) in pixels of the picture, without the softened edge."""
    x0, y0, x1, y1 = _BOUNDS[shape]
    half = DIAMETERS[size] / 2
    return (
        (x + x0 * half) * image_size, (y + y0 * half) * image_size,
        (x + x1 * half) * image_size, (y + y1 * half) * image_size,
    )  # fmt: skip


def draw_tints(seed: int, split: str, count: int, objects: int) -> tuple[np.ndarray, np.ndarray]:
    """Quiet light grounds (N, 3) and colour offsets (N, O, 3), both int; the first rows do not depend on N."""
    rng = np.random.default_rng([seed, *split.encode()])
    numbers = rng.random((count, 4 + 3 * objects))
    light = 212 + 36 * numbers[:, :1]
    tint = light + 16 * (numbers[:, 1:4] - 0.5)
    shades = 20 * (numbers[:, 4:] - 0.5)
    return tint.clip(0, 255).round().astype(int), shades.round().astype(int).reshape(count, objects, 3)

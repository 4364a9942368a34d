"""PNG pictures of heads: overlays on the photo, words, grids of layers, likeness, closures, curves. Pillow alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from vlretrieval.evaluation.fonts import font_for
from vlretrieval.heads.ablate import Drop
from vlretrieval.heads.examples import Example
from vlretrieval.heads.laboratory import Findings
from vlretrieval.heads.page.scale import apart, ticks

INK, SOFT, BLUE, LINE = "#1c1f24", "#6a707a", "#1f5fbf", "#cfd3d9"
TILE, GAP, TEXT = 120, 14, 14

Row = tuple[str, Sequence[tuple[str, Image.Image]]]


def write_pictures(found: Findings, folder: str | Path, evolution: Sequence[tuple[int, Findings]] = ()) -> list[Path]:
    """All pictures of an examination as PNG files in the folder; their paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    made: dict[str, Image.Image] = {}
    for number, example in enumerate(found.examples, 1):
        made[f"example_{number}_heads"] = overlays(example, found, example.telling_word)
        made[f"example_{number}_words"] = words(example, found)
    made["layers"] = layer_grid(found)
    if found.alike:
        made["likeness"] = tiles(
            [
                (layer.title, [(name, heat(matrix)) for name, matrix in named])
                for layer in found.alike.values()
                for named in [(("maps, bits", layer.maps), ("outputs, CKA", layer.outputs), ("weights", layer.weights))]
            ],
            "How alike the heads of a layer are: dark is 1",
        )
    if found.drops:
        made["closures"] = bars(
            found.drops, f"Points of R@{found.plan.ablation.k} lost by closing heads, with 95 % intervals"
        )
    if len(found.curve) > 1:
        line = [(float(point.left), point.recall) for point in found.curve]
        made["pruning"] = curves({"": line}, "Recall against heads left", "heads left")
    if len(evolution) > 1:
        for measure in ("entropy", "grounding"):
            lines = {
                found.title((name, head)): [
                    (float(step), at.layers[name].of(measure, head)) for step, at in evolution if name in at.layers
                ]
                for name, head in found.heads
                if measure in found.layers[name].figures
            }
            if lines:
                made[f"training_{measure}"] = curves(
                    lines, f"{measure.capitalize()} of heads in training", "optimizer steps"
                )
    paths = []
    for name, picture in made.items():
        path = folder / f"{name}.png"
        partial = path.with_name(path.name + ".partial")
        picture.save(partial, "PNG", optimize=True)
        paths.append(partial.replace(path))
    return paths


def overlays(example: Example, found: Findings, word: int) -> Image.Image:
    """Where each head of the layers that look at or from the picture looks for a word."""
    rows: list[Row] = []
    for layer in found.layers.values():
        maps = example.layers.get(layer.name)
        if maps is None or "patches" not in (maps.columns, maps.rows):
            continue
        if maps.columns == "words":
            seen = maps.maps[:, :, word]  # patches that look at the word
        elif maps.rows == "words":
            seen = maps.maps[:, word]
        else:
            seen = maps.maps.mean(1)
        rows.append(
            (
                layer.title,
                [(f"{n + 1} {found.roles[layer.name, n]}", overlay(example, one)) for n, one in enumerate(seen)],
            )
        )
    return tiles(rows, f"{example.caption}   [{example.words[word]}]")


def words(example: Example, found: Findings, most: int = 24) -> Image.Image:
    """Where each word looks, by the heads of the first text-to-image layer: a row a word."""
    for layer in found.layers.values():
        maps = example.layers.get(layer.name)
        if maps is not None and maps.rows == "words" and maps.columns == "patches":
            rows: list[Row] = [
                (word, [(f"head {head + 1}", overlay(example, maps.maps[head, at], 72)) for head in range(layer.heads)])
                for at, word in list(enumerate(example.words))[:most]
            ]
            return tiles(rows, f"{layer.title}: {example.caption}", side=72)
    matrices = [
        (layer.title, [(f"head {n + 1}", heat(one)) for n, one in enumerate(example.layers[layer.name].maps)])
        for layer in found.layers.values()
        if layer.name in example.layers and example.layers[layer.name].rows == "words"
    ]
    return tiles(matrices, f"words by words: {example.caption}")


def layer_grid(found: Findings) -> Image.Image:
    """Mean maps, a row a layer."""
    rows: list[Row] = [
        (
            layer.title,
            [
                (f"{head + 1} {found.roles[layer.name, head]}", heat(matrix))
                for head, matrix in enumerate(layer.mean_map.numpy())
            ],
        )
        for layer in found.layers.values()
    ]
    return tiles(rows, "Mean maps: queries down, keys across, dark is much")


def overlay(example: Example, patches: npt.NDArray[Any], side: int = TILE) -> Image.Image:
    """The picture, dark where a head does not look."""
    picture = example.picture.convert("RGB").resize((side, side), Image.Resampling.BICUBIC)
    grid = (patches / max(float(patches.max()), 1e-9)).reshape(example.side, example.side)
    light = Image.fromarray((255 * grid).astype(np.uint8)).resize((side, side), Image.Resampling.NEAREST)
    return Image.composite(picture, Image.blend(picture, Image.new("RGB", picture.size), 0.86), light)


def heat(matrix: npt.NDArray[Any], side: int = TILE) -> Image.Image:
    """A matrix of shares, white to dark blue, the larger side ``side`` pixels."""
    share = np.sqrt(np.clip(matrix, 0, None) / max(float(matrix.max()), 1e-9))[..., None]
    colour = np.array([255, 255, 255]) * (1 - share) + np.array([16, 52, 120]) * share
    made = Image.fromarray(colour.astype(np.uint8))
    scale = side / max(made.size)
    return made.resize(
        (max(1, round(made.width * scale)), max(1, round(made.height * scale))), Image.Resampling.NEAREST
    )


def tiles(rows: Sequence[Row], title: str, side: int = TILE) -> Image.Image:
    """Pictures in rows under names."""
    most = max((len(pictures) for _, pictures in rows), default=1)
    high = side + TEXT + 2 * GAP
    label = 210
    canvas = Image.new("RGB", (label + most * (side + GAP) + GAP, 2 * GAP + TEXT + len(rows) * high), "white")
    draw = ImageDraw.Draw(canvas)
    write(draw, (GAP, GAP), title, canvas.width - 2 * GAP)
    for number, (name, pictures) in enumerate(rows):
        top = 2 * GAP + TEXT + number * high
        write(draw, (GAP, top), name, label - 2 * GAP)
        for place, (called, picture) in enumerate(pictures):
            left = label + place * (side + GAP)
            canvas.paste(picture, (left, top))
            draw.rectangle((left, top, left + picture.width - 1, top + picture.height - 1), outline=LINE)
            write(draw, (left, top + side + 3), called, side, SOFT)
    return canvas


def write(draw: ImageDraw.ImageDraw, at: tuple[float, float], text: str, width: int, colour: str = INK) -> None:
    """Text in a font that has its letters, cut to the width; left out where no font of this system has them."""
    font = font_for(text, TEXT)
    if font is None:
        text, font = "(no font here has these letters)", font_for("a", TEXT)
    while len(text) > 1 and draw.textlength(text, font) > width:
        text = text[:-2] + "…" if not text.endswith("…") else text[:-2] + "…"
    draw.text(at, text, colour, font)


def bars(drops: Sequence[Drop], title: str, most: int = 40) -> Image.Image:
    """Kinds, directions and layers, then the heads that cost most."""
    heads = sorted((d for d in drops if d.closure.scope == "head"), key=lambda d: -d.final[0])
    rows = [d for d in drops if d.closure.scope != "head"] + heads
    rows = rows[:most]
    lowest, highest = min(0.0, *(d.final[1] for d in rows)), max(0.1, *(d.final[2] for d in rows))
    marks = [mark for mark in ticks(lowest, highest) if lowest <= mark <= highest]
    label, plot, high = 260, 460, 24
    canvas = Image.new("RGB", (label + plot + 170, 3 * GAP + TEXT + high * len(rows) + 2 * TEXT), "white")
    draw = ImageDraw.Draw(canvas)
    write(draw, (GAP, GAP), title, canvas.width - 2 * GAP)

    def x(value: float) -> float:
        return label + plot * (value - lowest) / (highest - lowest)

    top = 2 * GAP + TEXT
    for mark in marks:
        draw.line((x(mark), top, x(mark), top + high * len(rows)), LINE)
        write(draw, (x(mark) - 8, top + high * len(rows) + 4), f"{mark:g}", 60, SOFT)
    for number, drop in enumerate(rows):
        y = top + high * number
        value, low, high_end = drop.final
        left, right = sorted((x(0), x(value)))
        write(draw, (GAP, y + 2), drop.closure.title, label - 2 * GAP)
        draw.rectangle((left, y + 3, max(right, left + 1), y + high - 6), BLUE if low > 0 or high_end < 0 else SOFT)
        draw.line((x(low), y + 11, x(high_end), y + 11), INK, 2)
        write(draw, (label + plot + 10, y + 2), f"{value:.1f} [{low:.1f}, {high_end:.1f}]", 150)
    return canvas


def curves(lines: Mapping[str, Sequence[tuple[float, float]]], title: str, across: str) -> Image.Image:
    """Lines through points, named at their ends."""
    lines = {n: [p for p in line if not math.isnan(p[1])] for n, line in lines.items()}
    lines = {name: line for name, line in lines.items() if line}
    every = [point for line in lines.values() for point in line]
    width, high, left, bottom, right = 980, 460, 60, 50, 260 if len(lines) > 1 else 30
    canvas = Image.new("RGB", (width, high), "white")
    draw = ImageDraw.Draw(canvas)
    write(draw, (GAP, GAP), title, width - 2 * GAP)
    if not every:
        return canvas
    marks = [ticks(min(p[axis] for p in every), max(p[axis] for p in every)) for axis in (0, 1)]

    def at(point: tuple[float, float]) -> tuple[float, float]:
        x, y = ((v - m[0]) / ((m[-1] - m[0]) or 1) for v, m in zip(point, marks, strict=True))
        return left + x * (width - left - right), high - bottom - y * (high - bottom - 50)

    for mark in marks[1]:
        y = at((marks[0][0], mark))[1]
        draw.line((left, y, width - right, y), LINE)
        write(draw, (8, y - 8), f"{mark:g}", left - 12, SOFT)
    for mark in marks[0]:
        write(draw, (at((mark, marks[1][0]))[0] - 10, high - bottom + 6), f"{mark:g}", 70, SOFT)
    write(draw, (left, high - TEXT - 8), across, 300, SOFT)
    drawn = sorted(((name, [at(point) for point in line]) for name, line in lines.items()), key=lambda d: d[1][-1][1])
    labels = apart([places[-1][1] for _, places in drawn], TEXT + 1, high - bottom - 6)
    for (name, places), y in zip(drawn, labels, strict=True):
        draw.line(places, BLUE, 2)
        for left_of, top_of in places:
            draw.ellipse((left_of - 3, top_of - 3, left_of + 3, top_of + 3), BLUE)
        if name:
            write(draw, (width - right + 8, y - 8), name, right - 12)
    return canvas

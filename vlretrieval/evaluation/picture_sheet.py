"""One picture to look at while a model trains: queries, their answers (right ones marked), and maps of its heads."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from vlretrieval.data.splits import Split
from vlretrieval.evaluation.fonts import Font, font_for
from vlretrieval.evaluation.head_maps import Map, head_maps
from vlretrieval.evaluation.inputs import Inputs
from vlretrieval.evaluation.outcome import Evaluation
from vlretrieval.evaluation.rerank import answers
from vlretrieval.metrics.scores import IntArray

SIDE = 112  # pixels of a picture on the sheet
GAP = 12
TEXT = 13  # pixels of a letter
SHOWN = 5  # answers of a query
COLUMN = 300  # for a caption that is a query
ROW = SIDE + 2 * GAP + TEXT
WIDTH = GAP + COLUMN + (SHOWN + 1) * (SIDE + GAP)
PER_ROW = (WIDTH - GAP) // (SIDE + GAP)
RIGHT, WRONG, PLAIN = "#2a8a3e", "#c0392b", "#999999"
INK, FAINT = "#222222", "#777777"


@dataclass
class Writing:
    """Captions as they can be drawn: with a font that has their letters, or by number where there is none.

    Args:
        file: a font file; None: any that fits.
        beside: name of the text file that has the captions in full.
    """

    file: str | None
    beside: str
    unseen: int = 0  # captions that could not be drawn

    def lines(self, text: str, number: int, width: int, most: int) -> tuple[list[str], Font | None]:
        """At most ``most`` lines of about ``width`` pixels, and the font to draw them in."""
        font = font_for(text, TEXT, self.file)
        if font is None:
            self.unseen += 1
            text = f"caption {number}: no font here has its letters; see {self.beside}"
            font = font_for(text, TEXT)
        wide = any(ord(letter) > 0x2E80 for letter in text)  # Chinese letters are twice as wide, and not set apart
        columns = max(8, width // (TEXT if wide else round(TEXT * 0.56)))
        return textwrap.wrap(text, columns, max_lines=most, placeholder=" ..."), font


@dataclass
class Sheet:
    """What was drawn: the picture, the same as text, and how many captions no font could draw."""

    picture: Image.Image
    text: str
    unseen: int

    def write(self, path: str | Path) -> Path:
        """The picture to ``path`` (PNG), the text beside it with the suffix .txt; each whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        for target, save in (
            (path.with_suffix(".txt"), lambda file: file.write(self.text.encode())),
            (path, lambda file: self.picture.save(file, "PNG")),
        ):
            partial = target.with_name(target.name + ".partial")
            with partial.open("wb") as file:
                save(file)
            partial.replace(target)
        return path


def picture_sheet(
    outcome: Evaluation,
    inputs: Inputs,
    model: Any,
    *,
    queries: int = 6,
    title: str = "",
    beside: str = "",
    font: str | None = None,
) -> Sheet:
    """Draws the same few queries of a split at every call, so that sheets of different epochs can be laid side by side.

    Args:
        outcome: of one gallery; of several, the first is shown.
        inputs: the split as the model is shown it, for the maps of the heads.
        queries: of each direction, spread evenly over the split.
        beside: name of the text file, to be pointed to.
        font: a font file for the captions; None: any that has their letters.
    """
    gallery = outcome.galleries[0]
    split = gallery.split
    scale, weight = (outcome.figures["protocol"]["rerank"].get(name) for name in ("logit_scale", "weight"))
    captions = np.unique(np.linspace(0, len(split.captions) - 1, queries).astype(int)).tolist()
    images = np.unique(np.linspace(0, len(split.image_ids) - 1, queries).astype(int)).tolist()
    to_image, to_text = (answers(gallery, way, SHOWN, scale, weight) for way in ("t2i", "i2t"))
    maps = [] if len(outcome.galleries) > 1 else maps_of_caption(model, inputs, captions[0])

    rows = len(captions) + len(images) + (1 + -(-len(maps) // PER_ROW) if maps else 0)
    drawing = Drawing(split, Writing(font, beside), rows, title)
    drawing.heading("caption, its picture, and the pictures found (green: right, red: wrong)")
    for caption in captions:
        drawing.caption_query(caption, to_image[caption])
    drawing.heading("picture, and the captions found")
    for image in images:
        drawing.image_query(image, to_text[image])
    if maps:
        drawing.heading("where each cross-modal head looks (bright), for the first caption and its picture")
        drawing.heads(captions[0], maps)
    return Sheet(drawing.canvas, "\n".join(drawing.text) + "\n", drawing.writing.unseen)


def maps_of_caption(model: Any, inputs: Inputs, caption: int) -> list[tuple[str, Map]]:
    """The maps of all cross-modal heads for a caption and its picture."""
    rows = np.array([caption])
    ids, mask = inputs.token_rows(inputs.captions, rows)
    return head_maps(model, inputs.pixels(inputs.split.caption_image[rows]), ids, mask)


class Drawing:
    """A sheet being drawn, row below row, and the same as text.

    Args:
        split: the pictures and captions.
        writing: how captions are drawn.
        rows: of pictures, in all.
    """

    def __init__(self, split: Split, writing: Writing, rows: int, title: str):
        self.split, self.writing, self.text = split, writing, [title]
        self.canvas = Image.new("RGB", (WIDTH, GAP + 4 * (TEXT + GAP) + rows * ROW), "white")
        self.draw = ImageDraw.Draw(self.canvas)
        self.top = GAP
        self.heading(title)

    def heading(self, text: str) -> None:
        self.draw.text((GAP, self.top), text, INK, font_for(text, TEXT))
        self.top += TEXT + GAP

    def caption_query(self, caption: int, found: IntArray) -> None:
        """A caption, its own picture, and the pictures ``found`` for it, best first."""
        good, own = true_of(self.split, caption, 0), int(self.split.caption_image[caption])
        self._caption(GAP, self.top, caption, COLUMN - GAP, 6)
        self._picture(GAP + COLUMN, own, "its picture")
        self.text.append(f"\ncaption {caption}: {self.split.captions[caption]}")
        self.text.append(f"  its picture: {self.split.image_ids[own]}")
        for place, image in enumerate(found.tolist(), 1):
            said, colour = verdict(place, image in good)
            self._picture(GAP + COLUMN + place * (SIDE + GAP), image, said, colour)
            self.text.append(f"  {said}  {self.split.image_ids[image]}")
        self.top += ROW

    def image_query(self, image: int, found: IntArray) -> None:
        """A picture, and the captions ``found`` for it, best first."""
        good = true_of(self.split, image, 1)
        self._picture(GAP, image, str(self.split.image_ids[image])[:18])
        self.text.append(f"\npicture {self.split.image_ids[image]}")
        left = GAP + SIDE + GAP
        for place, caption in enumerate(found.tolist(), 1):
            said, colour = verdict(place, caption in good)
            top = self.top + (place - 1) * ROW // SHOWN
            self.draw.text((left, top), said, colour, font_for(said, TEXT))
            self._caption(left + 60, top, caption, WIDTH - left - 72, 1, colour)
            self.text.append(f"  {said}  caption {caption}: {self.split.captions[caption]}")
        self.top += ROW

    def heads(self, caption: int, maps: Sequence[tuple[str, Map]]) -> None:
        """The picture of a caption as each head sees it."""
        image = int(self.split.caption_image[caption])
        self._caption(GAP, self.top, caption, COLUMN - GAP, 6)
        self._picture(GAP + COLUMN, image, "its picture")
        for number, (name, weights) in enumerate(maps):
            if number % PER_ROW == 0:
                self.top += ROW
            self._picture(GAP + number % PER_ROW * (SIDE + GAP), image, short(name), weights=weights)
        self.top += ROW

    def _caption(self, left: int, top: int, caption: int, width: int, most: int, colour: str = INK) -> None:
        lines, font = self.writing.lines(self.split.captions[caption], caption, width, most)
        for row, line in enumerate(lines):
            self.draw.text((left, top + row * (TEXT + 5)), line, colour, font)

    def _picture(self, left: int, image: int, said: str, colour: str = PLAIN, weights: Map | None = None) -> None:
        """A picture in a coloured frame, with a word below; with ``weights`` dark where they are small."""
        inside = SIDE - 6
        picture = self.split.picture(image, inside)
        factor = inside / max(picture.size)  # a small picture is shown larger
        size = (max(1, round(picture.width * factor)), max(1, round(picture.height * factor)))
        picture = picture.resize(size, Image.Resampling.BICUBIC)
        if weights is not None:
            heat = Image.fromarray((255 * weights).astype(np.uint8)).resize(size, Image.Resampling.BICUBIC)
            picture = Image.composite(picture, Image.blend(picture, Image.new("RGB", size), 0.8), heat)
        self.draw.rectangle((left, self.top, left + SIDE - 1, self.top + SIDE - 1), outline=colour, width=3)
        self.canvas.paste(picture, (left + (SIDE - size[0]) // 2, self.top + (SIDE - size[1]) // 2))
        font = font_for(said, TEXT - 1)
        if font is not None:
            self.draw.text((left, self.top + SIDE + 3), said, FAINT if colour == PLAIN else colour, font)


def verdict(place: int, right: bool) -> tuple[str, str]:
    """ "1 right" and its colour: told by the word too, not by the colour alone."""
    return (f"{place} right", RIGHT) if right else (f"{place} wrong", WRONG)


def short(name: str) -> str:
    """ "text-to-image, layer 1, head 2" -> "text-image L1 H2", to fit below a picture."""
    kind, layer, head = name.split(", ")
    return f"{kind.replace('-to-', '-')} L{layer.split()[1]} H{head.split()[1]}"


def true_of(split: Split, query: int, side: int) -> set[int]:
    """What is true of caption (side 0) or picture (side 1) ``query``."""
    pairs = split.positives[split.positives[:, side] == query]
    return set(pairs[:, 1 - side].tolist())

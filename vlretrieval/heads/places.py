"""Where things are, for the model's eye: boxes as patches, words as tokens, and the phrases that name a thing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vlretrieval.data.splits import Split
from vlretrieval.data.tokenizers import Tokenizer

BoolArray = npt.NDArray[np.bool_]
Box = tuple[float, float, float, float]

COVERED = 0.25  # a patch belongs to a thing if so much of it, or of the thing, is common to both
ARTICLE = re.compile(r"(?:an?|the)\s+", re.IGNORECASE)  # begins a phrase, and names nothing
STOPS = re.compile(r"[^\w\s]+", re.UNICODE)  # what separates: commas, full stops


class Named(NamedTuple):
    """A phrase of a caption, ``text[start:end]``, and the boxes of what it names, in pixels of the picture."""

    start: int
    end: int
    boxes: tuple[Box, ...]


class Places(NamedTuple):
    """M phrases of B pairs, as masks.

    Attributes:
        pair: (M,) int64, the pair of each.
        tokens: (M, L) bool, the tokens that name the thing.
        patches: (M, P) bool, the image tokens that show it; P counts the class token, which shows nothing.
        other_patches: (M, P) bool, those of the picture's other known things.
        other_tokens: (M, L) bool, those that name other things.
    """

    pair: Tensor
    tokens: Tensor
    patches: Tensor
    other_patches: Tensor
    other_tokens: Tensor

    def __len__(self) -> int:
        return len(self.pair)


def named_things(split: Split, caption: int) -> list[Named]:
    """The phrases of a caption that name things whose places are known; none for most data sets.

    Drawn scenes know them exactly; an article before them is no part of the name. Elsewhere a region's label that
    stands in the caption as words of its own names all regions of that label.
    """
    regions = split.regions(int(split.caption_image[caption]))
    if not regions:
        return []
    if hasattr(split, "mentions"):
        text = split.captions[caption]
        return [
            Named(_after_article(text, mention.start), mention.end, tuple(regions[o].box for o in mention.objects))
            for mention in split.mentions(caption)
        ]
    boxes: dict[str, list[Box]] = {}
    for region in regions:
        boxes.setdefault(region.label.casefold(), []).append(region.box)
    text = split.captions[caption].casefold()
    if len(text) != len(split.captions[caption]):
        return []  # places in the folded text are not places in the text
    return [
        Named(found.start(), found.end(), tuple(of))
        for label, of in boxes.items()
        for found in re.finditer(rf"(?<!\w){re.escape(label)}(?!\w)", text)
    ]


def _after_article(text: str, start: int) -> int:
    found = ARTICLE.match(text, start)
    return found.end() if found else start


def patches_of(boxes: Sequence[Box], grid: tuple[int, int], size: tuple[float, float]) -> BoolArray:
    """(rows * columns,) bool, the patches that show what is in the boxes.

    A patch does if a quarter of it, or of the box, is common to both, and so does the one that shares most with it.

    Args:
        grid: (rows, columns) of patches.
        size: (width, height) of the picture that the boxes are in, which the grid covers.
    """
    rows, columns = grid
    width, height = size[0] / columns, size[1] / rows
    left, top = np.arange(columns) * width, np.arange(rows) * height
    inside = np.zeros((rows, columns), dtype=bool)
    for x0, y0, x1, y1 in boxes:
        across = np.clip(np.minimum(x1, left + width) - np.maximum(x0, left), 0, None)
        down = np.clip(np.minimum(y1, top + height) - np.maximum(y0, top), 0, None)
        common = down[:, None] * across
        smaller = min(width * height, max((x1 - x0) * (y1 - y0), 1e-9))
        if common.max() > 0:
            inside |= (common >= COVERED * smaller) | (common == common.max())
    return inside.reshape(-1)


def seen_box(box: Box, picture: tuple[int, int], transform: Any) -> tuple[Box, float]:
    """A box of the picture (width, height) as the model's square shows it, and the square's side.

    The square is the one that an :class:`~vlretrieval.data.transforms.EvalTransform` makes.
    """
    side = float(transform.image_size)
    width, height = picture
    mode = getattr(transform, "mode", "squash")
    if mode == "squash":
        across, down, left, top = side / width, side / height, 0.0, 0.0
    else:
        across = down = side / (min(width, height) if mode == "crop" else max(width, height))
        left, top = (side - width * across) / 2, (side - height * down) / 2
    x0, y0, x1, y1 = box
    return (x0 * across + left, y0 * down + top, x1 * across + left, y1 * down + top), side


def tokens_between(offsets: Sequence[tuple[int, int]], start: int, end: int) -> BoolArray:
    """(L,) bool, the tokens that share letters with ``text[start:end]``."""
    return np.array([first < end and last > start for first, last in offsets], dtype=bool)


def separators(offsets: Sequence[tuple[int, int]], text: str) -> BoolArray:
    """(L,) bool, the tokens that are nothing but punctuation."""
    return np.array([STOPS.fullmatch(text[first:last].strip()) is not None for first, last in offsets], dtype=bool)


def locate(
    split: Split,
    captions: Sequence[int],
    tokenizer: Tokenizer,
    transform: Any,
    length: int,
    grid: tuple[int, int],
    prefix: int,
) -> Places:
    """The named things of some captions and their own pictures, as the model is shown them.

    Args:
        length: L, tokens of the longest caption, padding included.
        grid: (rows, columns) of patches; prefix: image tokens before the first patch (1 with a class token).
    """
    pair, tokens, patches, others, other_tokens = [], [], [], [], []
    for number, caption in enumerate(captions):
        named = named_things(split, caption)
        if not named:
            continue
        image = int(split.caption_image[caption])
        offsets = tokenizer.offsets(split.captions[caption])
        picture = split.picture(image).size
        known = [region.box for region in split.regions(image)]
        spoken = [padded(tokens_between(offsets, thing.start, thing.end), length) for thing in named]
        for thing, own in zip(named, spoken, strict=True):
            shown = _shown(thing.boxes, picture, transform, grid, prefix)
            if not own.any() or not shown.any():  # cut off by the context length, or by a crop
                continue
            rest = tuple(box for box in known if box not in thing.boxes)
            pair.append(number)
            tokens.append(own)
            patches.append(shown)
            others.append(_shown(rest, picture, transform, grid, prefix) & ~shown)
            other_tokens.append(np.logical_or.reduce(spoken) & ~own)
    width = prefix + grid[0] * grid[1]

    def stacked(rows: list[BoolArray], columns: int) -> Tensor:
        return torch.from_numpy(np.stack(rows) if rows else np.zeros((0, columns), dtype=bool))

    return Places(
        torch.tensor(pair, dtype=torch.int64),
        stacked(tokens, length),
        stacked(patches, width),
        stacked(others, width),
        stacked(other_tokens, length),
    )


def _shown(
    boxes: Sequence[Box], picture: tuple[int, int], transform: Any, grid: tuple[int, int], prefix: int
) -> BoolArray:
    seen = [seen_box(box, picture, transform) for box in boxes]
    side = seen[0][1] if seen else 1.0
    shown = patches_of([box for box, _ in seen], grid, (side, side))
    return np.concatenate([np.zeros(prefix, dtype=bool), shown])


def padded(mask: BoolArray, length: int) -> BoolArray:
    """A mask of a text's tokens, with False for what the batch is padded by."""
    return np.concatenate([mask[:length], np.zeros(max(0, length - len(mask)), dtype=bool)])


def words_of(offsets: Sequence[tuple[int, int]], text: str) -> list[tuple[str, list[int]]]:
    """The text's words with their tokens, for showing: pieces of one word together, a Chinese letter by itself.

    The start and end tokens are called "[start]" and "[end]".
    """
    words: list[tuple[str, list[int]]] = [("[start]", [0])]
    spans: list[tuple[int, int]] = [(0, 0)]
    blanks: list[int] = []  # tokens of nothing but blanks go with the word that follows
    for number, (first, last) in enumerate(offsets[1:-1], start=1):
        before = spans[-1]
        if first == last:
            blanks.append(number)
            continue
        same = first < before[1]  # bytes of one letter
        whole = before[1] == first and first > 0 and _joined(text[first - 1 : first + 1])
        if len(words) > 1 and (same or whole):
            spans[-1] = (before[0], max(before[1], last))
            words[-1] = (text[spans[-1][0] : spans[-1][1]], [*words[-1][1], number])
        else:
            spans.append((first, last))
            words.append((text[first:last], [*blanks, number]))
            blanks = []
    words[-1][1].extend(blanks)
    return [*words, ("[end]", [len(offsets) - 1])]


def _joined(letters: str) -> bool:
    """Whether two neighbouring letters belong to one word."""
    return len(letters) == 2 and all(sign.isalnum() and not 0x2E80 <= ord(sign) <= 0x9FFF for sign in letters)

"""Marks in a rendered caption, so that the words of each thing can be found again in the finished sentence."""

from collections.abc import Callable
from typing import NamedTuple

from vlretrieval.data.scenes.query import Query

_OPEN, _CLOSE = 0xE000, "\ue0ff"  # private characters: no grammar uses them

# (query, form, marked) -> text. ``form`` picks among the grammar's sentences; equal arguments give equal text.
Grammar = Callable[[Query, int, bool], str]


class Mention(NamedTuple):
    """``text[start:end]`` of a caption speaks of these objects of its scene."""

    start: int
    end: int
    objects: tuple[int, ...]


def mark(phrase: str, thing: int) -> str:
    """The phrase, marked as that of thing number ``thing``."""
    return f"{chr(_OPEN + thing)}{phrase}{_CLOSE}"


def capitalised(text: str) -> str:
    """With a capital first letter, which may stand behind a mark."""
    if ord(text[0]) >= _OPEN:
        return text[0] + text[1].upper() + text[2:]
    return text[0].upper() + text[1:]


def read_marks(marked: str) -> tuple[str, list[tuple[int, int, int]]]:
    """The plain text, and (thing, start, end) of each marked phrase in it, in reading order."""
    plain: list[str] = []
    spans: list[tuple[int, int, int]] = []
    thing, start = -1, 0
    for letter in marked:
        if letter == _CLOSE:
            spans.append((thing, start, len(plain)))
        elif _OPEN <= ord(letter) < _OPEN + 64:
            thing, start = ord(letter) - _OPEN, len(plain)
        else:
            plain.append(letter)
    return "".join(plain), spans

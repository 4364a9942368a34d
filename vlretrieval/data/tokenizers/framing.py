"""Start and end tokens around a text's ids, and the letters that ids stand for."""

from collections.abc import Iterable, Sequence


def check_context(context_length: int) -> None:
    if context_length < 3:
        raise ValueError(f"context_length={context_length} has no room for start, one token and end; use at least 3")


def framed(rows: Iterable[Sequence[int]], start: int, end: int, context_length: int) -> list[list[int]]:
    return [[start, *row[: context_length - 2], end] for row in rows]


def framed_offsets(inner: Sequence[tuple[int, int]], text: str, context_length: int) -> list[tuple[int, int]]:
    return [(0, 0), *inner[: context_length - 2], (len(text), len(text))]


def without_blanks(text: str, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans without the blanks that a token may begin with."""
    shorter = []
    for start, end in spans:
        while start < end and text[start].isspace():
            start += 1
        shorter.append((start, end))
    return shorter

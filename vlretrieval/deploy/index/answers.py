"""What a search found, as a table, as JSON, or as an HTML contact sheet that is one file."""

from __future__ import annotations

import base64
import html
import json
import statistics
from dataclasses import asdict, dataclass
from typing import Any

from vlretrieval.data.images import BadImage, open_image
from vlretrieval.deploy.index.look import thumbnail
from vlretrieval.deploy.index.opened import Found, Hit, Index

SIDE = 224  # pixels of a picture on the contact sheet
STYLE = """
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --line: #c4c4c0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e4e0; --paper: #16181b; --line: #565a60; } }
body { font: 14px/1.45 system-ui, sans-serif; max-width: 1240px; margin: 2em auto; padding: 0 1em; color: var(--ink);
  background: var(--paper); }
h2 { margin-top: 2em; border-bottom: 1px solid var(--line); font-size: 1.2em; overflow-wrap: anywhere; }
.row { display: flex; flex-wrap: wrap; gap: 12px; }
figure { margin: 0; width: 184px; font-size: 12px; overflow-wrap: anywhere; }
figure img { width: 184px; height: 184px; object-fit: contain; background: #8882; }
"""


@dataclass(frozen=True)
class Answer:
    """A query (the text, or the picture's name) and what was found."""

    query: str
    found: Found


def table(index: Index, answers: list[Answer], weight: float | None) -> str:
    """A line that says what the order is by, one line a result, and milliseconds by stage."""
    lines: list[str] = []
    for answer in answers:
        hits = answer.found.hits
        if len(answers) > 1:
            lines += [f"== {answer.query}"]
        matched = [hit for hit in hits if hit.match is not None]
        by = "match" if weight is None else f"score = logit_scale * cosine + {weight:g} * match"
        lines.append(f"{len(hits)} of {len(index):,}: " + (f"re-ranked by {by}" if matched else "by cosine"))
        columns = ["cosine"]
        if matched:
            columns = ["match", "cosine", "place"] if weight is None else ["score", "match", "cosine", "place"]
        lines.append("rank" + "".join(f"{name:>10}" for name in columns))
        for rank, hit in enumerate(hits, 1):
            lines.append(f"{rank:>4}" + "".join(f"{cell(hit, name):>10}" for name in columns) + f"   {hit.id}")
    return "\n".join([*lines, milliseconds(answers)])


def cell(hit: Hit, name: str) -> str:
    value = getattr(hit, name)
    return "-" if value is None else str(value) if name == "place" else f"{value:.4f}"


def milliseconds(answers: list[Answer]) -> str:
    """ "ms: encode 1.2, shortlist 0.8, ...", of several queries the median and the 95th percentile."""
    stages = list(answers[0].found.milliseconds) if answers else []
    if len(answers) == 1:
        laps = answers[0].found.milliseconds
        return (
            "ms: " + ", ".join(f"{stage} {laps[stage]:.1f}" for stage in stages) + f", in all {sum(laps.values()):.1f}"
        )
    columns = {stage: [answer.found.milliseconds[stage] for answer in answers] for stage in stages}
    columns["in all"] = [sum(answer.found.milliseconds.values()) for answer in answers]
    said = [f"{stage} {percentile(values, 50):.1f} / {percentile(values, 95):.1f}" for stage, values in columns.items()]
    return f"ms, p50 / p95 of {len(answers)} queries: " + ", ".join(said)


def percentile(values: list[float], which: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[which - 1]


def json_of(index: Index, answers: list[Answer]) -> str:
    """A list of {"query", "hits", "milliseconds"}."""
    return json.dumps([as_data(answer) for answer in answers], indent=1, ensure_ascii=False)


def as_data(answer: Answer) -> dict[str, Any]:
    return {
        "query": answer.query,
        "hits": [asdict(hit) for hit in answer.found.hits],
        "milliseconds": {stage: round(value, 3) for stage, value in answer.found.milliseconds.items()},
    }


def html_sheet(index: Index, answers: list[Answer]) -> str:
    """One self-contained page: each query with its pictures. No script, no request."""
    parts = [f"<h1>{len(answers)} quer{'y' if len(answers) == 1 else 'ies'}, {len(index):,} pictures</h1>"]
    for answer in answers:
        figures = "".join(figure(index, hit) for hit in answer.found.hits)
        parts.append(f"<h2>{html.escape(answer.query)}</h2><div class=row>{figures}</div>")
    parts.append(f"<p>{html.escape(milliseconds(answers))}</p>")
    head = "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
    return f"{head}<title>Search results</title><style>{STYLE}</style>{''.join(parts)}</html>\n"


def figure(index: Index, hit: Hit) -> str:
    scores = f"cosine {hit.cosine:.3f}" + (
        "" if hit.match is None else f", match {hit.match:.2f}, {hit.place} by cosine"
    )
    return f"<figure>{picture(index, hit.id)}{html.escape(hit.id)}<br>{scores}</figure>"


def picture(index: Index, id: str) -> str:
    try:
        jpeg = small(index, id, SIDE)
    except BadImage as error:
        return f"<p>{html.escape(error.reason)}</p>"
    return f"<img alt='' src='data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}'>"


def small(index: Index, id: str, side: int) -> bytes:
    """A thumbnail as JPEG: the stored one, or made of the picture's file.

    Raises:
        KeyError: no such picture in the index.
        BadImage: it has none, and the file is gone.
    """
    stored = index.thumbnail(id)
    return thumbnail(open_image(index.picture(id), name=id), side) if stored is None else stored

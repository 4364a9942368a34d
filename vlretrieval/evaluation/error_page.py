"""One self-contained HTML page of what a model gets wrong: no script, no request, the pictures are in the page.

Worst queries with their answers, hubs, near-duplicates, recall by length of caption and by object count, and where the
deciding heads look.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from vlretrieval.data.splits import Split
from vlretrieval.evaluation.outcome import Evaluation, Gallery
from vlretrieval.evaluation.overlays import deciding_head
from vlretrieval.evaluation.rerank import answers
from vlretrieval.metrics.hubness import occurrences
from vlretrieval.metrics.ranks import Ranks
from vlretrieval.metrics.scores import IntArray, rows_float32

SHOWN = 5  # answers of a query
SIDE = 128  # pixels of a thumbnail

STYLE = """
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --card: #f4f4f2; --line: #c4c4c0; --good: #1f7a35;
  --bad: #b83227; --bar: #3f6fa8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e4e0; --paper: #16181b; --card: #22252a; --line: #565a60;
  --good: #5cc878; --bad: #ee7b70; --bar: #7fabe0; } }
body { font: 14px/1.45 system-ui, sans-serif; max-width: 1240px; margin: 2em auto; padding: 0 1em; color: var(--ink);
  background: var(--paper); }
h1 { font-size: 1.5em; }
h2 { margin-top: 2.2em; border-bottom: 1px solid var(--line); }
.case { display: flex; flex-wrap: wrap; gap: 10px; align-items: flex-start; margin: 14px 0; padding: 10px;
  background: var(--card); }
figure { margin: 0; width: 136px; font-size: 12px; overflow-wrap: anywhere; }
figure img { width: 128px; height: 128px; object-fit: contain; border: 4px solid var(--line); }
figure.right img { border-color: var(--good); }
figure.wrong img { border-color: var(--bad); border-style: dashed; }
.text { width: 180px; }
.text b, li.right { color: var(--good); font-weight: 600; }
ol { margin: 0; padding-left: 1.8em; max-width: 420px; }
table { border-collapse: collapse; }
td { padding: 3px 10px; text-align: right; }
td:first-child, td:last-child { text-align: left; }
.bar { display: inline-block; height: 10px; background: var(--bar); vertical-align: middle; }
"""


def error_page(
    outcome: Evaluation,
    path: str | Path,
    *,
    model: Any = None,
    worst: int = 20,
    title: str = "What the model gets wrong",
) -> Path:
    """Write the page.

    Args:
        outcome: of one gallery.
        model: for the attention of the deciding heads; None leaves it out.
        worst: queries of each direction, items of each other list.
    """
    if len(outcome.galleries) > 1:
        raise ValueError("the error page shows one gallery; choose protocol=full")
    gallery = outcome.galleries[0]
    stage = "reranked" if "reranked" in outcome.ranks else "first_stage"
    t2i, i2t = outcome.ranks[stage]
    scale, weight = (outcome.figures["protocol"]["rerank"].get(name) for name in ("logit_scale", "weight"))
    lists = {way: answers(gallery, way, SHOWN, scale, weight) for way in ("t2i", "i2t")}
    found = outcome.figures[stage]
    k = int(outcome.figures["protocol"]["ks"][0])
    nobody = ["<p>None: the first answer of each is right.</p>"]
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f"<p>{html.escape(_summary(outcome.figures, stage))}</p>",
        "<h2>Captions that find their picture last</h2>",
        *([_text_query(gallery, t2i, row, lists["t2i"], model) for row in _worst(t2i, worst)] or nobody),
        "<h2>Pictures that find their caption last</h2>",
        *([_image_query(gallery, i2t, row, lists["i2t"]) for row in _worst(i2t, worst)] or nobody),
        "<h2>Hubs: pictures that answer most captions</h2>",
        _hubs(gallery, lists["t2i"], worst // 2),
        "<h2>Hubs: captions that answer most pictures</h2>",
        _text_hubs(gallery, lists["i2t"], worst // 2),
        "<h2>Near-duplicates the model cannot tell apart</h2>",
        _duplicates(gallery, worst // 2),
        f"<h2>R@{k} by caption length (text to image, {found['t2i'][f'R@{k}']:.1f} % in all)</h2>",
        _by_length(gallery.split, t2i, k),
        f"<h2>R@{k} by number of objects (text to image)</h2>",
        _by_objects(gallery.split, t2i, k),
    ]
    page = "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
    page += f"<title>{html.escape(title)}</title><style>{STYLE}</style>{''.join(parts)}</html>\n"
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(page, encoding="utf-8")
    return partial.replace(path)


def _summary(figures: dict[str, Any], stage: str) -> str:
    split = figures["protocol"]["split"]
    recalls = ", ".join(
        f"{way} " + ", ".join(f"{n} {v:.1f} %" for n, v in figures[stage][way].items() if n.startswith("R@"))
        for way in ("t2i", "i2t")
    )
    return (
        f"Split {split['name']}, {split['images']} images, {split['captions']} captions (hash {split['hash']}). "
        f"{'Re-ranked' if stage == 'reranked' else 'First stage'}: {recalls}. "
        "A green border is a right answer, a dashed red one is wrong; ties count against the model."
    )


def _worst(ranks: Ranks, count: int) -> list[int]:
    """Rows of the queries answered worst, those whose first answer is right left out."""
    rank = ranks.rank()
    return [row for row in np.argsort(-rank, kind="stable")[:count].tolist() if rank[row] > 1]


def _text_query(gallery: Gallery, ranks: Ranks, row: int, lists: IntArray, model: Any) -> str:
    split, caption = gallery.split, int(ranks.query[row])
    good = set(split.positives[split.positives[:, 0] == caption, 1].tolist())
    own = int(split.caption_image[caption])
    cells = [
        f"<div class=text>{html.escape(split.captions[caption])}<br>found at place <b>{ranks.rank()[row]:.0f}</b> of "
        f"{ranks.gallery}</div>",
        _figure(split, own, "right", "its picture"),
    ]
    wrong = next((image for image in lists[caption].tolist() if image not in good), None)
    if model is not None and wrong is not None and gallery.texts.tokens is not None:
        looked = deciding_head(model, gallery.images, gallery.texts, caption, own, wrong)
        if looked is not None:
            cells.append(_figure(split, own, "right", f"where {looked[0]} looks", overlay=looked[1]))
    for place, image in enumerate(lists[caption].tolist(), 1):
        cells.append(_figure(split, image, "right" if image in good else "wrong", f"answer {place}"))
    return f"<div class=case>{''.join(cells)}</div>"


def _image_query(gallery: Gallery, ranks: Ranks, row: int, lists: IntArray) -> str:
    split, image = gallery.split, int(ranks.query[row])
    good = set(split.positives[split.positives[:, 1] == image, 0].tolist())
    answered = "".join(
        f"<li class={'right' if caption in good else 'wrong'}>{html.escape(split.captions[caption])}</li>"
        for caption in lists[image].tolist()
    )
    own = "".join(f"<li>{html.escape(split.captions[c])}</li>" for c in sorted(good)[:SHOWN])
    return (
        f"<div class=case>{_figure(split, image, 'right', f'first true caption at place {ranks.rank()[row]:.0f}')}"
        f"<div><b>answers</b><ol>{answered}</ol></div><div><b>true captions</b><ol>{own}</ol></div></div>"
    )


def _hubs(gallery: Gallery, lists: IntArray, count: int) -> str:
    times = occurrences(lists, len(gallery.split.image_ids))
    order = np.argsort(-times, kind="stable")[:count].tolist()
    share = lists.size / len(times)
    cells = [_figure(gallery.split, i, "plain", f"in {times[i]} lists of {SHOWN} (even: {share:.1f})") for i in order]
    return f"<div class=case>{''.join(cells)}</div>"


def _text_hubs(gallery: Gallery, lists: IntArray, count: int) -> str:
    times = occurrences(lists, len(gallery.split.captions))
    order = np.argsort(-times, kind="stable")[:count].tolist()
    return (
        "<ol>"
        + "".join(f"<li>{times[c]} lists: {html.escape(gallery.split.captions[c])}</li>" for c in order)
        + "</ol>"
    )


def nearest_pairs(embeddings: Any, count: int, block: int = 1024) -> list[tuple[float, int, int]]:
    """The ``count`` most similar pairs of different rows, (cosine, i, j) with i < j, most similar first; streamed."""
    best: list[tuple[float, int, int]] = []
    for top in range(0, len(embeddings), block):
        rows = rows_float32(embeddings, top, top + block)
        for left in range(top, len(embeddings), block):
            scores = rows @ rows_float32(embeddings, left, left + block).T
            if left == top:
                scores[np.tril_indices_from(scores)] = -np.inf
            keep = min(count, scores.size)
            flat = np.argpartition(-scores, keep - 1, axis=None)[:keep]
            i, j = np.unravel_index(flat, scores.shape)
            best += zip(scores[i, j].tolist(), (i + top).tolist(), (j + left).tolist(), strict=True)
            best = sorted((pair for pair in best if np.isfinite(pair[0])), key=lambda pair: (-pair[0], pair[1:]))[
                :count
            ]
    return best


def _duplicates(gallery: Gallery, count: int) -> str:
    split = gallery.split
    cells = []
    for cosine, one, other in nearest_pairs(gallery.images.embedding, count):
        pair = _figure(split, one, "plain", f"cosine {cosine:.4f}") + _figure(
            split, other, "plain", str(split.image_ids[other])
        )
        cells.append(f"<div class=case>{pair}</div>")
    return "".join(cells)


def _by_length(split: Split, ranks: Ranks, k: int) -> str:
    captions = [split.captions[row] for row in ranks.query]
    # Chinese and the like are written without blanks: there a caption's length is its characters
    spaced = 2 * sum(" " in caption.strip() for caption in captions) >= len(captions)
    lengths = np.array([len(caption.split()) if spaced else len(caption) for caption in captions])
    edges = np.unique(np.quantile(lengths, np.linspace(0, 1, 9)).astype(int))
    groups = np.searchsorted(edges[1:-1], lengths, side="right")
    unit = "words" if spaced else "characters"
    bounds = [(lengths[groups == g].min(), lengths[groups == g].max()) for g in np.unique(groups)]
    names = [f"{low} {unit}" if low == high else f"{low} to {high} {unit}" for low, high in bounds]
    return _bars(names, groups, ranks.hits(k))


def _by_objects(split: Split, ranks: Ranks, k: int) -> str:
    counts = np.array([len(split.regions(image)) for image in range(len(split.image_ids))])
    if not counts.any():
        return "<p>This data set has no object lists.</p>"
    groups = counts[split.caption_image[ranks.query]]
    return _bars([f"{g} objects" for g in np.unique(groups)], groups, ranks.hits(k))


def _bars(names: Sequence[str], groups: npt.NDArray[Any], hits: npt.NDArray[np.float64]) -> str:
    rows = []
    for name, group in zip(names, np.unique(groups), strict=True):
        share = 100 * hits[groups == group].mean()
        rows.append(
            f"<tr><td>{html.escape(name)}<td>{(groups == group).sum()} queries<td>{share:.1f} %"
            f"<td><span class=bar style='width:{3 * share:.0f}px'></span>"
        )
    return f"<table>{''.join(rows)}</table>"


def _figure(split: Split, image: int, kind: str, caption: str, overlay: npt.NDArray[np.float32] | None = None) -> str:
    picture = split.picture(image).copy()
    picture.thumbnail((SIDE, SIDE))
    if overlay is not None:
        heat = Image.fromarray((255 * overlay).astype(np.uint8)).resize(picture.size, Image.Resampling.BICUBIC)
        dark = Image.blend(picture, Image.new("RGB", picture.size), 0.75)
        picture = Image.composite(picture, dark, heat)
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=80)
    data = base64.b64encode(buffer.getvalue()).decode()
    return f"<figure class={kind}><img alt='' src='data:image/jpeg;base64,{data}'>{html.escape(caption)}</figure>"

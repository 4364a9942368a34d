"""What re-ranking buys: recall against top_k, against milliseconds a query and bytes kept; stage one is the ceiling.

Re-ranking k candidates can at best find what stage one has among its first k: its recall@k is the ceiling. Times are
this process's processor time for one query at a time: encode it, score the gallery by cosine, run the heads over its
shortlist, with what is kept of the gallery kept already.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vlretrieval.evaluation.encode import encode_images, encode_texts, evaluating
from vlretrieval.evaluation.evaluate import reranked
from vlretrieval.evaluation.inputs import Inputs
from vlretrieval.evaluation.matching import match_shortlists
from vlretrieval.evaluation.outcome import Gallery, Shortlists
from vlretrieval.metrics.ranks import rank_both
from vlretrieval.metrics.recall import recall_at
from vlretrieval.metrics.scores import IntArray

WAYS = ("t2i", "i2t")
NEAR_BEST = 0.1  # points of recall


def frontier(
    model: Any,
    inputs: Inputs,
    top_ks: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    *,
    k: int = 1,
    weight: float | None = None,
    batch_size: int = 64,
    timed_queries: int = 15,
) -> dict[str, Any]:
    """Measure one model with cross-modal heads on one split.

    Args:
        top_ks: shortlist lengths; those beyond the gallery are clamped to it. 0, stage one alone, is always there.
        k: of the recall@k that is followed.
        timed_queries: queries timed at each length; the median is reported.

    Returns:
        {"t2i": [{"top_k", "recall", "ceiling", "ms_a_query"}, ...], "i2t": ..., "enough": {way: top_k}, "bytes":
            {...}, "heads": what they are, in words}.

    Raises:
        ValueError: the model has no cross-modal heads.
    """
    if model.crossmodal is None:
        raise ValueError("a frontier needs cross-modal heads; this model is a plain dual encoder")
    if not top_ks or min(top_ks) < 1:
        raise ValueError(f"top_ks={list(top_ks)}: give shortlist lengths of 1 or more")
    split = inputs.split
    with evaluating(model) as device:
        images = encode_images(model, inputs, device, batch_size=batch_size, tokens=True)
        stored = inputs.features.get("text")
        texts = encode_texts(
            model, inputs, inputs.captions, device, batch_size=4 * batch_size, tokens=True, features=stored
        )
        gallery = Gallery(images, texts, split)
        lists = match_shortlists(model, gallery, max(top_ks), device)
        first = rank_both(texts.embedding, images.embedding, split.positives)
        scale = float(model.logit_scale)
        result: dict[str, Any] = {way: [] for way in WAYS}
        for top_k in sorted({0, *top_ks}):
            ranks = reranked(first, cut(lists, top_k), split.positives, scale, weight)
            for number, way in enumerate(WAYS):
                used = min(top_k, first[number].gallery)
                if any(point["top_k"] == used for point in result[way]):
                    continue  # two lengths beyond the gallery are one
                result[way].append(
                    {
                        "top_k": used,
                        "recall": recall_at(ranks[number], k),
                        "ceiling": recall_at(first[number], max(k, used)),
                        "ms_a_query": time_query(model, inputs, gallery, lists, way, used, timed_queries, device),
                    }
                )
        result["enough"] = {way: smallest_enough(result[way]) for way in WAYS}
        kept = model.keep_image(images.rows(np.arange(min(8, len(split.image_ids)))))
        result["bytes"] = {
            "embedding": 4 * images.embedding.shape[1],
            "kept_a_picture": kept.nbytes // len(kept),
            "tokens_a_caption": _token_bytes(texts) // len(split.captions),
        }
    return result | {
        "heads": heads_of(model),
        "k": k,
        "weight": weight,
        "threads": torch.get_num_threads(),
        "split_hash": split.hash,
    }


def heads_of(model: Any) -> str:
    """The cross-modal heads in words: "GQA: 8 heads, 2 of keys and values"."""
    head = getattr(model.crossmodal, "text_to_image", None) or getattr(model.crossmodal, "image_to_text", None)
    if head is None:
        return "cross-modal heads"
    queries, kept = head.blocks[0].cross.num_heads, head.blocks[0].cross.num_kv_heads
    if queries == kept:
        return f"MHA: {queries} heads"
    return f"{'MQA' if kept == 1 else 'GQA'}: {queries} heads, {kept} of keys and values"


def cut(lists: Shortlists, top_k: int) -> Shortlists:
    """The first ``top_k`` of each shortlist, which are the shortlists of that length."""
    t2i, i2t = ((a[:, :top_k], b[:, :top_k], c[:, :top_k]) for a, b, c in (lists.t2i, lists.i2t))
    return Shortlists(t2i, i2t)


def smallest_enough(points: Sequence[dict[str, Any]], near: float = NEAR_BEST) -> int:
    """The smallest top_k whose recall is within ``near`` points of the best."""
    best = max(point["recall"] for point in points)
    return min(point["top_k"] for point in points if point["recall"] >= best - near)


def time_query(
    model: Any,
    inputs: Inputs,
    gallery: Gallery,
    lists: Shortlists,
    way: str,
    top_k: int,
    queries: int,
    device: torch.device,
) -> float:
    """Median milliseconds of processor time for one query, from its pixels or tokens to its order."""
    candidates: IntArray = getattr(lists, way)[0][:, :top_k]
    chosen = np.linspace(0, len(candidates) - 1, queries).astype(np.int64)
    image_gallery = torch.from_numpy(gallery.images.embedding[:]).to(device)
    text_gallery = torch.from_numpy(gallery.texts.embedding[:]).to(device)
    spent = []
    for query in [chosen[0], *chosen]:  # the first once more: it warms caches and is not counted
        if way == "t2i":
            ids, mask = (part.to(device) for part in inputs.token_rows(inputs.captions, np.array([query])))
            there = model.keep_image(gallery.images.rows(candidates[query])) if top_k else None
            started = time.process_time()
            text = model.encode_text(ids, mask)
            image_gallery @ text.embedding[0]
            if there is not None:
                model.match_kept(there, text.index(torch.zeros(top_k, dtype=torch.long, device=device)))
        else:
            pixels = inputs.pixels(np.array([query])).to(device)
            texts = gallery.texts.rows(candidates[query]) if top_k else None
            started = time.process_time()
            image = model.encode_image(pixels)
            text_gallery @ image.embedding[0]
            if texts is not None:
                model.match_kept(model.keep_image(image), texts)
        spent.append(1000 * (time.process_time() - started))
    return statistics.median(spent[1:])


def _token_bytes(texts: Any) -> int:
    return int(texts.tokens.numel() * texts.tokens.element_size())


def plot(results: dict[str, dict[str, Any]], path: str) -> None:
    """Recall against top_k and against time, both directions, one colour a model; the ceiling dashed, enough ringed.

    Args:
        results: {model's name: what :func:`frontier` gave}.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(11, 8.6), layout="constrained")
    FigureCanvasAgg(figure)
    titles = {"t2i": "text to image", "i2t": "image to text"}
    ring: dict[str, Any] = {"marker": "o", "markersize": 13, "fillstyle": "none", "markeredgewidth": 2}
    lines = []
    for row, way in enumerate(WAYS):
        by_k, by_time = figure.add_subplot(2, 2, 2 * row + 1), figure.add_subplot(2, 2, 2 * row + 2)
        marks = {0.5: "0"}  # stage one alone has no place on a logarithmic axis
        for number, (name, result) in enumerate(results.items()):
            points, colour = result[way], f"C{number}"
            places = [max(point["top_k"], 0.5) for point in points]
            marks |= {place: f"{place:g}" for place in places if place >= 1}
            recalls, times = ([point[key] for point in points] for key in ("recall", "ms_a_query"))
            kept = result["bytes"]["kept_a_picture"] / 1024
            label = f"{name} ({result['heads']}; {kept:.0f} KiB kept a picture)"
            line = by_k.plot(places, recalls, "o-", color=colour, markersize=4, label=label)[0]
            by_k.plot(places, [point["ceiling"] for point in points], "--", color=colour, linewidth=1)
            by_time.plot(times, recalls, "o-", color=colour, markersize=4)
            at = next(place for place, point in enumerate(points) if point["top_k"] == result["enough"][way])
            for axes, across in ((by_k, places), (by_time, times)):
                axes.plot(across[at], recalls[at], color=colour, label=None, **ring)
            for point in points:
                here = (point["ms_a_query"], point["recall"])
                by_time.annotate(f"{point['top_k']}", here, xytext=(3, 5), textcoords="offset points", fontsize=7)
            lines += [line] if not row else []
        k = next(iter(results.values()))["k"]
        by_k.set(xscale="log", xlabel="top_k (0: stage one alone)", ylabel=f"{titles[way]} R@{k}, %")
        by_k.set_xticks(list(marks), list(marks.values()))
        by_k.minorticks_off()
        by_time.set(xlabel="ms of processor time a query (at each point its top_k)", ylabel=f"{titles[way]} R@{k}, %")
        for axes in (by_k, by_time):
            axes.grid(alpha=0.3)
    lines += [
        Line2D([], [], color="0.3", linestyle="--", linewidth=1, label="ceiling: stage one's recall@top_k"),
        Line2D([], [], color="0.3", linestyle="", label=f"the smallest top_k within {NEAR_BEST:g} of the best", **ring),
    ]
    figure.legend(handles=lines, loc="outside lower center", ncols=1, fontsize=9)
    figure.savefig(path, dpi=110)

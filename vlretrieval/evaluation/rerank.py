"""The second stage: the cross-modal heads' matching logit reorders each query's shortlist.

Pairs of both directions are scored once, grouped by picture: a picture's keys and values are projected once and serve
all the captions it meets. What lies outside a shortlist keeps its order below it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vlretrieval.evaluation.encode import Images, Tell, Texts, silent
from vlretrieval.evaluation.outcome import Gallery
from vlretrieval.evaluation.sharing import Processes
from vlretrieval.evaluation.shortlist import shortlist
from vlretrieval.metrics.ranks import TIE, Ranks
from vlretrieval.metrics.scores import IntArray

Floats = npt.NDArray[np.float64]

# The same text beside the same picture gets another last bit in another batch: logits this close, relative to their
# size (or to 1), are one logit, or equal pictures would be told apart by luck.
NOISE = 1e-5
IMAGES_AT_ONCE = 64  # pictures whose keys and values are kept at a time
PAIRS_AT_ONCE = 512  # pairs of one forward pass through the heads


def unique_pairs(t2i: IntArray, i2t: IntArray, texts: int) -> IntArray:
    """(n,) pair numbers image * texts + text of all shortlisted pairs, ascending, each once.

    Args:
        t2i: (M, K) images of each caption's shortlist; i2t: (N, K') captions of each image's.
    """
    from_text = t2i * texts + np.arange(len(t2i))[:, None]
    from_image = np.arange(len(i2t))[:, None] * texts + i2t
    return np.unique(np.concatenate([from_text.reshape(-1), from_image.reshape(-1)]))


def score_pairs(
    model: Any,
    images: Images,
    texts: Texts,
    image_rows: IntArray,
    text_rows: IntArray,
    device: torch.device,
    *,
    processes: Processes = Processes(),  # noqa: B008  (frozen)
    tell: Tell = silent,
) -> Floats:
    """(n,) matching logits of the pairs (image_rows[i], text_rows[i]); ``image_rows`` must not go down.

    Raises:
        ValueError: naming the first pair whose logit is not finite.
    """
    pictures, first = np.unique(image_rows, return_index=True)
    bounds = np.append(first, len(image_rows))
    chunks = [(at, min(at + IMAGES_AT_ONCE, len(pictures))) for at in range(0, len(pictures), IMAGES_AT_ONCE)]

    def compute(chunk: tuple[int, int]) -> Tensor:
        start, stop = chunk
        kept = model.keep_image(_to(images.rows(pictures[start:stop]), device))
        pair_at = np.arange(bounds[start], bounds[stop])
        picture = np.repeat(np.arange(stop - start), np.diff(bounds[start : stop + 1]))
        logits = torch.empty(len(pair_at))
        for which, pairs in even_groups(picture, _lengths(texts, text_rows[pair_at])):
            text = _to(texts.rows(text_rows[pair_at[pairs]]), device)
            matched = model.match_kept(kept.index(torch.from_numpy(which).to(device)), text)
            logits[torch.from_numpy(pairs)] = matched.float().cpu()
            tell("pairs", len(pairs), len(image_rows))
        return logits

    parts = list(processes.share(chunks, compute, at_once=8))
    logits = torch.cat(parts).double().numpy() if parts else np.empty(0)
    bad = np.flatnonzero(~np.isfinite(logits))
    if len(bad):
        image, text = int(image_rows[bad[0]]), int(text_rows[bad[0]])
        raise ValueError(f"the matching logit of image {image} with text {text} is not finite ({len(bad)} such pairs)")
    return logits


def even_groups(picture: IntArray, lengths: IntArray, most: int = PAIRS_AT_ONCE) -> Iterator[tuple[IntArray, IntArray]]:
    """Pairs in batches where each picture has equally many consecutive texts, so that its K/V serve all of them.

    Each picture's texts, sorted by length, are cut into runs of a power of two; runs of one size and of like length go
    together. No pair is repeated, and a handful of shapes occur.

    Args:
        picture: (n,) picture of each pair, not going down. lengths: (n,) tokens of each pair's text.

    Yields:
        pictures (C,) and the pairs (C * T,) that go with them, T consecutive ones to each.
    """
    order = np.lexsort((lengths, picture))
    runs: dict[int, list[tuple[int, int]]] = {}  # size -> (longest text, start in order)
    sizes = np.bincount(picture)
    start = 0
    for count in sizes.tolist():
        while count:
            size = min(1 << (count.bit_length() - 1), 64)
            runs.setdefault(size, []).append((int(lengths[order[start + size - 1]]), start))
            start, count = start + size, count - size
    for size in sorted(runs, reverse=True):
        starts = np.array([at for _, at in sorted(runs[size])])
        step = max(1, most // size)
        for first in range(0, len(starts), step):
            pairs = order[(starts[first : first + step, None] + np.arange(size)).reshape(-1)]
            yield picture[pairs[::size]], pairs


def fuse(
    cosine: npt.ArrayLike, match: npt.ArrayLike, logit_scale: float, weight: float | None
) -> tuple[Floats, Floats]:
    """What orders a shortlist, and how far it is in doubt.

    Args:
        cosine, match: (Q, K) of the shortlisted pairs.
        weight: of the matching logit beside logit_scale * cosine; None orders by the matching logit alone.

    Returns:
        scores (Q, K), and (Q, 1) the difference up to which two of a query's scores count as equal.
    """
    match = np.asarray(match, dtype=np.float64)
    noise = NOISE * np.maximum(1, np.abs(match).max(1, keepdims=True, initial=0))
    if weight is None:
        return match, noise
    return logit_scale * np.asarray(cosine, dtype=np.float64) + weight * match, logit_scale * TIE + weight * noise


def rerank(stage_one: Ranks, candidates: IntArray, scores: Floats, noise: Floats, positives: IntArray) -> Ranks:
    """Ranks after each query's shortlist is put in the order of ``scores``.

    A query none of whose positives is in its shortlist keeps its rank: everything in the shortlist is wrong and was
    above them before, too. With an empty shortlist (top_k = 0) nothing changes; with the whole gallery in it, these are
    the ranks of scoring all pairs.

    Args:
        stage_one: the dual encoder's ranks.
        candidates: (Q, K) of all queries, ranked or not.
        scores: (Q, K) what orders them, higher is better.
        noise: (Q, 1) the difference up to which scores count as equal; both from :func:`fuse`.
        positives: (P, 2) pairs (query, candidate), sorted.
    """
    if candidates.shape[1] == 0:
        return stage_one
    gallery = stage_one.gallery
    number = np.arange(len(candidates))[:, None] * gallery + candidates
    true: npt.NDArray[np.bool_] = np.isin(number, positives[:, 0] * gallery + positives[:, 1])
    best = np.where(true, scores, -np.inf).max(1)
    lead = scores - best[:, None]
    above = (~true & (lead > noise)).sum(1)
    tied = (~true & (np.abs(lead) <= noise)).sum(1)
    good = (true & (np.abs(lead) <= noise)).sum(1)
    query, found = stage_one.query, np.isfinite(best)[stage_one.query]
    # not found: beyond the shortlist, whatever ties or the last bit of a score say at its edge
    floor = np.maximum(stage_one.above, candidates.shape[1])
    return Ranks(
        query,
        np.where(found, above[query], floor),
        np.where(found, tied[query], np.maximum(stage_one.above + stage_one.tied - floor, 0)),
        np.where(found, good[query], stage_one.good),
        gallery,
        stage_one.left_out,
    )


def answers(
    gallery: Gallery, way: str, depth: int, logit_scale: float | None = None, weight: float | None = None
) -> IntArray:
    """(Q, depth) the first answers of each query, best first: the shortlist in its new order, then stage one's.

    Args:
        way: "t2i" or "i2t". depth: more than the gallery holds gives all of it.
    """
    text, image, none = gallery.texts.embedding, gallery.images.embedding, np.empty((0, 2), dtype=np.int64)
    queries, others = (text, image) if way == "t2i" else (image, text)
    lists = None if gallery.shortlists is None else getattr(gallery.shortlists, way)
    if lists is None:
        return shortlist(queries, others, depth, none)[0]
    head, cosine, match = lists
    scores, _ = fuse(cosine, match, 1.0 if logit_scale is None else logit_scale, weight)
    head = np.take_along_axis(head, np.argsort(-scores, axis=1, kind="stable"), axis=1)
    if depth <= head.shape[1]:
        return head[:, :depth]
    rest, _ = shortlist(queries, others, depth, none)
    inside = (rest[:, :, None] == head[:, None, :]).any(2)
    order = np.argsort(inside, axis=1, kind="stable")  # those not in the head first, in their order
    return np.concatenate([head, np.take_along_axis(rest, order, axis=1)], axis=1)[:, : min(depth, len(others))]


def _lengths(texts: Texts, rows: IntArray) -> IntArray:
    assert texts.length is not None, "tokens were not kept"
    return texts.length[rows]


def _to(encoded: Any, device: torch.device) -> Any:
    if device.type == "cpu":
        return encoded
    mask = None if encoded.mask is None else encoded.mask.to(device)
    return type(encoded)(encoded.embedding.to(device), encoded.tokens.to(device), mask)

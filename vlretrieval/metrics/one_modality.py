"""Retrieval within one modality, text to text or image to image: an item is never its own answer."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vlretrieval.metrics.ranks import (
    BLOCK,
    TIE,
    Probes,
    Ranks,
    best_probes,
    check_embeddings,
    check_positives,
    count_rivals,
)
from vlretrieval.metrics.scores import Embeddings, IntArray, pair_scores


def rank_within(embeddings: Embeddings, positives: npt.ArrayLike, block: int = BLOCK) -> Ranks:
    """Ranks of each item's best positive among all other items.

    Args:
        embeddings: (N, E); scores are dot products.
        positives: (P, 2) ordered pairs (query, candidate) of different items; give both orders where both ask.

    Raises:
        ValueError: an item is named as its own positive.
    """
    norms, _ = check_embeddings(embeddings, embeddings)
    pairs = check_positives(positives, len(embeddings), len(embeddings))
    own = np.flatnonzero(pairs[:, 0] == pairs[:, 1])
    if len(own):
        raise ValueError(f"item {int(pairs[own[0], 0])} is named as its own positive; a query is no answer to itself")
    score = pair_scores(embeddings, embeddings, pairs[:, 0], pairs[:, 1])
    probes, good = best_probes(pairs[:, 0], score, TIE * norms[pairs[:, 0]] * norms[pairs[:, 1]])
    itself = np.repeat(np.arange(len(embeddings))[:, None], 2, axis=1)
    hidden = np.unique(np.concatenate([pairs, itself]), axis=0)
    nobody = Probes(np.zeros(0, dtype=np.int64), np.zeros(0))
    (above, tied), _ = count_rivals(embeddings, embeddings, hidden, probes, nobody, norms, norms, block)
    return Ranks(probes.row, above, tied, good, len(embeddings) - 1, len(embeddings) - len(probes.row))


def captions_of_one_image(caption_image: IntArray) -> IntArray:
    """(P, 2) ordered pairs of different captions of the same picture: the positives of text to text."""
    return _pairs_within(np.argsort(caption_image, kind="stable"), np.bincount(caption_image))


def images_of_one_caption(positives: IntArray) -> IntArray:
    """(P, 2) ordered pairs of different pictures that one caption is true of: the positives of image to image.

    Empty where no caption has two pictures, as in the plain Flickr and COCO splits.
    """
    order = np.lexsort((positives[:, 1], positives[:, 0]))
    pairs = _pairs_within(positives[order, 1], np.bincount(positives[:, 0]))
    return np.unique(pairs, axis=0)


def _pairs_within(items: IntArray, sizes: IntArray) -> IntArray:
    """All ordered pairs of different items of consecutive groups of the given sizes."""
    found = [np.empty((0, 2), dtype=np.int64)]
    start = 0
    for size in sizes.tolist():
        group = items[start : start + size]
        start += size
        if size > 1:
            first, second = np.repeat(group, size), np.tile(group, size)
            found.append(np.stack([first, second], axis=1)[first != second])
    return np.concatenate(found)

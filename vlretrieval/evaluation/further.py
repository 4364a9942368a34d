"""Figures beside the table: every positive's place, hubs and their correction, text to text, image to image.

They stand apart from the recalls and are never mixed into them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vlretrieval.evaluation.outcome import Gallery
from vlretrieval.evaluation.shortlist import shortlist
from vlretrieval.metrics.graded import graded_figures, positive_places
from vlretrieval.metrics.hubness import corrected_ranks, hub_figures
from vlretrieval.metrics.one_modality import captions_of_one_image, images_of_one_caption, rank_within
from vlretrieval.metrics.ranks import Ranks
from vlretrieval.metrics.recall import direction_figures, query_intervals, recall_at
from vlretrieval.metrics.scores import IntArray

HUB_LIST = 10  # answers a query that make a hub, as in the literature


def further_figures(gallery: Gallery, ks: Sequence[int], *, replicates: int = 1000, seed: int = 0) -> dict[str, Any]:
    """All of them for one gallery, of the first stage; recalls with 95 % intervals unless ``replicates`` is 0."""
    text, image, positives = gallery.texts.embedding, gallery.images.embedding, gallery.split.positives
    figures: dict[str, Any] = {}
    t2i, i2t = positive_places(text, image, positives)
    figures["every_positive"] = {"t2i": graded_figures(t2i, ks), "i2t": graded_figures(i2t, ks)}
    caption_image, each_image = gallery.split.caption_image, np.arange(len(image))

    def intervals(ranks: Ranks, cluster: IntArray) -> dict[str, Any]:
        if not replicates:
            return {}
        return {"interval": query_intervals(ranks, ks, cluster, replicates=replicates, seed=seed)}

    none = np.empty((0, 2), dtype=np.int64)
    corrected = corrected_ranks(text, image, positives)
    figures["hubs"] = {
        "t2i": hub_figures(shortlist(text, image, HUB_LIST, none)[0], len(image)),
        "i2t": hub_figures(shortlist(image, text, HUB_LIST, none)[0], len(text)),
        "corrected_by": "CSLS over the 10 nearest queries of the test set; not to be compared with plain recalls",
        "corrected": {
            way: {f"R@{k}": recall_at(ranks, k) for k in ks} | intervals(ranks, cluster)
            for way, ranks, cluster in zip(("t2i", "i2t"), corrected, (caption_image, each_image), strict=True)
        },
    }
    for name, rows, cluster, pairs in (
        ("text_to_text", text, caption_image, captions_of_one_image(caption_image)),
        ("image_to_image", image, each_image, images_of_one_caption(positives)),
    ):
        if len(pairs):
            ranks = rank_within(rows, pairs)
            figures[name] = direction_figures(ranks, ks) | intervals(ranks, cluster)
    return figures

"""The protocol of an evaluation as plain data: everything that a figure depends on."""

from __future__ import annotations

import hashlib
import platform
from typing import Any

import numpy as np
import torch

import vlretrieval
from vlretrieval.data.splits import HardNegatives, Split
from vlretrieval.evaluation.outcome import Gallery


def describe(split: Split, settings: Any, gallery: Gallery, world_size: int) -> dict[str, Any]:
    """Everything a figure depends on, so that it can be made again, or refused as another protocol's."""
    shortlists = gallery.shortlists
    images, captions = len(split.image_ids), len(split.captions)
    per_image = np.bincount(split.caption_image, minlength=images)
    wider = len(split.positives) - captions
    reranking: dict[str, Any] = {"asked_top_k": settings.top_k, "weight": settings.weight}
    if shortlists is None:
        reranking["done"] = "no: top_k is 0" if settings.top_k == 0 else "no: the model has no cross-modal heads"
    else:
        reranking["done"] = "yes"
        reranking["top_k"] = {"t2i": shortlists.t2i[0].shape[1], "i2t": shortlists.i2t[0].shape[1]}
        fused = "the matching logit" if settings.weight is None else "logit_scale * cosine + weight * matching logit"
        reranking["score"] = f"{fused}; candidates outside the shortlist keep their order below it"
    return {
        **settings.protocol.describe(split),
        "split": {"name": split.name, "hash": split.hash, "images": images, "captions": captions, "notes": split.notes},
        "captions_per_image": {
            "least": int(per_image.min()), "mean": float(per_image.mean()), "most": int(per_image.max()),
        },
        "images_without_captions": int((per_image == 0).sum()),
        "positives": "own pairs by image id" if not wider else f"every true pair: {wider} beyond the own pairs",
        "directions": {"t2i": "text query, image gallery", "i2t": "image query, text gallery"},
        "recall": "hit rate: share of queries with at least one positive among the first k, percent",
        "ks": list(settings.ks),
        "k_beyond_gallery": {
            way: [k for k in settings.ks if k > len(held)]
            for way, held in (("t2i", gallery.split.image_ids), ("i2t", gallery.split.captions))
        },
        "ties": "against the model",
        "scores": "exact dot products of float32 unit vectors",
        "precision": settings.precision,
        "batch_size": settings.batch_size,
        "rerank": reranking,
        "hard_negatives_per_kind": settings.negatives_per_kind,
        "hard_negatives_hash": negatives_hash(split.negatives) if settings.hard_negatives else None,
        "intervals": {"level": 0.95, "replicates": settings.bootstrap, "seed": settings.seed, "drawn": "images"},
        "world_size": world_size,
        "versions": versions(),
    }  # fmt: skip


def versions() -> dict[str, str]:
    """Of what computed the figures."""
    return {
        "vlretrieval": vlretrieval.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def negatives_hash(negatives: HardNegatives) -> str | None:
    """First 16 hex digits of the sha256 over all hard negatives; None where there are none."""
    if not len(negatives):
        return None
    digest = hashlib.sha256(np.ascontiguousarray(negatives.caption).tobytes())
    for text, kind in zip(negatives.texts, negatives.kinds, strict=True):
        digest.update(f"{len(text)} {kind} {text}".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:16]

"""The model that an index was made with, and rows as they are stored: embeddings quantised, K/V side by side."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vlretrieval.deploy.index.store import EMBEDDING_TYPES, EMBEDDINGS, KEPT_TYPES, SCALES, Array, Made
from vlretrieval.deploy.loaded import CONFIG, MANIFEST, TOKENIZER, WEIGHTS, LoadedModel, read_json
from vlretrieval.model.attention import KeyValue
from vlretrieval.model.encoded import Kept


@dataclass(frozen=True)
class Settings:
    """What a user chooses of an index.

    Args:
        embeddings: "float32", "float16", or "int8" with a scale for each row (E + 4 bytes).
        kept: type of the kept K/V, or "none": then re-ranking opens the pictures again.
        thumbs: longer side of the thumbnails, 0 for none.
    """

    embeddings: str = "float16"
    kept: str = "float16"
    thumbs: int = 0

    def __post_init__(self) -> None:
        if self.embeddings not in EMBEDDING_TYPES:
            raise ValueError(f"embeddings={self.embeddings} is not known; choose {', '.join(EMBEDDING_TYPES)}")
        if self.kept not in KEPT_TYPES:
            raise ValueError(f"kept={self.kept} is not known; choose {', '.join(KEPT_TYPES)}")
        if not 0 <= self.thumbs <= 1024:
            raise ValueError(f"thumbs={self.thumbs} is not from 0 to 1024 pixels")


def identity(folder: str | PathLike[str]) -> str:
    """16 hex digits for all that decides what a model says: weights, model, preprocessing, tokenizer.

    The exported folder must have been opened, so that its files are those of its manifest.
    """
    folder = Path(folder)
    files, config = read_json(folder / MANIFEST)["files"], read_json(folder / CONFIG)
    # weights lie in one file, or in the graphs of an ONNX export
    graphs = {name: digest for name, digest in files.items() if name.endswith((".onnx", ".data", ".pt2"))}
    said = [files.get(WEIGHTS, graphs), files[TOKENIZER], config["model"], config["preprocess"]]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


@torch.inference_mode()
def made_of(model: LoadedModel, model_hash: str, settings: Settings) -> Made:
    """What the rows of an index of this model look like; one grey picture is put through it.

    Raises:
        ValueError: the heads would need a mask of the patches to be kept, which an index does not hold.
    """
    size = model.preprocess["image_size"]
    grey = torch.full((1, 3, size, size), 128, dtype=torch.uint8, device=model.device)
    encoded = model.model.encode_image(grey)
    if encoded.mask is not None and model.can_match and settings.kept != "none":
        raise ValueError("this image encoder masks patches, which an index does not keep; set kept=none")
    kept = model.can_match and settings.kept != "none"
    return Made(
        model=model_hash,
        width=encoded.embedding.shape[1],
        embeddings=settings.embeddings,
        kept=settings.kept if kept else "none",
        kept_shape=tuple(tuple(part.shape[1:]) for part in parts_of(model.model.keep_image(encoded))) if kept else (),
        thumbs=settings.thumbs,
    )


def parts_of(kept: Kept) -> list[Tensor]:
    """Keys and values of each layer (N, L, G, D), and tokens (N, P, dim) if they are kept."""
    # with the places first, as a projection lays them out, and as attention reads them fastest
    pairs = [part.transpose(1, 2) for kv in kept.text_to_image for part in (kv.key, kv.value)]
    return pairs if kept.tokens is None else [*pairs, kept.tokens]


def flat(kept: Kept, kind: str) -> Array:
    """(N, numbers) of what is kept, one row a picture."""
    joined = torch.cat([part.flatten(1).float() for part in parts_of(kept)], dim=1).cpu().numpy()
    if kind == "float16":
        largest = float(np.abs(joined).max(initial=0))
        if largest > np.finfo(np.float16).max:
            raise ValueError(f"kept values of up to {largest:g} do not fit float16; set kept=float32")
    return joined.astype(kind)


def unflat(rows: Array, shapes: Sequence[Sequence[int]], device: torch.device) -> Kept:
    """The inverse of :func:`flat`, in float32."""
    values = torch.from_numpy(np.require(rows, np.float32, ["C", "W"])).to(
        device
    )  # W: torch warns of what is only mapped
    sizes = [int(np.prod(shape)) for shape in shapes]
    parts = [part.view(len(values), *shape) for part, shape in zip(values.split(sizes, dim=1), shapes, strict=True)]
    tokens = parts.pop() if len(parts) % 2 else None
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return Kept(tuple(KeyValue(key.transpose(1, 2), value.transpose(1, 2)) for key, value in pairs), tokens)


def stored(embeddings: Array, kind: str) -> dict[str, Array]:
    """(N, E) float32 unit vectors as the rows of each file."""
    if not np.isfinite(embeddings).all():
        raise ValueError("an embedding is not finite: the model's weights are broken")
    if kind != "int8":
        return {EMBEDDINGS: embeddings.astype(kind)}
    scales = np.maximum(np.abs(embeddings).max(1, keepdims=True), 1e-12).astype(np.float32) / 127
    return {EMBEDDINGS: np.rint(embeddings / scales).astype(np.int8), SCALES: scales}


def restored(rows: Array, scales: Array | None) -> Array:
    """(N, E) float32 of stored rows."""
    values = rows.astype(np.float32)
    return values if scales is None else values * scales

"""Search with a loaded model: a shortlist by cosine, then its order by the cross-modal heads. No index, no server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vlretrieval.data.images import SUFFIXES, BadImage
from vlretrieval.deploy.loaded import LoadedModel


@dataclass(frozen=True)
class Hit:
    """One result; ``match`` is the cross-modal heads' logit, None beyond the shortlist or without such heads.

    ``score`` is what the shortlist is ordered by (the logit, or both scores together), None where ``match`` is.
    """

    item: str
    cosine: float
    match: float | None = None
    score: float | None = None


@dataclass(frozen=True)
class Gallery:
    """Pictures ready to be searched: files and (N, E) embeddings; ``broken`` tells (file, reason) of those left out."""

    files: list[Path]
    embeddings: Tensor
    broken: list[tuple[Path, str]]


def find_images(folder: str | Path) -> list[Path]:
    """Picture files in a folder and below, by suffix, in a fixed order.

    Raises:
        ValueError: no such folder, or no picture in it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"images={folder}: no such folder")
    files = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    if not files:
        raise ValueError(f"images={folder} holds no picture ({', '.join(SUFFIXES[:5])}, ...)")
    return files


def read_texts(path: str | Path, key: str = "texts") -> list[str]:
    """The texts of a UTF-8 file, one a line; blank lines are no texts. ``key`` is what errors call it.

    Raises:
        ValueError: naming the file (and line).
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except FileNotFoundError:
        raise ValueError(f"{key}={path}: no such file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{key}={path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
    texts = [line.strip() for line in lines if line.strip()]
    if not texts:
        raise ValueError(f"{key}={path} holds no text; write one a line")
    return texts


def read_gallery(model: LoadedModel, files: Sequence[Path], batch_size: int = 64) -> Gallery:
    """Encode picture files. A broken one is left out and told, since one bad file should not end a search.

    Raises:
        ValueError: not one of the files could be read.
    """
    good: list[Path] = []
    broken: list[tuple[Path, str]] = []
    parts: list[Tensor] = []
    for start in range(0, len(files), batch_size):
        pixels = []
        for file in files[start : start + batch_size]:
            try:
                pixels.append(model.pixels([file]))
            except BadImage as error:
                broken.append((file, error.reason))
            else:
                good.append(file)
        if pixels:
            with torch.inference_mode():
                parts.append(model.model.encode_image(torch.cat(pixels).to(model.device)).embedding.cpu())
    if not good:
        raise ValueError(f"none of {len(files)} pictures can be read; the first: {broken[0][0]}: {broken[0][1]}")
    return Gallery(good, torch.cat(parts), broken)


def search_images(
    model: LoadedModel, text: str, gallery: Gallery, top: int = 10, top_k: int = 50, weight: float | None = None
) -> list[Hit]:
    """The ``top`` pictures for a text, best first.

    Args:
        top: how many to return; more than the gallery holds gives the whole gallery.
        top_k: how many the cosine hands to the cross-modal heads; clamped to the gallery. 0, or a model without
            such heads: cosine alone. What lies beyond the shortlist keeps its cosine order behind it.
        weight: of the matching logit beside logit_scale * cosine; None: the model's own (``rerank_weight``).
    """
    check(top, top_k, text)
    cosines = gallery.embeddings @ model.encode_texts([text])[0]

    def match(rows: list[int]) -> Tensor:
        return model.match([gallery.files[row] for row in rows], [text])[:, 0]

    return ranked(list(map(str, gallery.files)), cosines, heads(model, match, weight), top, top_k)


def search_texts(
    model: LoadedModel,
    image: str | Path,
    texts: Sequence[str],
    top: int = 10,
    top_k: int = 50,
    weight: float | None = None,
) -> list[Hit]:
    """The ``top`` texts for a picture, best first; arguments as in :func:`search_images`."""
    check(top, top_k)
    cosines = model.encode_texts(texts) @ model.encode_images([image])[0]

    def match(rows: list[int]) -> Tensor:
        return model.match([image], [texts[row] for row in rows])[0]

    return ranked(list(texts), cosines, heads(model, match, weight), top, top_k)


def check(top: int, top_k: int, text: str | None = None) -> None:
    """Refuse what makes no search, before anything is read.

    Raises:
        ValueError: ``top`` below 1, ``top_k`` below 0, or a blank text.
    """
    if text is not None and not text.strip():
        raise ValueError("text is blank; say what to look for")
    if top < 1:
        raise ValueError(f"top={top}: at least 1 result is needed")
    if top_k < 0:
        raise ValueError(f"top_k={top_k} is negative; 0 leaves re-ranking out")


@dataclass(frozen=True)
class Heads:
    """The second stage: ``match`` gives the logits of gallery rows; score = scale * cosine + weight * logit."""

    match: Callable[[list[int]], Tensor]
    scale: float = 0.0
    weight: float = 1.0


def heads(model: LoadedModel, match: Callable[[list[int]], Tensor], weight: float | None) -> Heads | None:
    """The second stage of a model, None for a plain dual encoder."""
    if not model.can_match:
        return None
    weight = model.rerank_weight if weight is None else weight
    return Heads(match) if weight is None else Heads(match, model.model.logit_scale.item(), weight)


def ranked(items: list[str], cosines: Tensor, second: Heads | None, top: int, top_k: int) -> list[Hit]:
    """Cosine order, its head reordered by the second stage. Equal scores keep the order of the items."""
    order = torch.sort(cosines, descending=True, stable=True).indices.tolist()
    hits = [Hit(items[row], float(cosines[row])) for row in order]
    if second is not None and top_k:
        shortlist = order[:top_k]
        logits = second.match(shortlist)
        scores = second.scale * cosines[shortlist].double() + second.weight * logits.double()
        best = torch.sort(scores, descending=True, stable=True).indices.tolist()
        head = [
            Hit(items[shortlist[i]], float(cosines[shortlist[i]]), float(logits[i]), float(scores[i])) for i in best
        ]
        hits = head + hits[len(head) :]
    return hits[:top]

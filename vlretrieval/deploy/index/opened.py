"""An index opened for search: ``Index.open("photos.index").search("two dogs on snow")``.

A text is compared with every picture by cosine, and the best of them meet the cross-modal heads, with the keys and
values that the index keeps of them. What is opened stays as it was while another process brings the index up to date.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from vlretrieval.data.images import BadImage, open_image
from vlretrieval.deploy.index.made import identity, unflat
from vlretrieval.deploy.index.nearest import KINDS, Approximate, Exact, about, open_approximate, write_approximate
from vlretrieval.deploy.index.sources import Source, source_of
from vlretrieval.deploy.index.store import (
    EMBEDDINGS,
    KEPT,
    SCALES,
    THUMBS,
    Commit,
    Item,
    State,
    locked,
    map_rows,
    read_commit,
    read_state,
)
from vlretrieval.deploy.loaded import LoadedModel, load_folder
from vlretrieval.deploy.search import check
from vlretrieval.model.encoded import Encoded, Kept

MATCHED_AT_ONCE = 256  # pairs of one forward pass through the heads


@dataclass(frozen=True)
class Hit:
    """One result.

    Attributes:
        id: of the picture.
        cosine: of text (or picture) and picture.
        place: in the order by cosine, from 1.
        match: the cross-modal heads' logit, None beyond the shortlist or without such heads.
        score: what the shortlist is ordered by (the logit, or both scores together), None where ``match`` is.
    """

    id: str
    cosine: float
    place: int
    match: float | None = None
    score: float | None = None


@dataclass(frozen=True)
class Found:
    """The results of one query, best first; ``milliseconds`` by stage, those of a batch being shared by its queries."""

    hits: list[Hit]
    milliseconds: dict[str, float] = field(default_factory=dict)


class Index:
    """See :meth:`open`."""

    def __init__(
        self, folder: Path, commit: Commit, state: State, model: LoadedModel, nearest: str, images: str | None
    ) -> None:
        self.folder, self.commit, self.state, self.model = folder, commit, state, model
        self.ids = list(state.items)
        self._id_of = {item.row: item.id for item in state.items.values()}
        live = np.array(sorted(self._id_of), dtype=np.int64)
        scales = map_rows(folder, commit, SCALES) if commit.made.embeddings == "int8" else None
        self.exact = Exact(map_rows(folder, commit, EMBEDDINGS), scales, live)
        self.nearest: Exact | Approximate = self.exact
        if nearest != "exact":
            expected = about(commit.rows, commit.log_bytes, nearest)
            self.nearest = open_approximate(folder, self.exact, nearest, expected)
        self._kept = map_rows(folder, commit, KEPT) if commit.made.kept_values else None
        self._images: str | None = images or commit.sources.get("images")
        self._source: Source | None = None

    @staticmethod
    def open(
        folder: str | PathLike[str],
        *,
        model: str | PathLike[str] | None = None,
        nearest: str = "exact",
        images: str | None = None,
    ) -> Index:
        """Open what ``vlretrieval-index`` made.

        Args:
            model: the exported folder; None: where it lay when the index was made.
            nearest: "exact", or "faiss" or "usearch" if the index has theirs.
            images: where the pictures lie, if they were moved.

        Raises:
            ValueError: no index, a damaged or a stale one (made with another model than this).
        """
        folder = Path(folder)
        if nearest not in KINDS:
            raise ValueError(f"nearest={nearest} is not known; choose {', '.join(KINDS)}")
        commit = read_commit(folder)
        where = model or commit.sources.get("model")
        if where is None:
            raise ValueError(f"{folder} does not tell where its model lies; give model=FOLDER")
        loaded, made_with = load_folder(where), identity(where)
        if made_with != commit.made.model:
            raise ValueError(
                f"{folder} is stale: it was made with another model ({commit.made.model} there, {made_with} in {where}"
                "); give model=FOLDER of the one it was made with, or build it anew"
            )
        return Index(folder, commit, read_state(folder, commit), loaded, nearest, images)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def complete(self) -> bool:
        """False while it is being built, or after that was interrupted."""
        return self.commit.complete

    def item(self, id: str) -> Item:
        """
        Raises:
            KeyError: no such picture in the index.
        """
        return self.state.items[id]

    def thumbnail(self, id: str) -> bytes | None:
        """The stored JPEG, None where the index has none."""
        at = self.item(id).thumb
        if at is None:
            return None
        with (self.folder / THUMBS).open("rb") as file:
            file.seek(at[0])
            return file.read(at[1])

    def picture(self, id: str) -> bytes:
        """The picture's file.

        Raises:
            KeyError: no such picture in the index.
            BadImage: its file is gone or cannot be read.
        """
        self.item(id)
        return self.source.read(id)

    @property
    def source(self) -> Source:
        if self._source is None:
            if self._images is None:
                raise BadImage(str(self.folder), "does not tell where its pictures lie; give images=")
            try:
                self._source = source_of(self._images)
            except BadImage:
                raise
            except ValueError as error:
                raise BadImage(self._images, str(error)) from None
        return self._source

    def search(
        self,
        text: str | None = None,
        *,
        image: str | PathLike[str] | Image | None = None,
        top: int = 10,
        top_k: int = 50,
        weight: float | None = None,
    ) -> list[Hit]:
        """The ``top`` pictures for a text (or those like a picture), best first.

        Args:
            top_k: how many the cosine hands to the cross-modal heads; 0, or a model without such heads, leaves it out.
                A picture as the query is compared by cosine alone: the heads match texts with pictures.
            weight: of the matching logit beside logit_scale * cosine; None: the model's own.
        """
        if (text is None) == (image is None):
            raise ValueError("give either a text or an image")
        if text is not None:
            return self.search_texts([text], top, top_k, weight)[0].hits
        assert image is not None
        return self.search_images([image], top)[0].hits

    def search_texts(
        self, texts: Sequence[str], top: int = 10, top_k: int = 50, weight: float | None = None
    ) -> list[Found]:
        """As :meth:`search`, for several texts in one go."""
        for text in texts:
            check(top, top_k, text)
        clock = Clock()
        with torch.inference_mode():
            encoded = self._encode_texts(texts)
            queries = encoded.embedding.float().cpu().numpy()
            clock.lap("encode")
            depth = min(top_k, len(self)) if self.model.can_match else 0
            rows, cosines = self.nearest(queries, max(top, depth))
            clock.lap("shortlist")
            if not depth:
                return [Found(self._hits(r, c)[:top], clock.laps) for r, c in zip(rows, cosines, strict=True)]
            logits = self._match(encoded, rows[:, :depth], clock)
            clock.lap("rerank")
        return [
            Found(self._reranked(rows[i], cosines[i], logits[i], weight)[:top], clock.laps) for i in range(len(texts))
        ]

    def search_images(self, images: Sequence[str | PathLike[str] | Image], top: int = 10) -> list[Found]:
        """The pictures most like each of some pictures, by cosine.

        Raises:
            BadImage: naming the one that cannot be used.
        """
        check(top, 0)
        clock = Clock()
        pixels = self.model.pixels(images)
        clock.lap("decode")
        with torch.inference_mode():
            queries = self.model.model.encode_image(pixels.to(self.model.device)).embedding.float().cpu().numpy()
        clock.lap("encode")
        rows, cosines = self.nearest(queries, top)
        clock.lap("shortlist")
        return [Found(self._hits(r, c), clock.laps) for r, c in zip(rows, cosines, strict=True)]

    def kept(self, rows: Sequence[int]) -> Kept:
        """What the heads keep of some rows: mapped, or computed from the pictures if the index keeps none."""
        if self._kept is not None:
            return unflat(self._kept[np.asarray(rows)], self.commit.made.kept_shape, self.model.device)
        pixels = [
            self.model.pixels([open_image(self.picture(self._id_of[row]), name=self._id_of[row])]) for row in rows
        ]
        return self.model.model.keep_image(self.model.model.encode_image(torch.cat(pixels).to(self.model.device)))

    def encode_text(self, text: str) -> Encoded:
        """One text, its tokens included."""
        return self._encode_texts([text])

    def _encode_texts(self, texts: Sequence[str]) -> Encoded:
        ids, mask = self.model.token_ids(texts)
        return self.model.model.encode_text(ids.to(self.model.device), mask.to(self.model.device))

    def _match(self, texts: Encoded, rows: np.ndarray, clock: Clock) -> Tensor:
        """(Q, K) logits of each text with its shortlist: the text's own layers run once, not once a picture."""
        count, depth = rows.shape
        step = max(1, MATCHED_AT_ONCE // depth)
        parts = []
        for start in range(0, count, step):
            kept = self.kept(rows[start : start + step].reshape(-1).tolist())
            clock.lap("read")
            some = texts.part(slice(start, start + step))
            parts.append(self.model.model.match_kept(kept, some).float().cpu().view(-1, depth))
            clock.lap("rerank")
        return torch.cat(parts)

    def _hits(self, rows: np.ndarray, cosines: np.ndarray) -> list[Hit]:
        pairs = zip(rows.tolist(), cosines.tolist(), strict=True)
        return [Hit(self._id_of[row], cosine, place) for place, (row, cosine) in enumerate(pairs, 1) if row >= 0]

    def _reranked(self, rows: np.ndarray, cosines: np.ndarray, logits: Tensor, weight: float | None) -> list[Hit]:
        """The order by cosine, its head put in the order of the second stage; equal scores keep their order."""
        hits = self._hits(rows, cosines)
        weight = self.model.rerank_weight if weight is None else weight
        scale = 0.0 if weight is None else self.model.model.logit_scale.item()
        head = [
            Hit(hit.id, hit.cosine, hit.place, logit, scale * hit.cosine + (1.0 if weight is None else weight) * logit)
            for hit, logit in zip(hits, logits.tolist(), strict=False)
        ]
        return sorted(head, key=lambda hit: -(hit.score or 0.0)) + hits[len(head) :]


class Clock:
    """Milliseconds by stage."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now, self._since, self.laps = now, now(), dict[str, float]()

    def lap(self, stage: str) -> None:
        """Add what has gone by since the last lap to a stage."""
        at = self._now()
        self.laps[stage] = self.laps.get(stage, 0.0) + 1e3 * (at - self._since)
        self._since = at


def approximate(folder: str | PathLike[str], kind: str) -> Path:
    """Make the approximate index of a finished one; ``kind`` is "faiss" or "usearch"."""
    folder = Path(folder)
    with locked(folder):
        commit = read_commit(folder)
        state = read_state(folder, commit)
        live = np.array(sorted(item.row for item in state.items.values()), dtype=np.int64)
        scales = map_rows(folder, commit, SCALES) if commit.made.embeddings == "int8" else None
        exact = Exact(map_rows(folder, commit, EMBEDDINGS), scales, live)
        return write_approximate(folder, exact, kind, about(commit.rows, commit.log_bytes, kind))

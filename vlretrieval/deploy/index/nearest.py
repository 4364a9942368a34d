"""The rows with the largest dot products: exact and streamed, or through faiss or usearch and scored again exactly."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vlretrieval.deploy.index.made import restored
from vlretrieval.deploy.index.store import Array

Rows = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

BLOCK = 1 << 16  # rows turned to float32 at a time
HELD_BYTES = 1 << 30  # of float32 rows that stay in memory
GRAPH_UP_TO = 100_000  # rows of which faiss makes a graph; of more, quantised lists
KINDS = ("exact", "faiss", "usearch")
ABOUT = "{kind}.json"  # beside {kind}.index: what it was made of
SPARE = 2  # times as many candidates as are wanted, since the order of a quantised index is not the exact one


class Nearest(Protocol):
    """Finds rows."""

    def __call__(self, queries: Floats, count: int) -> tuple[Rows, Floats]:
        """(Q, K) rows and their scores, best first, equal ones in their order; K = min(count, live rows)."""
        ...


class Exact:
    """Every live row against every query.

    Args:
        rows: (N, E) as stored, perhaps memory-mapped.
        scales: (N, 1) of int8 rows, None for others.
        live: (L,) rows that count, ascending.
    """

    def __init__(self, rows: Array, scales: Array | None, live: Rows) -> None:
        self.rows, self.scales, self.live = rows, scales, live
        self._held: Floats | None = None
        if 4 * len(live) * rows.shape[1] <= HELD_BYTES:
            self._held = self._block(0, len(live))

    def _block(self, start: int, stop: int) -> Floats:
        if self._held is not None:
            return self._held[start:stop]
        which = self.live[start:stop]
        return restored(self.rows[which], None if self.scales is None else self.scales[which])

    def __call__(self, queries: Floats, count: int) -> tuple[Rows, Floats]:
        count = min(count, len(self.live))
        score = np.empty((len(queries), 0), dtype=np.float32)
        place = np.empty((len(queries), 0), dtype=np.int64)
        for start in range(0, len(self.live), BLOCK):
            found = queries @ self._block(start, start + BLOCK).T
            at = np.broadcast_to(np.arange(start, start + found.shape[1]), found.shape)
            score, place = best(np.concatenate([score, found], axis=1), np.concatenate([place, at], axis=1), count)
        return self.live[place], score

    def score(self, queries: Floats, rows: Rows) -> Floats:
        """(Q, K) exact scores of given rows (Q, K)."""
        values = restored(self.rows[rows], None if self.scales is None else self.scales[rows])
        return np.einsum("qke,qe->qk", values, queries)


def best(score: Floats, place: Rows, count: int) -> tuple[Floats, Rows]:
    """The ``count`` largest of each row, in order; of equal scores the earlier place."""
    if score.shape[1] > count:
        edge = -np.partition(-score, count - 1, axis=1)[:, [count - 1]] if count else np.inf
        # all that are level at the edge stay for the sort, which knows the places; rows are made even by -inf
        widest = int((score >= edge).sum(1).max(initial=0)) if count else 0
        keep = np.argsort(score < edge, axis=1, kind="stable")[:, :widest]
        score, place = np.take_along_axis(score, keep, axis=1), np.take_along_axis(place, keep, axis=1)
    order = np.lexsort((place, -score), axis=1)[:, :count]
    return np.take_along_axis(score, order, axis=1), np.take_along_axis(place, order, axis=1)


class Approximate:
    """Candidates of a library's index, scored again exactly."""

    def __init__(self, exact: Exact, candidates: Any) -> None:
        self.exact, self.candidates = exact, candidates

    def __call__(self, queries: Floats, count: int) -> tuple[Rows, Floats]:
        count = min(count, len(self.exact.live))
        rows = self.candidates(queries, min(SPARE * count, len(self.exact.live)))
        if (np.sort(rows, axis=1)[:, -count:] < 0).any():  # it found fewer than there are
            return self.exact(queries, count)
        score = np.where(rows >= 0, self.exact.score(queries, np.maximum(rows, 0)), -np.inf).astype(np.float32)
        score, rows = best(score, rows, count)
        return rows, score


def about(rows: int, log_bytes: int, kind: str) -> dict[str, Any]:
    """What an approximate index was made of: it is stale as soon as a picture comes or goes."""
    return {"kind": kind, "rows": rows, "log_bytes": log_bytes}


def write_approximate(folder: Path, exact: Exact, kind: str, made_of: dict[str, Any]) -> Path:
    """Build the library's index of all live rows, beside the exact one.

    faiss: HNSW up to 100,000 rows, beyond that IVF with product quantisation (arXiv:1702.08734); usearch: HNSW.

    Raises:
        ValueError: the library is not installed.
    """
    path = folder / f"{kind}.index"
    part = folder / f"{kind}.index.part"
    if not len(exact.live):
        raise ValueError(f"{folder} holds no picture; nearest={kind} has nothing to work on")
    if kind == "faiss":
        faiss = library("faiss", "faiss-cpu")
        index = faiss_index(faiss, exact)
        faiss.write_index(index, str(part))
    else:
        usearch = library("usearch.index", "usearch")
        index = usearch.Index(ndim=exact.rows.shape[1], metric="ip", dtype="f16")
        for start in range(0, len(exact.live), BLOCK):
            index.add(exact.live[start : start + BLOCK], exact._block(start, start + BLOCK))
        index.save(str(part))
    said = folder / ABOUT.format(kind=kind)
    said.unlink(missing_ok=True)  # first: an index without it is not taken
    os.replace(part, path)
    said_part = said.with_name(f"{said.name}.part")
    said_part.write_text(json.dumps(made_of))
    os.replace(said_part, said)
    return path


def faiss_index(faiss: Any, exact: Exact) -> Any:
    count, width = len(exact.live), exact.rows.shape[1]
    if count <= GRAPH_UP_TO:
        inner = faiss.IndexHNSWFlat(width, 32, faiss.METRIC_INNER_PRODUCT)
        inner.hnsw.efConstruction = 200
        index = faiss.IndexIDMap(inner)
    else:
        lists = max(1, min(int(4 * count**0.5), count // 39))  # faiss wants 39 rows to train each
        bytes_each = next(m for m in (64, 48, 32, 16, 8, 4, 2, 1) if width % m == 0 and m <= width // 2)
        index = faiss.index_factory(width, f"IVF{lists},PQ{bytes_each}", faiss.METRIC_INNER_PRODUCT)
        sample = np.random.default_rng(0).choice(count, min(count, 64 * lists), replace=False)
        index.train(restored_rows(exact, np.sort(sample)))
    for start in range(0, count, BLOCK):
        index.add_with_ids(exact._block(start, start + BLOCK), exact.live[start : start + BLOCK])
    return index


def restored_rows(exact: Exact, places: Rows) -> Floats:
    which = exact.live[places]
    return restored(exact.rows[which], None if exact.scales is None else exact.scales[which])


def open_approximate(folder: Path, exact: Exact, kind: str, expected: dict[str, Any]) -> Approximate:
    """What :func:`write_approximate` wrote.

    Raises:
        ValueError: it is not there, or was made before the index last changed.
    """
    path = folder / f"{kind}.index"
    way_out = f"make it with vlretrieval-index ... nearest={kind}, or search with nearest=exact"
    said = folder / ABOUT.format(kind=kind)
    if not path.is_file() or not said.is_file():
        raise ValueError(f"{folder} has no {kind} index; {way_out}")
    if json.loads(said.read_text()) != expected:
        raise ValueError(f"{path} is stale: pictures came or went since it was made; {way_out}")
    if kind == "faiss":
        faiss = library("faiss", "faiss-cpu")
        index = faiss.read_index(str(path))
        inner = faiss.downcast_index(index.index) if hasattr(index, "index") else index
        if hasattr(inner, "hnsw"):
            inner.hnsw.efSearch = 256
        elif hasattr(inner, "nprobe"):
            inner.nprobe = max(1, inner.nlist // 32)
        return Approximate(exact, lambda queries, count: index.search(np.ascontiguousarray(queries), count)[1])
    usearch = library("usearch.index", "usearch")
    index = usearch.Index.restore(str(path), view=True)

    def candidates(queries: Floats, count: int) -> Rows:
        found = index.search(queries, count)
        keys = np.atleast_2d(np.asarray(found.keys)).astype(np.int64)
        counts = np.atleast_1d(np.asarray(getattr(found, "counts", keys.shape[1])))
        return np.where(np.arange(keys.shape[1]) < counts[:, None], keys, -1)

    return Approximate(exact, candidates)


def library(name: str, package: str) -> Any:
    """An optional library."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(f"nearest={name.split('.')[0]} needs its library; pip install {package}") from None

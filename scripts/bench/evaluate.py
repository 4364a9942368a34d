"""Exact ranks by counting against the usual ways: processor time and memory, N images x 5 N captions, E = 512.

    python scripts/bench/evaluate.py              # N = 1000, 5000, 25,000, 100,000: about 10 minutes on one quiet core
    python scripts/bench/evaluate.py --quick      # N = 1000 and 5000, the three that are not slow: under a minute
    python scripts/bench/evaluate.py --sizes 100000 --only ours --pairs inf     # nothing left out: about half an hour

Each way runs in a process of its own, so that its peak memory is its own, and times the bare matrix product just before
and just after itself: the ratio of the two is what counts, a busy machine slows both. Goals (see the last lines of the
output): at most 1.25 x the bare product with the ranks of both directions, 1.7 x faster than faiss's flat search (which
gives the first ten and no ranks), 20 x faster than sorting and than CLIP_benchmark's way, and no more than 64 MiB of
memory beyond the embeddings at any size.

What is left out, and why: a way whose time or memory, scaled by the number of pairs from the size before, would pass
--seconds or 60 % of the free memory is not run. And where all pairs are more than --pairs (ours; a fifth of it for
faiss), the first captions alone are scored against all images, as many as fit: both sides are read in the same blocks,
and every image still asks, since a caption is then true of several. The column "captions" says how many there were.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", os.environ["OMP_NUM_THREADS"])

import numpy as np  # noqa: E402  (after the threads are set)

WIDTH = 512
KS = (1, 5, 10)
MIB = 1 << 20
STREAMED = {"ours": 1, "faiss": 5}  # ways that keep no full matrix, and by how much their share of --pairs is smaller

# text (M, E) and image (N, E), unit rows; true (caption, image) pairs (P, 2)
Data = tuple[np.ndarray, np.ndarray, np.ndarray]


def data_of(images: int, captions: int) -> Data:
    """Unit vectors of a middling model: about half of the captions find their picture first."""
    rng = np.random.default_rng(0)
    image = rng.standard_normal((images, WIDTH), dtype=np.float32)
    if captions >= images:
        pairs = np.stack([np.arange(captions), np.arange(captions) * images // captions], axis=1)
    else:  # a part of the captions: each true of several images, so that every image has one to look for
        pairs = np.stack([np.arange(images) % captions, np.arange(images)], axis=1)
    text = rng.standard_normal((captions, WIDTH), dtype=np.float32)
    for start in range(0, len(pairs), captions):
        some = pairs[start : start + captions]
        text[some[:, 0]] += 0.19 * image[some[:, 1]]
    for rows in (image, text):
        for start in range(0, len(rows), 4096):
            rows[start : start + 4096] /= np.linalg.norm(rows[start : start + 4096], axis=1, keepdims=True)
    return text, image, pairs


def bare(text: np.ndarray, image: np.ndarray, pairs: np.ndarray, block: int = 1024) -> dict[str, float]:
    """The matrix product alone, in blocks that are thrown away."""
    out = np.empty((block, block), np.float32)
    for top in range(0, len(text), block):
        for left in range(0, len(image), block):
            rows, columns = text[top : top + block], image[left : left + block]
            np.matmul(rows, columns.T, out=out.reshape(-1)[: len(rows) * len(columns)].reshape(len(rows), len(columns)))
    return {}


def ours(text: np.ndarray, image: np.ndarray, pairs: np.ndarray) -> dict[str, float]:
    """Exact ranks of both directions, ties counted against the model."""
    from vlretrieval.metrics import rank_both, recall_at

    t2i, i2t = rank_both(text, image, pairs)
    return {f"{way}/R@{k}": recall_at(ranks, k) for way, ranks in (("t2i", t2i), ("i2t", i2t)) for k in KS}


def argsort(text: np.ndarray, image: np.ndarray, pairs: np.ndarray) -> dict[str, float]:
    """The full matrix, sorted in both directions."""
    scores = text @ image.T
    owner = np.arange(len(text)) // 5
    places = (np.argsort(-scores, axis=1) == owner[:, None]).argmax(1)
    found = {f"t2i/R@{k}": 100 * float((places < k).mean()) for k in KS}
    order = np.argsort(-scores.T, axis=1)
    places = (order // 5 == np.arange(len(image))[:, None]).argmax(1)
    return found | {f"i2t/R@{k}": 100 * float((places < k).mean()) for k in KS}


def clip_benchmark(text: np.ndarray, image: np.ndarray, pairs: np.ndarray) -> dict[str, float]:
    """CLIP_benchmark's way: the full matrix and a bool matrix of the same size, top-k and one-hot for each k."""
    import torch

    scores = torch.from_numpy(text) @ torch.from_numpy(image).T
    positive = torch.zeros_like(scores, dtype=torch.bool)
    positive[torch.arange(len(text)), torch.arange(len(text)) // 5] = True

    def hits(scores: torch.Tensor, positive: torch.Tensor, k: int) -> float:
        found = []
        for rows, true in zip(scores.split(64), positive.split(64), strict=True):
            top = torch.topk(rows, k, dim=1).indices
            chosen = torch.nn.functional.one_hot(top, num_classes=rows.shape[1])
            found.append((chosen * true[:, None, :]).sum((1, 2)) > 0)
        return 100 * float(torch.cat(found).float().mean())

    found = {f"t2i/R@{k}": hits(scores, positive, k) for k in KS}
    return found | {f"i2t/R@{k}": hits(scores.T, positive.T, k) for k in KS}


def torchmetrics(text: np.ndarray, image: np.ndarray, pairs: np.ndarray) -> dict[str, float]:
    """torchmetrics' retrieval hit rate over all pairs (scores shifted above 0, which it asks for)."""
    import torch
    from torchmetrics.retrieval import RetrievalHitRate

    scores = torch.from_numpy(text) @ torch.from_numpy(image).T + 2
    positive = torch.arange(len(text))[:, None] // 5 == torch.arange(len(image))
    found = {}
    for way, table, true in (("t2i", scores, positive), ("i2t", scores.T, positive.T)):
        index = torch.arange(len(table))[:, None].expand_as(table).reshape(-1)
        for k in KS:
            metric = RetrievalHitRate(top_k=k)
            found[f"{way}/R@{k}"] = 100 * float(metric(table.reshape(-1), true.reshape(-1), indexes=index))
    return found


def faiss(text: np.ndarray, image: np.ndarray, pairs: np.ndarray) -> dict[str, float]:
    """faiss's exact flat search, first ten of both directions; gives no ranks beyond."""
    import faiss as library

    library.omp_set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    found = {}
    for way, queries, gallery, good in (("t2i", text, image, pairs), ("i2t", image, text, pairs[:, ::-1])):
        index = library.IndexFlatIP(WIDTH)
        index.add(gallery)
        _, top = index.search(queries, max(KS))
        number = np.arange(len(queries))[:, None] * len(gallery) + top
        true = np.isin(number, good[:, 0] * len(gallery) + good[:, 1])
        found |= {f"{way}/R@{k}": 100 * float(true[:, :k].any(1).mean()) for k in KS}
    return found


WAYS: dict[str, Callable[..., dict[str, float]]] = {
    way.__name__: way for way in (bare, ours, faiss, argsort, clip_benchmark, torchmetrics)
}


def reset_peak() -> None:
    """Give freed memory back and forget the process's highest so far (Linux)."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def memory_bytes(field: str) -> int:
    """VmHWM, the highest since the reset, or VmRSS, now."""
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(field))


def processor_seconds(way: Callable[..., Any], *data: np.ndarray) -> tuple[float, Any]:
    started = time.process_time()
    result = way(*data)
    return time.process_time() - started, result


def one(name: str, images: int, captions: int, rounds: int) -> dict[str, Any]:
    """Measure one way in this process; the bare product before and after each round."""
    data = data_of(images, captions)
    few = data_of(64, 320)
    WAYS[name](*few)  # imports
    bare(*few, block=64)
    reset_peak()
    before = memory_bytes("VmRSS")
    spent, product, figures = [], [], {}
    for _ in range(rounds):
        product.append(processor_seconds(bare, *data)[0])
        seconds, figures = processor_seconds(WAYS[name], *data)
        spent.append(seconds)
        product.append(processor_seconds(bare, *data)[0])
    ratios = [s / ((product[2 * i] + product[2 * i + 1]) / 2) for i, s in enumerate(spent)]
    return {
        "way": name,
        "images": images,
        "captions": captions,
        "seconds": float(np.median(spent)),
        "bare_seconds": float(np.median(product)),
        "ratio": float(np.median(ratios)),
        "extra_mib": (memory_bytes("VmHWM") - before) / MIB,
        "figures": figures,
    }


def goals(rows: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """Each goal that the rows speak of, and whether it is reached."""
    found = []
    for images in sorted({row["images"] for row in rows}):
        by = {row["way"]: row for row in rows if row["images"] == images}
        if "ours" not in by:
            continue
        mine = by["ours"]
        if images >= 5000:
            found.append((f"N={images}: {mine['ratio']:.2f} x the bare product (goal 1.25)", mine["ratio"] <= 1.25))
        found.append(
            (f"N={images}: {mine['extra_mib']:.0f} MiB beyond the embeddings (goal 64)", mine["extra_mib"] <= 64)
        )
        for other, goal in (("faiss", 1.7), ("argsort", 20), ("clip_benchmark", 20)):
            if other in by and images >= 5000:
                theirs = by[other]["ratio"]
                said = f"N={images}: {theirs / mine['ratio']:.1f} x faster than {other} (goal {goal}"
                said += f"; the bare product is {theirs:.1f} x cheaper)" if theirs < 1.15 * goal else ")"
                found.append((said, theirs / mine["ratio"] >= goal))
        for other, row in by.items():
            if other != "ours" and row["captions"] == mine["captions"]:
                worst = max(abs(row["figures"][name] - value) for name, value in mine["figures"].items())
                found.append((f"N={images}: recalls within {worst:.3f} points of {other}'s", worst <= 0.05))
    return found


def too_much(name: str, images: int, rows: list[dict[str, Any]], seconds: float) -> str | None:
    """Why a way is left out at this size, from its own measure at a smaller one; None if it is not."""
    smaller = [row for row in rows if row["way"] == name and row["images"] < images]
    if name in STREAMED or not smaller:
        return None
    scale = (images / smaller[-1]["images"]) ** 2
    needed_s, needed_gib = scale * smaller[-1]["seconds"], scale * smaller[-1]["extra_mib"] / 1024
    free_gib = memory_free() / (1 << 30)
    if needed_gib > 0.6 * free_gib:
        return f"would need {needed_gib:.0f} GiB, of {free_gib:.0f} free"
    return f"would take {needed_s:.0f} s, the limit is {seconds:.0f}" if needed_s > seconds else None


def memory_free() -> int:
    """Bytes that a new process may take without swapping."""
    with open("/proc/meminfo") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable"))


def line(images: int, captions: int, name: str, seconds: float, ratio: float, extra_mib: float | None, t2i: str) -> str:
    extra = "" if extra_mib is None else f"{extra_mib:.0f}"
    return f"{images:>7}{captions:>9} {name:<15}{seconds:>10.2f}{ratio:>9.2f}{extra:>11}   {t2i}"


def main() -> int:
    names = [name for name in WAYS if name != "bare"]
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 5000, 25_000, 100_000])
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--quick", action="store_true", help="--sizes 1000 5000 --only ours faiss --rounds 1")
    parser.add_argument("--rounds", type=int, default=3, help="of ours and faiss up to N = 5000; all else runs once")
    parser.add_argument("--pairs", type=float, default=3.2e9, help="of caption and image, scored at most by ours")
    parser.add_argument("--seconds", type=float, default=120, help="of a way that keeps a full matrix, at most")
    parser.add_argument("--child", nargs=3, metavar=("WAY", "N", "CAPTIONS"), help=argparse.SUPPRESS)
    parser.add_argument("--output", help="a JSON file for the rows")
    arguments = parser.parse_args()
    if arguments.child:
        name, images, captions = arguments.child
        print(json.dumps(one(name, int(images), int(captions), arguments.rounds)))
        return 0
    if arguments.quick:
        arguments.sizes, arguments.only, arguments.rounds = [1000, 5000], ["ours", "faiss"], 1
    rows: list[dict[str, Any]] = []
    print(f"{'N':>7}{'captions':>9} {'way':<15}{'seconds':>10}{'x bare':>9}{'extra MiB':>11}   t2i R@1", flush=True)
    for images in sorted(arguments.sizes):
        for name in arguments.only:
            reason = too_much(name, images, rows, arguments.seconds)
            if reason:
                print(f"{images:>7}{5 * images:>9} {name:<15}   left out: {reason}", flush=True)
                continue
            captions = int(min(5 * images, arguments.pairs / STREAMED.get(name, 1e-9) / images))
            rounds = arguments.rounds if name in STREAMED and images <= 5000 else 1
            command = [sys.executable, __file__, "--child", name, str(images), str(captions), "--rounds", str(rounds)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                said = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
                print(f"{images:>7}{captions:>9} {name:<15}   failed: {said}", flush=True)
                continue
            row = json.loads(done.stdout.splitlines()[-1])
            rows.append(row)
            if name == "ours":
                print(line(images, captions, "bare product", row["bare_seconds"], 1, None, ""))
            recall = f"{row['figures']['t2i/R@1']:.2f}"
            print(line(images, captions, name, row["seconds"], row["ratio"], row["extra_mib"], recall), flush=True)
    if arguments.output:
        with open(arguments.output, "w") as file:
            json.dump(rows, file, indent=1)
    reached = goals(rows)
    for said, good in reached:
        print(("reached  " if good else "MISSED   ") + said)
    return 0 if all(good for _, good in reached) else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""Holds an export against the model it came from, on real pairs: how far outputs differ, recall lost, speed.

Knows no format: both sides are models of the same contract (``encode_image``, ``encode_text``, ``keep_image``,
``match_kept``). What recall is and on which data is the caller's business too, and comes in as a function.
"""

from __future__ import annotations

import hashlib
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vlretrieval.data.tokenizers import Tokenizer, tokenizer_hash
from vlretrieval.model.encoded import Encoded

Measure = Callable[[Any], dict[str, Any]]  # a model -> the figures of vlretrieval.evaluation.evaluate
SHORTLIST, QUERIES, LARGER, ROUNDS = 16, 100, 16, 15

# The largest difference allowed, over the largest value of the source: rounding of sums in float32, of weights to 16
# bits. 8-bit numbers move single values further; what counts there is that embeddings keep their direction.
TOLERANCE = {"fp32": 1e-5, "fp16": 5e-3, "bf16": 4e-2, "int8": 1e-3}


@dataclass(frozen=True)
class Pairs:
    """Pictures and texts that an export is tried on.

    Attributes:
        pixels: (N, 3, S, S) uint8.
        token_ids: N lists; text i belongs to picture i.
        pad_id, context_length: the tokenizer's.
        origin: where they are from, for the certificate.
    """

    pixels: Tensor
    token_ids: Sequence[Sequence[int]]
    pad_id: int
    context_length: int
    origin: dict[str, Any]

    def __len__(self) -> int:
        return len(self.pixels)

    def texts(self, count: int, longest: bool = False) -> tuple[Tensor, Tensor]:
        """(B, L) ids and mask of the first ``count`` texts, L that of the longest of them, or the whole context."""
        rows = self.token_ids[:count]
        length = self.context_length if longest else max(map(len, rows))
        ids = torch.full((len(rows), length), self.pad_id, dtype=torch.int64)
        mask = torch.zeros(len(rows), length, dtype=torch.bool)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = True
        return ids, mask


def random_pairs(tokenizer: Tokenizer, image_size: int, count: int = LARGER) -> Pairs:
    """Noise and words at random, for want of data. Texts are of all lengths up to half the context."""
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, 3, image_size, image_size), generator=draw, dtype=torch.uint8)
    context = tokenizer.context_length
    rows = []
    for number in range(count):
        words = 1 + number * max(0, context // 2 - 3) // max(1, count - 1)
        ids = torch.randint(0, tokenizer.vocab_size, (words,), generator=draw)
        special = torch.tensor([tokenizer.pad_id, tokenizer.start_id, tokenizer.end_id])
        ids = torch.where(torch.isin(ids, special), 3, ids)
        rows.append([tokenizer.start_id, *ids.tolist(), tokenizer.end_id])
    return Pairs(pixels, rows, tokenizer.pad_id, context, {"drawn": "at random, for want of data", "pairs": count})


def difference(source: Tensor, exported: Tensor) -> dict[str, float]:
    """The largest absolute difference, and the same over the largest value of the source. NaN is infinitely far."""
    apart = (source.double() - exported.double()).abs().nan_to_num(nan=float("inf"))
    return {"max_abs": float(apart.max()), "max_rel": float(apart.max() / source.double().abs().max())}


def embedding_difference(source: Tensor, exported: Tensor) -> dict[str, float]:
    """As :func:`difference`, and the cosine of each (B, E) row to its twin, mean and least."""
    cosine = torch.nn.functional.cosine_similarity(source.double(), exported.double()).nan_to_num(nan=-1.0)
    return difference(source, exported) | {"mean_cosine": float(cosine.mean()), "min_cosine": float(cosine.min())}


@torch.inference_mode()
def parity(source: Any, exported: Any, pairs: Pairs) -> list[dict[str, Any]]:
    """One row for each thing compared: images, texts and matching logits, at two batch sizes and two lengths."""
    rows: list[dict[str, Any]] = []
    for batch in (1, min(LARGER, len(pairs))):
        pixels = pairs.pixels[:batch]
        theirs = [model.encode_image(pixels) for model in (source, exported)]
        apart = embedding_difference(theirs[0].embedding, theirs[1].embedding)
        rows.append({"what": "images", "batch": batch} | apart)
        for longest in (False, True):
            ids, mask = pairs.texts(batch, longest)
            texts = [model.encode_text(ids, mask) for model in (source, exported)]
            size: dict[str, Any] = {"batch": batch, "length": ids.shape[1]}
            rows.append({"what": "texts"} | size | embedding_difference(texts[0].embedding, texts[1].embedding))
            if source.crossmodal is not None:
                logits = [
                    shortlisted(model, image, text)
                    for model, image, text in zip((source, exported), theirs, texts, strict=True)
                ]
                rows.append({"what": "matches"} | size | difference(*logits))
    return rows


def shortlisted(model: Any, image: Encoded, text: Encoded) -> Tensor:
    """(T, K) matching logits of T texts with T pictures, each text with all of them up to K = 16."""
    texts, size = len(text), min(SHORTLIST, len(image))
    rows = (torch.arange(texts)[:, None] + torch.arange(size)) % len(image)  # (T, K)
    kept = model.keep_image(image).index(rows.flatten())
    return model.match_kept(kept, text).view(texts, size)


@torch.inference_mode()
def same_order(source: Any, exported: Any, pairs: Pairs) -> dict[str, int]:
    """How many texts' shortlists (by the source's cosine) are put in the very same order by both."""
    size, queries = min(SHORTLIST, len(pairs)), min(QUERIES, len(pairs))
    image, text = source.encode_image(pairs.pixels), source.encode_text(*pairs.texts(queries))
    shortlist = source.similarity(image, text).T.topk(size).indices  # (T, K)
    orders = []
    for model in (source, exported):
        images, texts = model.encode_image(pairs.pixels), model.encode_text(*pairs.texts(queries))
        kept = model.keep_image(images).index(shortlist.flatten())
        logits = model.match_kept(kept, texts)
        orders.append(logits.view(queries, size).argsort(dim=1, descending=True, stable=True))
    return {"queries": queries, "shortlist": size, "same": int((orders[0] == orders[1]).all(1).sum())}


@torch.inference_mode()
def speed(source: Any, exported: Any, pairs: Pairs, rounds: int = ROUNDS) -> dict[str, Any]:
    """How many times as fast the export is at batch 1: the median over rounds of the source's time over the export's.

    "match" is one text with 16 pictures that are kept.
    """
    pixels, text_input = pairs.pixels[:1], pairs.texts(1)
    # With one thread its own time, which tells the same on a machine in use.
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    works: dict[str, list[Callable[[], Any]]] = {
        "images": [partial(model.encode_image, pixels) for model in (source, exported)],
        "texts": [partial(model.encode_text, *text_input) for model in (source, exported)],
    }
    if source.crossmodal is not None:
        works["matches"] = [_reranking(model, pairs) for model in (source, exported)]
    found: dict[str, Any] = {}
    for name, sides in works.items():
        seconds: list[list[float]] = [[], []]
        for number in range(rounds + 2):
            for side, work in enumerate(sides):
                started_at = clock()
                work()
                if number >= 2:  # the first two warm up
                    seconds[side].append(clock() - started_at)
        ratios = [a / b for a, b in zip(*seconds, strict=True)]
        found[name] = {
            "ratio": statistics.median(ratios),
            "source_ms": 1e3 * statistics.median(seconds[0]),
            "export_ms": 1e3 * statistics.median(seconds[1]),
        }
    return {"batch": 1, "threads": torch.get_num_threads(), "rounds": rounds} | found


def _reranking(model: Any, pairs: Pairs) -> Callable[[], Tensor]:
    size = min(SHORTLIST, len(pairs))
    kept, text = model.keep_image(model.encode_image(pairs.pixels[:size])), model.encode_text(*pairs.texts(1))
    return lambda: model.match_kept(kept, text)


def certify(
    source: Any,
    exported: Any,
    pairs: Pairs,
    *,
    format: str,
    precision: str,
    tolerance: float | None = None,
    measure: Measure | None = None,
) -> dict[str, Any]:
    """The certificate, as plain data, without what the folder's writer knows (files, hashes).

    Args:
        source, exported: models of the same contract.
        tolerance: the largest relative difference, or for int8 the most that the mean cosine may lack of 1;
            None takes that of the precision.
        measure: evaluates a model; None leaves recall out.

    Returns:
        Also "faults": what is over the tolerance, a line each; none for a good export.
    """
    tolerance = TOLERANCE[precision] if tolerance is None else tolerance
    rows = parity(source, exported, pairs)
    certificate: dict[str, Any] = {
        "format": format,
        "precision": precision,
        "tolerance": {"of": "1 - mean cosine" if precision == "int8" else "max_rel", "most": tolerance},
        "faults": faults(rows, precision, tolerance),
        "pairs": pairs.origin,
        "parity": rows,
    }
    if source.crossmodal is not None:
        certificate["order"] = same_order(source, exported, pairs)
    if not certificate["faults"]:  # of an export that is thrown away nobody wants to know the recall
        certificate["figures"] = None if measure is None else before_and_after(measure, source, exported)
        certificate["speed"] = speed(source, exported, pairs)
    certificate["made_with"] = {
        "torch": torch.__version__,
        "processor": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
    }
    return certificate


def faults(rows: Sequence[dict[str, Any]], precision: str, tolerance: float) -> list[str]:
    """A line for each row over the tolerance."""
    found = []
    for row in rows:
        if precision != "int8":
            over, said = not row["max_rel"] <= tolerance, f"differ by {row['max_rel']:.1e} of the largest value"
        elif "mean_cosine" in row:
            over = not 1 - row["mean_cosine"] <= tolerance
            said = f"keep a mean cosine of {row['mean_cosine']:.5f}, and {1 - tolerance:g} is asked for"
        else:
            continue
        if over:
            at = ", ".join(f"{name} {row[name]}" for name in ("batch", "length") if name in row)
            found.append(f"{row['what']} ({at}) {said}" + ("" if precision == "int8" else f"; {tolerance:g} may be"))
    return found


def before_and_after(measure: Measure, source: Any, exported: Any) -> dict[str, Any]:
    """Recall and hard-negative accuracy of both, percent, and how many points the export loses."""
    before, after = flat(measure(source)), flat(measure(exported))
    return {"before": before, "after": after, "lost": {name: before[name] - after[name] for name in before}}


def flat(figures: dict[str, Any]) -> dict[str, float]:
    """{"first_stage t2i R@1": ..., "reranked i2t R@10": ..., "hard negatives, match": ...}"""
    found = {}
    for stage in ("first_stage", "reranked"):
        for way in ("t2i", "i2t"):
            for k in figures["protocol"]["ks"] if stage in figures else ():
                found[f"{stage} {way} R@{k}"] = float(figures[stage][way][f"R@{k}"])
    for score in ("cosine", "match"):
        row = figures.get("hard_negatives", {}).get("all", {})
        if score in row:
            found[f"hard negatives, {score}"] = float(row[score]["accuracy"])
    return found


def inputs_hash(preprocess: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """What decides what the model is shown: two exports are comparable only if these are equal."""
    digest = hashlib.sha256(json.dumps(preprocess, sort_keys=True).encode()).hexdigest()[:16]
    return {"preprocess": preprocess, "preprocess_hash": digest, "tokenizer_hash": tokenizer_hash(tokenizer)}


def line(certificate: dict[str, Any]) -> str:
    """The certificate in one line for people."""
    worst: dict[str, tuple[str, list[float]]] = {}
    for row in certificate["parity"]:
        key = "mean_cosine" if certificate["precision"] == "int8" and "mean_cosine" in row else "max_rel"
        worst.setdefault(row["what"], (key, []))[1].append(row[key])
    parts = [
        f"{what} keep a mean cosine of {min(values):.5f}"
        if key == "mean_cosine"
        else f"{what} within {max(values):.1e}"
        for what, (key, values) in worst.items()
    ]
    said = f"{certificate['format']} {certificate['precision']}: {', '.join(parts)}"
    if "order" in certificate:
        order = certificate["order"]
        said += f"; re-ranked in the same order for {order['same']} of {order['queries']} texts"
    if certificate.get("figures"):
        lost = certificate["figures"]["lost"]
        worst_name = max(lost, key=lambda name: lost[name])
        said += (
            f"; most lost: {lost[worst_name]:.2f} points of {worst_name}"
            if lost[worst_name] > 0
            else ("; no recall lost")
        )
    else:
        said += "; recall not measured"
    if "size" in certificate:
        size = certificate["size"]
        said += f"; {size['bytes'] / 1e6:.1f} MB, {size['ratio']:.2f}x the float32 weights"
    if "speed" in certificate:
        ratios = [f"{name} {row['ratio']:.1f}x" for name, row in certificate["speed"].items() if isinstance(row, dict)]
        said += f"; speed of torch eager at batch 1: {', '.join(ratios)}"
    return said

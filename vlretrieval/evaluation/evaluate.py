"""One function measures a model on a split: both stages, hard negatives, and the protocol the figures stand under."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import vlretrieval
from vlretrieval.data.splits import Split
from vlretrieval.data.tokenizers import Tokenizer
from vlretrieval.evaluation.encode import Images, Texts, encode_images, encode_texts, evaluating
from vlretrieval.evaluation.hard_negatives import accuracies, draw_negatives
from vlretrieval.evaluation.inputs import Inputs, Transform
from vlretrieval.evaluation.rerank import NOISE, fuse, rerank, score_pairs, unique_pairs
from vlretrieval.evaluation.sharing import Processes
from vlretrieval.evaluation.shortlist import shortlist
from vlretrieval.metrics.ranks import Ranks, rank_both
from vlretrieval.metrics.recall import both_directions, recall_at
from vlretrieval.metrics.scores import IntArray, pair_scores

Floats = npt.NDArray[np.float64]

WEIGHTS = (None, *(round(0.1 * 2 ** (step / 2), 3) for step in range(13)))  # tried by choose_weight, 0.1 to 6.4
COSINE_NOISE = 1e-6  # the same text in another batch: its cosine moves by about so much in float32


@dataclass(frozen=True)
class Settings:
    """How to evaluate.

    Args:
        ks: the k of recall@k; one beyond the gallery takes all of it, and the result says so.
        top_k: candidates a query that the cross-modal heads re-rank, clamped to the gallery; 0 leaves them out.
        weight: of the matching logit beside logit_scale * cosine in a shortlist; None orders by the logit alone.
        hard_negatives: whether the split's own hard negatives are scored.
        negatives_per_kind: at most so many of each kind, drawn by ``seed``; None scores all.
        bootstrap: draws for the 95 % intervals; 0 leaves them out.
        seed: of the bootstrap and of the drawn negatives.
        precision: "float32", or "bfloat16" / "float16" for the encoders' own arithmetic; scores are float32 always.
        batch_size: pictures a batch; four times as many captions.
    """

    ks: Sequence[int] = (1, 5, 10)
    top_k: int = 0
    weight: float | None = None
    hard_negatives: bool = True
    negatives_per_kind: int | None = None
    bootstrap: int = 1000
    seed: int = 0
    precision: str = "float32"
    batch_size: int = 64

    def __post_init__(self) -> None:
        if not self.ks or min(self.ks) < 1:
            raise ValueError(f"ks={list(self.ks)}: recall needs at least one k, each 1 or more")
        object.__setattr__(self, "ks", tuple(int(k) for k in self.ks))
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} is negative; 0 leaves re-ranking out")
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size} must be at least 1")
        if self.bootstrap < 0:
            raise ValueError(f"bootstrap={self.bootstrap} is negative; 0 leaves the intervals out")


@dataclass
class Shortlists:
    """What re-ranking works on, both directions: candidates and cosines (Q, K), and matching logits (Q, K)."""

    t2i: tuple[IntArray, Floats, Floats]
    i2t: tuple[IntArray, Floats, Floats]


@dataclass
class Evaluation:
    """The outcome: ``figures`` is metrics.json; the rest is what it was computed from, a query at a time.

    Attributes:
        figures: plain data. {"protocol", "first_stage", "reranked"?, "by_image_id"?, "hard_negatives"?}.
        ranks: {"first_stage": (t2i, i2t), "reranked": ...} under the split's truth.
        images, texts: the embeddings.
        shortlists: where the model re-ranked.
    """

    figures: dict[str, Any]
    ranks: dict[str, tuple[Ranks, Ranks]]
    images: Images
    texts: Texts
    shortlists: Shortlists | None = None
    caption_image: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def scalars(self, prefix: str = "") -> dict[str, float]:
        """The headline figures under flat names: "t2i/R@1", "rsum", "reranked/i2t/R@5", "negatives/all/match"."""
        flat: dict[str, float] = {}
        for stage, lead in (("first_stage", ""), ("reranked", "reranked/")):
            if stage not in self.figures:
                continue
            for way in ("t2i", "i2t"):
                for name, value in self.figures[stage][way].items():
                    if name.startswith("R@") or name in ("median_rank", "mean_rank", "MRR"):
                        flat[f"{lead}{way}/{name}"] = value
            flat[f"{lead}rsum"] = self.figures[stage]["rsum"]
        for kind, scores in self.figures.get("hard_negatives", {}).items():
            for name in ("cosine", "match"):
                if name in scores:
                    flat[f"negatives/{kind}/{name}"] = scores[name]["accuracy"]
        return {prefix + name: value for name, value in flat.items()}

    def write(self, folder: str | Path) -> Path:
        """Write metrics.json and queries.npz (each query's rank, for paired comparisons) and give the former's path."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, Any] = {"caption_image": self.caption_image}
        for stage, ways in self.ranks.items():
            for way, ranks in zip(("t2i", "i2t"), ways, strict=True):
                for name in ("query", "above", "tied", "good"):
                    arrays[f"{stage}/{way}/{name}"] = getattr(ranks, name)
        path = folder / "metrics.json"
        for target, save in (
            (folder / "queries.npz", lambda file: np.savez_compressed(file, **arrays)),
            (path, lambda file: file.write((json.dumps(self.figures, indent=2) + "\n").encode())),
        ):
            partial = target.with_name(target.name + ".partial")
            with partial.open("wb") as file:
                save(file)
            partial.replace(target)  # whole or not at all
        return path


def evaluate(
    model: Any,
    split: Split,
    tokenizer: Tokenizer,
    transform: Transform,
    settings: Settings = Settings(),  # noqa: B008  (frozen)
    *,
    inputs: Inputs | None = None,
    processes: Processes = Processes(),  # noqa: B008  (frozen)
) -> Evaluation:
    """Measure ``model`` on ``split``: recall both ways, re-ranked recall, hard negatives.

    Args:
        model: a RetrievalModel; it comes back in the mode it was in.
        tokenizer, transform: the model's own.
        inputs: the split made ready earlier (then split, tokenizer and transform are the ones it holds).
        processes: who shares the work; all of them must call, and all get the same outcome.

    Raises:
        ValueError: non-finite embeddings or logits (naming the row), an unreadable picture (naming the file).
    """
    inputs = inputs or Inputs(split, tokenizer, transform)
    split = inputs.split
    rerank_with_heads = settings.top_k > 0 and model.crossmodal is not None
    tokens = model.crossmodal is not None and (
        rerank_with_heads or (settings.hard_negatives and len(split.negatives) > 0)
    )
    with evaluating(model, settings.precision) as device:
        batch = settings.batch_size
        images = encode_images(model, inputs, device, batch_size=batch, tokens=tokens, processes=processes)
        texts = encode_texts(
            model, inputs, inputs.captions, device, batch_size=4 * batch, tokens=tokens, processes=processes
        )
        shortlists = None
        if rerank_with_heads:
            shortlists = match_shortlists(model, images, texts, split.positives, settings.top_k, device, processes)
        negatives = None
        if settings.hard_negatives and len(split.negatives):
            negatives = score_negatives(model, inputs, images, texts, settings, device, processes)
        logit_scale = float(model.logit_scale)

    truths = {"truth": split.positives}
    own = np.stack([np.arange(len(split.captions)), split.caption_image], axis=1)
    if len(split.positives) != len(own):
        truths["image id"] = own
    figures: dict[str, Any] = {"protocol": protocol(inputs, settings, model, shortlists, logit_scale, processes.count)}
    kept: dict[str, tuple[Ranks, Ranks]] = {}
    for rule, positives in truths.items():
        ranks = {"first_stage": rank_both(texts.embedding, images.embedding, positives)}
        if shortlists is not None:
            ranks["reranked"] = reranked(ranks["first_stage"], shortlists, positives, logit_scale, settings.weight)
        stages = {
            stage: both_directions(
                *ways, split.caption_image, settings.ks, replicates=settings.bootstrap, seed=settings.seed
            )
            for stage, ways in ranks.items()
        }
        if rule == "truth":
            figures |= stages
            kept = ranks
        else:
            figures["by_image_id"] = stages
    if negatives is not None:
        figures["hard_negatives"] = negatives
    return Evaluation(figures, kept, images, texts, shortlists, split.caption_image)


def match_shortlists(
    model: Any,
    images: Images,
    texts: Texts,
    positives: IntArray,
    top_k: int,
    device: torch.device,
    processes: Processes = Processes(),  # noqa: B008  (frozen)
) -> Shortlists:
    """Both directions' shortlists and the matching logits of their pairs, each pair scored once."""
    images_of, _ = shortlist(texts.embedding, images.embedding, top_k, positives)
    turned = positives[:, ::-1][np.lexsort((positives[:, 0], positives[:, 1]))]
    texts_of, _ = shortlist(images.embedding, texts.embedding, top_k, turned)
    count = len(texts.embedding)
    each_text, each_image = np.arange(count)[:, None], np.arange(len(images.embedding))[:, None]
    pairs = unique_pairs(images_of, texts_of, count)
    logits = score_pairs(model, images, texts, pairs // count, pairs % count, device, processes=processes)

    def look_up(image: IntArray, text: IntArray) -> tuple[Floats, Floats]:
        image, text = np.broadcast_arrays(image, text)
        cosine = pair_scores(texts.embedding, images.embedding, text.reshape(-1), image.reshape(-1)).reshape(
            image.shape
        )
        return cosine, logits[np.searchsorted(pairs, image * count + text)]

    return Shortlists(
        (images_of, *look_up(images_of, each_text)),
        (texts_of, *look_up(each_image, texts_of)),
    )


def reranked(
    first: tuple[Ranks, Ranks], shortlists: Shortlists, positives: IntArray, logit_scale: float, weight: float | None
) -> tuple[Ranks, Ranks]:
    """(t2i, i2t) ranks after re-ranking with the given fusion of the two scores."""
    ways = []
    for ranks, (candidates, cosine, match), pairs in (
        (first[0], shortlists.t2i, positives),
        (first[1], shortlists.i2t, positives[:, ::-1]),
    ):
        ways.append(rerank(ranks, candidates, *fuse(cosine, match, logit_scale, weight), pairs))
    return ways[0], ways[1]


def choose_weight(
    model: Any,
    split: Split,
    tokenizer: Tokenizer,
    transform: Transform,
    top_k: int,
    processes: Processes = Processes(),  # noqa: B008  (frozen)
    *,
    inputs: Inputs | None = None,
    grid: Sequence[float | None] = WEIGHTS,
) -> float | None:
    """The fusion weight with the highest re-ranked rsum on ``split``, which must not be the one measured later.

    None, the matching logit alone, wins a draw; then the smaller weight.
    """
    if model.crossmodal is None or top_k == 0:
        return None
    settings = Settings(top_k=top_k, hard_negatives=False, bootstrap=0)
    outcome = evaluate(model, split, tokenizer, transform, settings, inputs=inputs, processes=processes)
    shortlists = outcome.shortlists
    assert shortlists is not None
    scale = outcome.figures["protocol"]["rerank"]["logit_scale"]

    def rsum(weight: float | None) -> float:
        ways = reranked(outcome.ranks["first_stage"], shortlists, split.positives, scale, weight)
        return sum(recall_at(ranks, k) for ranks in ways for k in settings.ks)

    return max(grid, key=rsum)


def score_negatives(
    model: Any,
    inputs: Inputs,
    images: Images,
    texts: Texts,
    settings: Settings,
    device: torch.device,
    processes: Processes,
) -> dict[str, Any]:
    """Accuracy on the split's hard negatives, by cosine and (where the model has the heads) by matching logit."""
    split = inputs.split
    rows = draw_negatives(split.negatives, settings.negatives_per_kind, settings.seed)
    caption = split.negatives.caption[rows]
    image = split.caption_image[caption]  # never goes down: captions and their negatives are grouped by image
    heads = model.crossmodal is not None
    packed = inputs.tokens([split.negatives.texts[row] for row in rows])
    false = encode_texts(
        model, inputs, packed, device, batch_size=4 * settings.batch_size, tokens=heads, processes=processes,
        name="hard negative",
    )  # fmt: skip
    scores = {
        "cosine": (
            pair_scores(texts.embedding, images.embedding, caption, image),
            pair_scores(false.embedding, images.embedding, np.arange(len(rows)), image) + COSINE_NOISE,
        )
    }
    if heads:
        asked, at = np.unique(caption, return_inverse=True)
        true = score_pairs(model, images, texts, split.caption_image[asked], asked, device, processes=processes)
        wrong = score_pairs(model, images, false, image, np.arange(len(rows)), device, processes=processes)
        scores["match"] = (true[at], wrong + NOISE * np.maximum(1, np.abs(wrong)))
    kinds = [split.negatives.kinds[row] for row in rows]
    return accuracies(kinds, image, scores, replicates=settings.bootstrap, seed=settings.seed)


def protocol(
    inputs: Inputs, settings: Settings, model: Any, shortlists: Shortlists | None, logit_scale: float, world_size: int
) -> dict[str, Any]:
    """Everything a figure depends on, so that it can be made again, or refused as another protocol's."""
    split = inputs.split
    images, captions = len(split.image_ids), len(split.captions)
    per_image = np.bincount(split.caption_image, minlength=images)
    wider = len(split.positives) - captions
    reranking: dict[str, Any] = {"asked_top_k": settings.top_k, "weight": settings.weight, "logit_scale": logit_scale}
    if shortlists is None:
        reranking["done"] = "no: top_k is 0" if settings.top_k == 0 else "no: the model has no cross-modal heads"
    else:
        reranking["done"] = "yes"
        reranking["top_k"] = {"t2i": shortlists.t2i[0].shape[1], "i2t": shortlists.i2t[0].shape[1]}
        fused = "the matching logit" if settings.weight is None else "logit_scale * cosine + weight * matching logit"
        reranking["score"] = f"{fused}; candidates outside the shortlist keep their order below it"
    return {
        "split": {"name": split.name, "hash": split.hash, "images": images, "captions": captions, "notes": split.notes},
        "captions_per_image": {
            "least": int(per_image.min()), "mean": float(per_image.mean()), "most": int(per_image.max()),
        },
        "images_without_captions": int((per_image == 0).sum()),
        "positives": "own pairs by image id" if not wider else f"every true pair: {wider} beyond the own pairs",
        "recall": "hit rate: share of queries with at least one positive among the first k, percent",
        "ks": list(settings.ks),
        "k_beyond_gallery": {
            way: [k for k in settings.ks if k > size] for way, size in (("t2i", images), ("i2t", captions))
        },
        "ties": "against the model",
        "scores": "exact dot products of float32 unit vectors",
        "precision": settings.precision,
        **inputs.description(),
        "rerank": reranking,
        "hard_negatives_per_kind": settings.negatives_per_kind,
        "intervals": {"level": 0.95, "replicates": settings.bootstrap, "seed": settings.seed, "drawn": "images"},
        "world_size": world_size,
        "versions": {
            "vlretrieval": vlretrieval.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }  # fmt: skip

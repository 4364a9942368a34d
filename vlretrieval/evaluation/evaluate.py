"""One function measures a model on a split: both stages, hard negatives, and the protocol the figures stand under."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vlretrieval.data.splits import Split
from vlretrieval.data.tokenizers import Tokenizer
from vlretrieval.evaluation.describe import describe
from vlretrieval.evaluation.eccv_caption import GroundTruth
from vlretrieval.evaluation.embedding_files import EmbeddingSet
from vlretrieval.evaluation.encode import Images, Tell, Texts, encode_images, encode_texts, evaluating, silent
from vlretrieval.evaluation.further import further_figures
from vlretrieval.evaluation.hard_negatives import accuracies
from vlretrieval.evaluation.inputs import Inputs, Transform
from vlretrieval.evaluation.matching import match_shortlists, score_examples, score_negatives
from vlretrieval.evaluation.outcome import Evaluation, Gallery, Shortlists, Stages, joined
from vlretrieval.evaluation.protocols import PROTOCOLS, Protocol, part
from vlretrieval.evaluation.rerank import fuse, rerank
from vlretrieval.evaluation.sharing import Processes
from vlretrieval.evaluation.suites.winoground import PairedSplit
from vlretrieval.metrics.ranks import Ranks, rank_both
from vlretrieval.metrics.recall import Fold, both_directions, recall_at
from vlretrieval.metrics.scores import IntArray

Floats = npt.NDArray[np.float64]

WEIGHTS = (None, *(round(0.1 * 2 ** (step / 2), 3) for step in range(13)))  # tried by choose_weight, 0.1 to 6.4


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
        protocol: which pictures and captions, how many folds.
        further: mAP@R and the like, hubs, text to text: a few more passes over the scores (one gallery only).
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
    protocol: Protocol = PROTOCOLS["full"]
    further: bool = False

    def __post_init__(self) -> None:
        if not self.ks or min(self.ks) < 1:
            raise ValueError(f"ks={list(self.ks)}: recall needs at least one k, each 1 or more")
        if any(k != int(k) for k in self.ks) or len(set(self.ks)) < len(self.ks):
            raise ValueError(f"ks={list(self.ks)}: recall needs whole numbers, each once (rsum would count one twice)")
        object.__setattr__(self, "ks", tuple(int(k) for k in self.ks))
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} is negative; 0 leaves re-ranking out")
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size} must be at least 1")
        if self.bootstrap < 0:
            raise ValueError(f"bootstrap={self.bootstrap} is negative; 0 leaves the intervals out")


def evaluate(
    model: Any,
    split: Split,
    tokenizer: Tokenizer,
    transform: Transform,
    settings: Settings = Settings(),  # noqa: B008  (frozen)
    *,
    inputs: Inputs | None = None,
    processes: Processes = Processes(),  # noqa: B008  (frozen)
    tell: Tell = silent,
) -> Evaluation:
    """Measure ``model`` on ``split``: recall both ways, re-ranked recall, hard negatives.

    Args:
        model: a RetrievalModel; it comes back in the mode it was in.
        tokenizer, transform: the model's own.
        inputs: the split made ready earlier, under the same protocol (split, tokenizer and transform are then its own).
        processes: who shares the work; all of them must call, and all get the same outcome.
        tell: called with what was done ("pictures", "texts", "pairs", ...), how many just now, and in all.

    Raises:
        ValueError: non-finite embeddings or logits (naming the row), an unreadable picture (naming the file).
    """
    inputs = inputs or Inputs(settings.protocol.prepare(split), tokenizer, transform)
    split = inputs.split
    rerank_with_heads = settings.top_k > 0 and model.crossmodal is not None
    asked = (
        rerank_with_heads or isinstance(split, PairedSplit) or (settings.hard_negatives and len(split.negatives) > 0)
    )
    tokens = model.crossmodal is not None and asked
    with evaluating(model, settings.precision) as device:
        batch = settings.batch_size
        common: Any = {"tokens": tokens, "processes": processes, "tell": tell}
        images = encode_images(model, inputs, device, batch_size=batch, **common)
        stored = inputs.features.get("text")
        texts = encode_texts(model, inputs, inputs.captions, device, batch_size=4 * batch, features=stored, **common)
        galleries = galleries_of(images, texts, split, settings.protocol)
        if rerank_with_heads:
            for gallery in galleries:
                gallery.shortlists = match_shortlists(model, gallery, settings.top_k, device, processes, tell)
        negatives = None
        if settings.hard_negatives and len(split.negatives):
            negatives = score_negatives(model, inputs, images, texts, settings, device, processes, tell)
        paired = None
        if isinstance(split, PairedSplit):
            paired = score_examples(model, images, texts, split.tags, settings, device, processes)
        logit_scale = float(model.logit_scale)

    protocol = describe(split, settings, galleries[0], processes.count) | inputs.description()
    protocol["dtype"] = {"image": str(images.embedding.dtype), "text": str(texts.embedding.dtype)}
    protocol["rerank"]["logit_scale"] = logit_scale
    figures: dict[str, Any] = {"protocol": protocol}
    ranks = add_recalls(figures, galleries, split, settings, logit_scale)
    if negatives is not None:
        figures["hard_negatives"] = accuracies(negatives, replicates=settings.bootstrap, seed=settings.seed)
    if paired is not None:
        figures["winoground"] = paired
    return Evaluation(figures, ranks, images, texts, galleries, negatives)


def evaluate_embeddings(found: EmbeddingSet, settings: Settings) -> Evaluation:
    """The first stage's figures of embeddings that another program made."""
    split = settings.protocol.prepare(found.split)
    if len(split.captions) != len(found.split.captions):
        raise ValueError(
            f"protocol={settings.protocol.name} uses the first {settings.protocol.captions} captions of each image; "
            f"the embeddings have {len(found.split.captions)} texts for {len(split.image_ids)} images; "
            "write those captions alone, or set protocol=full"
        )
    images, texts = Images(found.image), Texts(found.text)
    galleries = galleries_of(images, texts, split, settings.protocol)
    protocol = describe(split, settings, galleries[0], 1)
    protocol["rerank"]["done"] = "no: embeddings alone"
    # how they were made is not known here; what they were stored as is
    protocol |= {"precision": None, "dtype": {"image": str(found.image.dtype), "text": str(found.text.dtype)}}
    figures: dict[str, Any] = {"protocol": protocol}
    ranks = add_recalls(figures, galleries, split, settings, 1.0)
    return Evaluation(figures, ranks, images, texts, galleries)


def galleries_of(images: Images, texts: Texts, split: Split, protocol: Protocol) -> list[Gallery]:
    """The whole split as one gallery, or its folds."""
    if protocol.folds == 1:
        return [Gallery(images, texts, split)]
    return [
        Gallery(images.part(int(i[0]), int(i[-1])), texts.part(c), part(split, i, c))
        for i, c in protocol.fold_rows(split)
    ]


def add_recalls(
    figures: dict[str, Any], galleries: Sequence[Gallery], split: Split, settings: Settings, logit_scale: float
) -> Stages:
    """Rank, put the figures of all stages and both truths into ``figures``, and return the ranks."""
    ranks = rank_stages(galleries, logit_scale, settings.weight)
    figures |= stage_figures(galleries, ranks, settings)
    if len(split.positives) != len(split.captions):
        own = rank_stages(galleries, logit_scale, settings.weight, own=True)
        figures["by_image_id"] = stage_figures(galleries, own, settings)
    if settings.further and len(galleries) == 1:
        figures["further"] = further_figures(
            galleries[0], settings.ks, replicates=settings.bootstrap, seed=settings.seed
        )
    if settings.protocol.eccv:
        figures["eccv_caption"] = GroundTruth().figures(
            galleries[0].texts.embedding,
            galleries[0].images.embedding,
            tuple(settings.ks),
            replicates=settings.bootstrap,
            seed=settings.seed,
        )
    return joined(ranks, settings.protocol.fold_rows(split))


def rank_stages(
    galleries: Sequence[Gallery], logit_scale: float, weight: float | None, own: bool = False
) -> list[Stages]:
    """Each gallery's ranks at each stage; ``own`` counts own pairs alone as true."""
    found = []
    for gallery in galleries:
        split = gallery.split
        positives = split.positives
        if own:
            positives = np.stack([np.arange(len(split.captions)), split.caption_image], axis=1)
        first = rank_both(gallery.texts.embedding, gallery.images.embedding, positives)
        stages = {"first_stage": first}
        if gallery.shortlists is not None:
            stages["reranked"] = reranked(first, gallery.shortlists, positives, logit_scale, weight)
        found.append(stages)
    return found


def stage_figures(galleries: Sequence[Gallery], ranks: Sequence[Stages], settings: Settings) -> dict[str, Any]:
    return {
        stage: both_directions(
            [Fold(*stages[stage], g.split.caption_image) for stages, g in zip(ranks, galleries, strict=True)],
            settings.ks,
            replicates=settings.bootstrap,
            seed=settings.seed,
        )
        for stage in ranks[0]
    }


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
    shortlists = outcome.galleries[0].shortlists
    assert shortlists is not None
    scale = outcome.figures["protocol"]["rerank"]["logit_scale"]

    def rsum(weight: float | None) -> float:
        ways = reranked(outcome.ranks["first_stage"], shortlists, split.positives, scale, weight)
        return sum(recall_at(ranks, k) for ranks in ways for k in settings.ks)

    return max(grid, key=rsum)

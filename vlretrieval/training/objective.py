"""The training objective: a contrastive loss on embeddings, a matching loss on cross-modal heads."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from vlretrieval import losses
from vlretrieval.model.crossmodal import Encoded
from vlretrieval.model.retrieval_model import RetrievalModel
from vlretrieval.training.chunks import recomputed_logits
from vlretrieval.training.gather import mean_over_ranks
from vlretrieval.training.length_buckets import match_pairs
from vlretrieval.training.momentum import Momentum, Teacher
from vlretrieval.training.precision import full_float32


@dataclass
class Pairs:
    """One step's encoded pairs: this rank's B, all ranks' M.

    Attributes:
        image, text: this rank's B rows; row i of one belongs with row i of the other.
        all_image, all_text: M rows of all ranks (the same objects where there is one rank).
        positives: (B, M) bool, pairs that share their picture or caption.
        uniform: (2, B, M) draws from [0, 1) that decide which hard negatives are taken.
        negatives: the data's hard-negative captions of the pairs that are matched, K consecutive rows a pair; or None.
        negative_valid: (B, K) bool for those pairs, False where a caption has fewer than K.
        teacher: what the momentum encoder says of the step; None without one.
    """

    image: Encoded
    text: Encoded
    all_image: Encoded
    all_text: Encoded
    positives: Tensor
    uniform: Tensor
    negatives: Encoded | None = None
    negative_valid: Tensor | None = None
    teacher: Teacher | None = None

    def first(self, count: int) -> Pairs:
        """This rank's first ``count`` pairs, beside everybody's; ``negatives`` are those of the first pairs already."""
        if count == len(self.image):
            return self
        some = slice(0, count)
        return replace(
            self,
            image=self.image.part(some),
            text=self.text.part(some),
            positives=self.positives[some],
            uniform=self.uniform[:, some],
        )


@dataclass
class MatchingLogits:
    """Matching logits of one step, true pairs first, and the cosines of the same pairs.

    Attributes:
        by_image: (B, 1 + n) each picture with its own caption, then false ones; ``image_valid`` (B, n) bool,
            False where none could be drawn.
        by_text: (B, c) each caption with false pictures; ``text_valid`` (B, c) bool.
        image_candidates, text_candidates: (B, 1 + n, E) and (B, c, E), the embeddings of what each was held against.
    """

    by_image: Tensor
    image_valid: Tensor
    by_text: Tensor
    text_valid: Tensor
    image_candidates: Tensor
    text_candidates: Tensor


class Objective:
    """Contrastive loss on embeddings, matching and ranking losses on the cross-modal heads' logits, mixed by weight.

    Args:
        contrastive: ``(image_emb, text_emb, logit_scale, positives, all_image_emb=, all_text_emb=) -> scalar``, e.g. a
            partial of :func:`vlretrieval.losses.info_nce`.
        contrastive_weight: of it; 0 leaves it out.
        matching_weight: of the binary loss, does this pair belong together (:func:`vlretrieval.losses.matching_loss`).
        ranking_weight: of picking the true one among hard negatives (:func:`vlretrieval.losses.ranking_loss`).
        ranking_residual: the ranking loss sees scaled cosine + matching logit, which is what re-ranking by both scores
            orders by. The heads then learn only what the cosine has wrong, from a start that is as good as it.
        matching_negatives: in-batch hard negatives drawn for each picture and for each caption.
        matching_share: share of a step's pairs that are matched, the first of each rank's; their hard negatives still
            come from all of them.
        matching_start: share of the run after which matching and ranking set in. Until the encoders tell things apart
            they teach little, and a step without them costs a third.
        length_buckets: runs of like length in which captions are computed, each padded to its own longest. Above 1 it
            saves work on a CPU where pictures are small and captions of mixed length; 1 is right on a GPU.
        distillation_weight: of the dual encoder's scores following the cross-modal heads'
            (:func:`vlretrieval.losses.distillation_loss`).
        chunk: pairs that are computed at a time (gradient caching, :mod:`vlretrieval.training.chunks`): the loss still
            sees the whole batch, memory holds the activations of a chunk, and a step costs a forward pass more.
            None: all at once.
        momentum: settings of a momentum encoder, whose targets and queue then take the place of ``contrastive``.
    """

    def __init__(
        self,
        contrastive: Callable[..., Tensor],
        *,
        contrastive_weight: float = 1.0,
        matching_weight: float = 1.0,
        ranking_weight: float = 0.0,
        ranking_residual: bool = False,
        matching_negatives: int = 1,
        matching_share: float = 1.0,
        matching_start: float = 0.0,
        length_buckets: int = 1,
        distillation_weight: float = 0.0,
        chunk: int | None = None,
        momentum: Momentum | None = None,
    ):
        weights = dict(
            contrastive=contrastive_weight,
            matching=matching_weight,
            ranking=ranking_weight,
            distillation=distillation_weight,
        )
        if min(weights.values()) < 0 or not any(weights.values()):
            given = ", ".join(f"{name}_weight={value}" for name, value in weights.items())
            raise ValueError(f"{given}: none may be negative, and one must be above 0")
        if ranking_residual and not ranking_weight:
            raise ValueError("ranking_residual=true has no effect with ranking_weight=0; raise that, or leave it out")
        if matching_negatives < 1:
            raise ValueError(f"matching_negatives={matching_negatives}: the matching loss needs at least 1")
        if not 0 < matching_share <= 1:
            raise ValueError(
                f"matching_share={matching_share} must be a share in (0, 1]; matching_weight=0 leaves it out"
            )
        if not 0 <= matching_start < 1 or (matching_start and not contrastive_weight):
            raise ValueError(
                f"matching_start={matching_start} must be a share of the run in [0, 1); 0 without a contrastive loss"
            )
        if length_buckets < 1:
            raise ValueError(f"length_buckets={length_buckets} must be at least 1")
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk={chunk} must be at least 1; null computes the batch at once")
        if momentum is not None and not contrastive_weight:
            raise ValueError("momentum has no effect with contrastive_weight=0; leave it out")
        if distillation_weight and not (matching_weight or ranking_weight):
            raise ValueError(
                f"distillation_weight={distillation_weight}, but nothing trains the cross-modal heads to be learnt "
                "from; set matching_weight or ranking_weight above 0"
            )
        self.chunk, self.momentum = chunk, momentum
        self.takes_bias = "logit_bias" in inspect.signature(contrastive).parameters and momentum is None
        self.contrastive, self.weights = contrastive, weights
        self.ranking_residual = ranking_residual
        self.matching_negatives, self.matching_start = matching_negatives, matching_start
        self.matching_share, self.length_buckets = matching_share, length_buckets

    def check(self, model: RetrievalModel) -> None:
        """Refuses a model that this objective leaves a part of without effect."""
        if model.logit_bias is not None and not self.takes_bias:
            raise ValueError(
                "model.init_logit_bias has no effect on this contrastive loss; leave it out, or take loss=sigmoid"
            )
        if model.crossmodal is None and self.weights["distillation"]:
            raise ValueError("distillation_weight needs cross-modal heads; set it to 0, or take heads=cross")

    def matched(self, pairs: int) -> int:
        """How many of a step's pairs are matched: the first so many, at least one."""
        return max(1, round(pairs * self.matching_share))

    def matches(self, model: RetrievalModel, progress: float = 1.0) -> bool:
        """Whether the matching logits are needed: they weigh something, at this ``progress`` (0 .. 1) of the run."""
        weighs = bool(self.weights["matching"] or self.weights["ranking"])
        return model.crossmodal is not None and weighs and progress >= self.matching_start

    def __call__(self, model: RetrievalModel, pairs: Pairs, progress: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
        """The scalar to minimise, and what to log: each loss, and the share of pairs that matching gets right.

        Args:
            progress: how much of the run is done, 0 .. 1.
        """
        parts: dict[str, Tensor] = {}
        if self.weights["contrastive"]:
            with full_float32(pairs.image.embedding.device):
                parts["contrastive"] = self._contrastive(model, pairs)
        accuracy = {}
        if self.matches(model, progress):
            matched = pairs.first(self.matched(len(pairs.image)))
            logits = matching_logits(model, matched, self.matching_negatives, self.length_buckets, self.chunk)
            false = torch.cat([logits.by_image[:, 1:].flatten(), logits.by_text.flatten()])
            valid = torch.cat([logits.image_valid.flatten(), logits.text_valid.flatten()])
            true = logits.by_image[:, 0]
            if self.weights["matching"]:
                parts["matching"] = losses.matching_loss(true, false, valid, mean_over_ranks(valid.sum()))
            if self.weights["ranking"]:
                parts["ranking"] = ranking(model, matched, logits, self.ranking_residual)
            if self.weights["distillation"]:
                parts["distillation"] = distillation(model, matched, logits)
            rejected = ((false < 0) & valid).sum() / valid.sum().clamp(min=1)
            accuracy["matching_accuracy"] = ((true > 0).float().mean() + rejected) / 2
        if not parts:
            raise ValueError("nothing to train on: contrastive_weight=0, and the model has no cross-modal heads")
        total = torch.stack([self.weights[name] * value for name, value in parts.items()]).sum()
        # the hinge leaves the scale out, and DDP averages no gradient at all while one is still to come
        total = total + 0.0 * model.logit_scale
        return total, {name: value.detach() for name, value in (parts | accuracy).items()}

    def _contrastive(self, model: RetrievalModel, pairs: Pairs) -> Tensor:
        image, text, scale = pairs.image.embedding, pairs.text.embedding, model.logit_scale
        if pairs.teacher is not None:
            teacher = pairs.teacher
            return losses.momentum_info_nce(
                image,
                text,
                scale,
                teacher.positives,
                teacher_image=teacher.image,
                teacher_text=teacher.text,
                gallery_image=teacher.gallery_image,
                gallery_text=teacher.gallery_text,
                soft_share=teacher.soft_share,
            )
        bias = {} if model.logit_bias is None else {"logit_bias": model.logit_bias.float()}
        return self.contrastive(
            image,
            text,
            scale,
            pairs.positives,
            all_image_emb=pairs.all_image.embedding,
            all_text_emb=pairs.all_text.embedding,
            **bias,
        )


def scaled_cosines(model: RetrievalModel, pairs: Pairs, logits: MatchingLogits) -> tuple[Tensor, Tensor]:
    """The dual encoder's scores of the matched candidates, the true one first: (B, 1 + n) and (B, 1 + c)."""
    image, text, scale = pairs.image.embedding[:, None], pairs.text.embedding[:, None], model.logit_scale
    to_text = scale * (image * logits.image_candidates).sum(-1)
    pictures = torch.cat([image, logits.text_candidates], dim=1)
    return to_text, scale * (text * pictures).sum(-1)


def ranking(model: RetrievalModel, pairs: Pairs, logits: MatchingLogits, residual: bool = False) -> Tensor:
    """Picking the true one among the matched candidates, in both directions; ``residual``: by both scores together."""
    with full_float32(logits.by_image.device):
        by_image, by_text = logits.by_image, torch.cat([logits.by_image[:, :1], logits.by_text], dim=1)
        if residual:  # the cosine is given: what the heads add to it must not come from bending the embeddings
            with torch.no_grad():
                to_text, to_image = scaled_cosines(model, pairs, logits)
            by_image, by_text = by_image + to_text, by_text + to_image
        return (losses.ranking_loss(by_image, logits.image_valid) + losses.ranking_loss(by_text, logits.text_valid)) / 2


def distillation(model: RetrievalModel, pairs: Pairs, logits: MatchingLogits) -> Tensor:
    """The dual encoder's scores of the matched candidates against the cross-modal heads', in both directions."""
    with full_float32(logits.by_image.device):
        to_text, to_image = scaled_cosines(model, pairs, logits)
        by_text = torch.cat([logits.by_image[:, :1], logits.by_text], dim=1)
        return (
            losses.distillation_loss(to_text, logits.by_image, logits.image_valid)
            + losses.distillation_loss(to_image, by_text, logits.text_valid)
        ) / 2


def matching_logits(
    model: RetrievalModel, pairs: Pairs, count: int = 1, length_buckets: int = 1, chunk: int | None = None
) -> MatchingLogits:
    """Matching logits of true pairs, and of false ones: hard negatives of the batch and the data's own.

    A picture's keys and values are projected once and serve all the captions it meets in the step: its own, ``count``
    hard ones of the batch and the data's. Then each caption meets ``count`` hard pictures.
    """
    image, text, all_text = pairs.image, pairs.text, pairs.all_text
    batch, device = len(image), image.tokens.device
    with torch.no_grad(), full_float32(device):
        scale = model.logit_scale
        to_text = scale * model.similarity(image, all_text)
        to_image = scale * model.similarity(pairs.all_image, text).T
        hard_text = losses.sample_hard_negatives(to_text, pairs.positives, count, uniform=pairs.uniform[0])
        hard_image = losses.sample_hard_negatives(to_image, pairs.positives, count, uniform=pairs.uniform[1])

    candidates = [text, all_text.index(hard_text.index.flatten())]  # B rows, then B * count, then B * K
    valid = [hard_text.drawn[:, None].expand(-1, count)]
    if pairs.negatives is not None and pairs.negative_valid is not None:
        candidates.append(pairs.negatives)
        valid.append(pairs.negative_valid)
    texts, each = _side_by_side(candidates, batch), sum(len(part) for part in candidates) // batch

    if chunk is None:
        by_image, by_text = _all_at_once(model, pairs, texts, hard_image.index, length_buckets)
    else:
        by_image, by_text = _in_chunks(model, pairs, texts, hard_image.index, length_buckets, chunk)
    return MatchingLogits(
        by_image.view(batch, each),
        torch.cat(valid, dim=1),
        by_text.view(batch, count),
        hard_image.drawn[:, None].expand(-1, count),
        texts.embedding.unflatten(0, (batch, each)),
        pairs.all_image.embedding[hard_image.index],
    )


def _all_at_once(
    model: RetrievalModel, pairs: Pairs, texts: Encoded, hard_image: Tensor, length_buckets: int
) -> tuple[Tensor, Tensor]:
    """Logits of each picture with its candidate ``texts``, and of each caption with its ``hard_image`` (B, c) rows."""
    image, text = pairs.image, pairs.text
    (batch, count), device = hard_image.shape, hard_image.device
    each = len(texts) // batch
    kept = model.keep_image(image)
    if pairs.all_image is image:
        met, met_rows = kept, hard_image.flatten()
    else:  # pictures beyond those matched here, other ranks' too: projected for this rank's captions
        met = model.keep_image(pairs.all_image.index(hard_image.flatten()))
        met_rows = torch.arange(batch * count, device=device)
    repeated = torch.arange(batch, device=device).repeat_interleave(count)
    if length_buckets == 1:  # each picture's K/V are read in place
        by_image = model.match_kept(kept, texts)
        by_text = model.match_kept(met.index(met_rows), text.index(repeated))
    else:
        own = torch.arange(batch, device=device).repeat_interleave(each)
        by_image = match_pairs(model, kept, texts, own, torch.arange(batch * each, device=device), length_buckets)
        by_text = match_pairs(model, met, text, met_rows, repeated, length_buckets)
    return by_image, by_text


def _in_chunks(
    model: RetrievalModel, pairs: Pairs, texts: Encoded, hard_image: Tensor, length_buckets: int, chunk: int
) -> tuple[Tensor, Tensor]:
    """As :func:`_all_at_once`, ``chunk`` pairs at a time, each computed again in the backward pass."""
    batch, count = hard_image.shape
    each = len(texts) // batch

    def match(image: Encoded, text: Encoded) -> Tensor:
        if length_buckets == 1:
            return model.match(image, text)
        rows = torch.arange(len(text), device=hard_image.device)
        return match_pairs(
            model, model.keep_image(image), text, rows // (len(text) // len(image)), rows, length_buckets
        )

    def by_image(rows: slice) -> Tensor:
        return match(pairs.image.part(rows), texts.part(slice(rows.start * each, rows.stop * each)))

    def by_text(rows: slice) -> Tensor:
        repeated = torch.arange(rows.start, rows.stop, device=hard_image.device).repeat_interleave(count)
        return match(pairs.all_image.index(hard_image[rows].flatten()), pairs.text.index(repeated))

    return recomputed_logits(by_image, batch, chunk), recomputed_logits(by_text, batch, chunk)


def _side_by_side(parts: list[Encoded], batch: int) -> Encoded:
    """Parts of B * k_i rows each -> B * sum(k_i) rows, a picture's candidates side by side, padded to the longest."""
    length = max(part.tokens.shape[1] for part in parts)
    tokens = [F.pad(p.tokens, (0, 0, 0, length - p.tokens.shape[1])).unflatten(0, (batch, -1)) for p in parts]
    masks = [F.pad(_mask(p), (0, length - p.tokens.shape[1])).unflatten(0, (batch, -1)) for p in parts]
    embedding = torch.cat([p.embedding.unflatten(0, (batch, -1)) for p in parts], dim=1)
    return Encoded(
        embedding.flatten(0, 1), torch.cat(tokens, dim=1).flatten(0, 1), torch.cat(masks, dim=1).flatten(0, 1)
    )


def _mask(encoded: Encoded) -> Tensor:
    if encoded.mask is not None:
        return encoded.mask
    return torch.ones(encoded.tokens.shape[:2], dtype=torch.bool, device=encoded.tokens.device)

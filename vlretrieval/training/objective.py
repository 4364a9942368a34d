"""The training objective: a contrastive loss on embeddings, a matching loss on cross-modal heads."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from vlretrieval import losses
from vlretrieval.model.retrieval_model import RetrievalModel
from vlretrieval.training.gather import mean_over_ranks
from vlretrieval.training.matching import MatchingLogits, matching_logits
from vlretrieval.training.momentum import Momentum
from vlretrieval.training.pairs import Pairs
from vlretrieval.training.precision import full_float32


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

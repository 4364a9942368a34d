"""The training objective: a contrastive loss on embeddings, a matching loss on cross-modal heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from vlretrieval import losses
from vlretrieval.model.crossmodal import Encoded
from vlretrieval.model.retrieval_model import RetrievalModel
from vlretrieval.training.length_buckets import match_pairs


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
    """

    image: Encoded
    text: Encoded
    all_image: Encoded
    all_text: Encoded
    positives: Tensor
    uniform: Tensor
    negatives: Encoded | None = None
    negative_valid: Tensor | None = None

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
    """Matching logits of one step, true pairs first.

    Attributes:
        by_image: (B, 1 + n) each picture with its own caption, then false ones; ``image_valid`` (B, n) bool,
            False where none could be drawn.
        by_text: (B, c) each caption with false pictures; ``text_valid`` (B, c) bool.
    """

    by_image: Tensor
    image_valid: Tensor
    by_text: Tensor
    text_valid: Tensor


class Objective:
    """Contrastive loss on embeddings, matching and ranking losses on the cross-modal heads' logits, mixed by weight.

    Args:
        contrastive: ``(image_emb, text_emb, logit_scale, positives, all_image_emb=, all_text_emb=) -> scalar``, e.g. a
            partial of :func:`vlretrieval.losses.info_nce`.
        contrastive_weight: of it; 0 leaves it out.
        matching_weight: of the binary loss, does this pair belong together (:func:`vlretrieval.losses.matching_loss`).
        ranking_weight: of picking the true one among hard negatives (:func:`vlretrieval.losses.ranking_loss`).
        matching_negatives: in-batch hard negatives drawn for each picture and for each caption.
        matching_share: share of a step's pairs that are matched; their hard negatives still come from all of them.
        matching_start: share of the run after which matching and ranking set in. Until the encoders tell things apart
            they teach little, and a step without them costs a third.
        length_buckets: runs of like length in which captions are computed, each padded to its own longest. Above 1 it
            saves work on a CPU where pictures are small and captions of mixed length; 1 is right on a GPU.
    """

    def __init__(
        self,
        contrastive: Callable[..., Tensor],
        *,
        contrastive_weight: float = 1.0,
        matching_weight: float = 1.0,
        ranking_weight: float = 0.0,
        matching_negatives: int = 1,
        matching_share: float = 1.0,
        matching_start: float = 0.0,
        length_buckets: int = 1,
    ):
        weights = dict(contrastive=contrastive_weight, matching=matching_weight, ranking=ranking_weight)
        if min(weights.values()) < 0 or not any(weights.values()):
            given = ", ".join(f"{name}_weight={value}" for name, value in weights.items())
            raise ValueError(f"{given}: none may be negative, and one must be above 0")
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
        self.contrastive, self.weights = contrastive, weights
        self.matching_negatives, self.matching_start = matching_negatives, matching_start
        self.matching_share, self.length_buckets = matching_share, length_buckets

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
            parts["contrastive"] = self.contrastive(
                pairs.image.embedding,
                pairs.text.embedding,
                model.logit_scale,
                pairs.positives,
                all_image_emb=pairs.all_image.embedding,
                all_text_emb=pairs.all_text.embedding,
            )
        accuracy = {}
        if self.matches(model, progress):
            matched = pairs.first(self.matched(len(pairs.image)))
            logits = matching_logits(model, matched, self.matching_negatives, self.length_buckets)
            false = torch.cat([logits.by_image[:, 1:].flatten(), logits.by_text.flatten()])
            valid = torch.cat([logits.image_valid.flatten(), logits.text_valid.flatten()])
            true = logits.by_image[:, 0]
            if self.weights["matching"]:
                parts["matching"] = losses.matching_loss(true, false, valid)
            if self.weights["ranking"]:
                parts["ranking"] = (
                    losses.ranking_loss(logits.by_image, logits.image_valid)
                    + losses.ranking_loss(torch.cat([true[:, None], logits.by_text], dim=1), logits.text_valid)
                ) / 2
            rejected = ((false < 0) & valid).sum() / valid.sum().clamp(min=1)
            accuracy["matching_accuracy"] = ((true > 0).float().mean() + rejected) / 2
        if not parts:
            raise ValueError("nothing to train on: contrastive_weight=0, and the model has no cross-modal heads")
        total = torch.stack([self.weights[name] * value for name, value in parts.items()]).sum()
        # the hinge leaves the scale out, and DDP averages no gradient at all while one is still to come
        total = total + 0.0 * model.logit_scale
        return total, {name: value.detach() for name, value in (parts | accuracy).items()}


def matching_logits(model: RetrievalModel, pairs: Pairs, count: int = 1, length_buckets: int = 1) -> MatchingLogits:
    """Matching logits of true pairs, and of false ones: hard negatives of the batch and the data's own.

    A picture's keys and values are projected once and serve all the captions it meets in the step: its own, ``count``
    hard ones of the batch and the data's. Then each caption meets ``count`` hard pictures.
    """
    image, text, all_text = pairs.image, pairs.text, pairs.all_text
    batch, device = len(image), image.tokens.device
    with torch.no_grad():
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

    kept = model.keep_image(image)
    if pairs.all_image is image:
        met, met_rows = kept, hard_image.index.flatten()
    else:  # pictures beyond those matched here, other ranks' too: projected for this rank's captions
        met = model.keep_image(pairs.all_image.index(hard_image.index.flatten()))
        met_rows = torch.arange(batch * count, device=device)
    repeated = torch.arange(batch, device=device).repeat_interleave(count)
    if length_buckets == 1:  # each picture's K/V are read in place
        by_image = model.match_kept(kept, texts)
        by_text = model.match_kept(met.index(met_rows), text.index(repeated))
    else:
        own = torch.arange(batch, device=device).repeat_interleave(each)
        by_image = match_pairs(model, kept, texts, own, torch.arange(batch * each, device=device), length_buckets)
        by_text = match_pairs(model, met, text, met_rows, repeated, length_buckets)
    return MatchingLogits(
        by_image.view(batch, each),
        torch.cat(valid, dim=1),
        by_text.view(batch, count),
        hard_image.drawn[:, None].expand(-1, count),
    )


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

"""The training objective: a contrastive loss on embeddings, a matching loss on cross-modal heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vlretrieval import losses
from vlretrieval.model.crossmodal import Encoded
from vlretrieval.model.retrieval_model import RetrievalModel


@dataclass
class Pairs:
    """One step's encoded pairs: this rank's B, all ranks' M.

    Attributes:
        image, text: this rank's B rows; row i of one belongs with row i of the other.
        all_image, all_text: M rows of all ranks (the same objects where there is one rank).
        positives: (B, M) bool, pairs that share their picture or caption.
        uniform: (2, B, M) draws from [0, 1) that decide which hard negatives are taken.
        negatives: the data's own hard-negative captions, K consecutive rows a pair, or None.
        negative_valid: (B, K) bool, False where a caption has fewer than K.
    """

    image: Encoded
    text: Encoded
    all_image: Encoded
    all_text: Encoded
    positives: Tensor
    uniform: Tensor
    negatives: Encoded | None = None
    negative_valid: Tensor | None = None


class Objective:
    """Contrastive and matching loss, mixed by weight.

    Args:
        contrastive: ``(image_emb, text_emb, logit_scale, positives, all_image_emb=, all_text_emb=) -> scalar``, e.g. a
            partial of :func:`vlretrieval.losses.info_nce`.
        contrastive_weight, matching_weight: of the two losses; 0 leaves one out.
        matching_negatives: in-batch hard negatives drawn for each picture and for each caption.
    """

    def __init__(
        self,
        contrastive: Callable[..., Tensor],
        *,
        contrastive_weight: float = 1.0,
        matching_weight: float = 1.0,
        matching_negatives: int = 1,
    ):
        if min(contrastive_weight, matching_weight) < 0 or contrastive_weight + matching_weight == 0:
            raise ValueError(
                f"contrastive_weight={contrastive_weight}, matching_weight={matching_weight}: "
                "neither may be negative, and one must be above 0"
            )
        if matching_negatives < 1:
            raise ValueError(f"matching_negatives={matching_negatives}: the matching loss needs at least 1")
        self.contrastive, self.contrastive_weight = contrastive, contrastive_weight
        self.matching_weight, self.matching_negatives = matching_weight, matching_negatives

    def __call__(self, model: RetrievalModel, pairs: Pairs) -> tuple[Tensor, dict[str, Tensor]]:
        """The scalar to minimise, and what to log: each loss, and the share of pairs that matching gets right."""
        total, parts = pairs.image.embedding.new_zeros(()), {}
        if self.contrastive_weight:
            parts["contrastive"] = self.contrastive(
                pairs.image.embedding,
                pairs.text.embedding,
                model.logit_scale,
                pairs.positives,
                all_image_emb=pairs.all_image.embedding,
                all_text_emb=pairs.all_text.embedding,
            )
            total = total + self.contrastive_weight * parts["contrastive"]
        if self.matching_weight and model.crossmodal is not None:
            true, false, valid = matching_logits(model, pairs, self.matching_negatives)
            parts["matching"] = losses.matching_loss(true, false, valid)
            total = total + self.matching_weight * parts["matching"]
            rejected = ((false < 0) & valid).sum() / valid.sum().clamp(min=1)
            parts["matching_accuracy"] = ((true > 0).float().mean() + rejected) / 2
        return total, {name: value.detach() for name, value in parts.items()}


def matching_logits(model: RetrievalModel, pairs: Pairs, count: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Matching logits of true pairs, and of false ones: hard negatives of the batch and the data's own.

    A picture's keys and values are projected once and serve all the captions it meets in the step: its own, ``count`` hard ones
    of the batch and the data's. Then each caption meets ``count`` hard pictures.

    Returns:
        (B,) logits of true pairs; (N,) logits of false pairs; (N,) bool, False where none could be drawn.
    """
    image, text, all_text = pairs.image, pairs.text, pairs.all_text
    with torch.no_grad():
        scale = model.logit_scale
        to_text, to_image = scale * model.similarity(image, all_text), scale * model.similarity(pairs.all_image, text).T
        hard_text = losses.sample_hard_negatives(to_text, pairs.positives, count, uniform=pairs.uniform[0])
        hard_image = losses.sample_hard_negatives(to_image, pairs.positives, count, uniform=pairs.uniform[1])

    candidates = [text, all_text.index(hard_text.index.flatten())]  # B rows, then B * count, then B * K
    valid = [hard_text.drawn[:, None].expand(-1, count)]
    if pairs.negatives is not None and pairs.negative_valid is not None:
        candidates.append(pairs.negatives)
        valid.append(pairs.negative_valid)
    kept = model.keep_image(image)
    by_image = model.match_kept(kept, _side_by_side(candidates, len(image))).view(len(image), -1)

    here = pairs.all_image is image
    met = kept.index(hard_image.index.flatten()) if here else model.keep_image(pairs.all_image.index(hard_image.index.flatten()))
    by_text = model.match_kept(met, _repeat(text, count))
    return (
        by_image[:, 0],
        torch.cat([by_image[:, 1:].flatten(), by_text]),
        torch.cat([torch.cat(valid, dim=1).flatten(), hard_image.drawn[:, None].expand(-1, count).flatten()]),
    )


def _side_by_side(parts: list[Encoded], batch: int) -> Encoded:
    """Parts of B * k_i rows each -> B * sum(k_i) rows, a picture's candidates next to each other, padded to the longest."""
    length = max(part.tokens.shape[1] for part in parts)
    tokens = [F.pad(p.tokens, (0, 0, 0, length - p.tokens.shape[1])).unflatten(0, (batch, -1)) for p in parts]
    masks = [F.pad(_mask(p), (0, length - p.tokens.shape[1])).unflatten(0, (batch, -1)) for p in parts]
    embedding = torch.cat([p.embedding.unflatten(0, (batch, -1)) for p in parts], dim=1)
    return Encoded(embedding.flatten(0, 1), torch.cat(tokens, dim=1).flatten(0, 1), torch.cat(masks, dim=1).flatten(0, 1))


def _repeat(encoded: Encoded, count: int) -> Encoded:
    if count == 1:
        return encoded
    return encoded.index(torch.arange(len(encoded), device=encoded.tokens.device).repeat_interleave(count))


def _mask(encoded: Encoded) -> Tensor:
    if encoded.mask is not None:
        return encoded.mask
    return torch.ones(encoded.tokens.shape[:2], dtype=torch.bool, device=encoded.tokens.device)

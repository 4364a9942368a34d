"""Matching logits of a training step: of true pairs, of hard negatives of the batch, and of the data's own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vlretrieval import losses
from vlretrieval.model.encoded import Encoded
from vlretrieval.model.retrieval_model import RetrievalModel
from vlretrieval.training.chunks import recomputed_logits
from vlretrieval.training.length_buckets import match_pairs
from vlretrieval.training.pairs import Pairs
from vlretrieval.training.precision import full_float32


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

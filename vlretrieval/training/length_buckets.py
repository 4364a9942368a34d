"""Texts of like length together, so that little padding is computed: worth it on a CPU with captions of mixed length.

Results come back in the order asked for; each text's are what they would be in any other company.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from vlretrieval.model.encoded import Encoded, Kept
from vlretrieval.model.retrieval_model import RetrievalModel


def encode_text(model: RetrievalModel, token_ids: Tensor, token_mask: Tensor, buckets: int = 1) -> Encoded:
    """``model.encode_text`` of (B, L) ids and mask, in ``buckets`` runs of like length."""
    if buckets == 1:
        return model.encode_text(token_ids, token_mask)
    return in_runs(
        lambda rows, length: model.encode_text(token_ids[rows, :length], token_mask[rows, :length]), token_mask, buckets
    )


def text_from(model: RetrievalModel, pooled: Tensor, tokens: Tensor, mask: Tensor, buckets: int = 1) -> Encoded:
    """``model.text_from`` of a tower's (B, dim) pooled, (B, L, dim) tokens and (B, L) mask, likewise."""
    if buckets == 1:
        return model.text_from(pooled, tokens, mask)
    return in_runs(
        lambda rows, length: model.text_from(pooled[rows], tokens[rows, :length], mask[rows, :length]), mask, buckets
    )


def in_runs(encode: Callable[[Tensor, int], Encoded], mask: Tensor, buckets: int) -> Encoded:
    """``encode`` of rows (N,) cut to a length, for runs of like length of the (B, L) ``mask``; in the mask's order."""
    parts = []
    order, lengths = by_length(mask)
    for rows, length in split(order, lengths, buckets):
        part = encode(rows, length)
        assert part.mask is not None
        # an encoder may have put tokens of its own in front, or give none at all
        short = mask.shape[1] - length if part.tokens.shape[1] else 0
        parts.append((part.embedding, F.pad(part.tokens, (0, 0, 0, short)), F.pad(part.mask, (0, short))))
    embedding, tokens, masks = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return Encoded(embedding, tokens, masks).index(order.argsort())


def match_pairs(
    model: RetrievalModel, kept: Kept, texts: Encoded, image_rows: Tensor, text_rows: Tensor, buckets: int = 1
) -> Tensor:
    """(N,) matching logits of pictures ``image_rows`` (N,) with texts ``text_rows`` (N,), in runs of like length."""
    assert texts.mask is not None
    lengths = texts.mask.sum(1)[text_rows]
    order = lengths.argsort()
    logits = []
    for rows, length in split(order, lengths[order], buckets):
        text = texts.index(text_rows[rows])
        assert text.mask is not None
        text = Encoded(text.embedding, text.tokens[:, :length], text.mask[:, :length])
        logits.append(model.match_kept(kept.index(image_rows[rows]), text))
    return torch.cat(logits)[order.argsort()]


def by_length(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of a (B, L) mask from the shortest to the longest, and their lengths in that order."""
    lengths = mask.sum(1)
    order = lengths.argsort(stable=True)
    return order, lengths[order]


def split(order: Tensor, lengths: Tensor, buckets: int) -> list[tuple[Tensor, int]]:
    """Runs of rows, each with the length of its longest (at least 1: a text without tokens is all padding)."""
    runs = zip(order.chunk(buckets), lengths.chunk(buckets), strict=True)
    return [(rows, max(1, int(longest[-1]))) for rows, longest in runs]

"""Retrieval losses and hard-negative sampling: tensors in, tensors out, one process's view.

``training/`` gathers over ranks before it calls these.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def positive_pairs(
    image_ids: Tensor, caption_ids: Tensor, other_image_ids: Tensor, other_caption_ids: Tensor
) -> Tensor:
    """(B, M) bool: pairs i and j share their picture or their caption text, so they are no negatives of each other.

    Args:
        image_ids, caption_ids: (B,) int64 of the rows; ``other_*``: (M,) of the columns.
    """
    return (image_ids[:, None] == other_image_ids) | (caption_ids[:, None] == other_caption_ids)


def info_nce(
    image_emb: Tensor,
    text_emb: Tensor,
    logit_scale: Tensor,
    positives: Tensor | None = None,
    *,
    all_image_emb: Tensor | None = None,
    all_text_emb: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Symmetric InfoNCE over one batch of pairs (CLIP, arXiv:2103.00020, fig. 3).

    Args:
        image_emb: (B, E) unit vectors; row i belongs with row i of ``text_emb``.
        text_emb: (B, E) unit vectors.
        logit_scale: scalar, multiplies cosines (the inverse of a temperature).
        positives: (B, M) bool, True where pair i and pair j share their picture or their caption, so that image i goes
            with text j and text i with image j; None means the diagonal. Each row spreads its target evenly over its
            positives (the L_out form of arXiv:2004.11362, eq. 2), so that two captions of one image in a batch never
            count against each other.
        all_image_emb, all_text_emb: (M, E) embeddings of all ranks, of which this rank's rows are a part; None means
            the B rows themselves. Memory is O(B M), never O(M^2).
        label_smoothing: share of each target spread over the whole row.

    Returns:
        Scalar float32, nats per query, averaged over both directions and over this rank's rows.
    """
    all_image_emb = image_emb if all_image_emb is None else all_image_emb
    all_text_emb = text_emb if all_text_emb is None else all_text_emb
    target: Tensor
    if positives is None:
        target = torch.arange(len(image_emb), device=image_emb.device)
    else:
        target = positives / positives.sum(1, keepdim=True)

    def one_way(queries: Tensor, gallery: Tensor) -> Tensor:
        return F.cross_entropy(
            logit_scale * queries.float() @ gallery.float().T, target, label_smoothing=label_smoothing
        )

    return (one_way(image_emb, all_text_emb) + one_way(text_emb, all_image_emb)) / 2


def sigmoid_loss(
    image_emb: Tensor,
    text_emb: Tensor,
    logit_scale: Tensor,
    positives: Tensor | None = None,
    *,
    all_image_emb: Tensor | None = None,
    all_text_emb: Tensor | None = None,
    logit_bias: Tensor | float = -10.0,
) -> Tensor:
    """Pairwise sigmoid loss (SigLIP, arXiv:2303.15343, eq. 1).

    Args:
        image_emb, text_emb, logit_scale, positives, all_text_emb: as in :func:`info_nce`. Each pair of image and text
            is met once, with the image's rank, so ``all_image_emb`` is taken and not used.
        logit_bias: added to every scaled cosine.

    Returns:
        Scalar float32, nats per image: summed over texts, averaged over images, as in the paper.
    """
    logits = (
        logit_scale * image_emb.float() @ (text_emb if all_text_emb is None else all_text_emb).float().T + logit_bias
    )
    positives = _or_diagonal(positives, logits)
    return F.softplus(torch.where(positives, -logits, logits)).sum() / len(logits)


def max_hinge(
    image_emb: Tensor,
    text_emb: Tensor,
    logit_scale: Tensor | None = None,
    positives: Tensor | None = None,
    *,
    all_image_emb: Tensor | None = None,
    all_text_emb: Tensor | None = None,
    margin: float = 0.2,
) -> Tensor:
    """Hinge with the hardest negative (VSE++, arXiv:1707.05612, eq. 6), on cosines.

    Args:
        image_emb, text_emb, positives, all_image_emb, all_text_emb: as in :func:`info_nce`; ``logit_scale`` is taken
            and not used.
        margin: in cosine.

    Returns:
        Scalar float32, summed over both directions, averaged over pairs. A row without a negative contributes 0.
    """
    own = (image_emb.float() * text_emb.float()).sum(-1)

    def one_way(queries: Tensor, gallery: Tensor) -> Tensor:
        cosine = queries.float() @ gallery.float().T
        hardest = cosine.masked_fill(_or_diagonal(positives, cosine), -torch.inf).max(1).values
        return (margin + hardest - own).clamp(min=0)

    to_text = one_way(image_emb, text_emb if all_text_emb is None else all_text_emb)
    to_image = one_way(text_emb, image_emb if all_image_emb is None else all_image_emb)
    return (to_text + to_image).mean()


def _or_diagonal(positives: Tensor | None, logits: Tensor) -> Tensor:
    return torch.eye(*logits.shape, dtype=torch.bool, device=logits.device) if positives is None else positives


class HardNegatives(NamedTuple):
    """``index`` (B, K) int64: the negatives drawn for each row; ``drawn`` (B,) bool: False where a row has none."""

    index: Tensor  # type: ignore[assignment]  # the tuple's own method is not needed
    drawn: Tensor


def sample_hard_negatives(
    scores: Tensor, positives: Tensor, count: int = 1, *, uniform: Tensor | None = None
) -> HardNegatives:
    """Draws negatives in proportion to exp(score), none of the row's positives among them (ALBEF, arXiv:2107.07651).

    Args:
        scores: (B, M) scaled similarities, any finite range.
        positives: (B, M) bool, never drawn.
        count: K, how many for each row; with replacement where a row has fewer.
        uniform: (B, M) draws from [0, 1) that decide; None takes fresh ones from torch's global state.

    Returns:
        :class:`HardNegatives`; a row whose every column is a positive draws nothing (``index`` 0, ``drawn`` False).
    """
    drawn = ~positives.all(1)
    # score + Gumbel noise ranks as draws without replacement do, in log space: no probability can underflow to 0
    uniform = torch.rand(scores.shape, device=scores.device) if uniform is None else uniform
    keys = scores.detach().float() - torch.log(-torch.log(uniform.clamp(1e-20, 1 - 1e-7)))
    keys = keys.masked_fill(positives, -torch.inf)
    available = (~positives).sum(1).clamp(min=1)
    order = keys.topk(min(count, keys.shape[1]), dim=1).indices  # positives (-inf) come last
    turn = torch.arange(count, device=scores.device)[None] % available[:, None].clamp(max=order.shape[1])
    index = order.gather(1, turn)
    return HardNegatives(index.masked_fill(~drawn[:, None], 0), drawn)


def matching_loss(
    positive: Tensor, negatives: Tensor, valid: Tensor | None = None, count: Tensor | None = None
) -> Tensor:
    """Binary cross-entropy of matching logits: pairs that belong together against pairs that do not.

    Args:
        positive: (B,) logits of true pairs.
        negatives: (N,) logits of false pairs.
        valid: (N,) bool, False for places where no negative could be drawn.
        count: what the sum over false pairs is divided by; None: how many are valid. Ranks give the mean of their
            counts, so that the mean of their losses is the loss of all their pairs.

    Returns:
        Scalar float32, nats; true and false pairs weigh one half each, however many there are of either. Without any
        valid negative the true pairs count alone.
    """
    true = F.softplus(-positive.float()).mean()
    wrong = F.softplus(negatives.float())
    if valid is None:
        valid = torch.ones_like(wrong, dtype=torch.bool)
    count = valid.sum() if count is None else count
    false = torch.where(valid, wrong, 0).sum() / torch.where(count > 0, count, 1)
    return (true + false) / 2


def ranking_loss(logits: Tensor, valid: Tensor | None = None) -> Tensor:
    """Cross-entropy of picking the true candidate of each query, the first, among its hard negatives.

    What re-ranking asks of a matching logit: only differences within one query's candidates count.

    Args:
        logits: (B, 1 + N), column 0 the true pair.
        valid: (B, N) bool, False where a negative could not be drawn.

    Returns:
        Scalar float32, nats per query; a query without a negative contributes 0.
    """
    logits = logits.float()
    if valid is not None:
        logits = torch.cat([logits[:, :1], logits[:, 1:].masked_fill(~valid, -torch.inf)], dim=1)
    return -logits.log_softmax(1)[:, 0].mean()


def momentum_info_nce(
    image_emb: Tensor,
    text_emb: Tensor,
    logit_scale: Tensor,
    positives: Tensor,
    *,
    teacher_image: Tensor,
    teacher_text: Tensor,
    gallery_image: Tensor,
    gallery_text: Tensor,
    soft_share: float = 0.4,
) -> Tensor:
    """InfoNCE against a momentum encoder's embeddings and queue, with its scores as soft targets (ALBEF, eq. 6).

    Args:
        image_emb, text_emb: (B, E) unit vectors of the model in training.
        logit_scale: scalar, multiplies cosines, of the teacher too.
        positives: (B, N) bool: gallery rows that share the pair's picture or caption; at least one in each row.
        teacher_image, teacher_text: (B, E) unit vectors of the same pairs by the momentum encoder.
        gallery_image, gallery_text: (N, E) by the momentum encoder: all ranks' pairs of this step, then the queue.
        soft_share: of the target that is the teacher's softmax; the rest is spread evenly over the positives.

    Returns:
        Scalar float32, nats per query, averaged over both directions.
    """
    hard = positives / positives.sum(1, keepdim=True)

    def one_way(queries: Tensor, teacher: Tensor, gallery: Tensor) -> Tensor:
        soft = (logit_scale.detach() * teacher.float() @ gallery.float().T).softmax(1)
        target = soft_share * soft + (1 - soft_share) * hard
        return F.cross_entropy(logit_scale * queries.float() @ gallery.float().T, target)

    return (one_way(image_emb, teacher_image, gallery_text) + one_way(text_emb, teacher_text, gallery_image)) / 2


def distillation_loss(student: Tensor, teacher: Tensor, valid: Tensor | None = None) -> Tensor:
    """Kullback-Leibler divergence of a dual encoder's scores from matching logits, over each query's candidates.

    Args:
        student: (B, 1 + N) scaled cosines, column 0 the true candidate.
        teacher: (B, 1 + N) matching logits of the same candidates; no gradient reaches them.
        valid: (B, N) bool, False where a negative could not be drawn.

    Returns:
        Scalar float32, nats per query; 0 where both rank with the same margins, or where a query has no negative.
    """
    student, teacher = student.float(), teacher.detach().float()
    if valid is not None:
        absent = F.pad(~valid, (1, 0))
        # a large finite number: the product of a probability of 0 and a logarithm of 0 would be NaN
        student, teacher = (logits.masked_fill(absent, -1e4) for logits in (student, teacher))
    return F.kl_div(student.log_softmax(1), teacher.log_softmax(1), reduction="batchmean", log_target=True)

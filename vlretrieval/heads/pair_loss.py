"""The training losses of a few pairs, by which learnt gates and the gradients of gates are measured."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlretrieval.evaluation.inputs import Inputs
from vlretrieval.losses import info_nce, matching_loss
from vlretrieval.metrics.scores import IntArray


def pair_loss(model: Any, inputs: Inputs, captions: IntArray) -> Tensor:
    """Contrastive loss of a batch, and where the model has cross-modal heads the matching loss, in nats.

    Each caption and its picture are matched, and held against the batch's most similar wrong picture and caption.

    Args:
        captions: rows of the split's captions; a batch of one has no wrong pair, and no matching loss of one.
    """
    device = next(model.parameters()).device
    split = inputs.split
    ids, mask = inputs.token_rows(inputs.captions, captions)
    pictures = split.caption_image[captions]
    image = model.encode_image(inputs.pixels(pictures).to(device))
    text = model.encode_text(ids.to(device), mask.to(device))
    positives = true_pairs(split.positives, len(split.image_ids), captions, pictures).to(device)
    loss = info_nce(image.embedding, text.embedding, model.logit_scale, (positives | positives.T).float())
    if model.crossmodal is None:
        return loss
    scores = model.similarity(image, text).detach()  # (B pictures, B captions)
    wrong_text = scores.masked_fill(positives.T, -torch.inf).argmax(1)
    wrong_image = scores.T.masked_fill(positives, -torch.inf).argmax(1)
    true = model.match(image, text)
    false = torch.cat([model.match(image, text.index(wrong_text)), model.match(image.index(wrong_image), text)])
    valid = torch.cat([~positives.all(0), ~positives.all(1)])
    return loss + matching_loss(true, false, valid)


def true_pairs(positives: IntArray, pictures: int, captions: IntArray, images: IntArray) -> Tensor:
    """(B, B) bool: is caption i true of picture j?"""
    known = positives[:, 0] * pictures + positives[:, 1]
    asked = captions[:, None] * pictures + images[None, :]
    return torch.from_numpy(np.isin(asked, known))

"""What an export is held against: some pictures of a split with their captions, and the recall on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from vlretrieval.data.splits import Split
from vlretrieval.deploy.certificate import Pairs
from vlretrieval.evaluation.evaluate import Settings, evaluate
from vlretrieval.evaluation.inputs import Inputs
from vlretrieval.evaluation.protocols import part
from vlretrieval.evaluation.subject import Subject


def pairs_of(split: Split, subject: Subject, count: int, settings: Settings) -> tuple[Pairs, Callable[[Any], Any]]:
    """``count`` pictures spread evenly over the split, each with all its captions.

    Returns:
        The pairs (each picture with its first caption) for the parity, and a function from a model to its figures on
        all of them.
    """
    with_captions = np.unique(split.caption_image)
    images = with_captions[np.linspace(0, len(with_captions) - 1, min(count, len(with_captions))).astype(np.int64)]
    chosen = part(split, images, np.flatnonzero(np.isin(split.caption_image, images)))
    inputs = Inputs(chosen, subject.tokenizer, subject.transform)
    first = np.unique(chosen.caption_image, return_index=True)[1]
    pairs = Pairs(
        inputs.pixels(np.arange(len(images))),
        subject.tokenizer([chosen.captions[row] for row in first]),
        subject.tokenizer.pad_id,
        subject.tokenizer.context_length,
        {
            "split": split.name,
            "split_hash": split.hash,
            "images": len(images),
            "captions": len(chosen.captions),
            "chosen": f"evenly from {len(with_captions)} images",
        },
    )

    def measure(model: Any) -> dict[str, Any]:
        return evaluate(
            model, chosen, subject.tokenizer, subject.transform, settings, inputs=inputs
        ).figures  # fmt: skip

    return pairs, measure

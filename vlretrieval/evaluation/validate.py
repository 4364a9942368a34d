"""Evaluation as training calls it: the split is read once, the figures come under flat names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vlretrieval.data.splits import Split
from vlretrieval.data.tokenizers import Tokenizer
from vlretrieval.evaluation.evaluate import Settings, evaluate
from vlretrieval.evaluation.inputs import Inputs, Transform


class Validator:
    """``model -> {"val/t2i/R@1": 61.3, ..., "val/rsum": 480.2}``, again and again on one split.

    Args:
        split, tokenizer, transform: what the model is shown.
        top_k: candidates that the cross-modal heads re-rank; 0 validates the first stage alone, which is fast.
        hard_negatives: whether the split's hard negatives are scored, at most ``negatives_per_kind`` of each kind.
        ks, precision, batch_size: see :class:`Settings`.
    """

    def __init__(
        self,
        split: Split,
        tokenizer: Tokenizer,
        transform: Transform,
        *,
        top_k: int = 0,
        hard_negatives: bool = False,
        negatives_per_kind: int | None = 200,
        ks: Sequence[int] = (1, 5, 10),
        precision: str = "float32",
        batch_size: int = 64,
    ) -> None:
        self.inputs = Inputs(split, tokenizer, transform)
        self.prefix = f"{split.name}/"
        self.settings = Settings(
            ks=tuple(ks),
            top_k=top_k,
            hard_negatives=hard_negatives,
            negatives_per_kind=negatives_per_kind,
            bootstrap=0,
            precision=precision,
            batch_size=batch_size,
        )

    def __call__(self, model: Any) -> dict[str, float]:
        inputs = self.inputs
        outcome = evaluate(model, inputs.split, inputs.tokenizer, inputs.transform, self.settings, inputs=inputs)
        return outcome.scalars(self.prefix)

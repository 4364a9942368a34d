"""The FLOPs that a training step needs, from the model's config and what was in the batch.

Model FLOPs in the usual sense (PaLM, arXiv:2204.02311, app. B): padding, recomputation and whatever else a program does
on top is not counted, so that what is left of the peak is the waste.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlretrieval.model.costs import Cost, costs


@dataclass(frozen=True)
class Work:
    """What some steps were about: pictures and texts encoded, tokens of those texts, pairs matched, pictures kept."""

    images: int = 0
    texts: int = 0
    text_tokens: int = 0
    matched: int = 0
    kept: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


class StepFlops:
    """FLOPs of training steps.

    Args:
        model: the resolved ``model`` block of a config.
        frozen: the parts that are not trained: they are computed forward only.
        teacher: whether a momentum encoder computes the encoders once more, forward.

    Raises:
        ValueError: for a model whose costs are not known from its config.
    """

    def __init__(self, model: Mapping[str, Any], frozen: tuple[str, ...] = (), teacher: bool = False):
        self.model, self.frozen, self.teacher = model, frozen, teacher
        self._known: dict[int, dict[str, Cost]] = {}  # by length of text
        self._parts(1)  # an unknown model is refused now

    def __call__(self, work: Work) -> float:
        """FLOPs, forward and backward (twice the forward); the texts are taken to be of their mean length each."""
        if not work.texts:
            return 0.0
        parts = self._parts(max(1, round(work.text_tokens / work.texts)))
        total = float(parts["image encoder"].flops * work.images * self._passes("image_encoder"))
        total += parts["text encoder"].flops * work.texts * self._passes("text_encoder")
        total += parts["projections"].flops * (work.images + work.texts) / 2 * 3
        for name, part in parts.items():
            if name.endswith("heads"):  # keys and values of a picture once, however many texts it meets
                once = part.flops_saved
                total += self._passes("crossmodal") * ((part.flops - once) * work.matched + once * work.kept)
        return total

    def _passes(self, part: str) -> int:
        return (1 if part in self.frozen else 3) + (self.teacher and part != "crossmodal")

    def _parts(self, length: int) -> dict[str, Cost]:
        if length not in self._known:
            self._known[length] = costs(self.model, length, training=True)
        return self._known[length]

"""torch.compile of a model's parts, in place: names of weights stay as they are."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from vlretrieval.model.retrieval_model import RetrievalModel


def compile_parts(model: RetrievalModel) -> None:
    """Compiles the encoders and each kind of cross-modal heads; the first steps wait for it."""
    model.image_encoder.compile()
    # a step's captions are padded to their longest: one program for any length, not one for each
    model.text_encoder.compile(dynamic=True)
    if model.crossmodal is not None:
        for kind in (model.crossmodal.text_to_image, model.crossmodal.image_to_text, model.crossmodal.joint):
            if kind is not None:
                kind.compile()


def as_written() -> AbstractContextManager[None]:
    """Within, compiled parts run as they are written.

    Evaluation meets shapes that no step has (a last batch, a shortlist), and would wait for a program for each.
    """
    return torch.compiler.set_stance("force_eager")

"""torch.compile of a model's parts, in place: names of weights stay as they are."""

from __future__ import annotations

from vlretrieval.model.retrieval_model import RetrievalModel


def compile_parts(model: RetrievalModel) -> None:
    """Compiles the encoders and each kind of cross-modal heads; the first steps wait for it."""
    parts = [model.image_encoder, model.text_encoder]
    if model.crossmodal is not None:
        kinds = (model.crossmodal.text_to_image, model.crossmodal.image_to_text, model.crossmodal.joint)
        parts += [kind for kind in kinds if kind is not None]
    for part in parts:
        part.compile()

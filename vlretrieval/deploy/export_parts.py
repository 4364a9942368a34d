"""A model of ours whose towers are open_clip's, taken apart into what open_clip and CLIPModel hold, or refused."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from vlretrieval.data.tokenizers import ClipTokenizer, Tokenizer
from vlretrieval.deploy.export_open_clip import OpenClipParts, preprocess_cfg
from vlretrieval.model.on_top import OnTop
from vlretrieval.model.retrieval_model import MAX_LOGIT_SCALE, RetrievalModel

LINEAR = ("head.proj", "text_projection", "attnpool.c_proj")  # last layers, where they are modules
TAKE = "take format=folder, onnx, torch or huggingface"


def parts_of(model: RetrievalModel, tokenizer: Tokenizer, preprocess: dict[str, Any]) -> OpenClipParts:
    """A model of ours as open_clip describes it.

    The projections into the joint space are multiplied into open_clip's own, so that nothing is left over.

    Raises:
        ValueError: why it cannot be: towers that are not open_clip's, what stands on them, heads, another tokenizer.
    """
    image, text = open_clip_tower(model, "image"), open_clip_tower(model, "text")
    if model.crossmodal is not None:
        raise _refused("it has no place for cross-modal heads; set towers_only=true to leave them out")
    if not isinstance(tokenizer, ClipTokenizer):
        raise _refused(f"its tokenizer is CLIP's, and this model has a {type(tokenizer).__name__}")
    ours, theirs = copy.deepcopy(image.config), text.config
    for key in ("embed_dim", "quick_gelu"):
        if ours.get(key, False) != theirs.get(key, False):
            raise _refused(f"the towers are of two models, of {key}={ours.get(key)} and {theirs.get(key)}")
    words = copy.deepcopy(theirs["text_cfg"])
    if words.get("pool_type", "argmax") == "last":
        raise _refused("its text tower takes the last place of the row, and ours the end of the text")
    weights = {f"visual.{name}": value for name, value in image.visual.state_dict().items()}
    weights |= {f"text.{name}": value for name, value in text.text.state_dict().items()}
    if any("lora_" in name for name in weights):
        raise _refused("it has no place for low-rank adapters (lora)")
    # A causal tower never looks at the places that a shorter context leaves out.
    words["context_length"] = tokenizer.context_length
    weights["text.positional_embedding"] = weights["text.positional_embedding"][: tokenizer.context_length]
    fold(weights, "visual.", model.image_projection)
    fold(weights, "text.", model.text_projection)
    weights["logit_scale"] = model.log_logit_scale.detach().clamp(max=math.log(MAX_LOGIT_SCALE))
    config = {name: value for name, value in ours.items() if name not in ("init_logit_bias", "nonscalar_logit_scale")}
    config |= {"embed_dim": model.embed_dim, "text_cfg": words, "custom_text": True}
    if model.logit_bias is not None:
        weights["logit_bias"] = model.logit_bias.detach()
        config["init_logit_bias"] = float(model.logit_bias.detach())
    if "timm_model_name" in config["vision_cfg"]:
        config["vision_cfg"] = config["vision_cfg"] | {"timm_model_pretrained": False}
    mean, std = ((buffer.flatten() / 255).tolist() for buffer in (image.mean, image.std))
    return OpenClipParts(config, preprocess_cfg(preprocess["image_size"], preprocess["resize"], mean, std), weights)


def open_clip_tower(model: RetrievalModel, side: str) -> Any:
    """The OpenClipImageTower or OpenClipTextTower below an encoder that adds nothing to what it says."""
    encoder = getattr(model, f"{side}_encoder")
    tower = encoder.base if isinstance(encoder, OnTop) else encoder
    if type(tower).__name__ != f"OpenClip{side.capitalize()}Tower":
        raise _refused(f"it holds open_clip's own towers, and the {side} tower is a {type(tower).__name__}; {TAKE}")
    if isinstance(encoder, OnTop) and encoder.added is not None:
        raise _refused(f"it has no place for the attention on top of the {side} tower (depth above 0); {TAKE}")
    return tower


def fold(weights: dict[str, Tensor], tower: str, projection: nn.Linear) -> None:
    """Multiply a projection (E', E) into the last matrix of a tower, in place."""
    matrix = projection.weight.detach()
    if matrix.shape[0] == matrix.shape[1] and torch.equal(matrix, torch.eye(len(matrix))):
        return  # as it stood at the start
    product, linear = matrix.double(), tuple(f"{tower}{end}." for end in LINEAR)
    found = [name for name in weights if name in (f"{tower}proj", f"{tower}text_projection") or name.startswith(linear)]
    if not found:
        raise _refused(f"the {tower[:-1]} tower ends in no matrix that the trained projection could be part of")
    for name in found:
        value = weights[name].detach().double()
        # a bare parameter is (width, E); a linear layer has a matrix (E, width), perhaps a bias (E,)
        weights[name] = (product @ value if name.startswith(linear) else value @ product.T).float()


def _refused(reason: str) -> ValueError:
    return ValueError(f"format=open_clip: {reason}")

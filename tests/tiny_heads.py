"""A tiny model with all kinds of heads, drawn scenes for it, and heads whose maps are set by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vlretrieval.data.scenes import Scenes
from vlretrieval.data.splits import Split
from vlretrieval.data.tokenizers import BpeTokenizer
from vlretrieval.data.transforms import EvalTransform
from vlretrieval.deploy.build import build_model
from vlretrieval.evaluation.inputs import Inputs
from vlretrieval.model.attention import MultiHeadAttention

SIDE, PATCH, LENGTH = 48, 16, 32


def heads_config(**changed: Any) -> dict[str, Any]:
    """The ``model`` block of a config: 16 wide, 4 heads of 4, all kinds of heads; ``part__key=value`` changes it."""
    model = "vlretrieval.model"
    config: dict[str, Any] = {
        "_target_": f"{model}.retrieval_model.RetrievalModel",
        "embed_dim": 8,
        "image_encoder": {
            "_target_": f"{model}.encoders.ImageEncoder",
            **dict(image_size=SIDE, patch_size=PATCH, dim=16, depth=2, num_heads=4),
        },
        "text_encoder": {
            "_target_": f"{model}.encoders.TextEncoder",
            **dict(vocab_size=400, context_length=LENGTH, dim=16, depth=1, num_heads=4, position="rotary"),
        },
        "crossmodal": {
            "_target_": f"{model}.crossmodal.CrossModal",
            **dict(text_dim=16, image_dim=16, text_to_image=4, image_to_text=2, text_self_heads=4),
            **dict(text_to_image_depth=2, text_self_position="rotary", mlp_ratio=2.0),
        },
    }
    for key, value in changed.items():
        part, _, name = key.rpartition("__")
        (config[part] if part else config)[name] = value
    return config


def heads_model(seed: int = 0, **changed: Any) -> Any:
    """The model of :func:`heads_config`, in evaluation mode; biases and all are drawn, so that nothing is 0 by luck."""
    torch.manual_seed(seed)
    model = build_model(heads_config(**changed)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def scene_split(count: int = 24, **settings: Any) -> Split:
    return Scenes(train=40, val=count, test=0, image_size=SIDE, **settings).split("val")


def scene_inputs(split: Split | None = None) -> Inputs:
    split = split or scene_split()
    tokenizer = BpeTokenizer(vocab_size=400, context_length=LENGTH).fit(split.captions)
    return Inputs(split, tokenizer, EvalTransform(SIDE))


def random_pairs(batch: int = 3, length: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    """pixels (B, 3, S, S) uint8, token_ids and token_mask (B, L), the texts of uneven length."""
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (batch, 3, SIDE, SIDE), generator=generator, dtype=torch.uint8)
    ids = torch.randint(3, 300, (batch, length), generator=generator)
    mask = torch.arange(length)[None] < torch.tensor([length - row for row in range(batch)])[:, None]
    return pixels, ids, mask


@torch.no_grad()
def logits_of(model: Any, pairs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Image embeddings, text embeddings and matching logits of the pairs."""
    pixels, ids, mask = pairs
    image, text = model.encode_image(pixels), model.encode_text(ids, mask)
    return image.embedding, text.embedding, model.match(image, text)


@torch.no_grad()
def copy_head(layer: MultiHeadAttention, source: int, target: int) -> None:
    """Make one head of a layer, its own K/V included, a copy of another."""
    assert layer.num_heads == layer.num_kv_heads
    width = layer.head_dim
    merged = [layer.qkv] if layer.context_dim is None else [layer.q, layer.kv]
    for linear in merged:
        for start in range(0, linear.out_features, layer.inner):
            for tensor in (linear.weight, linear.bias):
                rows = tensor[start : start + layer.inner]
                rows[target * width : (target + 1) * width] = rows[source * width : (source + 1) * width]
    layer.out.weight[:, target * width : (target + 1) * width] = layer.out.weight[
        :, source * width : (source + 1) * width
    ]

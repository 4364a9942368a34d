"""What a model costs, from its config alone: parameters, FLOPs, activations, and the bytes kept of a picture.

Pure functions of numbers; nothing is built. FLOPs are those of matrix products, a multiply-add as two, which is what
``torch.utils.flop_counter`` counts: softmax, norms and additions are left out. ``vlretrieval-train ... dry_run=true``
shows them as a table, by :func:`vlretrieval.commands.dry_run.show`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from vlretrieval.model.crossmodal import CrossModal, of_kind
from vlretrieval.model.encoders import ImageEncoder, TextEncoder
from vlretrieval.model.retrieval_model import RetrievalModel
from vlretrieval.model.transformer import per_block

FLOAT32 = 4  # bytes


@dataclass(frozen=True)
class Cost:
    """Of one part of a model.

    Attributes:
        parameters: learnt numbers.
        flops: of a forward pass over one pair: its picture, its text, or both, as the part sees them.
        flops_saved: of these, what is not computed again where the picture's keys and values are kept.
        activations: numbers that a training step keeps for its backward pass, a pair.
        kept: numbers that re-ranking keeps of a gallery picture.
    """

    parameters: int = 0
    flops: int = 0
    flops_saved: int = 0
    activations: int = 0
    kept: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def costs(model: Mapping[str, Any], text_length: int | None = None, *, training: bool = False) -> dict[str, Cost]:
    """The cost of each part, by name.

    Args:
        model: the resolved ``model`` block of a config.
        text_length: tokens of a caption, padding included; None = the context length.
        training: FLOPs without the patches that training drops.

    Raises:
        ValueError: for a ``_target_`` other than this package's own encoders and heads.
    """
    outer = arguments(RetrievalModel, model, "model")
    image = arguments(ImageEncoder, outer["image_encoder"], "model.image_encoder")
    text = arguments(TextEncoder, outer["text_encoder"], "model.text_encoder")
    length, width = text_length or text["context_length"], outer["embed_dim"]
    projections = linear(text["dim"], width, 1, bias=False) + linear(image["dim"], width, 1, bias=False)
    parts = {
        "text encoder": text_encoder(text, length),
        "image encoder": image_encoder(image, training),
        # with the scale of the cosines, and their bias
        "projections": projections + Cost(parameters=1 + (outer["init_logit_bias"] is not None)),
    }
    if outer["crossmodal"] is not None:
        heads = arguments(CrossModal, outer["crossmodal"], "model.crossmodal")
        for kind, part in (("text_to_image", text_to_image), ("image_to_text", image_to_text), ("joint", joint)):
            if heads[kind]:
                cost = part(heads, length, image_length(image, training))
                trained = part(heads, length, image_length(image, training=True))  # patches may be left out in training
                parts[kind.replace("_", "-") + " heads"] = replace(cost, activations=trained.activations)
        if heads["image_to_text"] and heads["joint"]:  # both start from the picture's tokens, which are kept once
            parts["joint heads"] = replace(parts["joint heads"], kept=0)
    return parts


def total(model: Mapping[str, Any], text_length: int | None = None) -> Cost:
    """Of all parts together."""
    return sum(costs(model, text_length).values(), Cost())


def parameter_count(model: Mapping[str, Any]) -> int:
    """Learnt numbers of the model that the config describes."""
    return total(model).parameters


def flops(model: Mapping[str, Any], text_length: int | None = None) -> int:
    """Of encoding one picture and one text and matching them, forward."""
    return total(model, text_length).flops


def kv_bytes(model: Mapping[str, Any], bytes_each: int = FLOAT32) -> int:
    """Kept of a gallery picture for re-ranking: K/V of text-to-image heads, and tokens that image-to-text heads use."""
    return bytes_each * total(model).kept


def activation_bytes(model: Mapping[str, Any], text_length: int | None = None, bytes_each: int = FLOAT32) -> int:
    """Kept by a training step for its backward pass, for each pair encoded and matched once.

    As on a CPU (fused attention, float dropout masks). Parameters, gradients and optimizer state come on top, and with
    activation checkpointing one block's activations while it is recomputed.
    """
    return bytes_each * total(model, text_length).activations


def arguments(kind: type, config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """All arguments of a constructor: the config's, and for the others the signature's defaults."""
    target = config.get("_target_")
    if target != f"{kind.__module__}.{kind.__qualname__}":
        raise ValueError(f"{key}._target_={target}: costs are known from the config for {kind.__name__} only")
    bound = inspect.signature(kind).bind(**{name: value for name, value in config.items() if not name.startswith("_")})
    bound.apply_defaults()
    return bound.arguments


# --------------------------------------------------------------------------------------------------- parts of a model


def text_encoder(of: Mapping[str, Any], length: int) -> Cost:
    """Of all arguments of :class:`TextEncoder`, for a caption of ``length`` tokens."""
    dim = of["dim"]
    table = of["vocab_size"] + (of["context_length"] if of["position"] == "learned" else 0)
    pool = (
        Cost(flops=2 * length * dim, activations=length) if of["pool"] == "mean" else Cost()
    )  # a product with the mask
    return Cost(parameters=table * dim) + transformer(of, length) + pool


def image_encoder(of: Mapping[str, Any], training: bool = False) -> Cost:
    """Of all arguments of :class:`ImageEncoder`, for a picture of ``image_size``; ``training`` as in :func:`costs`."""
    dim, length, prefix = of["dim"], image_length(of), int(of["pool"] == "first")
    table = prefix + (length if of["position"] == "learned" else 0)
    patches = linear(3 * of["patch_size"] ** 2, dim, length - prefix) + Cost(parameters=table * dim)
    trained = transformer(of, image_length(of, training=True))
    activations = trained.activations + (length * dim if of["patch_dropout"] else 0)  # what is chosen from
    computed = trained if training else transformer(of, length)
    return patches + replace(computed, activations=activations)


def image_length(of: Mapping[str, Any], training: bool = False) -> int:
    """Tokens of a picture: its patches (in training without those dropped), and the class token where there is one."""
    patches = (of["image_size"] // of["patch_size"]) ** 2
    kept = max(1, round(patches * (1 - of["patch_dropout"]))) if training and of["patch_dropout"] else patches
    return kept + int(of["pool"] == "first")


def text_to_image(of: Mapping[str, Any], text_length: int, image_length: int) -> Cost:
    """Of all arguments of :class:`CrossModal`, its text-to-image heads."""
    querying = dict(dim=of["text_dim"], rows=text_length, self_heads=of["text_self_heads"])
    rotary = of["text_self_position"] == "rotary"
    context = dict(context_dim=of["image_dim"], keys=image_length)
    return cross_head(of, "text_to_image", of["text_to_image_depth"], **querying, rotary=rotary, **context, first=1)


def image_to_text(of: Mapping[str, Any], text_length: int, image_length: int) -> Cost:
    """Of all arguments of :class:`CrossModal`, its image-to-text heads, which keep the patches they query with."""
    querying = dict(dim=of["image_dim"], rows=image_length)
    context = dict(context_dim=of["text_dim"], keys=text_length)
    cost = cross_head(of, "image_to_text", of["image_to_text_depth"], **querying, **context)
    return replace(cost, flops_saved=0, kept=image_length * of["image_dim"])


def joint(of: Mapping[str, Any], text_length: int, image_length: int) -> Cost:
    """Of all arguments of :class:`CrossModal`, its joint stream."""
    dim, image_dim = of["text_dim"], of["image_dim"]
    entry = linear(dim, dim, text_length) + linear(image_dim, dim, image_length) + Cost(parameters=2 * dim)
    entry = replace(entry, activations=0)  # the encoders' tokens, counted there
    stream = {
        **of,
        "dim": dim,
        "depth": of["joint_depth"],
        "num_heads": of["joint"],
        "num_kv_heads": None,
        "head_dim": of_kind(of["head_dim"], "joint"),
    }
    cost = entry + transformer(stream, text_length + image_length) + linear(dim, 1, 1)
    return replace(cost, kept=image_length * image_dim)


def cross_head(
    of: Mapping[str, Any],
    kind: str,
    depth: int,
    *,
    dim: int,
    rows: int,
    context_dim: int,
    keys: int,
    self_heads: int | Sequence[int] = 0,
    rotary: bool = False,
    first: int | None = None,
) -> Cost:
    """Of a :class:`CrossModalHead`: ``rows`` tokens query ``keys`` others; the last block computes ``first`` rows."""
    heads = per_block(of[kind], depth, kind)
    shared = per_block(of_kind(of["num_kv_heads"], kind), depth, "num_kv_heads")
    among = per_block(self_heads, depth, "text_self_heads")
    width, self_width = of_kind(of["head_dim"], kind), of_kind(of["head_dim"], "text_self")
    cost = Cost()
    for number in range(depth):
        computed = first if first and number == depth - 1 else rows
        grouped = dict(num_kv_heads=shared[number], head_dim=width, qk_norm=of["qk_norm"])
        block = attention(dim, heads[number] or 0, computed, keys, context_dim=context_dim, **grouped)
        block += norm(dim, computed) + norm(dim, computed) + mlp(dim, computed, of["mlp_ratio"])
        own = among[number]
        if own:
            block += attention(dim, own, computed, rows, head_dim=self_width, qk_norm=of["qk_norm"], rotary=rotary)
            block += norm(dim, rows)
        else:
            block += Cost(activations=(rows - computed) * dim)  # the first rows are a view of them all
        if of["dropout"]:
            block += dropout_masks(dim, computed, 3 if own else 2)
        cost += replace(block, activations=rows * dim) if of["activation_checkpointing"] else block
    # what enters the first block, and the norm of the context, are the encoders' tokens, which are counted there
    cost += Cost(parameters=2 * context_dim, activations=keys * (context_dim + 2) - rows * dim)
    return cost + norm(dim, 1) + linear(dim, 1, 1)


def transformer(of: Mapping[str, Any], length: int) -> Cost:
    """Of a :class:`Transformer` with these arguments over ``length`` tokens."""
    dim, depth = of["dim"], of["depth"]
    cost = norm(dim, length) + Cost(activations=length * dim)  # its output feeds what follows
    counts = (per_block(of[name], depth, name) for name in ("num_heads", "num_kv_heads"))
    for heads, shared in zip(*counts, strict=True):
        grouped = dict(num_kv_heads=shared, head_dim=of["head_dim"], qk_norm=of["qk_norm"])
        block = attention(dim, heads or 0, length, length, rotary=of.get("position") == "rotary", **grouped)
        block += norm(dim, length) + norm(dim, length) + mlp(dim, length, of["mlp_ratio"])
        if of["dropout"]:
            block += dropout_masks(dim, length, branches=2)
        cost += replace(block, activations=length * dim) if of["activation_checkpointing"] else block
    return cost


# ------------------------------------------------------------------------------------------------------------- layers


def attention(
    dim: int,
    num_heads: int,
    queries: int,
    keys: int,
    *,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    context_dim: int | None = None,
    bias: bool = True,
    qk_norm: bool = False,
    rotary: bool = False,
) -> Cost:
    """Of a :class:`MultiHeadAttention` for ``queries`` rows over ``keys`` rows, K/V projected too.

    4 dim^2 weights for MHA with head_dim = dim / heads; the products with a context cost ``keys`` rows, those with the
    queries ``queries`` rows, scores and weighted sum 4 queries keys heads head_dim FLOPs, whatever the K/V heads.
    """
    head_dim = head_dim or dim // num_heads
    inner, kv = num_heads * head_dim, 2 * (num_kv_heads or num_heads) * head_dim
    cost = (
        linear(dim, inner, queries, bias)
        + linear(context_dim or dim, kv, keys, bias)
        + linear(inner, dim, queries, bias)
    )
    cost += Cost(parameters=2 * head_dim if qk_norm else 0, flops=4 * queries * keys * inner)
    # input, Q, K, V, output of the heads, log of the softmax's sum; a context is counted where it is normalised
    activations = (queries if context_dim else keys) * dim + queries * (2 * inner + num_heads) + keys * kv
    changed = queries * inner + keys * kv // 2  # Q and K, once more after each change; a norm has two steps
    activations += changed * (2 * qk_norm + rotary) + (changed // head_dim if qk_norm else 0)
    saved = dict(kept=keys * kv, flops_saved=2 * keys * context_dim * kv) if context_dim else {}
    return replace(cost, activations=activations, **saved)


def mlp(dim: int, rows: int, ratio: float) -> Cost:
    """Two linear layers; the input of the GELU between is kept too."""
    hidden = int(dim * ratio)
    return linear(dim, hidden, rows) + linear(hidden, dim, rows) + Cost(activations=rows * hidden)


def linear(inputs: int, outputs: int, rows: int, bias: bool = True) -> Cost:
    """A linear layer, which keeps its input."""
    return Cost(outputs * (inputs + bias), 2 * rows * inputs * outputs, activations=rows * inputs)


def norm(dim: int, rows: int) -> Cost:
    """A LayerNorm, which keeps its input, a mean and a deviation."""
    return Cost(parameters=2 * dim, activations=rows * (dim + 2))


def dropout_masks(dim: int, rows: int, branches: int) -> Cost:
    """Of the residual branches."""
    return Cost(activations=branches * rows * dim)

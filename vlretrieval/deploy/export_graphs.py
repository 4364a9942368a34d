"""The model cut into the graphs that leave it: image tower, text tower, what re-ranking keeps, and the scorer.

Each is a module of tensors in and tensors out, with names for them and for the axes that may vary. What writes them
(onnx, torch) and what runs them is another file's business.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from vlretrieval.model.attention import KeyValue, MultiHeadAttention
from vlretrieval.model.crossmodal import CrossModal, CrossModalHead
from vlretrieval.model.encoded import Encoded
from vlretrieval.model.retrieval_model import RetrievalModel
from vlretrieval.model.transformer import Block, pool_tokens

M = TypeVar("M", bound=nn.Module)
Axes = dict[int, str]  # axis -> name of the dimension that varies


@dataclass(frozen=True)
class Graph:
    """One graph.

    Attributes:
        name: of its file, without suffix.
        module: tensors in, a tuple of tensors out.
        example: inputs of sizes that stand for all others; none of a varying axis is 0 or 1.
        inputs, outputs: names, in order.
        axes: of each input, the axes that vary.
    """

    name: str
    module: nn.Module
    example: tuple[Tensor, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    axes: tuple[Axes, ...]


class ImageGraph(nn.Module):
    """(B, 3, S, S) uint8 -> embedding (B, E), tokens (B, P, dim)."""

    def __init__(self, model: RetrievalModel):
        super().__init__()
        self.encoder, self.projection = model.image_encoder, model.image_projection

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.encoder(pixels)
        return _embedding(self.projection, hidden.pooled), hidden.tokens


class TextGraph(nn.Module):
    """(B, L) int64 ids, (B, L) bool mask -> embedding (B, E), tokens (B, T, dim), and the mask (B, T) if it is new."""

    def __init__(self, model: RetrievalModel, new_mask: bool):
        super().__init__()
        self.encoder, self.projection, self.new_mask = model.text_encoder, model.text_projection, new_mask

    def forward(self, token_ids: Tensor, token_mask: Tensor) -> tuple[Tensor, ...]:
        hidden = self.encoder(token_ids, token_mask)
        embedding = _embedding(self.projection, hidden.pooled)
        return (embedding, hidden.tokens, hidden.mask) if self.new_mask else (embedding, hidden.tokens)


class KeepGraph(nn.Module):
    """Tokens (N, P, dim) of pictures -> key and value (N, G, P, D) of every text-to-image layer, in turn."""

    def __init__(self, head: CrossModalHead):
        super().__init__()
        self.context_norm = head.context_norm
        # A program holds all weights of its module, used or not: those of the queries stay behind.
        self.crossings = nn.ModuleList(without(crossing(block), "q", "q_norm", "out") for block in head.blocks)

    def forward(self, image_tokens: Tensor) -> tuple[Tensor, ...]:
        context = self.context_norm(image_tokens)
        kept = [cross.project_context(context) for cross in self.crossings]  # type: ignore[operator]
        return tuple(part for one in kept for part in (one.key, one.value))


class ScorerGraph(nn.Module):
    """Matching logits (T, K) of T texts, each with K pictures of its own.

    Inputs: text_tokens (T, L, dim), text_mask (T, L) bool, then what is kept of the pictures: key and value
    (T, K, G, P, D) of every text-to-image layer, and tokens (T, K, P, dim) where other heads need them.
    """

    def __init__(self, heads: CrossModal):
        super().__init__()
        self.heads = without(heads)
        head = heads.text_to_image
        if head is not None:  # what projects the pictures is in the graph "keep"
            self.heads.text_to_image = without(head, "context_norm")
            self.heads.text_to_image.blocks = nn.ModuleList(without(block) for block in head.blocks)
            for block in self.heads.text_to_image.blocks:
                block.cross = without(crossing(block), "kv", "k_norm")

    def forward(self, text_tokens: Tensor, text_mask: Tensor, *kept: Tensor) -> Tensor:
        texts, pictures = kept[0].shape[:2]
        flat = [part.flatten(0, 1) for part in kept]  # (T K, ...)
        words, mask = spread(text_tokens, pictures), spread(text_mask, pictures)
        logits = []
        head = self.heads.text_to_image
        if head is not None:
            layers = len(head.blocks)
            context = tuple(KeyValue(*flat[2 * layer : 2 * layer + 2]) for layer in range(layers))
            logits.append(text_to_image(head, text_tokens, text_mask, context, pictures))
        if self.heads.image_to_text is not None:
            head = self.heads.image_to_text
            texts_kept = tuple(
                KeyValue(spread(kept_text.key, pictures), spread(kept_text.value, pictures))
                for kept_text in head.keep(text_tokens)
            )
            logits.append(head(flat[-1], None, texts_kept, mask))
        if self.heads.joint is not None:
            logits.append(self.heads.joint(flat[-1], None, words, mask))
        return torch.stack(logits).sum(0).unflatten(0, (texts, pictures))


def text_to_image(
    head: CrossModalHead, text: Tensor, mask: Tensor, context: tuple[KeyValue, ...], pictures: int
) -> Tensor:
    """``head(text, mask, context)``, (T K,), for graphs whose T and K vary: no branch looks at either.

    As there, the first self-attention among a text's tokens is computed once, whatever number of pictures it meets.
    """
    rotate = head.positions.rotate((text.shape[1],), text.device)
    first, *others = head.blocks
    assert isinstance(first, Block)
    one = 1 if head.pool == "first" else None
    attended = first.self_attended(text, key_mask=mask, rotate=rotate, first=None if others else one)
    x = first.after_self_attention(spread(attended, pictures), context[0])
    mask = spread(mask, pictures)
    for block, kept in zip(others, context[1:], strict=True):
        last = block is others[-1]
        x = block(x, key_mask=mask, rotate=rotate, context=kept, first=one if last else None)
    return head.logit(head.norm(pool_tokens(x, None if one else mask, head.pool))).squeeze(-1)


def crossing(block: nn.Module) -> MultiHeadAttention:
    """The cross-attention of a block of cross-modal heads."""
    assert isinstance(block, Block) and block.cross is not None
    return block.cross


def without(module: M, *parts: str) -> M:
    """The module with the same weights, but for some of its parts; what it is a copy of keeps them."""
    rest = copy.copy(module)
    rest.__dict__["_modules"] = {name: part for name, part in module._modules.items() if name not in parts}
    return rest


def spread(tensor: Tensor, times: int) -> Tensor:
    """Each row ``times`` times, one after the other: (T, ...) -> (T times, ...)."""
    return tensor[:, None].expand(-1, times, *tensor.shape[1:]).flatten(0, 1)


def _embedding(projection: nn.Module, pooled: Tensor) -> Tensor:
    return torch.nn.functional.normalize(projection(pooled).float(), dim=-1)


def kept_names(heads: CrossModal) -> list[str]:
    """Names of what is kept of a picture, in the order in which the scorer takes it."""
    layers = len(heads.text_to_image.blocks) if heads.text_to_image is not None else 0
    names = [f"kept_{part}_{layer}" for layer in range(layers) for part in ("key", "value")]
    return names + (["kept_tokens"] if heads.image_to_text is not None or heads.joint is not None else [])


def graphs_of(model: RetrievalModel, image_size: int) -> list[Graph]:
    """The graphs of a model in evaluation mode: image and text, and with cross-modal heads keep and scorer.

    Raises:
        ValueError: an image encoder that masks some of its tokens, which the graphs have no place for.
    """
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (3, 3, image_size, image_size), generator=generator, dtype=torch.uint8)
    ids = torch.arange(3)[:, None] + torch.arange(1, 7)  # any ids do
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, 4:] = False
    with torch.no_grad():
        image, text = model.encode_image(pixels), model.encode_text(ids, mask)
    if image.mask is not None:
        raise ValueError("the image encoder masks some of its tokens, and graphs take them all; take format=folder")
    new_mask = text.mask is not mask
    batch: Axes = {0: "batch"}
    graphs = [
        Graph("image", ImageGraph(model), (pixels,), ("pixels",), ("image_embedding", "image_tokens"), (batch,)),
        Graph(
            "text",
            TextGraph(model, new_mask),
            (ids, mask),
            ("token_ids", "token_mask"),
            ("text_embedding", "text_tokens", "text_mask")[: 3 if new_mask else 2],
            ({0: "batch", 1: "length"},) * 2,
        ),
    ]
    heads = model.crossmodal
    return graphs if heads is None else graphs + scoring_graphs(heads, image, text)


def scoring_graphs(heads: CrossModal, image: Encoded, text: Encoded) -> list[Graph]:
    """What is kept of a picture, and the scorer that takes it."""
    graphs = []
    with torch.no_grad():
        kept = heads.keep_image(image)
    parts = [part for kv in kept.text_to_image for part in (kv.key, kv.value)]
    names = kept_names(heads)
    if heads.text_to_image is not None:
        graphs.append(
            Graph(
                "keep",
                KeepGraph(heads.text_to_image),
                (image.tokens,),
                ("image_tokens",),
                tuple(names[: len(parts)]),
                ({0: "images"},),
            )
        )
    if kept.tokens is not None:
        parts.append(kept.tokens)
    # three texts with two pictures each
    shortlists = tuple(part[:2].expand(3, *part[:2].shape).contiguous() for part in parts)
    mask = torch.ones(text.tokens.shape[:2], dtype=torch.bool) if text.mask is None else text.mask
    words: Axes = {0: "texts", 1: "length"}
    graphs.append(
        Graph(
            "scorer",
            ScorerGraph(heads),
            (text.tokens, mask, *shortlists),
            ("text_tokens", "text_mask", *names),
            ("match",),
            (words, words, *({0: "texts", 1: "shortlist"} for _ in parts)),
        )
    )
    return graphs


def traced(graph: Graph, context_length: int) -> torch.export.ExportedProgram:
    """The graph as a program of torch's, its named axes free: any batch and shortlist, any length up to the context."""
    # Over the example's own 6 tokens the text tower may add some, which the scorer then sees.
    longest = context_length + max(0, graph.example[0].shape[1] - 6) if graph.name in ("text", "scorer") else None
    sizes = {
        name: torch.export.Dim(name, max=longest) if name == "length" else torch.export.Dim(name)
        for axes in graph.axes
        for name in axes.values()
    }
    shapes = tuple({axis: sizes[name] for axis, name in axes.items()} for axes in graph.axes)
    variadic = graph.name == "scorer"  # *kept is one argument to the tracer
    dynamic = (*shapes[:2], shapes[2:]) if variadic else shapes
    with torch.no_grad(), quiet():
        return torch.export.export(graph.module.eval(), graph.example, dynamic_shapes=dynamic, strict=True)


@contextmanager
def quiet() -> Iterator[None]:
    """The tracer's and the quantizer's own log lines speak to their developers."""
    names = ("torch.onnx", "torch._dynamo", "torch.export", "onnxscript", None)  # None: the root, as quantizing uses it
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)

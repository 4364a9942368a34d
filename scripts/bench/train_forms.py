"""Who is measured in training: our step, open_clip's with its own CLIP class, and the bare matrix products.

A step is a call without arguments: forward, backward and optimizer over the next of a few batches, in a loop. All steps
over one :class:`Shape` and one list of captions meet the same batches in the same order.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vlretrieval.data.datasets import Batch
from vlretrieval.data.tokenizers import ClipTokenizer, pad
from vlretrieval.losses import info_nce
from vlretrieval.model.encoders import ImageEncoder, TextEncoder
from vlretrieval.model.retrieval_model import RetrievalModel
from vlretrieval.training.length_buckets import encode_text
from vlretrieval.training.objective import Objective
from vlretrieval.training.optimization import adamw
from vlretrieval.training.task import RetrievalTask

CONTEXT = 77  # CLIP's
RATES: dict[str, Any] = dict(lr=1e-4, weight_decay=0.1, betas=(0.9, 0.98), eps=1e-6)


@dataclass(frozen=True)
class Shape:
    """Two towers and a batch. Heads are 64 wide."""

    name: str
    image_size: int
    patch: int
    image_dim: int
    image_depth: int
    text_dim: int
    text_depth: int
    embed_dim: int
    batch: int
    vocab: int = ClipTokenizer.vocab_size

    @property
    def patches(self) -> int:
        return (self.image_size // self.patch) ** 2

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.patches} patches of {self.patch} px, {self.image_depth} x {self.image_dim}, "
            f"text {self.text_depth} x {self.text_dim}, batch {self.batch}"
        )


SHAPES = [
    Shape("96 px", 96, 16, 192, 6, 192, 4, 192, 64),
    Shape("128 px", 128, 16, 256, 6, 256, 4, 256, 48),
    Shape("224 px", 224, 16, 384, 12, 384, 6, 256, 16),
]


def captions_of(path: str | None, count: int = 4096) -> list[str]:
    """The first captions of a Karpathy JSON's training split, or of the built-in scenes."""
    if path is None:
        from vlretrieval.data.scenes.source import Scenes

        return list(Scenes(train=math.ceil(count / 5)).split("train").captions[:count])
    images = json.loads(Path(path).read_text(encoding="utf-8"))["images"]
    texts = [sentence["raw"] for image in images if image["split"] == "train" for sentence in image["sentences"]]
    return texts[:count]


def batches_of(shape: Shape, captions: Sequence[str], device: torch.device, count: int = 8) -> list[Batch]:
    """Batches as our loader makes them: captions by open_clip's BPE, padded to the longest of each; noise as pixels."""
    generator = torch.Generator().manual_seed(0)
    size = (shape.batch, 3, shape.image_size, shape.image_size)
    pixels = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    order = torch.randperm(len(captions), generator=generator).tolist()
    rows = torch.arange(shape.batch)
    tokenizer, batches = ClipTokenizer(CONTEXT), []
    for number in range(count):
        chosen = [captions[order[(number * shape.batch + i) % len(order)]] for i in range(shape.batch)]
        token_ids, token_mask = pad(tokenizer(chosen), tokenizer.pad_id, limit=CONTEXT)
        batches.append(Batch(pixels, token_ids % shape.vocab, token_mask, rows, rows, rows).to(device))
    return batches


def precision(device: torch.device) -> AbstractContextManager:
    """What both sides train in by default: bfloat16 on a GPU, float32 on a CPU."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def our_model(shape: Shape, *, patch_dropout: float = 0.0, num_kv_heads: int | None = None) -> RetrievalModel:
    """CLIP's architecture out of our parts: learned positions, a class token, causal text pooled at its end token."""
    return RetrievalModel(
        ImageEncoder(
            shape.image_size,
            shape.patch,
            shape.image_dim,
            shape.image_depth,
            shape.image_dim // 64,
            num_kv_heads=num_kv_heads,
            patch_dropout=patch_dropout,
        ),
        TextEncoder(
            shape.vocab,
            CONTEXT,
            shape.text_dim,
            shape.text_depth,
            shape.text_dim // 64,
            num_kv_heads=num_kv_heads,
            causal=True,
            pool="last",
        ),
        embed_dim=shape.embed_dim,
    )


def our_task(
    model: RetrievalModel, chunk: int | None = None, scheduler: Callable[..., Any] | None = None
) -> RetrievalTask:
    objective = Objective(info_nce, matching_weight=0.0, chunk=chunk)
    return RetrievalTask(model, objective, partial(adamw, **RATES), scheduler)


class OurStep:
    """:class:`RetrievalTask`'s arithmetic in a bare loop. It normalises the pixels itself."""

    def __init__(self, model: RetrievalModel, batches: Sequence[Batch], chunk: int | None = None):
        self.model = model.to(batches[0].pixels.device).train()
        self.task = our_task(self.model, chunk)
        self.optimizer = adamw(self.model, **RATES)
        self.batches = itertools.cycle(batches)

    def loss(self, batch: Batch) -> Tensor:
        with precision(batch.pixels.device):
            return self.task.objective(self.model, self.task.encode(batch))[0]

    def __call__(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(next(self.batches))
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            self.model.log_logit_scale.clamp_(0, math.log(100))
        return loss.detach()


def open_clip_model(shape: Shape, *, patch_dropout: float = 0.0, context_length: int = CONTEXT) -> nn.Module:
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    return CLIP(
        shape.embed_dim,
        CLIPVisionCfg(
            layers=shape.image_depth,
            width=shape.image_dim,
            patch_size=shape.patch,
            image_size=shape.image_size,
            patch_dropout=patch_dropout,
        ),
        CLIPTextCfg(
            context_length=context_length,
            vocab_size=shape.vocab,
            width=shape.text_dim,
            heads=shape.text_dim // 64,
            layers=shape.text_depth,
        ),
        output_dict=True,
    )


class OpenClipStep:
    """The step of open_clip's own training script on one device, without its loader: pixels come normalised.

    Args:
        fused: give it the fused AdamW, which its script does not ask for.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Batch], *, fused: bool = False):
        from open_clip.loss import ClipLoss

        device = batches[0].pixels.device
        self.model = model.to(device).train()
        self.lossy = ClipLoss(cache_labels=True)
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        plain = [p for name, p in named if p.ndim < 2 or "ln" in name or "bias" in name]
        matrices = [p for name, p in named if not (p.ndim < 2 or "ln" in name or "bias" in name)]
        groups = [{"params": plain, "weight_decay": 0.0}, {"params": matrices, "weight_decay": RATES["weight_decay"]}]
        self.optimizer: Optimizer = torch.optim.AdamW(groups, fused=fused or None, **RATES)
        context: int = self.model.context_length  # type: ignore[assignment]
        pixels = normalised(batches[0].pixels)
        self.batches = itertools.cycle([(pixels, to_length(batch.token_ids, context)) for batch in batches])

    def loss(self, pixels: Tensor, token_ids: Tensor) -> Tensor:
        with precision(pixels.device):
            return sum(self.lossy(**self.model(pixels, token_ids), output_dict=True).values())

    def __call__(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(*next(self.batches))
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            self.model.logit_scale.clamp_(0, math.log(100))  # type: ignore[operator, union-attr]
        return loss.detach()


class OurText(OurStep):
    """The text tower alone, towards embeddings that stay as they are; captions in ``buckets`` runs of like length."""

    def __init__(self, model: RetrievalModel, batches: Sequence[Batch], buckets: int = 1):
        super().__init__(model, batches)
        self.buckets = buckets

    def loss(self, batch: Batch) -> Tensor:
        with precision(batch.pixels.device):
            text = encode_text(self.model, batch.token_ids, batch.token_mask, self.buckets).embedding
        return info_nce(fixed(text), text, self.model.logit_scale)


class OpenClipText(OpenClipStep):
    """Its text tower alone, in the same way."""

    def loss(self, pixels: Tensor, token_ids: Tensor) -> Tensor:
        with precision(pixels.device):
            text = self.model.encode_text(token_ids, normalize=True)  # type: ignore[operator]
            return self.lossy(fixed(text), text, self.model.logit_scale.exp())  # type: ignore[operator, union-attr]


def fixed(like: Tensor) -> Tensor:
    """Unit vectors in the place of the other tower's."""
    generator = torch.Generator().manual_seed(0)
    return nn.functional.normalize(torch.randn(like.shape, generator=generator).to(like), dim=-1)


def normalised(pixels: Tensor) -> Tensor:
    """As open_clip's loader hands them over."""
    mean, std = (torch.tensor(v, device=pixels.device)[:, None, None] for v in ((0.48, 0.46, 0.41), (0.27, 0.26, 0.28)))
    return (pixels.float() / 255 - mean) / std


def to_length(token_ids: Tensor, length: int) -> Tensor:
    """(B, L) ids padded with 0 to the context, which open_clip's text tower always computes in full."""
    return torch.nn.functional.pad(token_ids, (0, length - token_ids.shape[1]))


class Floor:
    """The matrix products of our step and of its backward pass, and nothing else: no softmax, norm, loss or optimizer.

    Operands lie ready in the best layout, and results are written over those of the round before.
    """

    def __init__(self, shape: Shape, batches: Sequence[Batch], device: torch.device):
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.device = device
        self.each = itertools.cycle([self.products(shape, batch.token_ids.shape[1]) for batch in batches])

    def products(self, shape: Shape, length: int) -> list[tuple[int, bool, list[Tensor]]]:
        """(how often, whether the left side needs a gradient, operands and places for results)."""
        b = shape.batch
        found = [(1, False, self.operands(1, b * shape.patches, 3 * shape.patch**2, shape.image_dim))]
        for tokens, dim, depth in (
            (shape.patches + 1, shape.image_dim, shape.image_depth),
            (length, shape.text_dim, shape.text_depth),
        ):
            heads = dim // 64
            for outer in (3 * dim, dim, 4 * dim):
                found.append((depth, True, self.operands(1, b * tokens, dim, outer)))
            found.append((depth, True, self.operands(1, b * tokens, 4 * dim, dim)))
            found.append((depth, True, self.operands(b * heads, tokens, 64, tokens)))
            found.append((depth, True, self.operands(b * heads, tokens, tokens, 64)))
            found.append((1, True, self.operands(1, b, dim, shape.embed_dim)))
        found.append((2, True, self.operands(1, b, shape.embed_dim, b)))
        return found

    def operands(self, count: int, rows: int, inner: int, columns: int) -> list[Tensor]:
        kept = self.kept
        sizes = [(count, rows, inner), (count, inner, columns), (count, rows, columns)]
        return [kept(role, size) for role in ("in", "out") for size in sizes]

    def kept(self, role: str, size: tuple[int, ...]) -> Tensor:
        """One tensor for all that have the same use and size."""
        cache: dict[tuple[str, tuple[int, ...]], Tensor] = self.__dict__.setdefault("cache", {})
        if (role, size) not in cache:
            cache[role, size] = torch.randn(size, dtype=self.dtype, device=self.device)
        return cache[role, size]

    def __call__(self) -> None:
        with torch.no_grad():
            for count, to_left, (a, w, gradient, a_out, w_out, out) in next(self.each):
                for _ in range(count):
                    torch.matmul(a, w, out=out)
                    torch.matmul(a.mT, gradient, out=w_out)
                    if to_left:
                        torch.matmul(gradient, w.mT, out=a_out)

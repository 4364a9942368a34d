"""A split through the two encoders: embeddings for the first stage, and tokens for re-ranking where they are wanted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vlretrieval.data.features import FeatureRows, Features
from vlretrieval.data.packed import PackedTokens
from vlretrieval.evaluation.inputs import Inputs, by_length, in_order
from vlretrieval.evaluation.keep import room_for
from vlretrieval.evaluation.sharing import Processes
from vlretrieval.metrics.scores import Embeddings, IntArray, row_norms
from vlretrieval.model.encoded import Encoded
from vlretrieval.model.modes import modes_kept

log = logging.getLogger(__name__)

Float32 = npt.NDArray[np.float32]


@dataclass
class Texts:
    """Texts encoded: embeddings (M, E), and their tokens end to end without padding, or None where not kept."""

    embedding: Embeddings
    tokens: Tensor | None = None  # (sum of lengths, dim)
    begin: IntArray | None = None  # (M,) where each text's tokens begin
    length: IntArray | None = None  # (M,) and how many they are

    def part(self, rows: IntArray) -> Texts:
        """The given texts; their tokens are shared, not copied."""
        if self.begin is None or self.length is None:
            return Texts(self.embedding[rows])
        return Texts(self.embedding[rows], self.tokens, self.begin[rows], self.length[rows])

    def rows(self, rows: IntArray) -> Encoded:
        """The given texts, padded to the longest of them."""
        assert self.tokens is not None and self.begin is not None and self.length is not None, "tokens were not kept"
        start, length = self.begin[rows], self.length[rows]
        steps = np.arange(length.max())
        mask = torch.from_numpy(steps < length[:, None])
        at = np.minimum(start[:, None] + steps, len(self.tokens) - 1)
        # zeros where there is no token: never another text's hidden states, though the mask hides them anyway
        tokens = self.tokens[torch.from_numpy(at)] * mask[..., None].to(self.tokens.device)
        return Encoded(torch.from_numpy(self.embedding[rows]), tokens, mask.to(tokens.device))


@dataclass
class Images:
    """Pictures encoded: embeddings (N, E), and their tokens (N, P, dim) or None where not kept."""

    embedding: Embeddings
    tokens: Tensor | None = None
    mask: Tensor | None = None

    def part(self, first: int, last: int) -> Images:
        """Pictures first..last; nothing is copied."""
        tokens = None if self.tokens is None else self.tokens[first : last + 1]
        mask = None if self.mask is None else self.mask[first : last + 1]
        return Images(self.embedding[first : last + 1], tokens, mask)

    def rows(self, rows: IntArray) -> Encoded:
        """The given pictures."""
        assert self.tokens is not None, "tokens were not kept"
        at = torch.from_numpy(rows)
        mask = None if self.mask is None else self.mask[at]
        return Encoded(torch.from_numpy(self.embedding[rows]), self.tokens[at], mask)


Tell = Callable[[str, int, int], None]  # what is done, how many of it just now, and in all


def silent(what: str, done: int, total: int) -> None:
    """Tell nobody."""


def _moved(rows: FeatureRows, device: torch.device) -> FeatureRows:
    return rows.mapped(lambda tensor: tensor.to(device, torch.float32 if tensor.is_floating_point() else None))


@contextmanager
def evaluating(model: nn.Module, precision: str = "float32") -> Iterator[torch.device]:
    """The model as evaluation wants it: eval mode, no gradients, and the precision asked for and no other.

    Yields the model's device. An autocast around the call (training's) is switched off for "float32".
    """
    if precision not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"precision={precision!r} is not known; choose float32, bfloat16 or float16")
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    if device.type == "cpu" and precision != "float32":
        log.warning(
            "precision=%s on a CPU is 5 to 15 times slower than float32 where it has no units for it", precision
        )
    with (
        modes_kept(model),
        torch.inference_mode(),
        torch.autocast(
            device.type,
            enabled=precision != "float32",
            dtype=getattr(torch, precision.replace("float32", "bfloat16")),
        ),
    ):
        model.eval()
        yield device


def encode_images(
    model: Any,
    inputs: Inputs,
    device: torch.device,
    *,
    batch_size: int = 64,
    tokens: bool = False,
    processes: Processes = Processes(),  # noqa: B008  (frozen)
    tell: Tell = silent,
) -> Images:
    """All N pictures. Non-finite embeddings are an error that names the picture."""
    count = len(inputs.split.image_ids)
    batches = in_order(count, batch_size)

    def compute(rows: IntArray) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if "image" in inputs.features:
            encoded = model.image_from(*_moved(inputs.features["image"].gather(rows), device))
        else:
            encoded = model.encode_image(inputs.pixels(rows).to(device))
        tell("pictures", len(rows), count)
        mask = None if not tokens or encoded.mask is None else encoded.mask.cpu()
        return encoded.embedding.float().cpu(), encoded.tokens.cpu() if tokens else None, mask

    embeddings, masks = [], []
    kept: Tensor | None = None
    for rows, (embedding, own, mask) in zip(batches, processes.share(batches, compute), strict=True):
        embeddings.append(embedding)
        if own is not None:
            kept = room_for((count, *own.shape[1:]), own.dtype) if kept is None else kept
            kept[rows[0] : rows[-1] + 1] = own
        if mask is not None:
            masks.append(mask)
    whole = torch.cat(embeddings).numpy()
    row_norms(whole, "image")
    return Images(whole, kept, torch.cat(masks) if masks else None)


def encode_texts(
    model: Any,
    inputs: Inputs,
    packed: PackedTokens,
    device: torch.device,
    *,
    batch_size: int = 256,
    tokens: bool = False,
    processes: Processes = Processes(),  # noqa: B008  (frozen)
    name: str = "text",
    features: Features | None = None,
    at: IntArray | None = None,
    tell: Tell = silent,
) -> Texts:
    """All texts of ``packed``, in batches of like length. Non-finite embeddings are an error that names the text.

    With ``features``, from what a frozen tower gave of them: its rows ``at`` (None: all, in order).
    """
    lengths = packed.lengths()
    batches = by_length(lengths, batch_size)

    def compute(rows: IntArray) -> tuple[Tensor, Tensor | None, IntArray]:
        if features is not None:
            encoded = model.text_from(*_moved(features.gather(rows if at is None else at[rows]), device))
        else:
            ids, mask = inputs.token_rows(packed, rows)
            encoded = model.encode_text(ids.to(device), mask.to(device))
        tell(f"{name}s", len(rows), len(packed))
        real = torch.ones(encoded.tokens.shape[:2], dtype=torch.bool) if encoded.mask is None else encoded.mask
        kept = encoded.tokens[real].cpu() if tokens else None
        return encoded.embedding.float().cpu(), kept, real.sum(1).cpu().numpy()

    embeddings: Float32 | None = None
    kept: Tensor | None = None
    begin, length = np.zeros(len(packed), dtype=np.int64), np.zeros(len(packed), dtype=np.int64)
    end = 0
    for rows, (embedding, own, own_lengths) in zip(batches, processes.share(batches, compute), strict=True):
        if embeddings is None:
            embeddings = np.empty((len(packed), embedding.shape[1]), dtype=np.float32)
            # an encoder may add tokens of its own, as many to each text
            extra = int(own_lengths[0] - lengths[rows[0]])
            if own is not None:
                kept = room_for((int(lengths.sum()) + extra * len(packed), own.shape[1]), own.dtype)
        embeddings[rows] = embedding.numpy()
        if own is not None and kept is not None:
            kept[end : end + len(own)] = own
            begin[rows], length[rows] = end + np.cumsum(own_lengths) - own_lengths, own_lengths
            end += len(own)
    assert embeddings is not None, "a split has captions"
    row_norms(embeddings, name)
    return Texts(embeddings) if kept is None else Texts(embeddings, kept, begin, length)

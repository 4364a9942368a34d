"""A split made ready for evaluation: pictures as uint8 tensors, captions as token ids. Read once, used by every pass.

Training's validation keeps one of these for the whole run, so that pictures are decoded and captions tokenised once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from PIL.Image import Image
from torch import Tensor

from vlretrieval.data.features import Features
from vlretrieval.data.packed import PackedTokens
from vlretrieval.data.pictures import decode_all
from vlretrieval.data.splits import Split
from vlretrieval.data.tokenizers import Tokenizer, tokenizer_hash
from vlretrieval.metrics.scores import IntArray

Transform = Callable[[Image], Tensor]  # RGB picture -> (3, S, S) uint8

HELD_BYTES = 2 << 30  # pictures of a split up to this size stay decoded in memory


class Inputs:
    """What a model is shown of a split.

    Args:
        split: the pictures and captions.
        tokenizer: the model's own, fitted.
        transform: RGB picture -> (3, S, S) uint8, the same for every picture; with an ``image_size``.
        held_bytes: up to this many bytes of pixels are decoded once and kept; beyond, files are read at each pass.
        features: what frozen towers gave of this split, in place of its "image", "text" or "negatives".
    """

    def __init__(
        self,
        split: Split,
        tokenizer: Tokenizer,
        transform: Transform,
        *,
        held_bytes: int = HELD_BYTES,
        features: Mapping[str, Features] | None = None,
    ) -> None:
        self.split, self.tokenizer, self.transform = split, tokenizer, transform
        self.features = dict(features or {})
        for part, count in (("image", len(split.image_ids)), ("text", len(split.captions))):
            if part in self.features and len(self.features[part]) != count:
                raise ValueError(
                    f"{self.features[part].path} holds {len(self.features[part])} items, but the protocol takes "
                    f"{count} of them; set protocol=full, or leave out {part}_features"
                )
        self._held = 3 * int(getattr(transform, "image_size", 1 << 20)) ** 2 * len(split.image_ids) <= held_bytes
        self._pixels: npt.NDArray[np.uint8] | None = None
        self._captions: PackedTokens | None = None
        self._negatives: PackedTokens | None = None
        self._truncated: int | None = None

    def pixels(self, rows: IntArray) -> Tensor:
        """(B, 3, S, S) uint8 of the pictures ``rows``. One that cannot be read is an error: nothing is skipped."""
        if self._pixels is None and self._held:
            size = int(getattr(self.transform, "image_size"))  # noqa: B009  (a Callable has none, a transform does)
            self._pixels = decode_all(self.split, self.transform, size)
        if self._pixels is not None:
            return torch.from_numpy(self._pixels[rows])
        return torch.stack([self.transform(self.split.picture(int(row))) for row in rows])

    @property
    def captions(self) -> PackedTokens:
        """Token ids of the M captions."""
        if self._captions is None:
            self._captions = self.tokens(self.split.captions)
        return self._captions

    @property
    def negatives(self) -> PackedTokens:
        """Token ids of the K hard negatives."""
        if self._negatives is None:
            self._negatives = self.tokens(self.split.negatives.texts)
        return self._negatives

    @property
    def truncated(self) -> int:
        """Captions longer than the context, which the model sees cut."""
        if self._truncated is None:
            self._truncated = int(self.tokenizer.count_truncated(list(self.split.captions)))
        return self._truncated

    def tokens(self, texts: Sequence[str]) -> PackedTokens:
        return PackedTokens(self.tokenizer(list(texts)), self.tokenizer.pad_id)

    def token_rows(self, packed: PackedTokens, rows: IntArray) -> tuple[Tensor, Tensor]:
        """token_ids (B, L) int64 and token_mask (B, L) bool of the texts ``rows``, padded to the longest of them."""
        ids, mask = packed.gather(rows, limit=self.tokenizer.context_length)
        return torch.from_numpy(ids), torch.from_numpy(mask)

    def description(self) -> dict[str, object]:
        """What decides what the model is shown, for the protocol in metrics.json."""
        return {
            "preprocessing": repr(self.transform),
            "tokenizer_hash": tokenizer_hash(self.tokenizer),
            "captions_truncated": self.truncated,
        }


def by_length(lengths: IntArray, batch_size: int) -> list[IntArray]:
    """Batches of rows of like length, longest first: little padding, and a batch too big for memory fails at once."""
    order = np.argsort(-lengths, kind="stable")
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def in_order(rows: int, batch_size: int) -> list[IntArray]:
    """Rows 0..rows-1 in batches."""
    return [np.arange(start, min(start + batch_size, rows)) for start in range(0, rows, batch_size)]

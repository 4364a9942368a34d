"""What every tokenizer offers, and its token lists as one rectangle.

Padding is a step of its own (``pad``), so that a batch is only as long as its longest caption.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from vlretrieval.data.packed import padded_length


@runtime_checkable
class Tokenizer(Protocol):
    """Texts in, lists of ids out: start, text, end, cut to ``context_length`` with the end token kept."""

    vocab_size: int
    context_length: int

    @property
    def pad_id(self) -> int: ...

    @property
    def start_id(self) -> int: ...

    @property
    def end_id(self) -> int: ...

    @property
    def fitted(self) -> bool:
        """False only for a trainable tokenizer before its ``fit``."""
        ...

    def __call__(self, texts: Sequence[str]) -> list[list[int]]: ...

    def count_truncated(self, texts: Sequence[str]) -> int:
        """How many of ``texts`` do not fit into ``context_length``."""
        ...

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Which letters ``text[start:end]`` each id of its row stands for; (0, 0) for the start token, and for the end
        token the text's end. Ids that together spell one letter all have that letter."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Plain data from which ``tokenizer_from_dict`` makes an equal tokenizer."""
        ...


def pad(
    ids: Sequence[Sequence[int]], pad_id: int, multiple: int = 4, limit: int | None = None
) -> tuple[Tensor, Tensor]:
    """Token lists as one rectangle.

    Args:
        ids: B lists of ids.
        pad_id: id written beyond a list's end.
        multiple: the length is rounded up to it, so that few shapes occur.
        limit: the context length; rounding never goes beyond it.

    Returns:
        token_ids (B, L) int64 and token_mask (B, L) bool, True where there is a token; L is the longest of the batch.
    """
    length = padded_length(max(map(len, ids), default=0), multiple, limit)
    token_ids = np.full((len(ids), length), pad_id, dtype=np.int64)
    mask = np.zeros((len(ids), length), dtype=bool)
    for row, tokens in enumerate(ids):
        token_ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = True
    return torch.from_numpy(token_ids), torch.from_numpy(mask)

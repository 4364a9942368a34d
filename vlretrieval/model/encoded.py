"""What the encoders hand on, and what re-ranking keeps of pictures."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vlretrieval.model.attention import KeyValue


@dataclass
class Encoded:
    """One modality of a batch: embedding (B, E) unit float32, tokens (B, T, dim), mask (B, T) bool, None: all real."""

    embedding: Tensor
    tokens: Tensor
    mask: Tensor | None = None

    def __len__(self) -> int:
        return len(self.embedding)

    def index(self, rows: Tensor) -> Encoded:
        """The given rows (int64), in the given order."""
        mask = None if self.mask is None else take(self.mask, rows)
        return Encoded(take(self.embedding, rows), take(self.tokens, rows), mask)

    def part(self, rows: slice) -> Encoded:
        """A run of rows, as views."""
        return Encoded(self.embedding[rows], self.tokens[rows], None if self.mask is None else self.mask[rows])


def take(tensor: Tensor, rows: Tensor) -> Tensor:
    """Rows of a tensor. The backward pass of ``tensor[rows]`` would be several times dearer on a CPU."""
    return tensor.index_select(0, rows)


@dataclass
class Kept:
    """What re-ranking keeps of N pictures.

    ``text_to_image`` holds the K/V of each text-to-image layer, ``tokens`` (N, P, dim) what image-to-text heads query
    with (None where there are none).
    """

    text_to_image: tuple[KeyValue, ...]
    tokens: Tensor | None
    mask: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens) if self.tokens is not None else len(self.text_to_image[0].key)

    def index(self, rows: Tensor) -> Kept:
        """The given pictures (int64), in the given order."""
        return Kept(
            tuple(kv.index(rows) for kv in self.text_to_image),
            None if self.tokens is None else take(self.tokens, rows),
            None if self.mask is None else take(self.mask, rows),
        )

    @property
    def nbytes(self) -> int:
        """Bytes kept, all pictures together."""
        return sum(kv.nbytes for kv in self.text_to_image) + (0 if self.tokens is None else self.tokens.nbytes)

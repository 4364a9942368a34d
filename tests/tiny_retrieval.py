"""A tiny model and a tiny split for the evaluation tests: the model's contract, in a few lines, with scores that are
known from the data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vlretrieval.data.splits import HardNegatives, Split
from vlretrieval.data.tokenizers import BpeTokenizer
from vlretrieval.data.transforms import EvalTransform
from vlretrieval.model.encoded import Encoded

WORDS = ("red", "green", "blue", "small", "large", "circle", "square", "above", "below", "left")


@dataclass
class FakeKept:
    tokens: Tensor

    def index(self, rows: Tensor) -> FakeKept:
        return FakeKept(self.tokens[rows])

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes


class FakeModel(nn.Module):
    """Embeddings from a fixed random map of the mean pixel or token, a matching logit from the tokens themselves."""

    def __init__(self, dim: int = 12, vocab_size: int = 300, seed: int = 0, heads: bool = True):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.pixel_map = nn.Parameter(torch.randn(3, dim, generator=generator))
        self.table = nn.Parameter(torch.randn(vocab_size, dim, generator=generator))
        self.crossmodal = nn.Identity() if heads else None
        self.calls: list[tuple[int, int]] = []

    @property
    def logit_scale(self) -> Tensor:
        return torch.tensor(10.0)

    def encode_image(self, pixels: Tensor) -> Encoded:
        assert pixels.dtype == torch.uint8
        patches = nn.functional.adaptive_avg_pool2d(pixels.float() / 255, 2).flatten(2).transpose(1, 2)  # (B, 4, 3)
        tokens = torch.tanh((patches - 0.5) @ self.pixel_map * 3)
        return Encoded(nn.functional.normalize(tokens.mean(1), dim=-1), tokens, None)

    def encode_text(self, token_ids: Tensor, token_mask: Tensor) -> Encoded:
        tokens = torch.tanh(self.table[token_ids])
        mean = (tokens * token_mask[..., None]).sum(1) / token_mask.sum(1, keepdim=True)
        return Encoded(nn.functional.normalize(mean, dim=-1), tokens, token_mask)

    def keep_image(self, image: Encoded) -> FakeKept:
        return FakeKept(image.tokens)

    def match_kept(self, kept: FakeKept, text: Encoded) -> Tensor:
        self.calls.append((len(kept), len(text.tokens)))
        texts = len(text.tokens) // len(kept)
        patches = kept.tokens.repeat_interleave(texts, 0)
        scores = (text.tokens @ patches.transpose(1, 2)).amax(-1)  # each word's best patch
        return (scores * text.mask).sum(1) / text.mask.sum(1)

    def match(self, image: Encoded, text: Encoded) -> Tensor:
        return self.match_kept(self.keep_image(image), text)


def tiny_split(
    images: int = 23,
    captions: tuple[int, ...] = (5, 1, 0, 3),
    seed: int = 0,
    negatives: bool = True,
    positives: np.ndarray | None = None,
    name: str = "test",
) -> Split:
    """Coloured pictures with uneven captions of random words; the second kind of negative is the caption itself."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (images, 4, 4, 3), dtype=np.uint8)
    counts = [captions[i % len(captions)] for i in range(images)]
    owner = np.repeat(np.arange(images), counts)
    texts = [" ".join(rng.choice(WORDS, rng.integers(1, 9))) for _ in owner]
    wrong = HardNegatives(
        [f for text in texts for f in (" ".join(reversed(text.split())) + " tree", text)],
        ["other", "same"] * len(texts),
        np.repeat(np.arange(len(texts)), 2),
    )
    return Split(
        name,
        [f"image-{i}" for i in range(images)],
        texts,
        owner,
        lambda index: Image.fromarray(pixels[index]).resize((8, 8), Image.Resampling.NEAREST),
        positives=positives,
        negatives=wrong if negatives else None,
    )


def tiny_tokenizer(split: Split) -> BpeTokenizer:
    return BpeTokenizer(vocab_size=300, context_length=16).fit(split.captions)


TRANSFORM = EvalTransform(8)

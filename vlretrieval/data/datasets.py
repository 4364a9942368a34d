"""Training pairs: everything a step needs, tokenised and (for small sets) decoded once, so that a step is an index."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vlretrieval.data.feature_copies import gather_copies
from vlretrieval.data.features import FeatureRows, Features
from vlretrieval.data.ordering import keyed_draw
from vlretrieval.data.packed import PackedTokens
from vlretrieval.data.sides import names_a_side
from vlretrieval.data.splits import Split
from vlretrieval.data.tokenizers import Tokenizer

log = logging.getLogger(__name__)

CaptionsPerImage = Literal["one", "first", "all"]
# Names for keyed_draw: two draws for the same caption and epoch must not be equal.
_CAPTION, _NEGATIVE, _AUGMENT, _COPY = 1, 2, 3, 4


@dataclass
class Batch:
    """B image-caption pairs, ready for a model.

    ``image_ids`` and ``caption_ids`` say what is the same: two rows with an equal image, or an equal (normalised)
    caption, are no negatives of each other.
    """

    pixels: Tensor | None  # (B, 3, S, S) uint8; None where ``image`` stands for them
    token_ids: Tensor  # (B, L) int64
    token_mask: Tensor  # (B, L) bool, True = token
    image_ids: Tensor  # (B,) int64
    caption_ids: Tensor  # (B,) int64
    index: Tensor  # (B,) int64, the caption's index in the split
    negative_token_ids: Tensor | None = None  # (B, K, Ln) int64
    negative_token_mask: Tensor | None = None  # (B, K, Ln) bool; all False where a caption has fewer than K
    # A frozen tower's output, half precision, of the same pictures, captions and negatives (B, K, ...).
    image: FeatureRows | None = None
    text: FeatureRows | None = None
    negatives: FeatureRows | None = None

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        changed: dict[str, Any] = {}
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if value is not None:
                changed[name] = value.mapped(change) if isinstance(value, FeatureRows) else change(value)
        return replace(self, **changed)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """The same batch on ``device``."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """The same batch in page-locked memory."""
        return self._mapped(lambda tensor: tensor.pin_memory())

    def in_shared_memory(self) -> "Batch":
        """The same batch where other processes can read it."""
        return self._mapped(lambda tensor: tensor.share_memory_())

    def __len__(self) -> int:
        return len(self.index)


class Step(NamedTuple):
    """What the sampler asks for: the epoch, which keys every random choice, and the samples."""

    epoch: int
    samples: np.ndarray  # (B,) int64


class TrainPairs:
    """The pairs of a split, by step.

    Args:
        split: what to train on.
        tokenizer: fitted.
        pictures: gives the pixels (B, 3, S, S) uint8 of images, from their indices (B,), one random key each (B,)
            uint64, which is all that their augmentation may depend on, and whether each may be mirrored (B,) bool.
            None with ``image_features``.
        captions_per_image: "one": a sample is an image with one of its captions, drawn anew each epoch; "first": always
            with its first; "all": a sample is a caption, so an image is seen as often as it has captions.
        negatives_per_caption: hard negatives of the data drawn for each caption of a step.
        usable: (N,) bool, images that may be used; None: all.
        keep_sides: a picture is never mirrored for a caption that says left or right.
        seed: of every draw.
        multiple: captions are padded to the longest of the batch, rounded up to it.
        image_features: a frozen tower's output of all pictures, in place of pixels; of several (the pictures as they
            are, and augmented copies) each sample draws one anew each epoch.
        text_features, negative_features: likewise of all captions, and of the data's hard negatives.
    """

    def __init__(
        self,
        split: Split,
        tokenizer: Tokenizer,
        pictures: Callable[[np.ndarray, np.ndarray, np.ndarray], Tensor] | None,
        *,
        captions_per_image: CaptionsPerImage = "one",
        negatives_per_caption: int = 0,
        usable: np.ndarray | None = None,
        keep_sides: bool = True,
        seed: int = 0,
        multiple: int = 4,
        image_features: Sequence[Features] = (),
        text_features: Features | None = None,
        negative_features: Features | None = None,
    ) -> None:
        assert (pictures is None) != (not image_features)
        if captions_per_image not in ("one", "first", "all"):
            raise ValueError(f"captions_per_image={captions_per_image!r} is not known; choose one, first or all")
        if negatives_per_caption and not len(split.negatives):
            raise ValueError(
                f"negatives_per_caption={negatives_per_caption}, but split {split.name!r} brings no hard negatives; "
                f"set it to 0"
            )
        self.split, self.pictures = split, pictures
        self.image_features, self.text_features = tuple(image_features), text_features
        self.negative_features = negative_features
        self.captions_per_image, self.negatives_per_caption = captions_per_image, negatives_per_caption
        self.seed, self.multiple, self.context_length = seed, multiple, tokenizer.context_length
        self.tokens = tokenise(split, tokenizer)
        self.caption_image, self.caption_ids = split.caption_image, split.caption_groups
        self._starts = split.captions_of_image
        self._sided = names_a_side(split.captions) if keep_sides else np.zeros(len(split.captions), dtype=bool)
        counts = np.diff(self._starts)
        wanted = counts > 0 if usable is None else (counts > 0) & usable
        images = np.flatnonzero(wanted)
        if not len(images):
            raise ValueError(f"split {split.name!r} has no image that can be used with a caption")
        if (counts == 0).any():
            log.warning("%s: %d images have no caption and are left out", split.name, int((counts == 0).sum()))
        self._samples = np.flatnonzero(wanted[self.caption_image]) if captions_per_image == "all" else images
        if negatives_per_caption:
            self.negative_tokens = PackedTokens(_in_parts(split.negatives.texts, tokenizer), tokenizer.pad_id)
            self._negative_starts = np.searchsorted(split.negatives.caption, np.arange(len(split.captions) + 1))

    def __len__(self) -> int:
        """Samples an epoch."""
        return len(self._samples)

    @property
    def shards(self) -> np.ndarray | None:
        """(samples,) the shard that each sample's picture lies in; None where they are files of their own."""
        if self.split.shards is None:
            return None
        images = self._samples if self.captions_per_image != "all" else self.caption_image[self._samples]
        return self.split.shards[images]

    def captions_of(self, step: Step) -> np.ndarray:
        """(B,) int64: the captions that ``step`` trains on."""
        samples = self._samples[step.samples]
        if self.captions_per_image == "all":
            return samples
        first, count = self._starts[samples], self._starts[samples + 1] - self._starts[samples]
        if self.captions_per_image == "first":
            return first
        return first + (keyed_draw(self.seed, step.epoch, _CAPTION, samples) % count.astype(np.uint64)).astype(np.int64)

    def __getitem__(self, step: Step) -> Batch:
        captions = self.captions_of(step)
        images = self.caption_image[captions]
        token_ids, token_mask = self.tokens.gather(captions, self.multiple, self.context_length)
        pixels = None
        if self.pictures is not None:
            keys = keyed_draw(self.seed, step.epoch, _AUGMENT, captions)
            pixels = self.pictures(images, keys, ~self._sided[captions])
        batch = Batch(
            pixels=pixels,
            token_ids=torch.from_numpy(token_ids),
            token_mask=torch.from_numpy(token_mask),
            image_ids=torch.from_numpy(images),
            caption_ids=torch.from_numpy(self.caption_ids[captions]),
            index=torch.from_numpy(captions),
            text=_gathered(self.text_features, captions, self.multiple),
        )
        if self.image_features:
            drawn = keyed_draw(self.seed, step.epoch, _COPY, captions) % np.uint64(len(self.image_features))
            batch.image = gather_copies(self.image_features, images, drawn)
        if self.negatives_per_caption:
            drawn = self.negatives_of(captions, step.epoch)
            ids, mask = self.negative_tokens.gather(drawn, self.multiple, self.context_length)
            batch.negative_token_ids, batch.negative_token_mask = torch.from_numpy(ids), torch.from_numpy(mask)
            batch.negatives = _gathered(self.negative_features, drawn, self.multiple)
        return batch

    def negatives_of(self, captions: np.ndarray, epoch: int) -> np.ndarray:
        """(B, K) int64: indices into ``split.negatives``, no repeats; -1 where a caption has fewer than K."""
        start = self._negative_starts[captions][:, None]
        count = self._negative_starts[captions + 1][:, None] - start
        places = np.arange(max(int(count.max()), self.negatives_per_caption))
        keys = keyed_draw(self.seed, epoch, _NEGATIVE, captions[:, None], places)
        keys = np.where(places < count, keys, np.uint64(2**64 - 1))  # what does not exist is drawn last
        chosen = np.argsort(keys, axis=1, kind="stable")[:, : self.negatives_per_caption]
        return np.where(chosen < count, start + chosen, -1)


def _gathered(features: Features | None, rows: np.ndarray, multiple: int = 4) -> FeatureRows | None:
    return None if features is None else features.gather(rows, multiple)


def tokenise(split: Split, tokenizer: Tokenizer) -> PackedTokens:
    """All captions of ``split``, packed. Captions that are cut are counted and warned about."""
    packed = PackedTokens(_in_parts(split.captions, tokenizer), tokenizer.pad_id)
    full = np.flatnonzero(packed.lengths() >= tokenizer.context_length)  # only these can have been cut
    cut = tokenizer.count_truncated([split.captions[int(i)] for i in full]) if len(full) else 0
    if cut:
        log.warning(
            "%s: %d of %d captions (%.2f %%) are longer than context_length=%d and are cut (their end token is kept)",
            split.name,
            cut,
            len(packed),
            100 * cut / len(packed),
            tokenizer.context_length,
        )
    split.notes["captions_cut"] = cut
    return packed


def _in_parts(texts: Sequence[str], tokenizer: Tokenizer, part: int = 4096) -> Iterator[list[int]]:
    for start in range(0, len(texts), part):
        yield from tokenizer(list(texts[start : start + part]))

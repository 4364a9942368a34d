"""The LightningDataModule: a source, a tokenizer and the settings of a training step become a loader."""

import logging
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule

from vlretrieval.data.bad_samples import BadSamples
from vlretrieval.data.cache import open_cache
from vlretrieval.data.datasets import CaptionsPerImage, TrainPairs
from vlretrieval.data.feature_copies import AugmentedCopy, copy_part
from vlretrieval.data.features import Features, about_images, about_texts, features_path, open_features
from vlretrieval.data.loader import TrainLoader
from vlretrieval.data.ordering import EpochOrder
from vlretrieval.data.pictures import Augment, FilePictures, MemoryPictures, decode_all
from vlretrieval.data.sides import names_a_side
from vlretrieval.data.splits import Source, Split, plain
from vlretrieval.data.tokenizers import Tokenizer
from vlretrieval.data.transforms import EvalTransform, ResizeMode

log = logging.getLogger(__name__)


class RetrievalData(LightningDataModule):
    """Training batches of a source. Evaluation reads ``split("val")`` itself, so there is no val_dataloader.

    Args:
        source: where splits come from.
        tokenizer: fitted, or one to be fitted on the captions of the train split.
        image_size: side of the pictures a model gets.
        batch_size: pairs a step, over all processes together.
        captions_per_image: "one" (drawn anew each epoch), "first" or "all"; see ``TrainPairs``.
        negatives_per_caption: hard negatives of the data for each caption of a step.
        num_workers: loader processes. 0 is right when the pictures are in memory.
        pin_memory: page-locked batches, for a GPU.
        worker_timeout_s: a worker silent for so long counts as hung; 0: never.
        shards_together: read tar shards in sequence, so many mixed at a time: for sets larger than memory. None: one
            permutation of all samples.
        seed: of order, caption choice, negatives and augmentation.
        cache_in_memory: decode the train pictures once into memory, where they fit ``cache_limit_bytes``.
        cache_limit_bytes: the most that cache may take.
        cache: folder that ``vlretrieval-data cache`` made; the train pictures are read from it, memory-mapped. They are
            stored with side ``stored_size``.
        image_features: folder that ``vlretrieval-data features`` made: a frozen image tower's output of the train
            pictures, which takes the place of pixels; it leaves nothing for ``augment`` to do.
        image_feature_copies: augmented copies of each train picture (by ``augment``) beside it in ``image_features``;
            each epoch draws one of them.
        text_features: likewise of the text tower; it takes the place of token ids.
        resize: "squash", "crop" or "pad"; see ``EvalTransform``.
        augment: a ``TrainTransform``; None: pictures as they are, only resized.
        stored_size: side of the pictures kept in memory for ``augment`` to cut from; None: an eighth more than
            image_size with ``augment``, else image_size.
        keep_sides: a picture is never mirrored for a caption that says left or right; False mirrors it and warns.
        on_bad_image: "error" stops at the first picture that cannot be read. "skip" looks at every picture before
            training, leaves the bad ones out, lists them in ``bad_samples_file``, and stops above ``max_bad_share``.
            Nothing stands in for a picture that was left out, and evaluation always stops.
        max_bad_share: share of bad pictures above which "skip" gives up.
        bad_samples_file: JSON lines of what was left out, and why.
        settings: fields of the source, repeated by a configuration so that ``data.json=...`` is short for
            ``data.source.reader.json=...``. One that the source does not have is refused.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        image_size: int,
        batch_size: int,
        *,
        captions_per_image: CaptionsPerImage = "one",
        negatives_per_caption: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
        worker_timeout_s: float = 0,
        shards_together: int | None = None,
        seed: int = 0,
        cache_in_memory: bool = True,
        cache_limit_bytes: int = 2 * 1024**3,
        cache: str | None = None,
        image_features: str | None = None,
        image_feature_copies: int = 0,
        text_features: str | None = None,
        resize: ResizeMode = "squash",
        augment: Augment | None = None,
        stored_size: int | None = None,
        keep_sides: bool = True,
        on_bad_image: str = "error",
        max_bad_share: float = 0.01,
        bad_samples_file: str = "bad_samples.jsonl",
        **settings: Any,
    ) -> None:
        super().__init__()
        _check_settings(source, settings)
        if on_bad_image not in ("error", "skip"):
            raise ValueError(f"on_bad_image={on_bad_image!r} is not known; choose error or skip")
        self.source, self.tokenizer = source, tokenizer
        self.image_size, self.batch_size, self.seed = image_size, batch_size, seed
        self.captions_per_image, self.negatives_per_caption = captions_per_image, negatives_per_caption
        self.num_workers, self.pin_memory, self.worker_timeout_s = num_workers, pin_memory, worker_timeout_s
        if shards_together is not None and shards_together < 1:
            raise ValueError(f"shards_together={shards_together} must be at least 1; null mixes all shards")
        self.shards_together = shards_together
        self.cache_in_memory, self.cache_limit_bytes = cache_in_memory, cache_limit_bytes
        self.cache = cache
        if image_features is not None and cache is not None:
            raise ValueError(f"cache has no effect with image_features={image_features}: no pixels are read")
        if image_features is not None and (augment is None) != (image_feature_copies == 0):
            raise ValueError(
                f"image_feature_copies={image_feature_copies} with image_features={image_features}: augment makes the "
                "copies; set both, or neither"
            )
        if image_features is None and image_feature_copies:
            raise ValueError(f"image_feature_copies={image_feature_copies} has no effect without image_features")
        self.image_features, self.text_features = image_features, text_features
        self.image_feature_copies = image_feature_copies
        self._features: dict[str, dict[str, Features]] = {}
        self.transform = EvalTransform(image_size, resize)
        self.augment, self.keep_sides = augment, keep_sides
        self.stored_size = stored_size or (image_size if augment is None else image_size + image_size // 8)
        if self.stored_size != image_size and augment is None:
            raise ValueError(f"stored_size={stored_size} has no effect without augment; leave it out")
        if getattr(augment, "image_size", image_size) != image_size:
            made = getattr(augment, "image_size", None)
            raise ValueError(f"augment makes pictures of {made}, but image_size={image_size}")
        self.on_bad_image, self.max_bad_share, self.bad_samples_file = on_bad_image, max_bad_share, bad_samples_file
        self.pairs: TrainPairs | None = None
        self.loader: TrainLoader | None = None

    def split(self, name: str) -> Split:
        """A split of the source."""
        return self.source.split(name)

    def fit_tokenizer(self) -> None:
        """Fit a trainable tokenizer that is not fitted yet, on the train captions and no others."""
        if not self.tokenizer.fitted:
            self.tokenizer.fit(self.source.split("train").captions)  # type: ignore[attr-defined]

    def setup(self, stage: str | None = None) -> None:
        """Tokenise the train captions and, for small sets, decode the pictures. Done once."""
        self.fit_tokenizer()
        if stage not in (None, "fit") or self.pairs is not None:
            return
        split = self.source.split("train")
        features = self.features()
        pictures, usable = self._pictures(split) if "image" not in features else (None, None)
        self.pairs = TrainPairs(
            split,
            self.tokenizer,
            pictures,
            captions_per_image=self.captions_per_image,
            negatives_per_caption=self.negatives_per_caption,
            usable=usable,
            keep_sides=self.keep_sides,
            seed=self.seed,
            image_features=[
                features[copy_part(i)] for i in range(1 + self.image_feature_copies) if "image" in features
            ],
            text_features=features.get("text"),
            negative_features=features.get("negatives"),
        )
        self._tell_about_flips(split)

    def features(self, name: str = "train") -> dict[str, Features]:
        """The frozen towers' outputs of a split that take the place of their inputs: part -> features.

        The train split must be there; another one that was not computed is read from its pictures and captions.

        Raises:
            ValueError: for features that are of other data, other preprocessing, or damaged.
        """
        if name not in self._features:
            self._features[name] = self._open_features(name)
        return self._features[name]

    def _open_features(self, name: str) -> dict[str, Features]:
        if self.image_features is None and self.text_features is None:
            return {}
        self.fit_tokenizer()
        split = self.source.split(name)
        used = len(split.negatives) and (self.negatives_per_caption or name != "train")
        folders = {"image": self.image_features, "text": self.text_features}
        folders["negatives"] = self.text_features if used else None
        found = {}
        for copy in self.copies() if name == "train" else ():
            place = features_path(str(self.image_features), name, copy.part)
            found[copy.part] = open_features(place, copy.about(split, self.transform), split)
        for part, folder in folders.items():
            path = None if folder is None else features_path(folder, name, part)
            if path is None or (name != "train" and not path.exists()):
                continue
            if part == "image":
                found[part] = open_features(path, about_images(split, self.transform), split)
            else:
                found[part] = open_features(path, about_texts(split, self.tokenizer, part), split)
        return found

    def copies(self) -> list[AugmentedCopy]:
        """The augmented copies of the train pictures that ``image_features`` holds beside them."""
        if self.augment is None:
            return []
        numbers = range(1, 1 + self.image_feature_copies)
        # of no seed of the run's: runs of several seeds share what was computed once
        return [AugmentedCopy(number, self.augment, 0, self.keep_sides) for number in numbers]

    def _tell_about_flips(self, split: Split) -> None:
        if not getattr(self.augment, "flip", 0):
            return
        sided = int(names_a_side(split.captions).sum())
        if sided and not self.keep_sides:
            log.warning(
                "train: %d captions (%.2f %%) say left or right, and flip=%g makes them false; set keep_sides=true",
                sided,
                100 * sided / len(split.captions),
                self.augment.flip,  # type: ignore[union-attr]
            )
        elif sided:
            log.info("train: pictures are not mirrored for the %d captions that say left or right", sided)

    def _pictures(self, split: Split) -> tuple[MemoryPictures | FilePictures, np.ndarray | None]:
        if self.cache is not None:
            stored, readable = open_cache(split, EvalTransform(self.stored_size, self.transform.mode), self.cache)
            return MemoryPictures(stored, self.augment), readable
        bad = BadSamples(split, self.max_bad_share, self.bad_samples_file) if self.on_bad_image == "skip" else None
        needed = len(split.image_ids) * 3 * self.stored_size**2
        if self.cache_in_memory and needed <= self.cache_limit_bytes:
            transform = EvalTransform(self.stored_size, self.transform.mode)
            pixels = decode_all(split, transform, self.stored_size, bad.add if bad else None)
            return MemoryPictures(pixels, self.augment), bad.usable() if bad else None
        if self.cache_in_memory:
            log.warning(
                "train: %d pictures need %.1f GB, more than cache_limit_bytes=%d; they are decoded each step, not kept",
                len(split.image_ids),
                needed / 1e9,
                self.cache_limit_bytes,
            )
        if bad:
            bad.look_at_all()
        return FilePictures(split, self.transform, self.augment), bad.usable() if bad else None

    def train_dataloader(self) -> TrainLoader:
        """A loader whose ``state_dict`` holds its place; Lightning stores it in every checkpoint."""
        if self.pairs is None:
            self.setup("fit")
        assert self.pairs is not None
        attached = self.trainer
        rank, world_size = (attached.global_rank, attached.world_size) if attached else (0, 1)
        shards = None if self.shards_together is None else self.pairs.shards
        if self.shards_together is not None and shards is None:
            raise ValueError(f"shards_together={self.shards_together} has no effect: this data set has no tar shards")
        order = EpochOrder(
            len(self.pairs),
            self.batch_size,
            self.seed,
            rank,
            world_size,
            shards=shards,
            together=self.shards_together or 1,
        )
        self.loader = TrainLoader(
            self.pairs,
            order,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory and torch.cuda.is_available(),
            timeout_s=self.worker_timeout_s,
        )
        return self.loader


def _check_settings(source: Source, settings: dict[str, Any]) -> None:
    known = source.fingerprint() if settings else {}
    for name, value in settings.items():
        if name not in known:
            raise ValueError(f"data.{name}={value!r} has no effect: {type(source).__name__} has no such setting")
        if plain(known[name]) != plain(value):
            raise ValueError(f"data.{name}={value!r}, but the source was given {known[name]!r}; set one of them")

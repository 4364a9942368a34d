"""One split of an image-text set, flat: what training and evaluation read. It does not know files or formats."""

import hashlib
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class Region:
    """A thing at a place: its name and its box (x0, y0, x1, y1) in pixels of the picture."""

    label: str
    box: tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class HardNegative:
    """A caption that is nearly, but not, true of the picture, and the kind of its fault ("swap_colour", ...)."""

    text: str
    kind: str


@dataclass(frozen=True)
class HardNegatives:
    """All hard negatives of a split, flat: ``texts[k]`` of ``kinds[k]`` is the false sister of caption ``caption[k]``.

    ``caption`` is (K,) int64 and non-decreasing; K may be 0.
    """

    texts: Sequence[str] = ()
    kinds: Sequence[str] = ()
    caption: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def __post_init__(self) -> None:
        object.__setattr__(self, "caption", np.asarray(self.caption, dtype=np.int64))
        if not len(self.texts) == len(self.kinds) == len(self.caption):
            raise ValueError(
                f"hard negatives need one text, kind and caption each, got {len(self.texts)} texts, "
                f"{len(self.kinds)} kinds and {len(self.caption)} captions"
            )
        if (np.diff(self.caption) < 0).any():
            raise ValueError("hard negatives must be grouped by caption: their caption indices may not go down")

    def __len__(self) -> int:
        return len(self.texts)


class Source(Protocol):
    """Where splits come from: a set of files, or a drawing machine."""

    def split(self, name: str) -> "Split":
        """The split called ``name``; ValueError naming those that exist when it is unknown or empty."""
        ...

    def fingerprint(self) -> dict:
        """Plain data that says what the set is, for the run folder."""
        ...


def plain(value: Any) -> Any:
    """``value`` with a config's own containers (OmegaConf's) made plain dicts and lists."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [plain(item) for item in value]
    return value


class Split:
    """Pictures, their captions, and which captions are true of which pictures.

    Args:
        name: "train", "val", "test" or another name of the set's own.
        image_ids: N ids, each once.
        captions: M captions, grouped by image.
        caption_image: (M,) index of each caption's image, never going down.
        picture: gives picture ``index`` as RGB, upright.
        reduced: the same, perhaps decoded at a reduced scale, with no side shorter than its second argument
            (or than the file's own); None where decoding has no cheaper form.
        positives: (P, 2) (caption, image) pairs that are true; own pairs are added. None: own pairs alone.
        negatives: the data's own hard negatives.
        regions: gives the regions known in picture ``index``.
        stamp: gives a text that changes when the pictures' files do, by their times of change, or by their contents if
            asked; None: there are no files.
        notes: counts worth telling (captions left out, pictures without captions), for reports.
        shards: (N,) int64, the shard that each picture lies in; None: pictures are files of their own.
    """

    def __init__(
        self,
        name: str,
        image_ids: Sequence[str],
        captions: Sequence[str],
        caption_image: np.ndarray | Sequence[int],
        picture: Callable[[int], Image],
        *,
        reduced: Callable[[int, int | Callable[[int, int], int]], Image] | None = None,
        positives: np.ndarray | None = None,
        negatives: HardNegatives | None = None,
        regions: Callable[[int], tuple[Region, ...]] | None = None,
        stamp: Callable[[bool], str] | None = None,
        notes: dict[str, int] | None = None,
        shards: np.ndarray | None = None,
    ) -> None:
        self.shards = shards
        self.name = name
        self.image_ids = image_ids
        self.captions = captions
        self.caption_image = np.asarray(caption_image, dtype=np.int64)
        self.negatives = negatives if negatives is not None else HardNegatives()
        self.notes = notes or {}
        self._picture = picture
        self._reduced = reduced
        self._regions = regions
        self._stamp = stamp
        self._check()
        own = np.stack([np.arange(len(captions), dtype=np.int64), self.caption_image], axis=1)
        self.positives = own if positives is None else _unique_pairs(own, positives, len(captions), len(image_ids))

    def _check(self) -> None:
        if len(self.caption_image) != len(self.captions):
            raise ValueError(f"{len(self.captions)} captions, but {len(self.caption_image)} caption_image entries")
        if len(self.captions) == 0 or len(self.image_ids) == 0:
            sizes = f"{len(self.image_ids)} images, {len(self.captions)} captions"
            raise ValueError(f"split {self.name!r} is empty: {sizes}")
        low, high = self.caption_image.min(), self.caption_image.max()
        if low < 0 or high >= len(self.image_ids):
            raise ValueError(f"caption_image must lie in 0..{len(self.image_ids) - 1}, got {low}..{high}")
        if (np.diff(self.caption_image) < 0).any():
            raise ValueError("captions must be grouped by image: caption_image may not go down")
        if len(self.negatives) and self.negatives.caption[-1] >= len(self.captions):
            raise ValueError(f"a hard negative belongs to caption {self.negatives.caption[-1]} of {len(self.captions)}")
        seen: set[str] = set()
        for image_id in self.image_ids:
            if image_id in seen:
                raise ValueError(f"image id {image_id!r} occurs twice in split {self.name!r}; one picture is one id")
            seen.add(image_id)

    def __repr__(self) -> str:
        return f"Split({self.name!r}, {len(self.image_ids)} images, {len(self.captions)} captions)"

    def picture(self, index: int, at_least: int | Callable[[int, int], int] | None = None) -> Image:
        """Picture ``index``: RGB, upright.

        Args:
            index: 0..N-1.
            at_least: a picture with no side shorter than this (or than what a function of its width and height says)
                will do; a JPEG is then decoded at a reduced scale where that is cheaper. None: the full picture.
        """
        if at_least is None or self._reduced is None:
            return self._picture(index)
        return self._reduced(index, at_least)

    def regions(self, index: int) -> tuple[Region, ...]:
        """The things known to be at places of picture ``index``; none for most sets."""
        return self._regions(index) if self._regions is not None else ()

    def stamp(self, contents: bool = False) -> str:
        """A text that changes when the pictures' files do. What was made of the pictures is stale then.

        Args:
            contents: tell by what is in the files (all are read), not by their names, sizes and times of change.
        """
        return self._stamp(contents) if self._stamp is not None else ""

    @cached_property
    def captions_of_image(self) -> np.ndarray:
        """(N + 1,) int64 offsets: image i has the captions ``offsets[i]:offsets[i + 1]``, maybe none."""
        return np.searchsorted(self.caption_image, np.arange(len(self.image_ids) + 1))

    @cached_property
    def caption_groups(self) -> np.ndarray:
        """(M,) int64: captions of equal normalised text have equal numbers."""
        return text_groups(self.captions)

    @cached_property
    def hash(self) -> str:
        """First 16 hex digits of the sha256 over image ids, captions and positives."""
        digest = hashlib.sha256()
        for texts in (self.image_ids, self.captions):
            for text in texts:
                raw = text.encode("utf-8", "surrogatepass")
                digest.update(len(raw).to_bytes(8, "little") + raw)
        digest.update(np.ascontiguousarray(self.caption_image).tobytes())
        digest.update(np.ascontiguousarray(self.positives).tobytes())
        return digest.hexdigest()[:16]

    def with_equal_captions_positive(self) -> "Split":
        """The same split, where a caption is also true of every image that has an equal (normalised) caption."""
        order = np.argsort(self.caption_groups, kind="stable")
        bounds = np.flatnonzero(np.diff(self.caption_groups[order])) + 1
        extra = [
            np.stack(np.meshgrid(group, np.unique(self.caption_image[group]), indexing="ij"), axis=-1).reshape(-1, 2)
            for group in np.split(order, bounds)
            if len(group) > 1
        ]
        return Split(
            self.name,
            self.image_ids,
            self.captions,
            self.caption_image,
            self._picture,
            reduced=self._reduced,
            positives=np.concatenate([self.positives, *extra]),
            negatives=self.negatives,
            regions=self._regions,
            stamp=self._stamp,
            notes=self.notes,
            shards=self.shards,
        )


def _unique_pairs(own: np.ndarray, given: np.ndarray, captions: int, images: int) -> np.ndarray:
    given = np.asarray(given, dtype=np.int64).reshape(-1, 2)
    if len(given) and ((given < 0).any() or (given >= (captions, images)).any()):
        raise ValueError(f"positives are (caption, image) pairs below ({captions}, {images}), got up to {given.max(0)}")
    flat = np.union1d(own[:, 0] * images + own[:, 1], given[:, 0] * images + given[:, 1])
    return np.stack([flat // images, flat % images], axis=1)


def normalised_text(text: str) -> str:
    """The form in which two captions count as the same: NFKC, no case, single blanks, no full stop at the end."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).rstrip(" .。!！")


def text_groups(texts: Iterable[str]) -> np.ndarray:
    """(M,) int64: the number of each text's normalised form, counted in order of first appearance."""
    numbers: dict[bytes, int] = {}
    # A digest for a key, so that a million long captions need no second copy of their text.
    forms = (normalised_text(text).encode("utf-8", "surrogatepass") for text in texts)
    keys = (hashlib.blake2b(form, digest_size=16).digest() for form in forms)
    return np.fromiter((numbers.setdefault(key, len(numbers)) for key in keys), dtype=np.int64)

"""The built-in data set: the settings, and the splits drawn from them."""

from collections.abc import Sequence
from random import Random

from vlretrieval.data.scenes import chinese, english
from vlretrieval.data.scenes.captions import KINDS
from vlretrieval.data.scenes.layout import TENTHS, Rules, draw_scenes
from vlretrieval.data.scenes.scene_split import SceneSplit
from vlretrieval.data.scenes.vocabulary import COLOURS, SHAPES, choose
from vlretrieval.data.scenes.wording import Grammar
from vlretrieval.data.scenes.writing import write

GRAMMARS: dict[str, tuple[Grammar, ...]] = {
    "en": (english.render,),
    "zh": (chinese.render,),
    "both": (english.render, chinese.render),
}
VERSION = 2  # goes up whenever the same arguments begin to give other scenes, words or negatives


class Scenes:
    """Drawn scenes with captions in English or Chinese: no files, no network, the same everywhere.

    A split is a pure function of the seed, its name and the settings; asking for more scenes adds to the end. No
    multiset of (shape, colour, size) occurs in two splits, wherever the objects stand. Every caption is a positive of
    every picture of its split that it is true of; ``query`` says what true means.

    Args:
        seed: another seed, other scenes.
        train, val, test: how many scenes each split has; 0 for no such split.
        image_size: side of the square pictures, in pixels.
        min_objects, max_objects: how many objects a scene holds, evenly drawn; at most 6.
        shapes, colours: how many of the known ones, or their names.
        placement: "grid" puts each object into a cell of a 3 x 3 grid, "free" anywhere. Objects never overlap.
        jitter: 0..1, how much of its free way inside the cell an object may take (None: 0.6). For "grid" only.
        repeat: 0..1, the chance that a further object copies the shape and colour of an earlier one.
        captions: the kinds of caption, one each a scene; a kind may occur twice.
        language: "en", "zh", or "both" (a scene's captions in turn English and Chinese). Meanings do not depend on it.
    """

    def __init__(
        self,
        seed: int = 0,
        train: int = 20_000,
        val: int = 500,
        test: int = 1_000,
        image_size: int = 64,
        min_objects: int = 2,
        max_objects: int = 4,
        shapes: int | Sequence[str] = 8,
        colours: int | Sequence[str] = 8,
        placement: str = "grid",
        jitter: float | None = None,
        repeat: float = 0.15,
        captions: Sequence[str] = ("objects", "relation", "place", "count", "only"),
        language: str = "en",
    ) -> None:
        self.counts = {"train": train, "val": val, "test": test}
        for name, count in self.counts.items():
            if count < 0:
                raise ValueError(f"{name}={count} must be 0 or more scenes")
        if image_size < 32:
            raise ValueError(f"image_size={image_size} is too small to tell shapes apart; use 32 or more")
        if not 1 <= min_objects <= max_objects <= 6:
            raise ValueError(f"min_objects={min_objects}, max_objects={max_objects} must be 1 <= min <= max <= 6")
        if placement not in ("grid", "free"):
            raise ValueError(f"placement={placement!r} must be 'grid' or 'free'")
        if placement == "free" and jitter is not None:
            raise ValueError(f"jitter={jitter} has no effect with placement='free'; leave it out, or use 'grid'")
        jitter = 0.6 if jitter is None else jitter
        for what, share in (("jitter", jitter), ("repeat", repeat)):
            if not 0 <= share <= 1:
                raise ValueError(f"{what}={share} must be from 0 to 1")
        unknown = [kind for kind in captions if kind not in KINDS]
        if unknown or not captions:
            raise ValueError(f"captions={list(captions)} must be one or more of {list(KINDS)}")
        if language not in GRAMMARS:
            raise ValueError(f"language={language!r} must be one of {list(GRAMMARS)}")
        self.seed = seed
        self.image_size = image_size
        self.captions = tuple(captions)
        self.language = language
        self.rules = Rules(
            choose("shapes", shapes, SHAPES), choose("colours", colours, tuple(COLOURS)),
            min_objects, max_objects, placement, jitter, repeat,
        )  # fmt: skip
        kinds = len(self.rules.shapes) * len(self.rules.colours)
        if kinds <= max_objects:
            raise ValueError(
                f"{len(self.rules.shapes)} shapes in {len(self.rules.colours)} colours are {kinds} kinds of object, "
                f"which max_objects={max_objects} could use up; allow more, so that something is always absent"
            )
        self._splits: dict[str, SceneSplit] = {}

    def fingerprint(self) -> dict:
        """Plain data that says what the set is: equal fingerprints, equal data."""
        rules = self.rules
        return {
            "source": "scenes", "version": VERSION, "seed": self.seed, **self.counts,
            "image_size": self.image_size, "min_objects": rules.min_objects, "max_objects": rules.max_objects,
            "shapes": [SHAPES[shape] for shape in rules.shapes],
            "colours": [tuple(COLOURS)[colour] for colour in rules.colours],
            "placement": rules.placement, "jitter": rules.jitter if rules.placement == "grid" else None,
            "repeat": rules.repeat, "captions": list(self.captions), "language": self.language,
        }  # fmt: skip

    def split(self, name: str) -> SceneSplit:
        """The split, made when first asked for, then kept.

        Raises:
            ValueError: when there is none of that name, or it has no scenes, or the settings do not give so many.
        """
        if not self.counts.get(name):
            there = [f"{known} ({count} scenes)" for known, count in self.counts.items() if count]
            what = "has no scenes" if name in TENTHS else "does not exist"
            raise ValueError(f"split {name!r} {what}; there are: {', '.join(there) or 'none'}")
        if name not in self._splits:
            scenes = draw_scenes(self.rules, self.seed, name, self.counts[name])
            rng = Random(f"scenes/{self.seed}/{name}/captions")
            written = write(scenes, self.captions, self.rules, GRAMMARS[self.language], rng)
            self._splits[name] = SceneSplit(name, scenes, written, seed=self.seed, image_size=self.image_size)
        return self._splits[name]

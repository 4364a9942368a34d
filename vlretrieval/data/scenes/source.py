"""The built-in data set: scenes drawn from a seed, with captions, known truth, known hard negatives, known places."""

from collections.abc import Sequence
from functools import cached_property
from random import Random

import numpy as np
from PIL.Image import Image

from vlretrieval.data.scenes import captions, chinese, english, negatives
from vlretrieval.data.scenes.captions import Draft
from vlretrieval.data.scenes.draw import box_of, draw_scene, draw_tints
from vlretrieval.data.scenes.layout import TENTHS, Rules, Scene, draw_scenes
from vlretrieval.data.scenes.query import Query, QueryTable, Thing, tabulate
from vlretrieval.data.scenes.truth import Truth
from vlretrieval.data.scenes.vocabulary import COLOURS, SHAPES, choose
from vlretrieval.data.scenes.wording import Grammar, Mention, read_marks
from vlretrieval.data.splits import HardNegatives, Region, Split

GRAMMARS: dict[str, Grammar] = {"en": english.render, "zh": chinese.render}
_LANGUAGES = {"en": ("en",), "zh": ("zh",), "both": ("en", "zh")}
VERSION = 1  # goes up whenever the same arguments begin to give other scenes, words or negatives


class SceneSplit(Split):
    """A split of drawn scenes. Beyond ``Split``, it knows its objects and what each caption speaks of.

    Attributes:
        scenes: N tuples of ``Placed`` objects.
        drafts: M drafts: each caption's meaning, and the objects its things are.
        caption_kinds: M kinds, see ``captions``.
        negative_queries: K queries, the meanings of ``negatives``.
    """

    def __init__(
        self,
        name: str,
        scenes: list[Scene],
        drafts: list[Draft],
        caption_kinds: list[str],
        forms: list[int],
        grammars: list[Grammar],
        negative_queries: list[Query],
        *,
        caption_negatives: HardNegatives,
        seed: int,
        image_size: int,
    ) -> None:
        self.scenes = scenes
        self.drafts = drafts
        self.caption_kinds = caption_kinds
        self.negative_queries = negative_queries
        self._forms = forms
        self._grammars = grammars
        self._image_size = image_size
        self._tints, self._shades = draw_tints(seed, name, len(scenes), max(len(scene) for scene in scenes))
        super().__init__(
            name,
            image_ids=[f"scene-{name}-{number:05d}" for number in range(len(scenes))],
            captions=[
                grammar(draft.query, form, False)
                for draft, form, grammar in zip(drafts, forms, grammars, strict=True)
            ],
            caption_image=np.repeat(np.arange(len(scenes)), len(drafts) // len(scenes)),
            picture=self._draw,
            negatives=caption_negatives,
            regions=self._find_regions,
        )
        del self.__dict__["positives"]  # the own pairs alone: replaced by the truth, once it is asked for

    @cached_property
    def positives(self) -> np.ndarray:  # type: ignore[override]
        """(P, 2) int64: all (caption, image) pairs that are true; computed when first asked for."""
        return self._truth.pairs(self._table)

    @cached_property
    def _truth(self) -> Truth:
        return Truth(self.scenes)

    @cached_property
    def _table(self) -> QueryTable:
        return tabulate([draft.query for draft in self.drafts])

    def describes(self, captions: np.ndarray | Sequence[int], images: np.ndarray | Sequence[int]) -> np.ndarray:
        """(A, B) bool: is caption ``captions[a]`` true of picture ``images[b]``? Milliseconds for a batch."""
        rows, columns = np.asarray(captions, dtype=np.int64), np.asarray(images, dtype=np.int64)
        pairs = self._truth.holds(self._table, np.repeat(rows, len(columns)), np.tile(columns, len(rows)))
        return pairs.reshape(len(rows), len(columns))

    def mentions(self, caption: int) -> tuple[Mention, ...]:
        """Which letters of a caption speak of which objects of its own picture, in reading order.

        Object o has the box ``regions(caption_image[caption])[o].box``.
        """
        draft = self.drafts[caption]
        marked = self._grammars[caption](draft.query, self._forms[caption], True)
        return tuple(Mention(start, end, draft.objects[thing]) for thing, start, end in read_marks(marked)[1])

    def _draw(self, index: int) -> Image:
        tint = tuple(self._tints[index].tolist())
        return draw_scene(self.scenes[index], self._image_size, tint, self._shades[index])

    def _find_regions(self, index: int) -> tuple[Region, ...]:
        phrase = chinese.phrase if all(g is chinese.render for g in self._grammars[:2]) else english.phrase
        return tuple(
            Region(phrase(Thing(o.shape, o.colour, o.size), True), box_of(o.shape, o.size, o.x, o.y, self._image_size))
            for o in self.scenes[index]
        )


class Scenes:
    """Drawn scenes with captions in English or Chinese: no files, no network, the same everywhere for the same arguments.

    A split is a pure function of the seed, its name and the settings; asking for more scenes adds to the end. No
    multiset of (shape, colour, size) occurs in two splits, wherever the objects stand. Every caption is a positive of
    every picture of its split that it is true of, as ``query`` defines truth.

    Args:
        seed: another seed, other scenes.
        train, val, test: how many scenes each split has; 0 for no such split.
        image_size: side of the square pictures, in pixels.
        min_objects, max_objects: how many objects a scene holds, evenly drawn; at most 6.
        shapes, colours: how many of the known ones, or their names.
        placement: "grid" puts each object into a cell of a 3 x 3 grid, "free" anywhere. Objects never overlap.
        jitter: 0..1, how much of its free way inside the cell an object may take; of no effect, so refused, with "free".
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
        unknown = [kind for kind in captions if kind not in _caption_kinds()]
        if unknown or not captions:
            raise ValueError(f"captions={list(captions)} must be one or more of {list(_caption_kinds())}")
        if language not in _LANGUAGES:
            raise ValueError(f"language={language!r} must be one of {list(_LANGUAGES)}")
        self.seed = seed
        self.image_size = image_size
        self.captions = tuple(captions)
        self.language = language
        self.rules = Rules(
            choose("shapes", shapes, SHAPES), choose("colours", colours, tuple(COLOURS)),
            min_objects, max_objects, placement, jitter, repeat,
        )  # fmt: skip
        self._splits: dict[str, SceneSplit] = {}

    def fingerprint(self) -> dict:
        """Plain data that says what the set is: equal fingerprints, equal data."""
        rules = self.rules
        return {
            "source": "scenes", "version": VERSION, "seed": self.seed, **self.counts,
            "image_size": self.image_size, "min_objects": rules.min_objects, "max_objects": rules.max_objects,
            "shapes": [SHAPES[shape] for shape in rules.shapes],
            "colours": [tuple(COLOURS)[colour] for colour in rules.colours],
            "placement": rules.placement, "jitter": rules.jitter, "repeat": rules.repeat,
            "captions": list(self.captions), "language": self.language,
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
            self._splits[name] = self._make(name)
        return self._splits[name]

    def _make(self, name: str) -> SceneSplit:
        scenes = draw_scenes(self.rules, self.seed, name, self.counts[name])
        rng = Random(f"scenes/{self.seed}/{name}/captions")
        languages = [GRAMMARS[language] for language in _LANGUAGES[self.language]]
        drafts, kinds, forms, grammars = [], [], [], []
        proposed: list[tuple[str, Query]] = []
        proposed_for: list[int] = []
        for scene in scenes:
            said: set[tuple[Query, int]] = set()
            for number, wanted in enumerate(self.captions):
                kind, draft = captions.draft(scene, wanted, rng)
                form = int(rng.random() * 100_000)
                while (draft.query, form % 100) in said:
                    form += 1
                said.add((draft.query, form % 100))
                proposals = negatives.propose(draft.query, scene, self.rules, rng)
                proposed += proposals
                proposed_for += [len(drafts)] * len(proposals)
                drafts.append(draft)
                kinds.append(kind)
                forms.append(form)
                grammars.append(languages[number % len(languages)])
        kept, caption_negatives = self._false_ones(scenes, proposed, np.array(proposed_for), forms, grammars)
        return SceneSplit(
            name, scenes, drafts, kinds, forms, grammars, kept,
            caption_negatives=caption_negatives, seed=self.seed, image_size=self.image_size,
        )  # fmt: skip

    def _false_ones(
        self,
        scenes: list[Scene],
        proposed: list[tuple[str, Query]],
        caption: np.ndarray,
        forms: list[int],
        grammars: list[Grammar],
    ) -> tuple[list[Query], HardNegatives]:
        """The proposals that are false of their own scene, even if the least difference made a relation."""
        lenient = Truth(scenes, margin=0.0)
        table = tabulate([query for _, query in proposed])
        true = lenient.holds(table, np.arange(len(proposed)), caption // len(self.captions))
        keep = np.flatnonzero(~true).tolist()
        queries = [proposed[k][1] for k in keep]
        owners = caption[keep]
        texts = [
            grammars[owner](query, forms[owner], False) for query, owner in zip(queries, owners.tolist(), strict=True)
        ]
        return queries, HardNegatives(texts, [proposed[k][0] for k in keep], owners)


def _caption_kinds() -> tuple[str, ...]:
    return tuple(captions.KINDS)

"""A split of drawn scenes: what ``Split`` gives, from objects that are known."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from PIL import Image

from vlretrieval.data.scenes import chinese, english
from vlretrieval.data.scenes.draw import box_of, draw_scene, draw_tints
from vlretrieval.data.scenes.layout import Scene
from vlretrieval.data.scenes.query import QueryTable, tabulate, thing
from vlretrieval.data.scenes.truth import Truth
from vlretrieval.data.scenes.wording import Mention, read_marks
from vlretrieval.data.scenes.writing import Written
from vlretrieval.data.splits import Region, Split


class SceneSplit(Split):
    """Beyond ``Split``, it knows its objects, and which of them each caption speaks of.

    Attributes:
        scenes: N tuples of ``Placed`` objects.
        written: the captions and negatives with their meanings.
    """

    def __init__(self, name: str, scenes: list[Scene], written: Written, *, seed: int, image_size: int) -> None:
        self.scenes = scenes
        self.written = written
        self._image_size = image_size
        self._tints, self._shades = draw_tints(seed, name, len(scenes), max(len(scene) for scene in scenes))
        super().__init__(
            name,
            image_ids=[f"scene-{name}-{number:05d}" for number in range(len(scenes))],
            captions=written.texts,
            caption_image=np.repeat(np.arange(len(scenes)), len(written.texts) // len(scenes)),
            picture=self._draw,
            negatives=written.negatives,
            regions=self._find_regions,
        )
        del self.__dict__["positives"]  # own pairs alone: the property below gives the truth instead

    @cached_property
    def positives(self) -> np.ndarray:  # type: ignore[override]
        """(P, 2) int64: all (caption, image) pairs that are true. Computed when first asked for: a second for
        1,000 scenes, but a large training split has millions; ``describes`` tells about a batch."""
        return self._truth.pairs(self._table)

    @cached_property
    def _truth(self) -> Truth:
        return Truth(self.scenes)

    @cached_property
    def _table(self) -> QueryTable:
        return tabulate([draft.query for draft in self.written.drafts])

    def describes(self, captions: np.ndarray | Sequence[int], images: np.ndarray | Sequence[int]) -> np.ndarray:
        """(A, B) bool: is caption ``captions[a]`` true of picture ``images[b]``? Milliseconds for a batch."""
        rows, columns = np.asarray(captions, dtype=np.int64), np.asarray(images, dtype=np.int64)
        true = self._truth.holds(self._table, np.repeat(rows, len(columns)), np.tile(columns, len(rows)))
        return true.reshape(len(rows), len(columns))

    def mentions(self, caption: int) -> tuple[Mention, ...]:
        """Which letters of a caption speak of which objects of its own picture, in reading order.

        Object o has the box ``regions(caption_image[caption])[o].box``.
        """
        draft = self.written.drafts[caption]
        marked = self.written.grammars[caption](draft.query, self.written.forms[caption], True)
        return tuple(Mention(start, end, draft.objects[number]) for number, start, end in read_marks(marked)[1])

    def _draw(self, index: int) -> Image.Image:
        red, green, blue = self._tints[index].tolist()
        return draw_scene(self.scenes[index], self._image_size, (red, green, blue), self._shades[index])

    def _find_regions(self, index: int) -> tuple[Region, ...]:
        english_too = any(grammar is english.render for grammar in self.written.grammars[:2])
        phrase = english.phrase if english_too else chinese.phrase
        return tuple(
            Region(phrase(thing(o.shape, o.colour, o.size), True), box_of(o.shape, o.size, o.x, o.y, self._image_size))
            for o in self.scenes[index]
        )

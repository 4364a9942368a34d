"""What to say of a scene: draws true queries of several kinds. The words come from a grammar afterwards.

The kinds: "objects" names all or most objects; "relation" says how two of them stand; "place" says where one is;
"count" counts what is alike ("two red circles", "three stars"); "only" names all and says that this is all.
"""

from collections.abc import Callable, Iterable
from random import Random
from typing import NamedTuple

from vlretrieval.data.scenes.layout import Placed, Scene
from vlretrieval.data.scenes.query import Query, Thing, thing
from vlretrieval.data.scenes.truth import MARGIN
from vlretrieval.data.scenes.vocabulary import ANY, CORNERS_AND_MIDDLE, PLACES

_PLACES_OF_CELL = tuple(
    tuple(number for number, cells in enumerate(PLACES.values()) if cells >> cell & 1) for cell in range(9)
)

LOOSE = 0.1  # how many of an "only" caption's objects are named by half
SIZED = 0.5  # how many of the objects in "objects", "relation" and "only" captions are named with their size


class Draft(NamedTuple):
    """A true caption before it has words: its query, and for each thing the objects of the scene it speaks of."""

    query: Query
    objects: tuple[tuple[int, ...], ...]


def shuffled(items: Iterable[int], rng: Random) -> list[int]:
    """A shuffled list, by random() alone: see ``layout``."""
    order = list(items)
    for last in range(len(order) - 1, 0, -1):
        other = int(rng.random() * (last + 1))
        order[last], order[other] = order[other], order[last]
    return order


def matching(scene: Scene, wanted: Thing) -> list[int]:
    """The objects of the scene with the shape, colour and size of the thing."""
    shape, colour, size, _, _ = wanted
    return [
        number
        for number, placed in enumerate(scene)
        if shape in (ANY, placed.shape) and colour in (ANY, placed.colour) and size in (ANY, placed.size)
    ]


def loosened(shape: int, colour: int, rng: Random) -> tuple[int, int]:
    """Named by half: "a star", more seldom "a red shape"."""
    return (shape, ANY) if rng.random() < 0.8 else (ANY, colour)


def _named(placed: Placed, rng: Random) -> Thing:
    return thing(placed.shape, placed.colour, placed.size if rng.random() < SIZED else ANY)


def _counted(groups: dict[Thing, list[int]], exhaustive: bool = False) -> Draft:
    """Things with the objects they stand for, each counted."""
    things = tuple(
        thing(said.shape, said.colour, said.size, said.place, len(group)) if len(group) > 1 else said
        for said, group in groups.items()
    )
    return Draft(Query(things, ANY, exhaustive), tuple(map(tuple, groups.values())))


def _listing(scene: Scene, chosen: list[int], rng: Random, exhaustive: bool) -> Draft:
    """The chosen objects, alike ones counted together. A count must be that of the whole scene; where it would not
    be, all objects are named, without sizes."""
    if exhaustive:  # each by itself, so that an object added or left out leaves a list like any other
        loose = [number for number in chosen if rng.random() < LOOSE]
    else:  # one at most, and of three or more: the caption would be true of too many scenes
        loose = [chosen[int(rng.random() * len(chosen))]] if len(chosen) > 2 and rng.random() < 0.3 else []
    groups: dict[Thing, list[int]] = {}
    sized: dict[tuple[int, int], bool] = {}  # one choice for all of a kind: not "a large red star and a red star"
    for number in chosen:
        shape, colour, size, *_ = scene[number]
        if not sized.setdefault((shape, colour), rng.random() < SIZED):
            size = ANY
        if number in loose:
            shape, colour = loosened(shape, colour, rng)
        groups.setdefault(thing(shape, colour, size), []).append(number)
    if len(groups) < len(chosen) and any(
        len(group) > 1 and len(matching(scene, said)) != len(group) for said, group in groups.items()
    ):
        groups = {}
        for number in shuffled(range(len(scene)), rng):
            groups.setdefault(thing(scene[number].shape, scene[number].colour), []).append(number)
    return _counted(groups, exhaustive)


def objects(scene: Scene, rng: Random) -> Draft:
    """All objects, or all but one."""
    chosen = shuffled(range(len(scene)), rng)
    if len(chosen) > 2 and rng.random() < 0.4:
        chosen.pop()
    return _listing(scene, chosen, rng, exhaustive=False)


def only(scene: Scene, rng: Random) -> Draft:
    """All objects, and nothing else."""
    return _listing(scene, shuffled(range(len(scene)), rng), rng, exhaustive=True)


def relation(scene: Scene, rng: Random) -> Draft | None:
    """Two objects of different shape or colour, one clearly left of, right of, above or below the other."""
    clear = []
    for i, a in enumerate(scene):
        for j, b in enumerate(scene):
            if i != j and (a.shape != b.shape or a.colour != b.colour):
                if abs(b.x - a.x) > MARGIN:
                    clear.append((i, 0 if b.x > a.x else 1, j))
                if abs(b.y - a.y) > MARGIN:
                    clear.append((i, 2 if b.y > a.y else 3, j))
    if not clear:
        return None
    i, name, j = clear[int(rng.random() * len(clear))]
    things: tuple[Thing, ...] = (_named(scene[i], rng), _named(scene[j], rng))
    spoken: tuple[tuple[int, ...], ...] = ((i,), (j,))
    others = [k for k in range(len(scene)) if k != i and k != j]
    if others and rng.random() < 0.25:
        k = others[int(rng.random() * len(others))]
        things += (thing(scene[k].shape, scene[k].colour),)
        spoken += ((k,),)
    return Draft(Query(things, name), spoken)


def place(scene: Scene, rng: Random) -> Draft:
    """An object and the part of the picture it is in, and often a second object, with its place or without."""
    order = shuffled(range(len(scene)), rng)
    first = scene[order[0]]
    others = [k for k in order[1:] if scene[k][:2] != first[:2]]
    if not others or rng.random() < 0.25:
        return Draft(Query((_with_place(first, rng, exact=True),)), ((order[0],),))
    other = scene[others[0]]
    if rng.random() < 0.5:
        second = _with_place(other, rng, exact=False)
    else:
        second = thing(other.shape, other.colour)
    return Draft(Query((_with_place(first, rng, exact=False), second)), ((order[0],), (others[0],)))


def _with_place(placed: Placed, rng: Random, exact: bool) -> Thing:
    """A place by itself says little, so with ``exact`` it is one cell where possible, and the size is named too."""
    fitting = _PLACES_OF_CELL[placed.cell]
    if exact and fitting[0] < CORNERS_AND_MIDDLE:
        where = fitting[0]
    else:
        where = fitting[int(rng.random() * len(fitting))]
    sized = exact or rng.random() < 0.4
    return thing(placed.shape, placed.colour, placed.size if sized else ANY, where)


def count(scene: Scene, rng: Random) -> Draft | None:
    """Objects alike in shape, colour or both, counted; with one other object, or with all of them and nothing else."""
    alike: dict[Thing, list[int]] = {}
    for number, placed in enumerate(scene):
        shape, colour = placed.shape, placed.colour
        for said in (thing(shape, colour), thing(shape), thing(ANY, colour)):
            alike.setdefault(said, []).append(number)
    several = [
        said
        for said, group in alike.items()
        # Two shapes of one colour, and nothing more, would be said of too many scenes.
        if len(group) > 1 and (len(group) < len(scene) or ANY not in said[:2])
    ]
    if not several:
        return None
    chosen = several[int(rng.random() * len(several))]
    groups = {chosen: alike[chosen]}
    exhaustive = rng.random() < 0.7
    others = shuffled([number for number in range(len(scene)) if number not in alike[chosen]], rng)
    for number in others if exhaustive else others[:1]:
        groups.setdefault(thing(scene[number].shape, scene[number].colour), []).append(number)
    if rng.random() < 0.5:
        groups = dict(reversed(groups.items()))
    return _counted(groups, exhaustive)


KINDS: dict[str, Callable[[Scene, Random], Draft | None]] = {
    "objects": objects,
    "relation": relation,
    "place": place,
    "count": count,
    "only": only,
}
# What is said instead, where a scene gives no caption of the kind: nothing is alike, or nothing differs.
_INSTEAD = {"count": "relation", "relation": "place"}


def draft(scene: Scene, kind: str, rng: Random) -> tuple[str, Draft]:
    """A true draft of the kind, or of the one that stands in for it; with the kind it came out as."""
    made = KINDS[kind](scene, rng)
    return (kind, made) if made is not None else draft(scene, _INSTEAD[kind], rng)

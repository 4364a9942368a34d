"""What to say of a scene: draws true queries of several kinds. The words come from a grammar afterwards.

The kinds: "objects" names all or most objects; "relation" says how two of them stand; "place" says where one is;
"count" counts what is alike ("two red circles", "three stars"); "only" names all and says that this is all.
"""

from collections.abc import Callable
from random import Random
from typing import NamedTuple

from vlretrieval.data.scenes.layout import Placed, Scene
from vlretrieval.data.scenes.query import Query, Thing
from vlretrieval.data.scenes.truth import MARGIN
from vlretrieval.data.scenes.vocabulary import ANY, CORNERS_AND_MIDDLE, PLACES

_CELLS_OF_PLACE = tuple(PLACES.values())


class Draft(NamedTuple):
    """A true caption before it has words: its query, and for each thing the objects of the scene it speaks of."""

    query: Query
    objects: tuple[tuple[int, ...], ...]


def shuffled(items: list, rng: Random) -> list:
    """A shuffled copy, by random() alone: see ``layout``."""
    items = list(items)
    for last in range(len(items) - 1, 0, -1):
        other = int(rng.random() * (last + 1))
        items[last], items[other] = items[other], items[last]
    return items


def matching(scene: Scene, thing: Thing) -> list[int]:
    """The objects of the scene with the shape, colour and size of the thing."""
    return [
        number
        for number, placed in enumerate(scene)
        if thing.shape in (ANY, placed.shape)
        and thing.colour in (ANY, placed.colour)
        and thing.size in (ANY, placed.size)
    ]


def _named(placed: Placed, rng: Random) -> Thing:
    return Thing(placed.shape, placed.colour, placed.size if rng.random() < 0.5 else ANY)


def _listing(scene: Scene, chosen: list[int], rng: Random) -> Draft:
    """The chosen objects, alike ones counted together. A count must be that of the whole scene; where it would not
    be, all objects are named, without sizes."""
    loose = -1  # with three or more, one may be named by half: "a star", "a red shape"
    if len(chosen) >= 3 and rng.random() < 0.3:
        loose = chosen[int(rng.random() * len(chosen))]
    groups: dict[Thing, list[int]] = {}
    for number in chosen:
        thing = _named(scene[number], rng)
        if number == loose:
            thing = thing._replace(colour=ANY) if rng.random() < 0.8 else thing._replace(shape=ANY)
        groups.setdefault(thing, []).append(number)
    if any(len(group) > 1 and matching(scene, thing) != sorted(group) for thing, group in groups.items()):
        groups = {}
        for number in shuffled(list(range(len(scene))), rng):
            groups.setdefault(Thing(scene[number].shape, scene[number].colour), []).append(number)
    return _draft(groups)


def _draft(groups: dict[Thing, list[int]], exhaustive: bool = False) -> Draft:
    things = tuple(thing._replace(count=len(group)) for thing, group in groups.items())
    return Draft(Query(things, exhaustive=exhaustive), tuple(tuple(group) for group in groups.values()))


def objects(scene: Scene, rng: Random) -> Draft | None:
    """All objects, or all but one."""
    chosen = shuffled(list(range(len(scene))), rng)
    if len(chosen) > 2 and rng.random() < 0.4:
        chosen.pop()
    return _listing(scene, chosen, rng)


def only(scene: Scene, rng: Random) -> Draft | None:
    """All objects, and nothing else."""
    draft = _listing(scene, shuffled(list(range(len(scene))), rng), rng)
    return draft._replace(query=draft.query._replace(exhaustive=True))


def relation(scene: Scene, rng: Random) -> Draft | None:
    """Two objects of different shape or colour, one clearly left of, right of, above or below the other."""
    clear = []
    for i, a in enumerate(scene):
        for j, b in enumerate(scene):
            if i != j and (a.shape, a.colour) != (b.shape, b.colour):
                across, down = b.x - a.x, b.y - a.y
                if abs(across) > MARGIN:
                    clear.append((i, 0 if across > 0 else 1, j))
                if abs(down) > MARGIN:
                    clear.append((i, 2 if down > 0 else 3, j))
    if not clear:
        return None
    i, name, j = clear[int(rng.random() * len(clear))]
    things, spoken = [_named(scene[i], rng), _named(scene[j], rng)], [(i,), (j,)]
    others = [k for k in range(len(scene)) if k not in (i, j)]
    if others and rng.random() < 0.25:
        k = others[int(rng.random() * len(others))]
        things.append(Thing(scene[k].shape, scene[k].colour))
        spoken.append((k,))
    return Draft(Query(tuple(things), name), tuple(spoken))


def place(scene: Scene, rng: Random) -> Draft | None:
    """An object and the part of the picture it is in, and often a second object, with its place or without."""
    order = shuffled(list(range(len(scene))), rng)
    second = len(order) > 1 and rng.random() < 0.75
    thing = _with_place(scene[order[0]], rng, exact=not second)
    things, spoken = [thing], [(order[0],)]
    if second:
        other = scene[order[1]]
        things.append(_with_place(other, rng, exact=False) if rng.random() < 0.5 else Thing(other.shape, other.colour))
        spoken.append((order[1],))
    return Draft(Query(tuple(things)), tuple(spoken))


def _with_place(placed: Placed, rng: Random, exact: bool) -> Thing:
    """A place by itself says little, so with ``exact`` it is a single cell, or else the size is named too."""
    fitting = [number for number, cells in enumerate(_CELLS_OF_PLACE) if cells >> placed.cell & 1]
    if exact and fitting[0] < CORNERS_AND_MIDDLE:
        where = fitting[0]
    else:
        where = fitting[int(rng.random() * len(fitting))]
    sized = exact or rng.random() < 0.4
    return Thing(placed.shape, placed.colour, placed.size if sized else ANY, where)


def count(scene: Scene, rng: Random) -> Draft | None:
    """Objects alike in shape, colour or both, counted; with one other object, or with all of them and nothing else."""
    alike: dict[Thing, list[int]] = {}
    for number, placed in enumerate(scene):
        for thing in (Thing(placed.shape, placed.colour), Thing(placed.shape), Thing(ANY, placed.colour)):
            alike.setdefault(thing, []).append(number)
    several = [
        thing
        for thing, group in alike.items()
        # Two shapes of one colour, and nothing more, would be said of too many scenes.
        if len(group) > 1 and (len(group) < len(scene) or ANY not in thing[:2])
    ]
    if not several:
        return None
    counted = several[int(rng.random() * len(several))]
    group = alike[counted]
    groups: dict[Thing, list[int]] = {counted: group}
    exhaustive = rng.random() < 0.6
    others = shuffled([number for number in range(len(scene)) if number not in group], rng)
    for number in others if exhaustive else others[:1]:
        groups.setdefault(Thing(scene[number].shape, scene[number].colour), []).append(number)
    order = shuffled(list(groups), rng)
    return _draft({thing: groups[thing] for thing in order}, exhaustive)


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
    if made is None:
        return draft(scene, _INSTEAD[kind], rng)
    return kind, made

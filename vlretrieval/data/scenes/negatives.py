"""Hard negatives: a true query changed in one respect, so that it speaks falsely of its own scene.

Kinds:

- swap_colour: two things exchange their colours;
- swap_relation: left becomes right, above becomes below, or the two things change places;
- swap_place: a thing is said to be in the mirrored part of the picture, top left in place of top right;
- replace_object: one thing's noun, or colour and noun, become those of no object in the scene;
- add_object: an "only" caption names one object more, which is absent;
- leave_out: an "only" caption leaves out an object that is there.

What text alone gives away: colours, relations, places and replaced nouns are drawn as evenly as the true ones, and
added and left-out objects pass between the same lengths in both directions, as often one way as the other. Yet within
add_object the negative is always the longer sentence, within leave_out the shorter: read these two together (counted
words win a few points above chance over both; the tests bound it). And where scenes repeat objects (``repeat``), true
captions hold a few more equal nouns and colours than the negatives do.

The functions propose; whether a proposal is false is for ``truth`` to say, and those that are not are dropped.
"""

from random import Random

from vlretrieval.data.scenes.captions import LOOSE, SIZED, loosened, shuffled
from vlretrieval.data.scenes.layout import Rules, Scene
from vlretrieval.data.scenes.query import Query, Thing, thing
from vlretrieval.data.scenes.vocabulary import ANY, MIRRORED, OPPOSITE

KINDS = ("swap_colour", "swap_relation", "swap_place", "replace_object", "add_object", "leave_out")
_VARIANTS = 3  # of add_object and leave_out: only the exhaustive captions have them

Proposal = tuple[str, Query]
Kinds = set[tuple[int, int]]  # (shape, colour) of the objects in a scene


def propose(query: Query, scene: Scene, rules: Rules, rng: Random, like_only: bool) -> list[Proposal]:
    """Changed queries with their kinds.

    Args:
        query: true of the scene.
        scene: whose caption it is.
        rules: what there is to put in place of what.
        rng: by random() alone.
        like_only: an added object is named as "only" captions name theirs: some with their size, some by half.
    """
    present = {placed[:2] for placed in scene}
    proposals: list[Proposal] = []
    _swap_colour(query, rng, proposals)
    if query.relation != ANY:
        _swap_relation(query, proposals)
    _swap_place(query, proposals)
    _replace_object(query, present, rules, rng, proposals)
    if query.exhaustive:
        # Only between numbers of objects that scenes have: else the number alone would show the negative.
        fixed = rules.min_objects == rules.max_objects
        if fixed or len(scene) < rules.max_objects:
            _add_object(query, present, rules, rng, like_only, proposals)
        if len(scene) > (1 if fixed else rules.min_objects):
            _leave_out(query, rng, proposals)
    return proposals


def _swap_colour(query: Query, rng: Random, proposals: list[Proposal]) -> None:
    pairs = []
    things = query.things
    for i, a in enumerate(things):
        for j in range(i):
            b = things[j]
            if a.colour != b.colour and ANY not in (a.colour, b.colour):
                # Things that differ in colour alone would only change order, or as the two of a relation change
                # places, which is swap_relation.
                if _recoloured(a, b.colour) != b or query.relation != ANY and i > 1:
                    pairs.append((j, i))
    if pairs:
        j, i = pairs[int(rng.random() * len(pairs))]
        changed = list(things)
        changed[i] = _recoloured(things[i], things[j].colour)
        changed[j] = _recoloured(things[j], things[i].colour)
        proposals.append(("swap_colour", Query(tuple(changed), query.relation, query.exhaustive)))


def _recoloured(said: Thing, colour: int) -> Thing:
    return thing(said.shape, colour, said.size, said.place, said.quantity)


def _swap_relation(query: Query, proposals: list[Proposal]) -> None:
    first, second, *rest = query.things
    proposals.append(("swap_relation", Query(query.things, OPPOSITE[query.relation])))
    proposals.append(("swap_relation", Query((second, first, *rest), query.relation)))


def _swap_place(query: Query, proposals: list[Proposal]) -> None:
    for number, said in enumerate(query.things):
        for mirrored in MIRRORED:
            if said.place != ANY and mirrored[said.place] != said.place:
                changed = thing(said.shape, said.colour, said.size, mirrored[said.place], said.quantity)
                things = (*query.things[:number], changed, *query.things[number + 1 :])
                proposals.append(("swap_place", Query(things, query.relation, query.exhaustive)))


def _absent(present: Kinds, rules: Rules, rng: Random) -> tuple[int, int] | None:
    shapes, colours = rules.shapes, rules.colours
    for _ in range(20):
        kind = shapes[int(rng.random() * len(shapes))], colours[int(rng.random() * len(colours))]
        if kind not in present:
            return kind
    return None


def _replace_object(query: Query, present: Kinds, rules: Rules, rng: Random, proposals: list[Proposal]) -> None:
    number = int(rng.random() * len(query.things))
    said = query.things[number]
    kind: tuple[int, int] | None
    if said.shape == ANY:  # "a red shape"
        here = {colour for _, colour in present}
        free = [(ANY, colour) for colour in rules.colours if colour not in here]
        kind = free[int(rng.random() * len(free))] if free else None
    elif said.colour == ANY:  # "a star"
        here = {shape for shape, _ in present}
        free = [(shape, ANY) for shape in rules.shapes if shape not in here]
        kind = free[int(rng.random() * len(free))] if free else None
    elif rng.random() < 0.5:
        free = [(shape, said.colour) for shape in rules.shapes if (shape, said.colour) not in present]
        kind = free[int(rng.random() * len(free))] if free else None
    else:
        kind = _absent(present, rules, rng)
    if kind is not None:
        changed = thing(*kind, said.size, said.place, said.quantity)
        things = (*query.things[:number], changed, *query.things[number + 1 :])
        proposals.append(("replace_object", Query(things, query.relation, query.exhaustive)))


def _add_object(
    query: Query, present: Kinds, rules: Rules, rng: Random, like_only: bool, proposals: list[Proposal]
) -> None:
    drawn = {_absent(present, rules, rng) for _ in range(_VARIANTS)} - {None}
    for kind in sorted(drawn):  # type: ignore[type-var]
        shape, colour = kind  # type: ignore[misc]
        size = int(rng.random() * 2) if like_only and rng.random() < SIZED else ANY
        if like_only and rng.random() < LOOSE:
            shape, colour = loosened(shape, colour, rng)
        at = int(rng.random() * (len(query.things) + 1))
        things = (*query.things[:at], thing(shape, colour, size), *query.things[at:])
        proposals.append(("add_object", Query(things, ANY, True)))


def _leave_out(query: Query, rng: Random, proposals: list[Proposal]) -> None:
    for number in shuffled(range(len(query.things)), rng)[:_VARIANTS]:
        said = query.things[number]
        rest = query.things[:number] + query.things[number + 1 :]
        # No true caption counts down to "a star", or says "only two stars" and nothing more.
        if said.quantity == 2 and ANY in said[:2] or len(rest) == 1 and rest[0].quantity > 1 and ANY in rest[0][:2]:
            continue
        fewer = (thing(said.shape, said.colour, said.size, said.place, said.quantity - 1),) if said.quantity > 1 else ()
        things = (*query.things[:number], *fewer, *query.things[number + 1 :])
        if things:
            proposals.append(("leave_out", Query(things, ANY, True)))

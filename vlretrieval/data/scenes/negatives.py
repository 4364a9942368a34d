"""Hard negatives: a true query changed in one respect, so that it speaks falsely of its own scene.

Kinds:

- swap_colour: two things exchange their colours;
- swap_relation: left becomes right, above becomes below, or the two things change places;
- replace_object: one thing's shape, or shape and colour, become those of no object in the scene;
- add_object: an "only" caption names one object more, which is absent;
- leave_out: an "only" caption leaves out an object that is there.

What text alone gives away: colours, relations and replaced shapes are drawn as evenly as the true ones, and added and
left-out objects pass between the same lengths in both directions, as often one way as the other. Yet within
add_object the negative is always the longer sentence, within leave_out the shorter: read these two together. And where
scenes repeat objects (``repeat``), true captions hold a few more equal shapes and colours than the negatives do.

The functions propose; whether a proposal is false is for ``truth`` to say, and those that are not are dropped.
"""

from random import Random

from vlretrieval.data.scenes.captions import shuffled
from vlretrieval.data.scenes.layout import Rules, Scene
from vlretrieval.data.scenes.query import Query, Thing
from vlretrieval.data.scenes.vocabulary import ANY, OPPOSITE

KINDS = ("swap_colour", "swap_relation", "replace_object", "add_object", "leave_out")
_VARIANTS = 2  # of add_object and leave_out: only the exhaustive captions have them


def propose(query: Query, scene: Scene, rules: Rules, rng: Random) -> list[tuple[str, Query]]:
    """Changed queries with their kinds; no two equal."""
    kinds_here = {(placed.shape, placed.colour) for placed in scene}
    proposals = [
        *_swap_colour(query, rng),
        *_swap_relation(query),
        *_replace_object(query, kinds_here, rules, rng),
    ]
    if query.exhaustive:
        # Only between numbers of objects that scenes have: else the number alone would show the negative.
        fixed = rules.min_objects == rules.max_objects
        if fixed or query.total < rules.max_objects:
            proposals += _add_object(query, kinds_here, rules, rng)
        if (fixed or query.total > rules.min_objects) and query.total > 1:
            proposals += _leave_out(query, rng)
    return list(dict.fromkeys(proposals))


def _swap_colour(query: Query, rng: Random) -> list[tuple[str, Query]]:
    things = query.things
    pairs = []
    for i in range(len(things)):
        for j in range(i + 1, len(things)):
            a, b = things[i], things[j]
            # Things that differ in colour alone would only change order.
            told_apart = query.relation != ANY or a._replace(colour=b.colour) != b
            if a.colour != b.colour and a.colour != ANY and b.colour != ANY and told_apart:
                pairs.append((i, j))
    if not pairs:
        return []
    i, j = pairs[int(rng.random() * len(pairs))]
    changed = list(things)
    changed[i] = things[i]._replace(colour=things[j].colour)
    changed[j] = things[j]._replace(colour=things[i].colour)
    return [("swap_colour", query._replace(things=tuple(changed)))]


def _swap_relation(query: Query) -> list[tuple[str, Query]]:
    if query.relation == ANY:
        return []
    first, second, *rest = query.things
    return [
        ("swap_relation", query._replace(relation=OPPOSITE[query.relation])),
        ("swap_relation", query._replace(things=(second, first, *rest))),
    ]


def _absent(kinds_here: set[tuple[int, int]], rules: Rules, rng: Random) -> tuple[int, int] | None:
    for _ in range(20):
        shape = rules.shapes[int(rng.random() * len(rules.shapes))]
        colour = rules.colours[int(rng.random() * len(rules.colours))]
        if (shape, colour) not in kinds_here:
            return shape, colour
    return None


def _replace_object(
    query: Query, kinds_here: set[tuple[int, int]], rules: Rules, rng: Random
) -> list[tuple[str, Query]]:
    number = int(rng.random() * len(query.things))
    thing = query.things[number]
    drawn = _absent(kinds_here, rules, rng)
    if drawn is None:
        return []
    shape, colour = drawn
    if thing.shape == ANY:
        shape = ANY
        if any(colour == there for _, there in kinds_here):
            return _noun_or_colour(query, number, kinds_here, rules, rng)
    elif thing.colour == ANY or rng.random() < 0.5:
        return _noun_or_colour(query, number, kinds_here, rules, rng)
    return [_with_thing("replace_object", query, number, thing._replace(shape=shape, colour=colour))]


def _noun_or_colour(
    query: Query, number: int, kinds_here: set[tuple[int, int]], rules: Rules, rng: Random
) -> list[tuple[str, Query]]:
    """Only the noun changes; for "a red shape", only the colour."""
    thing = query.things[number]
    if thing.shape == ANY:
        free = [c for c in rules.colours if all(c != there for _, there in kinds_here)]
        changes = [thing._replace(colour=colour) for colour in free]
    else:
        colours = (thing.colour,) if thing.colour != ANY else rules.colours
        free = [s for s in rules.shapes if all((s, colour) not in kinds_here for colour in colours)]
        changes = [thing._replace(shape=shape) for shape in free]
    if not changes:
        return []
    return [_with_thing("replace_object", query, number, changes[int(rng.random() * len(changes))])]


def _with_thing(kind: str, query: Query, number: int, thing: Thing) -> tuple[str, Query]:
    return kind, query._replace(things=(*query.things[:number], thing, *query.things[number + 1 :]))


def _add_object(query: Query, kinds_here: set[tuple[int, int]], rules: Rules, rng: Random) -> list[tuple[str, Query]]:
    sized = any(thing.size != ANY for thing in query.things)
    result = []
    for _ in range(_VARIANTS):
        drawn = _absent(kinds_here, rules, rng)
        if drawn is not None:
            size = int(rng.random() * 2) if sized and rng.random() < 0.5 else ANY
            at = int(rng.random() * (len(query.things) + 1))
            things = (*query.things[:at], Thing(*drawn, size), *query.things[at:])
            result.append(("add_object", query._replace(things=things)))
    return result


def _leave_out(query: Query, rng: Random) -> list[tuple[str, Query]]:
    result = []
    for number in shuffled(list(range(len(query.things))), rng)[:_VARIANTS]:
        thing = query.things[number]
        fewer = (thing._replace(count=thing.count - 1),) if thing.count > 1 else ()
        things = (*query.things[:number], *fewer, *query.things[number + 1 :])
        if things:
            result.append(("leave_out", query._replace(things=things)))
    return result

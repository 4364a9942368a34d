"""English sentences for queries. Wording only: what a sentence means, and whether it is true, is not decided here."""

from functools import cache

from vlretrieval.data.scenes.query import Query, Thing
from vlretrieval.data.scenes.vocabulary import ANY, COLOURS, SHAPES, SIZES
from vlretrieval.data.scenes.wording import capitalised, mark

_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")
_COLOURS = tuple(COLOURS)
_PLURALS = tuple(shape + ("es" if shape.endswith("s") else "s") for shape in SHAPES)
_PLACES = (
    "in the top left corner", "in the top right corner", "in the bottom left corner", "in the bottom right corner",
    "in the middle", "at the top", "at the bottom", "on the left", "on the right",
)  # fmt: skip
_RELATIONS = (
    ("to the left of", "to the right of", "above", "below"),
    ("left of", "right of", "above", "below"),
)

# {L} the list, {is} is / are, {n} how many shapes in all. All but the bare form give a capital and keep their stop.
_LISTS = (
    "{L}.", "a picture of {L}.", "there {is} {L}.", "you can see {L}.", "the picture shows {L}.",
    "{L} on a plain background.", "this image has {L} in it.", "here {is} {L}.",
)  # fmt: skip
_BARE_LIST = len(_LISTS)  # "red circle, small blue star and heart"
_ONLY = (
    "only {L}.", "there {is} only {L} in the picture.", "{L}, and nothing else.", "the picture shows only {L}.",
    "nothing but {L}.", "exactly {n}: {L}.", "all you can see is {L}.",
)  # fmt: skip
_STANDING = (
    "{A} {r} {B}{C}.", "{A} is {r} {B}{D}.", "there is {A} {r} {B}{C}.", "{r} {B} there is {A}{C}.",
    "a picture of {A} {r} {B}{C}.", "you can see {A} {r} {B}{C}.", "{A} can be seen {r} {B}{C}.",
)  # fmt: skip
_PLACED = (
    "{A} {p}{C}.", "{A} is {p} of the picture{D}.", "there is {A} {p}{C}.", "{p} of the picture there is {A}{C}.",
    "a picture with {A} {p}{C}.", "you can see {A} {p}{C}.", "{p} there is {A}{C}.",
)  # fmt: skip


@cache
def phrase(thing: Thing, bare: bool = False) -> str:
    """ "a small red circle", "two stars"; bare leaves out the article: "small red circle"."""
    noun = ("shape" if thing.shape == ANY else SHAPES[thing.shape]) if thing.quantity == 1 else (
        "shapes" if thing.shape == ANY else _PLURALS[thing.shape]
    )  # fmt: skip
    words = [SIZES[thing.size]] if thing.size != ANY else []
    words += [_COLOURS[thing.colour]] if thing.colour != ANY else []
    described = " ".join([*words, noun])
    if thing.quantity > 1:
        return f"{_NUMBERS[thing.quantity]} {described}"
    if bare:
        return described
    return f"{'an' if described[0] in 'aeiou' else 'a'} {described}"


def joined(phrases: list[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return phrases[0] if len(phrases) == 1 else f"{', '.join(phrases[:-1])} and {phrases[-1]}"


def render(query: Query, form: int, marked: bool = False) -> str:
    """The query as a sentence.

    Args:
        query: what to say.
        form: any number; picks among the sentences that suit the query.
        marked: with the marks of ``wording`` around each thing's phrase.
    """
    things = query.things
    placed = things[0].place != ANY
    bare = query.relation == ANY and not placed and not query.exhaustive and form % (len(_LISTS) + 1) == _BARE_LIST
    said = [phrase(thing, bare) for thing in things]
    if marked:
        said = [mark(words, number) for number, words in enumerate(said)]
    if query.relation != ANY:
        return _standing(query, form, said)
    if placed:
        return _placed(query, form, said)
    if bare:
        return joined(said)
    if query.exhaustive:
        total = query.total
        shapes = f"{_NUMBERS[total]} shape{'s' if total > 1 else ''}"
        sentence = _ONLY[form % len(_ONLY)].replace("{n}", shapes)
    else:
        sentence = _LISTS[form % (len(_LISTS) + 1)]
    # "there is a circle and two stars": the verb goes with the nearest phrase.
    return capitalised(sentence.replace("{is}", "are" if things[0].quantity > 1 else "is").replace("{L}", joined(said)))


def _standing(query: Query, form: int, said: list[str]) -> str:
    number, variant = form % len(_STANDING), form // len(_STANDING) % len(_RELATIONS)
    sentence = _STANDING[number].replace("{r}", _RELATIONS[variant][query.relation])
    also = said[2] if len(said) > 2 else ""
    sentence = sentence.replace("{C}", f", and also {also}" if also else "")
    sentence = sentence.replace("{D}", f", and there is also {also}" if also else "")
    return capitalised(sentence.replace("{A}", said[0]).replace("{B}", said[1]))


def _placed(query: Query, form: int, said: list[str]) -> str:
    sentence = _PLACED[form % len(_PLACED)].replace("{p}", _PLACES[query.things[0].place])
    loose = full = ""
    for thing, words in zip(query.things[1:], said[1:], strict=True):
        where = f" {_PLACES[thing.place]}" if thing.place != ANY else ""
        loose += f", and {words}{where}" if where else f", and also {words}"
        full += f", and {words} is{where}" if where else f", and there is also {words}"
    return capitalised(sentence.replace("{C}", loose).replace("{D}", full).replace("{A}", said[0]))

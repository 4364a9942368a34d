"""The small English lexicon of the text edits: nouns by class, adjectives by class, relations with their opposites.

Every class holds words that exclude each other: what is a dog is no cat, what is red is not green. Words for the same
thing are joined by /; the first of them is the one that replaces others.
"""

from __future__ import annotations

import re

# One entry a thing. What is not here is left alone: a wrong edit is worse than none.
_NOUNS = {
    "animal": (
        "dog/puppy/terrier/retriever/poodle/labrador/hound cat/kitten horse/pony/foal cow/calf/bull/cattle "
        "sheep/lamb bird/pigeon/seagull/parrot/duck/goose elephant bear zebra giraffe monkey rabbit goat pig"
    ),
    "vehicle": (
        "car/truck/van/taxi/cab bus train/tram airplane/plane/jet boat/ship/canoe/kayak/sailboat bicycle/bike "
        "motorcycle/motorbike"
    ),
    "food": (
        "pizza sandwich/burger/hamburger/hotdog cake/cupcake banana apple carrot broccoli donut/doughnut salad soup"
    ),
    "furniture": "chair/stool/armchair table/desk/counter bed couch/sofa bench",
    "thing": (
        "ball/football/basketball/baseball frisbee kite umbrella/parasol book/magazine guitar "
        "phone/telephone/cellphone camera/camcorder laptop/computer"
    ),
    "board": "skateboard surfboard snowboard ski/skis sled",
    "worn": (
        "hat/cap/helmet/hood shirt/sweater/jacket/coat/tshirt/t-shirt/blouse dress/skirt "
        "shoe/boot/sneaker/sandal glove/mitten"
    ),
    "place": (
        "beach/shore/sand/coast street/road/sidewalk kitchen forest/woods desert mountain/hill pool field/meadow/lawn"
    ),
    "person": "man/guy/gentleman woman/lady boy girl baby/infant/toddler",
}
_ADJECTIVES = {
    "colour": "red blue green yellow orange purple/violet pink black white brown/tan gray/grey",
    "size": "small/little/tiny large/big/huge/giant",
    "age": "young old/elderly",
    "length": "long short tall",
    "wetness": "wet dry",
    "pattern": "striped plaid spotted",
}
# Either of a pair turns a true statement into a false one where the other stood.
_OPPOSITES = (
    ("to the left of", "to the right of"),
    ("on the left of", "on the right of"),
    ("in front of", "behind"),
    ("on top of", "underneath"),
    ("above", "below"),
    ("inside", "outside"),
    ("into", "out of"),
    ("over", "under"),
    ("up the", "down the"),
)
# Between two words of a symmetric statement a swap changes no truth.
SYMMETRIC = frozenset(
    "and or with together near beside next to by along alongside others other both meets meet meeting touching".split()
)
AFTER_A_THING = frozenset(". , ; in on at by near under behind beside next outside inside while during".split())
# After these a noun before them is half of one: "football team", "monkey bars".
TAILS = frozenset(
    "player players team teams game match court field bars carriage tennis park ride seat rack top owner trick show "
    "race stop station track stand rider riders suit gear".split()
)
# Words that say of a person which sex it is.
SEXED = frozenset("he she his her him hers himself herself mother father son daughter wife husband".split())
_OTHER_SEX = {"man": ("woman", "girl"), "boy": ("girl", "woman"), "woman": ("man", "boy"), "girl": ("boy", "man")}
FILLERS = frozenset("a an the one two three four five several some many his her their its".split())


def _classes(table: dict[str, str]) -> tuple[dict[str, str], dict[str, str], dict[str, list[str]]]:
    """word -> class, word -> what it means, class -> its replacing words."""
    kind: dict[str, str] = {}
    meaning: dict[str, str] = {}
    members: dict[str, list[str]] = {}
    for name, text in table.items():
        for entry in text.split():
            words = entry.split("/")
            members.setdefault(name, []).append(words[0])
            for word in words:
                kind[word], meaning[word] = name, words[0]
    return kind, meaning, members


def plural(noun: str) -> str:
    """The plural of a noun of the lexicon."""
    irregular = {"man": "men", "woman": "women", "sheep": "sheep", "goose": "geese", "calf": "calves", "ski": "skis"}
    irregular |= {"lady": "ladies", "puppy": "puppies", "pony": "ponies", "baby": "babies", "glass": "glasses"}
    if noun in irregular:
        return irregular[noun]
    return noun + ("es" if re.search(r"(s|x|ch|sh)$", noun) else "s")


NOUN_CLASS, NOUN_MEANING, NOUNS_OF = _classes(_NOUNS)
ADJECTIVE_CLASS, ADJECTIVE_MEANING, ADJECTIVES_OF = _classes(_ADJECTIVES)
SINGULAR = {plural(noun): noun for noun in NOUN_CLASS if plural(noun) != noun}
OPPOSITE = {one: other for pair in _OPPOSITES for one, other in (pair, pair[::-1])}


def noun_of(word: str) -> str | None:
    """The singular of a known noun, from its singular or plural."""
    word = word.lower()
    return word if word in NOUN_CLASS else SINGULAR.get(word)


def is_plural(word: str) -> bool:
    return word.lower() in SINGULAR


def means_the_same(one: str, other: str) -> bool:
    """Whether two known nouns may name one thing."""
    return NOUN_MEANING[one] == NOUN_MEANING[other]


def replacements(noun: str) -> tuple[str, ...]:
    """What may stand for a known noun: others of its class; for a person those of the other sex alone."""
    if NOUN_CLASS[noun] == "person":
        return _OTHER_SEX.get(NOUN_MEANING[noun], ())
    return tuple(other for other in NOUNS_OF[NOUN_CLASS[noun]] if other != NOUN_MEANING[noun])


def alike(one: str, other: str) -> bool:
    """Whether two known nouns can take each other's place: of one class, or both alive."""
    classes = {NOUN_CLASS[one], NOUN_CLASS[other]}
    return len(classes) == 1 or classes == {"person", "animal"}

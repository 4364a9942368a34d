"""Hard negatives for any English captions: a small edit of a caption that makes it false of its picture.

Kinds: "swap_nouns", "swap_adjectives", "swap_relation" (its opposite), "replace_noun" and "replace_colour" (by what no
caption of the picture names), "leave_out" (a thing that is there is no longer named; the shorter caption is the weaker
one). Only words of the small lexicon are touched, statements that mean the same both ways round are left alone, and
what is equal to another caption of the picture is no negative. Rules cannot see the picture: a share of the edits stays
true (a noun that no caption names may be there). Measure models against each other by it, not against a ceiling of 100
%.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from vlretrieval.data.splits import HardNegatives, Split, normalised_text
from vlretrieval.evaluation.suites import words as lexicon

KINDS = ("swap_nouns", "swap_adjectives", "swap_relation", "replace_noun", "replace_colour", "leave_out")
TOKEN = re.compile(r"(\s*)([A-Za-z][A-Za-z'-]*|\d+|[^\sA-Za-z\d])")


class Word(str):
    """A word with the blanks before it, so that an edited caption is spaced as its author spaced it."""

    gap: str

    def __new__(cls, text: str, gap: str = " ") -> Word:
        word = super().__new__(cls, text)
        word.gap = gap
        return word

    def as_(self, text: str) -> Word:
        """Another word in its place."""
        return Word(text, self.gap)


def words_of(caption: str) -> list[Word]:
    return [Word(text, gap) for gap, text in TOKEN.findall(caption)]


def with_text_edits(split: Split, kinds: Sequence[str] = KINDS, seed: int = 0) -> Split:
    """The split with at most one edit of each kind for each caption as its hard negatives.

    Raises:
        ValueError: an unknown kind; or no caption could be edited (they are not English, or of other things).
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise ValueError(f"kinds={list(kinds)}: choose from {', '.join(KINDS)}")
    texts: list[str] = []
    named: list[str] = []
    caption_of: list[int] = []
    offsets = split.captions_of_image
    for image in range(len(split.image_ids)):
        rows = range(int(offsets[image]), int(offsets[image + 1]))
        captions = [split.captions[row] for row in rows]
        objects = [region.label for region in split.regions(image)]
        true = {normalised_text(caption) for caption in captions}
        for place, row in enumerate(rows):
            others = captions[:place] + captions[place + 1 :]
            made = edits(captions[place], others, objects, random.Random(f"{seed}/{split.image_ids[image]}/{place}"))
            for kind, text in made:
                if kind in kinds and normalised_text(text) not in true:
                    texts.append(text)
                    named.append(kind)
                    caption_of.append(row)
    if not texts:
        raise ValueError(
            f"no caption of split {split.name!r} could be edited: the edits know common English words only; "
            f"the first caption is {split.captions[0]!r}"
        )
    return Split(
        split.name,
        split.image_ids,
        split.captions,
        split.caption_image,
        split.picture,
        positives=split.positives,
        negatives=HardNegatives(texts, named, np.array(caption_of)),
        regions=split.regions,
        notes=split.notes | {"text_edits": len(texts)},
        stamp=split.stamp,
    )


def edits(caption: str, others: Iterable[str], objects: Iterable[str], rng: random.Random) -> Iterator[tuple[str, str]]:
    """(kind, edited caption), at most one of each kind.

    Args:
        others: the picture's other captions. objects: labels of what is known to be in it.
    """
    words = words_of(caption)
    confirmed = {word.lower() for text in (*others, *objects) for word in words_of(text)}
    there = confirmed | {word.lower() for word in words}
    found = {
        "swap_nouns": swap_nouns(words, rng),
        "swap_adjectives": swap_adjectives(words, rng),
        "swap_relation": swap_relation(words, rng),
        "replace_noun": replace_noun(words, there, rng),
        "replace_colour": replace_colour(words, there, rng),
        "leave_out": leave_out(words, confirmed),
    }
    for kind, edited in found.items():
        if edited is not None:
            yield kind, join(edited, words)


def things(words: list[Word]) -> list[int]:
    """Places of known nouns that stand for themselves, not for the first half of a compound."""
    after = [word.lower() for word in words[1:]] + ["."]
    return [
        place
        for place, (word, then) in enumerate(zip(words, after, strict=True))
        if lexicon.noun_of(word) and then not in lexicon.TAILS and not lexicon.noun_of(then)
    ]


def swap_nouns(words: list[Word], rng: random.Random) -> list[Word] | None:
    """Two things of one number change places: "a dog chases a cat" -> "a cat chases a dog".

    Only things that can stand for each other (two that live, or two of one class): "a hat wears a boy" would be found
    false without the picture.
    """
    at = things(words)
    pairs = []
    for first, second in zip(at, at[1:], strict=False):
        one, other = lexicon.noun_of(words[first]), lexicon.noun_of(words[second])
        assert one and other
        if second == first + 1 or lexicon.means_the_same(one, other) or not lexicon.alike(one, other):
            continue
        if lexicon.is_plural(words[first]) == lexicon.is_plural(words[second]) and says_more(words[first + 1 : second]):
            pairs.append((first, second))
    return _swapped(words, *rng.choice(pairs)) if pairs else None


def says_more(between: list[Word]) -> bool:
    """Whether words between two nouns state something of them that is not the same both ways round."""
    left = [w.lower() for w in between if w.lower() not in lexicon.FILLERS and w.lower() not in lexicon.ADJECTIVE_CLASS]
    return bool(left) and not any(word in lexicon.SYMMETRIC or not word[0].isalpha() for word in left)


def swap_adjectives(words: list[Word], rng: random.Random) -> list[Word] | None:
    """Two adjectives of one class change places: "a red ball and a blue car" -> "a blue ball and a red car"."""
    described = []  # (place, adjective, the noun it stands before)
    for place, word in enumerate(words[:-1]):
        noun = lexicon.noun_of(words[place + 1])
        if noun and word.lower() in lexicon.ADJECTIVE_CLASS and not _is_skin(words, place):
            described.append((place, word.lower(), noun))
    pairs = [
        (first[0], second[0])
        for number, first in enumerate(described)
        for second in described[number + 1 :]
        if lexicon.ADJECTIVE_CLASS[first[1]] == lexicon.ADJECTIVE_CLASS[second[1]]
        and lexicon.ADJECTIVE_MEANING[first[1]] != lexicon.ADJECTIVE_MEANING[second[1]]
        and not lexicon.means_the_same(first[2], second[2])
    ]
    return _swapped(words, *rng.choice(pairs)) if pairs else None


def swap_relation(words: list[Word], rng: random.Random) -> list[Word] | None:
    """A relation becomes its opposite: "in front of a tree" -> "behind a tree"."""
    lower = [word.lower() for word in words]
    found = []
    for relation, opposite in lexicon.OPPOSITE.items():
        parts = relation.split()
        for place in range(1, len(words) - len(parts)):
            # something must follow that the relation is about: "looks over" alone is none
            after = lower[place + len(parts)]
            if lower[place : place + len(parts)] == parts and after[0].isalpha():
                found.append((place, len(parts), opposite))
    if not found:
        return None
    place, count, opposite = rng.choice(sorted(found))
    changed = [Word(part, words[place].gap if number == 0 else " ") for number, part in enumerate(opposite.split())]
    return words[:place] + changed + words[place + count :]


def replace_noun(words: list[Word], there: set[str], rng: random.Random) -> list[Word] | None:
    """A thing becomes another of its class that no caption and no object list names; a person the other sex."""
    known = {lexicon.NOUN_MEANING[noun] for word in there if (noun := lexicon.noun_of(word))}
    places = things(words)
    rng.shuffle(places)
    for place in places:
        noun = lexicon.noun_of(words[place])
        assert noun is not None
        others = [other for other in lexicon.replacements(noun) if other not in known]
        if lexicon.NOUN_CLASS[noun] == "person" and any(word.lower() in lexicon.SEXED for word in words):
            continue  # "a woman and his dog" gives itself away
        if others:
            other = rng.choice(others)
            return _put(words, place, lexicon.plural(other) if lexicon.is_plural(words[place]) else other)
    return None


def replace_colour(words: list[Word], there: set[str], rng: random.Random) -> list[Word] | None:
    """A colour becomes one that no caption names."""
    known = {lexicon.ADJECTIVE_MEANING[word] for word in there if lexicon.ADJECTIVE_CLASS.get(word) == "colour"}
    places = [
        place
        for place, word in enumerate(words)
        if lexicon.ADJECTIVE_CLASS.get(word.lower()) == "colour" and not _is_skin(words, place)
    ]
    others = [colour for colour in lexicon.ADJECTIVES_OF["colour"] if colour not in known]
    return _put(words, rng.choice(places), rng.choice(others)) if places and others else None


def leave_out(words: list[Word], confirmed: set[str]) -> list[Word] | None:
    """The second of two like things joined by "and" is no longer named: "a dog and a cat on a bed" -> "a dog on a bed".

    Only a thing that an object list or another caption names as well, so that it is really there.
    """
    lower = [word.lower() for word in words]
    sure = {lexicon.NOUN_MEANING[noun] for word in confirmed if (noun := lexicon.noun_of(word))}
    for place in range(1, len(words) - 1):
        end = place + 1
        while end < len(words) and (lower[end] in lexicon.FILLERS or lower[end] in lexicon.ADJECTIVE_CLASS):
            end += 1
        before, noun = lexicon.noun_of(lower[place - 1]), lexicon.noun_of(lower[end]) if end < len(words) else None
        if (
            lower[place] == "and"
            and before
            and noun
            and lexicon.alike(before, noun)
            and lexicon.NOUN_MEANING[noun] in sure
        ):
            follows = lower[end + 1] if end + 1 < len(words) else "."
            if follows in lexicon.AFTER_A_THING:  # else most likely a verb, which would no longer agree
                return words[:place] + words[end + 1 :]
    return None


def join(words: list[Word], before: list[Word]) -> str:
    """The edited words as a caption: a or an by what follows now, a capital at the start where there was one."""
    kept = {(article.lower(), word) for article, word in zip(before, before[1:], strict=False)}
    fixed = list(words)
    for place, word in enumerate(words[:-1]):
        if word.lower() in ("a", "an") and (word.lower(), words[place + 1]) not in kept:
            article = "an" if words[place + 1][0].lower() in "aeiou" else "a"
            fixed[place] = word.as_(article.capitalize() if word[0].isupper() else article)
    text = "".join(word.gap + word for word in fixed)
    return text[:1].upper() + text[1:] if before[0][:1].isupper() else text


def _is_skin(words: list[Word], place: int) -> bool:
    """Whether a colour is said of a person: to change it is no edit of a thing."""
    noun = lexicon.noun_of(words[place + 1]) if place + 1 < len(words) else None
    return noun is not None and lexicon.NOUN_CLASS[noun] == "person"


def _swapped(words: list[Word], first: int, second: int) -> list[Word]:
    swapped = list(words)
    one, other = (words[place].lower() if place == 0 else str(words[place]) for place in (first, second))
    swapped[first], swapped[second] = words[first].as_(other), words[second].as_(one)
    return swapped


def _put(words: list[Word], place: int, text: str) -> list[Word]:
    changed = list(words)
    changed[place] = words[place].as_(text)
    return changed

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
TOKEN = re.compile(r"[A-Za-z][A-Za-z'-]*|\d+|[^\sA-Za-z\d]")


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
    )


def edits(caption: str, others: Iterable[str], objects: Iterable[str], rng: random.Random) -> Iterator[tuple[str, str]]:
    """(kind, edited caption), at most one of each kind.

    Args:
        others: the picture's other captions. objects: labels of what is known to be in it.
    """
    tokens = TOKEN.findall(caption)
    there = {token.lower() for text in (caption, *others, *objects) for token in TOKEN.findall(text)}
    found = {
        "swap_nouns": swap_nouns(tokens, rng),
        "swap_adjectives": swap_adjectives(tokens, rng),
        "swap_relation": swap_relation(tokens, rng),
        "replace_noun": replace_noun(tokens, there, rng),
        "replace_colour": replace_colour(tokens, there, rng),
        "leave_out": leave_out(tokens, {t.lower() for text in (*others, *objects) for t in TOKEN.findall(text)}),
    }
    for kind, edited in found.items():
        if edited is not None:
            yield kind, join(edited)


def swap_nouns(tokens: list[str], rng: random.Random) -> list[str] | None:
    """Two things of one number change places: "a dog chases a cat" -> "a cat chases a dog"."""
    at = [place for place, token in enumerate(tokens) if lexicon.noun_of(token)]
    pairs = []
    for first, second in zip(at, at[1:], strict=False):
        one, other = lexicon.noun_of(tokens[first]), lexicon.noun_of(tokens[second])
        assert one and other
        if second == first + 1 or lexicon.means_the_same(one, other):
            continue
        if lexicon.is_plural(tokens[first]) == lexicon.is_plural(tokens[second]) and says_more(
            tokens[first + 1 : second]
        ):
            pairs.append((first, second))
    return _swapped(tokens, *rng.choice(pairs)) if pairs else None


def says_more(between: list[str]) -> bool:
    """Whether words between two nouns state something of them that is not the same both ways round."""
    left = [t.lower() for t in between if t.lower() not in lexicon.FILLERS and t.lower() not in lexicon.ADJECTIVE_CLASS]
    return bool(left) and not any(t in lexicon.SYMMETRIC or not t[0].isalpha() for t in left)


def swap_adjectives(tokens: list[str], rng: random.Random) -> list[str] | None:
    """Two adjectives of one class change places: "a red ball and a blue car" -> "a blue ball and a red car"."""
    described = []  # (place, adjective, the noun it stands before)
    for place, token in enumerate(tokens[:-1]):
        noun = lexicon.noun_of(tokens[place + 1])
        if token.lower() in lexicon.ADJECTIVE_CLASS and noun:
            described.append((place, token.lower(), noun))
    pairs = [
        (first[0], second[0])
        for number, first in enumerate(described)
        for second in described[number + 1 :]
        if lexicon.ADJECTIVE_CLASS[first[1]] == lexicon.ADJECTIVE_CLASS[second[1]]
        and lexicon.ADJECTIVE_MEANING[first[1]] != lexicon.ADJECTIVE_MEANING[second[1]]
        and not lexicon.means_the_same(first[2], second[2])
    ]
    return _swapped(tokens, *rng.choice(pairs)) if pairs else None


def swap_relation(tokens: list[str], rng: random.Random) -> list[str] | None:
    """A relation becomes its opposite: "in front of a tree" -> "behind a tree"."""
    lower = [token.lower() for token in tokens]
    found = []
    for relation, opposite in lexicon.OPPOSITE.items():
        words = relation.split()
        for place in range(1, len(tokens) - len(words)):
            # something must follow that the relation is about: "looks over" alone is none
            after = lower[place + len(words)]
            if lower[place : place + len(words)] == words and after[0].isalpha():
                found.append((place, len(words), opposite))
    if not found:
        return None
    place, count, opposite = rng.choice(sorted(found))
    return tokens[:place] + opposite.split() + tokens[place + count :]


def replace_noun(tokens: list[str], there: set[str], rng: random.Random) -> list[str] | None:
    """A thing becomes another of its class that no caption and no object list names."""
    known = {lexicon.NOUN_MEANING[noun] for word in there if (noun := lexicon.noun_of(word))}
    places = [place for place, token in enumerate(tokens) if lexicon.noun_of(token)]
    rng.shuffle(places)
    for place in places:
        noun = lexicon.noun_of(tokens[place])
        assert noun is not None
        others = [other for other in lexicon.NOUNS_OF[lexicon.NOUN_CLASS[noun]] if other not in known]
        if others:
            other = rng.choice(others)
            return _put(tokens, place, lexicon.plural(other) if lexicon.is_plural(tokens[place]) else other)
    return None


def replace_colour(tokens: list[str], there: set[str], rng: random.Random) -> list[str] | None:
    """A colour becomes one that no caption names."""
    known = {lexicon.ADJECTIVE_MEANING[word] for word in there if lexicon.ADJECTIVE_CLASS.get(word) == "colour"}
    places = [place for place, token in enumerate(tokens) if lexicon.ADJECTIVE_CLASS.get(token.lower()) == "colour"]
    others = [colour for colour in lexicon.ADJECTIVES_OF["colour"] if colour not in known]
    return _put(tokens, rng.choice(places), rng.choice(others)) if places and others else None


def leave_out(tokens: list[str], confirmed: set[str]) -> list[str] | None:
    """The second of two things joined by "and" is no longer named: "a dog and a cat on a bed" -> "a dog on a bed".

    Only a thing that an object list or another caption names as well, so that it is really there.
    """
    lower = [token.lower() for token in tokens]
    sure = {lexicon.NOUN_MEANING[noun] for word in confirmed if (noun := lexicon.noun_of(word))}
    for place in range(1, len(tokens) - 1):
        end = place + 1
        while end < len(tokens) and (lower[end] in lexicon.FILLERS or lower[end] in lexicon.ADJECTIVE_CLASS):
            end += 1
        noun = lexicon.noun_of(lower[end]) if end < len(tokens) else None
        if lower[place] == "and" and lexicon.noun_of(lower[place - 1]) and noun and lexicon.NOUN_MEANING[noun] in sure:
            follows = lower[end + 1] if end + 1 < len(tokens) else "."
            if follows not in lexicon.AFTER_A_THING:
                continue  # most likely a verb, which would no longer agree
            return tokens[:place] + tokens[end + 1 :]
    return None


def join(tokens: list[str]) -> str:
    """Words as a sentence again: a or an by what follows, no blank before a full stop, a capital where one was."""
    fixed = list(tokens)
    for place, token in enumerate(fixed[:-1]):
        if token.lower() in ("a", "an"):
            article = "an" if fixed[place + 1][0].lower() in "aeiou" else "a"
            fixed[place] = article.capitalize() if token[0].isupper() else article
    text = re.sub(r"\s+([.,;:!?])", r"\1", " ".join(fixed))
    return text[:1].upper() + text[1:] if tokens[0][:1].isupper() else text


def _swapped(tokens: list[str], first: int, second: int) -> list[str]:
    swapped = list(tokens)
    swapped[first], swapped[second] = tokens[second].lower(), tokens[first].lower()
    if tokens[first][0].isupper():
        swapped[first] = swapped[first].capitalize()
    return swapped


def _put(tokens: list[str], place: int, word: str) -> list[str]:
    changed = list(tokens)
    changed[place] = word.capitalize() if tokens[place][0].isupper() else word
    return changed

"""Hard negatives of scenes: false, well spread over their kinds, and not to be told from the text alone."""

from collections import Counter

import numpy as np
import pytest
from test_scenes_truth import true_by_trying

from vlretrieval.data.scenes import Scenes
from vlretrieval.data.scenes.negatives import KINDS
from vlretrieval.data.scenes.vocabulary import COLOURS, SHAPES


@pytest.fixture(scope="module")
def test_split():
    return Scenes(test=1000).split("test")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"placement": "free"},
        {"shapes": 3, "colours": 3, "repeat": 0.5, "max_objects": 6},
        {"min_objects": 3, "max_objects": 3},
        {"language": "zh"},
    ],
    ids=str,
)
def test_every_negative_is_false_of_its_own_picture(settings):
    split = Scenes(test=50, **settings).split("test")
    assert len(split.negatives) == len(split.written.negative_table)
    for row, caption in enumerate(split.negatives.caption):
        query = split.written.negative_table.query(row)
        # Even if the least difference made a relation: nobody could call the negative true.
        assert not true_by_trying(query, split.scenes[split.caption_image[caption]], margin=0.0)
        grammar, form = split.written.grammars[caption], split.written.forms[caption]
        assert split.negatives.texts[row] == grammar(query, form, False)
        assert split.negatives.texts[row] != split.captions[caption]


def test_every_caption_has_a_negative_and_every_kind_has_plenty(test_split):
    assert len(np.unique(test_split.negatives.caption)) == len(test_split.captions)
    counts = Counter(test_split.negatives.kinds)
    assert set(counts) == set(KINDS)
    assert min(counts.values()) >= 1000, counts


def test_no_negative_is_given_twice(test_split):
    pairs = list(zip(test_split.negatives.caption.tolist(), test_split.negatives.texts, strict=True))
    assert len(set(pairs)) == len(pairs)


def words(text: str) -> list[str]:
    return text.lower().replace(",", "").replace(".", "").replace(":", "").split()


def test_swapped_captions_hold_the_same_words(test_split):
    negatives = test_split.negatives
    articles = {"a", "an"}  # these follow the word behind them
    for kind, text, caption in zip(negatives.kinds, negatives.texts, negatives.caption, strict=True):
        true, false = Counter(words(test_split.captions[caption])), Counter(words(text))
        changed = set((true - false) + (false - true)) - articles
        if kind == "swap_colour":
            assert not changed, (test_split.captions[caption], text)
        elif kind == "swap_relation":
            assert changed <= {"left", "right", "above", "below"}
            assert len(changed) in (0, 2)
        elif kind == "swap_place":
            assert changed in ({"left", "right"}, {"top", "bottom"}), (test_split.captions[caption], text)
        elif kind == "replace_object":
            plurals = {shape + end for shape in SHAPES for end in ("s", "es")}
            assert changed <= {*SHAPES, *COLOURS, *plurals} and changed
        elif kind == "add_object":
            assert len(words(text)) > len(words(test_split.captions[caption]))
        else:
            assert len(words(text)) <= len(words(test_split.captions[caption]))


def test_leave_out_leaves_one_object_of_the_picture_unsaid(test_split):
    for row, (kind, caption) in enumerate(zip(test_split.negatives.kinds, test_split.negatives.caption, strict=True)):
        if kind in ("leave_out", "add_object"):
            query = test_split.written.negative_table.query(row)
            objects = len(test_split.scenes[test_split.caption_image[caption]])
            assert query.exhaustive and query.total == objects + (1 if kind == "add_object" else -1)
            assert 2 <= query.total <= 4, "a number that no scene has would show the negative"


def wins_of_text(split, train) -> dict[str, float]:
    """How often, in percent, words alone tell a caption from its negative: each word's log odds, fitted on train."""
    true: Counter[str] = Counter()
    false: Counter[str] = Counter()
    for text, caption in zip(train.negatives.texts, train.negatives.caption, strict=True):
        true.update(words(train.captions[caption]))  # once for each of its negatives, so that the two sides weigh equal
        false.update(words(text))
    odds = {word: np.log((true[word] + 5) / (false[word] + 5)) for word in {*true, *false}}
    wins: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for kind, text, caption in zip(split.negatives.kinds, split.negatives.texts, split.negatives.caption, strict=True):
        true_bag, false_bag = Counter(words(split.captions[caption])), Counter(words(text))
        margin = sum(odds.get(w, 0) * (true_bag[w] - false_bag[w]) for w in {*true_bag, *false_bag})
        wins[kind].append(0.5 if abs(margin) < 1e-9 else float(margin > 0))
    return {kind: 100 * float(np.mean(won)) for kind, won in wins.items()}


def test_words_alone_do_not_tell_the_true_caption(test_split):
    wins = wins_of_text(test_split, Scenes(train=1000).split("train"))
    for kind in ("swap_colour", "swap_relation", "swap_place", "replace_object"):
        assert wins[kind] == pytest.approx(50, abs=5), wins
    # The longer of the two is false for one of these kinds and true for the other, by their nature.
    assert (wins["add_object"] + wins["leave_out"]) / 2 == pytest.approx(50, abs=10), wins


def test_longer_is_as_often_true_as_false_among_only_captions(test_split):
    counts = Counter(test_split.negatives.kinds)
    assert counts["add_object"] / counts["leave_out"] == pytest.approx(1, abs=0.25)

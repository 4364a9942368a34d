"""Splits: what belongs together, what is true, and what is refused."""

import numpy as np
import pytest
from tiny_data import picture, tiny_split

from vlretrieval.data.splits import HardNegatives, Split, normalised_text, text_groups


def make(**changes) -> Split:
    fields = {
        "name": "test",
        "image_ids": ["a", "b", "c"],
        "captions": ["A dog.", "a cat", "a DOG", "two birds"],
        "caption_image": [0, 0, 1, 2],
        "picture": picture,
    }
    return Split(**{**fields, **changes})


def test_own_pairs_are_always_positives_and_given_ones_join_them():
    assert make().positives.tolist() == [[0, 0], [1, 0], [2, 1], [3, 2]]
    assert make(positives=np.array([[0, 1], [0, 0]])).positives.tolist() == [[0, 0], [0, 1], [1, 0], [2, 1], [3, 2]]


def test_equal_captions_can_count_as_positives_of_each_others_images():
    split = make().with_equal_captions_positive()
    assert split.positives.tolist() == [[0, 0], [0, 1], [1, 0], [2, 0], [2, 1], [3, 2]]


def test_text_groups_ignore_case_blanks_and_the_full_stop():
    assert text_groups(["A dog.", "a  dog", " a dog 。", "a dog s", "A DOG!"]).tolist() == [0, 0, 0, 1, 0]
    assert normalised_text("ﬁne Ｄog") == "fine dog"


def test_the_hash_changes_with_ids_captions_and_positives_and_with_nothing_else():
    same = make(picture=lambda index: None, negatives=HardNegatives(["x"], ["k"], np.array([0])))
    assert same.hash == make().hash and len(make().hash) == 16
    others = [
        make(image_ids=["a", "b", "d"]),
        make(captions=["A dog", "a cat", "a DOG", "two birds"]),
        make(captions=["A dog.a", " cat", "a DOG", "two birds"]),
        make(caption_image=[0, 1, 1, 2]),
        make(positives=np.array([[0, 1]])),
    ]
    assert len({make().hash, *(other.hash for other in others)}) == 6


def test_an_image_may_have_any_number_of_captions():
    split = make(caption_image=[0, 0, 0, 2])
    assert split.captions_of_image.tolist() == [0, 3, 3, 4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"captions": [], "caption_image": []}, "split 'test' is empty: 3 images, 0 captions"),
        ({"image_ids": []}, "split 'test' is empty: 0 images, 4 captions"),
        ({"caption_image": [0, 1]}, "4 captions, but 2 caption_image entries"),
        ({"caption_image": [0, 0, 1, 3]}, "must lie in 0..2, got 0..3"),
        ({"caption_image": [1, 0, 1, 2]}, "grouped by image"),
        ({"image_ids": ["a", "b", "a"]}, "image id 'a' occurs twice"),
        ({"positives": np.array([[9, 0]])}, r"pairs below \(4, 3\)"),
        ({"negatives": HardNegatives(["x"], ["k"], np.array([4]))}, "belongs to caption 4 of 4"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_hard_negatives_must_be_grouped_and_complete():
    with pytest.raises(ValueError, match="one text, kind and caption each"):
        HardNegatives(["x"], [], np.array([0]))
    with pytest.raises(ValueError, match="grouped by caption"):
        HardNegatives(["x", "y"], ["k", "k"], np.array([1, 0]))
    assert len(tiny_split(negatives=2).negatives) == 60 * 2 + 30

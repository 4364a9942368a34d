"""The truth about scenes, against a twin that tries every way of giving objects to things."""

from itertools import permutations, product
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlretrieval.data.scenes import Scenes
from vlretrieval.data.scenes.layout import Placed, Rules, Scene, draw_scenes
from vlretrieval.data.scenes.query import Query, Thing, tabulate
from vlretrieval.data.scenes.truth import MARGIN, Truth
from vlretrieval.data.scenes.vocabulary import ANY, PLACES

CELLS = list(PLACES.values())


def fits(thing: Thing, placed: Placed) -> bool:
    return (
        thing.shape in (ANY, placed.shape)
        and thing.colour in (ANY, placed.colour)
        and thing.size in (ANY, placed.size)
        and (thing.place == ANY or bool(CELLS[thing.place] >> placed.cell & 1))
    )


def stands(a: Placed, relation: int, b: Placed, margin: float) -> bool:
    return (b.x - a.x > margin, a.x - b.x > margin, b.y - a.y > margin, a.y - b.y > margin)[relation]


def true_by_trying(query: Query, scene: Scene, margin: float = MARGIN) -> bool:
    """The meaning of a query, word for word as ``query`` says it."""
    wanted = [thing for thing in query.things for _ in range(thing.quantity)]
    if query.exhaustive and len(wanted) != len(scene):
        return False
    for thing in query.things:
        if thing.quantity > 1 and sum(fits(thing, placed) for placed in scene) != thing.quantity:
            return False
    return any(
        all(fits(thing, placed) for thing, placed in zip(wanted, objects, strict=True))
        and (query.relation == ANY or stands(objects[0], query.relation, objects[1], margin))
        for objects in permutations(scene, len(wanted))
    )


# Few shapes and colours, so that things often fit several objects, or the wrong ones.
TIGHT = Rules((0, 1, 2), (0, 1), 1, 5, "grid", 1.0, 0.4)
SCENES = draw_scenes(TIGHT, seed=3, split="train", count=40)

free_or = lambda most: st.sampled_from([ANY, *range(most)])
things = st.builds(
    Thing,
    shape=free_or(3),
    colour=free_or(2),
    size=st.sampled_from([ANY, ANY, 0, 1]),
    place=st.sampled_from([ANY, ANY, ANY, 0, 4, 5, 8]),
    quantity=st.sampled_from([1, 1, 1, 2, 3]),
)
single = things.map(lambda thing: thing._replace(quantity=1))
plain = st.builds(Query, st.lists(things, min_size=1, max_size=4).map(tuple), st.just(ANY), st.booleans())
standing = st.builds(Query, st.lists(single, min_size=2, max_size=3).map(tuple), st.integers(0, 3), st.booleans())


@given(st.lists(plain | standing, min_size=1, max_size=12), st.sampled_from([0.0, MARGIN]))
@settings(max_examples=60, deadline=None)
def test_truth_is_that_of_trying_every_assignment(queries, margin):
    truth = Truth(SCENES, margin)
    pairs = product(range(len(queries)), range(len(SCENES)))
    expected = [[q, s] for q, s in pairs if true_by_trying(queries[q], SCENES[s], margin)]
    assert truth.pairs(tabulate(queries)).tolist() == expected


def test_every_caption_is_true_of_its_own_picture_and_of_all_that_the_twin_finds():
    split = Scenes(test=60, max_objects=5, shapes=3, colours=2, repeat=0.4).split("test")
    own = np.stack([np.arange(len(split.captions)), split.caption_image], axis=1)
    given_pairs = set(map(tuple, split.positives.tolist()))
    assert given_pairs >= set(map(tuple, own.tolist()))
    assert len(given_pairs) > 1.5 * len(own), "with so few shapes and colours many captions fit several pictures"
    for caption, draft in enumerate(split.written.drafts):
        for image, scene in enumerate(split.scenes):
            assert ((caption, image) in given_pairs) == true_by_trying(draft.query, scene)


def test_the_truth_of_a_batch_is_the_truth_of_the_split():
    split = Scenes(val=80).split("val")
    table = np.zeros((len(split.captions), len(split.image_ids)), dtype=bool)
    table[tuple(split.positives.T)] = True
    rng = np.random.default_rng(0)
    captions, images = rng.integers(len(split.captions), size=32), rng.integers(len(split.image_ids), size=20)
    assert (split.describes(captions, images) == table[captions][:, images]).all()


def test_captions_are_specific_but_not_all_unique():
    split = Scenes(test=1000).split("test")
    assert 1.2 < len(split.positives) / len(split.captions) < 3


@pytest.mark.parametrize("placement", ["grid", "free"])
def test_relations_and_places_hold_with_a_clear_difference(placement):
    split = Scenes(train=300, placement=placement).split("train")
    for caption, (query, objects) in enumerate(split.written.drafts):
        scene = split.scenes[split.caption_image[caption]]
        if query.relation != ANY:
            first, second = scene[objects[0][0]], scene[objects[1][0]]
            assert stands(first, query.relation, second, MARGIN)
    for scene in split.scenes:
        for placed in scene:
            for centre in (placed.x, placed.y):
                assert min(abs(centre - line) for line in (1 / 3, 2 / 3)) >= 0.04


def test_in_a_grid_no_relation_is_doubtful_whatever_the_jitter():
    for jitter in (0.0, 0.5, 1.0):
        for scene in draw_scenes(Rules((0,), tuple(range(8)), 4, 4, "grid", jitter, 0.0), 0, "train", 100):
            for a, b in permutations(scene, 2):
                assert (abs(a.x - b.x) > MARGIN) == (a.cell % 3 != b.cell % 3)
                assert (abs(a.y - b.y) > MARGIN) == (a.cell // 3 != b.cell // 3)


def test_a_query_survives_its_table():
    rng = Random(0)
    drafts = Scenes(test=30, max_objects=4).split("test").written.drafts
    queries = [drafts[int(rng.random() * len(drafts))].query for _ in range(50)]
    table = tabulate(queries, width=6)
    assert [table.query(row) for row in range(len(table))] == queries

"""Protocols by name: sizes, first captions, folds; and the ground truths that others publish."""

import numpy as np
import pytest

from tests.tiny_retrieval import TRANSFORM, FakeModel, tiny_split, tiny_tokenizer
from vlretrieval.evaluation.evaluate import Settings, evaluate
from vlretrieval.evaluation.protocols import PROTOCOLS, Protocol, part, protocol_named
from vlretrieval.metrics.hubness import corrected_ranks, hub_figures, mean_of_best
from vlretrieval.metrics.one_modality import captions_of_one_image, images_of_one_caption, rank_within


def test_a_whole_set_in_place_of_the_test_split_is_refused():
    with pytest.raises(ValueError, match="protocol=flickr30k_1k measures 1000 images, but split 'all' has 23"):
        PROTOCOLS["flickr30k_1k"].prepare(tiny_split(name="all"))


@pytest.mark.parametrize("name", ["val", "train", "restval"])
def test_a_validation_split_of_the_right_size_is_no_test_split(name):
    """Flickr8k's and COCO's validation splits have as many images as their test splits."""
    with pytest.raises(ValueError, match=f"measures the published test split, not {name!r}"):
        Protocol("published", images=23).prepare(tiny_split(name=name))
    assert Protocol("full").prepare(tiny_split(name=name)).name == name


def test_a_split_of_the_right_size_and_another_content_is_told(capsys):
    from vlretrieval.evaluation.table import print_figures

    split = tiny_split()
    for hashes, said in (((("English", split.hash),), "the published one (English)"), ((("English", "0"),), "not the")):
        settings = Settings(bootstrap=0, protocol=Protocol("published", images=23, hashes=hashes))
        figures = evaluate(FakeModel(), split, tiny_tokenizer(split), TRANSFORM, settings).figures
        print_figures(figures)
        assert f"protocol published: the split is {said}" in capsys.readouterr().out


def test_an_unknown_protocol_lists_the_known_ones():
    with pytest.raises(ValueError, match="choose full, .*coco_1k"):
        protocol_named("coco_2k")


def test_only_the_first_captions_are_used_and_too_few_are_refused():
    five_of_seven = Protocol("five", captions=5).prepare(tiny_split(images=8, captions=(7, 5)))
    assert np.bincount(five_of_seven.caption_image).tolist() == [5] * 8
    whole = tiny_split(images=8, captions=(7, 5))
    first = np.repeat(np.searchsorted(whole.caption_image, np.arange(8)), 5) + np.tile(np.arange(5), 8)
    assert list(five_of_seven.captions) == [whole.captions[row] for row in first]
    with pytest.raises(ValueError, match="uses 5 captions an image, but 'image-1' has 4"):
        Protocol("five", captions=5).prepare(tiny_split(images=8, captions=(7, 4)))


def test_folds_are_sequential_galleries_of_their_own_and_their_mean_is_reported():
    split = tiny_split(
        images=20, captions=(3, 2), positives=np.array([(c, i) for c in range(0, 50, 4) for i in (2, 13)])
    )
    tokenizer = tiny_tokenizer(split)
    settings = Settings(top_k=3, bootstrap=60, protocol=Protocol("folded", folds=4))
    outcome = evaluate(FakeModel(), split, tokenizer, TRANSFORM, settings)
    alone = []
    for fold in range(4):
        images = np.arange(5 * fold, 5 * fold + 5)
        captions = np.flatnonzero(np.isin(split.caption_image, images))
        plain = Settings(top_k=3, bootstrap=0)
        alone.append(evaluate(FakeModel(), part(split, images, captions), tokenizer, TRANSFORM, plain).figures)
    for stage in ("first_stage", "reranked"):
        for way in ("t2i", "i2t"):
            found = outcome.figures[stage][way]
            for name in ("R@1", "R@5", "median_rank", "mean_rank", "MRR"):
                assert found[name] == pytest.approx(np.mean([one[stage][way][name] for one in alone])), (
                    stage,
                    way,
                    name,
                )
            assert found["gallery"] == (5 if way == "t2i" else alone[0][stage][way]["gallery"]) or isinstance(
                found["gallery"], list
            )
            low, high = found["interval"]["R@1"]
            assert low <= found["R@1"] <= high
    assert outcome.figures["protocol"]["name"] == "folded, mean of 4 sequential folds of 5 images"
    t2i, i2t = outcome.ranks["first_stage"]
    assert t2i.query.tolist() == list(range(50)) and i2t.query.tolist() == list(range(20))
    assert 100 * t2i.hits(1).mean() == pytest.approx(
        np.mean([one["first_stage"]["t2i"]["R@1"] for one in alone]), abs=3
    )


def test_images_that_do_not_divide_into_folds_are_refused():
    with pytest.raises(ValueError, match="23 images do not divide"):
        Protocol("five folds", folds=5).prepare(tiny_split())


def test_equal_captions_count_as_true_where_asked():
    split = tiny_split(images=40, captions=(5,))
    assert len(split.positives) == 200 < len(PROTOCOLS["full_equal_captions"].prepare(split).positives)


def test_text_to_text_finds_another_caption_of_the_same_picture_and_never_itself():
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(12), [5, 1, 3] * 4)
    text = rng.integers(-1, 2, (len(owner), 4)).astype(np.float32)
    pairs = captions_of_one_image(owner)
    ranks = rank_within(text, pairs, block=8)
    assert ranks.gallery == len(owner) - 1 and ranks.left_out == 4, "a picture's only caption asks nothing"
    for row, query in enumerate(ranks.query):
        scores = text @ text[query]
        good = {j for j in range(len(owner)) if owner[j] == owner[query] and j != query}
        best = max(scores[j] for j in good)
        wrong = [j for j in range(len(owner)) if j not in good and j != query]
        assert ranks.rank()[row] == 1 + sum(scores[j] >= best for j in wrong)
    with pytest.raises(ValueError, match="item 3 is named as its own positive"):
        rank_within(text, [(0, 1), (3, 3)])


def test_image_to_image_needs_captions_that_are_true_of_two_pictures():
    assert len(images_of_one_caption(np.array([(0, 0), (1, 1)]))) == 0
    shared = images_of_one_caption(np.array([(0, 0), (0, 4), (1, 1), (2, 4), (2, 0), (3, 0), (3, 1), (3, 2)]))
    assert shared.tolist() == [[0, 1], [0, 2], [0, 4], [1, 0], [1, 2], [2, 0], [2, 1], [4, 0]]


def test_a_hub_is_seen_and_the_correction_lowers_it():
    rng = np.random.default_rng(0)
    image = rng.standard_normal((200, 64)).astype(np.float32)
    common = 6 * np.eye(1, 64, dtype=np.float32)  # what all texts share, and one picture is made of
    text = (image + common + 1.2 * rng.standard_normal((200, 64))).astype(np.float32)
    image /= np.linalg.norm(image, axis=1, keepdims=True)
    text /= np.linalg.norm(text, axis=1, keepdims=True)
    image[7] = common[0] / 6
    pairs = np.stack([np.arange(200)] * 2, 1)
    plain = hub_figures(np.argsort(-text @ image.T, axis=1)[:, :1], 200)
    even = hub_figures(np.arange(200)[:, None], 200)
    assert plain["most"] > 20 and plain["skewness"] > 3 and even["skewness"] == 0 and even["never"] == 0
    from vlretrieval.metrics import rank_both, recall_at

    before, after = rank_both(text, image, pairs)[0], corrected_ranks(text, image, pairs)[0]
    assert recall_at(after, 1) > recall_at(before, 1) + 2


def test_the_mean_of_the_best_scores_is_streamed():
    rng = np.random.default_rng(1)
    queries, gallery = rng.standard_normal((37, 5)).astype(np.float32), rng.standard_normal((50, 5)).astype(np.float32)
    full = np.sort(queries @ gallery.T, axis=1)
    for k in (1, 10, 80):
        assert mean_of_best(queries, gallery, k, block=8) == pytest.approx(full[:, -min(k, 50) :].mean(1), abs=1e-5)


def test_csls_by_hand():
    rng = np.random.default_rng(2)
    text, image = rng.standard_normal((30, 6)).astype(np.float32), rng.standard_normal((20, 6)).astype(np.float32)
    pairs = np.stack([np.arange(30), np.arange(30) % 20], 1)
    scores = (text @ image.T).astype(np.float64)
    of_image = np.sort(scores, axis=0)[-4:].mean(0)
    of_text = np.sort(scores, axis=1)[:, -4:].mean(1)
    csls = 2 * scores - of_image[None, :] - of_text[:, None]
    t2i, _ = corrected_ranks(text, image, pairs, k=4)
    assert t2i.rank().tolist() == [1 + int((csls[c] > csls[c, c % 20]).sum()) for c in range(30)]


@pytest.mark.slow
def test_cxc_and_eccv_figures_equal_those_of_eccv_caption_on_its_own_ground_truth():
    package = pytest.importorskip("eccv_caption")
    from vlretrieval.evaluation.eccv_caption import GroundTruth

    truth = GroundTruth()
    rng = np.random.default_rng(0)
    image = rng.standard_normal((5000, 16)).astype(np.float32)
    text = np.repeat(image, 5, axis=0) + 0.8 * rng.standard_normal((25000, 16)).astype(np.float32)
    ours = truth.figures(text, image)

    def best(queries, gallery, ids, depth=200):
        rows = []
        for start in range(0, len(queries), 500):
            scores = queries[start : start + 500] @ gallery.T
            head = np.argpartition(-scores, depth, axis=1)[:, :depth]
            order = np.argsort(-np.take_along_axis(scores, head, axis=1), axis=1, kind="stable")
            rows += ids[np.take_along_axis(head, order, axis=1)].tolist()
        return rows

    assert max(len(v) for v in package.Metrics().eccv_gts["i2t"].values()) <= 200
    i2t = dict(zip(truth.image_id.tolist(), best(image, text, truth.caption_id), strict=True))
    t2i = dict(zip(truth.caption_id.tolist(), best(text, image, truth.image_id), strict=True))
    wanted = ("eccv_r1", "eccv_map_at_r", "eccv_rprecision", "coco_5k_recalls", "cxc_recalls")
    theirs = package.Metrics().compute_all_metrics(i2t, t2i, target_metrics=wanted, Ks=(1, 5, 10))
    for way in ("t2i", "i2t"):
        assert ours["eccv"][way]["mAP@R"] == pytest.approx(100 * theirs["eccv_map_at_r"][way])
        assert ours["eccv"][way]["R-precision"] == pytest.approx(100 * theirs["eccv_rprecision"][way])
        assert ours["eccv"][way]["R@1"] == pytest.approx(100 * theirs["eccv_r1"][way])
        for k in (1, 5, 10):
            assert ours["coco_5k"][way][f"R@{k}"] == pytest.approx(100 * theirs[f"coco_5k_r{k}"][way])
            assert ours["cxc"][way][f"R@{k}"] == pytest.approx(100 * theirs[f"cxc_r{k}"][way])

"""Ranks against a slow twin made of lists and sorting, and the traps that have cost others points of recall."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from vlretrieval.metrics import Fold, NonFiniteEmbedding, rank_both, recall_at
from vlretrieval.metrics.counting import count_true
from vlretrieval.metrics.ranks import TIE, Probes, check_positives, count_rivals
from vlretrieval.metrics.recall import both_directions, direction_figures, mean_reciprocal_rank, median_rank


def ranks_by_sorting(similarity, positives):
    """{query: (pessimistic, optimistic) rank of its first positive}; its other positives are taken out first."""
    ranks = {}
    for query, scores in enumerate(similarity.tolist()):
        good = {candidate for caption, candidate in positives if caption == query}
        if not good:
            continue
        best = max(good, key=lambda j: scores[j])
        field = [j for j in range(len(scores)) if j == best or j not in good]
        against = sorted(field, key=lambda j: (-scores[j], j == best))
        favour = sorted(field, key=lambda j: (-scores[j], j != best))
        ranks[query] = (1 + against.index(best), 1 + favour.index(best))
    return ranks


@st.composite
def galleries(draw, whole_numbers=True):
    """Small galleries with heavy ties (whole numbers), uneven captions, one-item galleries, many-to-many positives."""
    texts, images, width = draw(st.integers(1, 24)), draw(st.integers(1, 24)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    low, high = (-1, 2) if whole_numbers else (-1000, 1000)
    text = rng.integers(low, high, (texts, width)).astype(np.float32)
    image = rng.integers(low, high, (images, width)).astype(np.float32)
    pairs = draw(st.lists(st.tuples(st.integers(0, texts - 1), st.integers(0, images - 1)), min_size=1, max_size=40))
    return text, image, pairs


@settings(max_examples=150, deadline=None)
@given(galleries(), st.sampled_from([8, 16, 1024]))
def test_ranks_equal_those_of_sorting_with_ties_uneven_captions_and_many_positives(gallery, block):
    text, image, pairs = gallery
    t2i, i2t = rank_both(text, image, pairs, block)
    slow_t2i = ranks_by_sorting(text @ image.T, pairs)
    slow_i2t = ranks_by_sorting(image @ text.T, [(i, c) for c, i in pairs])
    for ranks, slow in ((t2i, slow_t2i), (i2t, slow_i2t)):
        assert ranks.query.tolist() == list(slow)
        assert ranks.rank("pessimistic").tolist() == [worst for worst, _ in slow.values()]
        assert ranks.rank("optimistic").tolist() == [best for _, best in slow.values()]
    assert t2i.left_out == len(text) - len(slow_t2i)


@settings(max_examples=60, deadline=None)
@given(galleries(), st.integers(1, 30))
def test_expected_recall_is_the_mean_over_random_orders_of_the_ties(gallery, k):
    text, image, pairs = gallery
    t2i, _ = rank_both(text, image, pairs)
    rng = np.random.default_rng(0)
    hits, places = t2i.hits(k, "expected"), t2i.rank("expected")
    for row in range(min(3, len(t2i))):
        group = np.r_[np.zeros(t2i.tied[row]), np.ones(t2i.good[row])]
        first = np.array([t2i.above[row] + 1 + np.argmax(rng.permutation(group)) for _ in range(600)])
        assert hits[row] == pytest.approx((first <= k).mean(), abs=0.09)
        assert places[row] == pytest.approx(first.mean(), abs=0.2 * (1 + t2i.tied[row]))


@settings(max_examples=25, deadline=None)
@given(galleries(whole_numbers=False), st.integers(0, 1000))
def test_no_rank_depends_on_block_size_or_order(gallery, seed):
    text, image, pairs = gallery
    text = text / np.maximum(np.linalg.norm(text, axis=1, keepdims=True), 1e-6)
    image = image / np.maximum(np.linalg.norm(image, axis=1, keepdims=True), 1e-6)
    base = rank_both(text, image, pairs)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(text))
    moved = rank_both(text[order], image, [(int(np.flatnonzero(order == c)[0]), i) for c, i in pairs], block=8)
    assert sorted(base[0].rank()) == sorted(moved[0].rank())
    assert base[1].rank().tolist() == moved[1].rank().tolist()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([8, 24, 1024]), st.integers(2, 200))
def test_ranks_are_those_of_exact_arithmetic_down_to_the_last_bit_of_an_embedding(seed, block, width):
    """Candidates that differ by one bit in one value, or not at all: float32 products cannot order them."""
    rng = np.random.default_rng(seed)
    text = rng.standard_normal((12, width)).astype(np.float32)
    image = np.repeat(rng.standard_normal((5, width)).astype(np.float32), 6, axis=0)
    for row in range(len(image)):
        if row % 6 < 4:
            at = rng.integers(width)
            image[row, at] = np.nextafter(image[row, at], np.float32(np.inf * rng.choice([-1, 1])))
    image = image[rng.permutation(len(image))]
    pairs = [(c, int(rng.integers(30))) for c in range(12)]
    t2i, _ = rank_both(text, image, pairs, block)
    exact = [[math.fsum(t * i for t, i in zip(a.tolist(), b.tolist(), strict=True)) for b in image] for a in text]
    longest = max(np.linalg.norm(image.astype(np.float64), axis=1))
    for row, (caption, own) in enumerate(pairs):
        reach = TIE * np.linalg.norm(text[caption].astype(np.float64)) * longest
        leads = [score - exact[caption][own] for i, score in enumerate(exact[caption]) if i != own]
        assume(not any(0.9 * reach < abs(lead) < 1.1 * reach for lead in leads))
        assert t2i.above[row] == sum(lead > reach for lead in leads)
        assert t2i.tied[row] == sum(abs(lead) <= reach for lead in leads)


def duplicated_gallery(images=700, width=96, seed=0):
    """Every picture twice under two ids, as in a crawl: all true scores are tied with the twin's."""
    rng = np.random.default_rng(seed)
    image = rng.standard_normal((images, width)).astype(np.float32)
    image /= np.linalg.norm(image, axis=1, keepdims=True)
    text = (image + 0.02 * rng.standard_normal(image.shape)).astype(np.float32)
    pairs = np.stack([np.arange(images)] * 2, axis=1)
    return text, np.concatenate([image, image]), pairs


@pytest.mark.parametrize("block", [8, 56, 64, 100, 255, 256, 1000, 1024, 4096])
def test_an_exact_duplicate_is_a_tie_in_any_block(block):
    text, image, pairs = duplicated_gallery()
    t2i, _ = rank_both(text, image, pairs, block)
    assert t2i.tied.tolist() == [1] * len(text)
    assert (recall_at(t2i, 1), recall_at(t2i, 1, "expected"), recall_at(t2i, 1, "optimistic")) == (0, 50, 100)


def test_a_positive_scored_by_another_product_keeps_its_rank():
    """The twin's score from a matrix product, its own from a row product: they differ in the last bit, not in rank."""
    text, image, pairs = duplicated_gallery()
    half = len(image) // 2
    matrix = text @ image.T
    alone = np.einsum("ij,ij->i", text, image[:half])
    assert (alone != matrix[np.arange(half), np.arange(half)]).any(), "this machine cannot show the trap"
    naive = 1 + (matrix > alone[:, None]).sum(1)  # what loses points: 1 or 2 by the last bit
    assert len(set(naive.tolist())) > 1
    exact = np.einsum("ij,ij->i", text, image[:half], dtype=np.float64)
    for own in (exact, alone.astype(np.float64) + (exact - alone)):
        probes = Probes(np.arange(half), own)
        nobody = Probes(np.zeros(0, np.int64), np.zeros(0))
        norms = np.linalg.norm(text, axis=1), np.linalg.norm(image, axis=1)
        (above, tied), _ = count_rivals(text, image, check_positives(pairs, half, 2 * half), probes, nobody, *norms)
        assert (above == 0).all() and (tied == 1).all()


def test_all_equal_scores_are_no_recall_by_default_and_the_bounds_say_so():
    same = np.full((12, 4), 0.5, np.float32)
    figures = direction_figures(rank_both(same, same, [(i, i) for i in range(12)])[0], [1, 5, 12])
    assert figures["R@1"] == 0 and figures["R@12"] == 100 and figures["median_rank"] == 12
    assert figures["ties"]["R@1"] == pytest.approx([0, 100 / 12, 100])
    assert figures["tied_share"] == 100


def test_scores_rounded_to_bfloat16_show_their_doubt_as_ties():
    """Cosines of a trained model crowd between 0.2 and 0.3, where bfloat16 has 103 values."""
    rng = np.random.default_rng(0)
    scores = (0.25 + 0.01 * rng.standard_normal((400, 400)) + 0.03 * np.eye(400)).astype(np.float32)
    rounded = ((scores.view(np.uint32) + 0x8000) & 0xFFFF0000).view(np.float32)
    gallery, pairs = np.eye(400, dtype=np.float32), [(i, i) for i in range(400)]  # the scores themselves as embeddings
    exact, _ = rank_both(scores, gallery, pairs)
    coarse, _ = rank_both(rounded, gallery, pairs)
    assert exact.tied_share == 0 and coarse.tied_share > 0.1
    low, true, high = recall_at(coarse, 1), recall_at(exact, 1), recall_at(coarse, 1, "optimistic")
    assert low < true < high and high - low > 5


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", ["text", "image"])
def test_a_non_finite_embedding_is_an_error_that_names_its_first_row(value, which):
    arrays = {"text": np.ones((9, 4), np.float32), "image": np.ones((7, 4), np.float32)}
    arrays[which][5, 2] = value
    arrays[which][6, 0] = value
    with pytest.raises(NonFiniteEmbedding, match=rf"{which} embedding 5 of \d is not finite .* column 2; 2 such rows"):
        rank_both(arrays["text"], arrays["image"], [(0, 0)])


@pytest.mark.parametrize("size", [1e30, 1e-24])
def test_very_large_and_very_small_embeddings_are_ranked(size):
    rng = np.random.default_rng(0)
    text, image = rng.standard_normal((30, 6)), rng.standard_normal((20, 6))
    pairs = [(c, c % 20) for c in range(30)]
    plain, _ = rank_both(text.astype(np.float32), image.astype(np.float32), pairs)
    small = 1 if size > 1 else size
    scaled, _ = rank_both((small * text).astype(np.float32), (size * image).astype(np.float32), pairs)
    assert scaled.rank().tolist() == plain.rank().tolist()
    with pytest.raises(ValueError, match="overflow float32"):
        rank_both((1e20 * text).astype(np.float32), (1e20 * image).astype(np.float32), pairs)


def test_images_without_captions_are_left_out_and_counted():
    text, image = np.eye(3, 6, dtype=np.float32), np.eye(6, dtype=np.float32)
    _, i2t = rank_both(text, image, [(0, 0), (1, 1), (2, 2)])
    assert (len(i2t), i2t.left_out, recall_at(i2t, 1)) == (3, 3, 100)


def test_k_beyond_the_gallery_takes_all_of_it():
    text, image = np.eye(2, dtype=np.float32), np.eye(2, dtype=np.float32)
    t2i, _ = rank_both(text, image[::-1], [(0, 0), (1, 1)])
    assert (recall_at(t2i, 1), recall_at(t2i, 2), recall_at(t2i, 10)) == (0, 100, 100)
    with pytest.raises(ValueError, match="k=0"):
        recall_at(t2i, 0)


def test_captions_of_one_image_are_never_rivals_of_each_other():
    """The perfect model of five captions an image: 100 %, where own pairs alone on the diagonal would give 20 %."""
    image = np.eye(8, dtype=np.float32)
    text = np.repeat(image, 5, axis=0)
    t2i, i2t = rank_both(text, image, [(c, c // 5) for c in range(40)])
    assert recall_at(t2i, 1) == recall_at(i2t, 1) == 100


def test_the_first_caption_alone_is_another_gallery():
    rng = np.random.default_rng(1)
    image = rng.standard_normal((60, 16)).astype(np.float32)
    text = np.repeat(image, 5, axis=0) + 1.6 * rng.standard_normal((300, 16)).astype(np.float32)
    _, all_five = rank_both(text, image, [(c, c // 5) for c in range(300)])
    _, first = rank_both(text[::5], image, [(c, c) for c in range(60)])
    assert (all_five.gallery, first.gallery) == (300, 60)
    assert recall_at(all_five, 1) > recall_at(first, 1) + 5


@pytest.mark.parametrize(
    ("positives", "message"),
    [([(0, 9)], r"positive pair 0 is \[0, 9\], but there are 4 captions"), ([], "at least one"), ([1, 2], "P, 2")],
)
def test_positives_that_do_not_fit_are_refused(positives, message):
    with pytest.raises(ValueError, match=message):
        rank_both(np.ones((4, 2), np.float32), np.ones((3, 2), np.float32), positives)


def test_two_widths_are_refused():
    with pytest.raises(ValueError, match="text embeddings are 2 wide, image embeddings 3"):
        rank_both(np.ones((4, 2), np.float32), np.ones((3, 3), np.float32), [(0, 0)])


def test_memory_mapped_half_precision_galleries_rank_the_same(tmp_path):
    rng = np.random.default_rng(0)
    image = rng.standard_normal((50, 8)).astype(np.float16)
    text = rng.standard_normal((90, 8)).astype(np.float16)
    np.save(tmp_path / "image.npy", image)
    pairs = [(c, c % 50) for c in range(90)]
    mapped = rank_both(text, np.load(tmp_path / "image.npy", mmap_mode="r"), pairs, block=16)
    plain = rank_both(text.astype(np.float32), image.astype(np.float32), pairs)
    assert [r.rank().tolist() for r in mapped] == [r.rank().tolist() for r in plain]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 700), st.integers(1, 700), st.integers(0, 100), st.integers(0, 9))
def test_counting_bytes_equals_counting(rows, columns, percent, seed):
    mask = np.random.default_rng(seed).random((rows, columns)) < percent / 100
    for axis in (0, 1):
        assert (count_true(mask, axis) == mask.sum(axis)).all()


def test_counts_of_2000_and_more_in_a_row_do_not_wrap():
    mask = np.ones((2500, 2504), bool)
    assert (count_true(mask, 0) == 2500).all() and (count_true(mask, 1) == 2504).all()


def test_both_directions_and_their_intervals_hold_the_point_estimate():
    rng = np.random.default_rng(3)
    image = rng.standard_normal((80, 16)).astype(np.float32)
    text = np.repeat(image, 3, axis=0) + 1.4 * rng.standard_normal((240, 16)).astype(np.float32)
    owner = np.arange(240) // 3
    fold = Fold(*rank_both(text, image, np.stack([np.arange(240), owner], axis=1)), owner)
    result = both_directions([fold], (1, 5, 10), replicates=300)
    for way in ("t2i", "i2t"):
        for name, (low, high) in result[way]["interval"].items():
            assert low <= result[way][name] <= high, (way, name)
    low, high = result["rsum_interval"]
    assert low < result["rsum"] < high
    assert result["rsum"] == sum(result[way][f"R@{k}"] for way in ("t2i", "i2t") for k in (1, 5, 10))
    assert result == both_directions([fold], (1, 5, 10), replicates=300), "same seed, same interval"
    assert "interval" not in both_directions([fold], replicates=0)["t2i"]


def test_captions_of_one_picture_widen_the_interval():
    """50 pictures x 20 captions that stand or fall together are 50 observations, not 1000."""
    from vlretrieval.metrics import bootstrap_means, cluster_sums, interval

    hit = np.repeat(np.arange(50) % 2, 20).astype(float)
    together = interval(bootstrap_means(*cluster_sums(hit, np.repeat(np.arange(50), 20), 50)))[0]
    alone = interval(bootstrap_means(*cluster_sums(hit, np.arange(1000), 1000)))[0]
    assert np.ptp(together) == pytest.approx(4 * 0.5 / 50**0.5, rel=0.15)
    assert np.ptp(together) > 4 * np.ptp(alone)


def test_mrr_and_median_of_known_ranks():
    image = np.eye(4, dtype=np.float32)
    text = np.array([[1, 0, 0, 0], [3, 2, 1, 0], [3, 2, 1, 0], [4, 3, 2, 1]], np.float32)
    t2i, _ = rank_both(text, image, [(i, i) for i in range(4)])
    assert t2i.rank().tolist() == [1, 2, 3, 4]
    assert median_rank(t2i) == 2.5 and mean_reciprocal_rank(t2i) == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4)


def test_memory_is_a_few_blocks_whatever_the_gallery():
    """The full matrix would be 216 MB here, and its order twice that."""
    rng = np.random.default_rng(0)
    text, image = rng.standard_normal((9000, 4), np.float32), rng.standard_normal((6000, 4), np.float32)
    pairs = np.stack([np.arange(9000), np.arange(9000) % 6000], axis=1)
    rank_both(text[:2000], image, pairs[:2000])
    tracemalloc.start()
    rank_both(text, image, pairs)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20

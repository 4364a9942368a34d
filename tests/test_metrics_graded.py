"""mAP@R, AP, R-precision, nDCG: against a slow twin and against scikit-learn."""

import numpy as np
import pytest
from hypothesis import given, settings

from tests.test_metrics_ranks import galleries
from vlretrieval.metrics import mean_reciprocal_rank, rank_both
from vlretrieval.metrics.graded import (
    average_precision,
    average_precision_at_r,
    graded_figures,
    ndcg,
    positive_places,
    precision_at_r,
    true_recall,
)


def by_sorting(scores, good):
    """One query's figures from its sorted list, wrong candidates first at an equal score."""
    order = sorted(range(len(scores)), key=lambda j: (-scores[j], good[j]))
    hits = [good[j] for j in order]
    total = sum(hits)
    precision = [sum(hits[: i + 1]) / (i + 1) for i in range(len(hits))]
    ideal = sum(1 / np.log2(i + 2) for i in range(min(total, 5)))
    return {
        "map_at_r": sum(p for p, hit in zip(precision[:total], hits, strict=False) if hit) / total,
        "ap": sum(p for p, hit in zip(precision, hits, strict=True) if hit) / total,
        "r_precision": sum(hits[:total]) / total,
        "ndcg5": sum(hit / np.log2(i + 2) for i, hit in enumerate(hits[:5])) / ideal,
        "recall3": sum(hits[:3]) / total,
    }


@settings(max_examples=100)
@given(galleries())
def test_every_figure_equals_its_definition_on_the_sorted_list(gallery):
    text, image, pairs = gallery
    scores, good = text @ image.T, np.zeros((len(text), len(image)), bool)
    good[tuple(np.array(pairs).T)] = True
    for places, table, true in zip(
        positive_places(text, image, pairs, block=8), (scores, scores.T), (good, good.T), strict=True
    ):
        assert places.query.tolist() == np.flatnonzero(true.any(1)).tolist()
        slow = [by_sorting(table[q].tolist(), true[q].tolist()) for q in places.query]
        for name, fast in (
            ("map_at_r", average_precision_at_r(places)),
            ("ap", average_precision(places)),
            ("r_precision", precision_at_r(places)),
            ("ndcg5", ndcg(places, 5)),
            ("recall3", true_recall(places, 3)),
        ):
            assert fast == pytest.approx([row[name] for row in slow]), name


def test_figures_equal_those_of_scikit_learn():
    sklearn = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    text, image = rng.standard_normal((60, 8)).astype(np.float32), rng.standard_normal((40, 8)).astype(np.float32)
    good = rng.random((60, 40)) < 0.1
    good[:, 0] |= ~good.any(1)
    scores = text.astype(np.float64) @ image.T.astype(np.float64)
    pairs = np.argwhere(good)
    places, _ = positive_places(text, image, pairs)
    assert average_precision(places) == pytest.approx(
        [sklearn.average_precision_score(good[q], scores[q]) for q in range(60)]
    )
    for k in (None, 1, 5, 200):
        assert ndcg(places, k).mean() == pytest.approx(sklearn.ndcg_score(good, scores, k=k))
    one = np.zeros_like(good)
    one[np.arange(60), rng.integers(0, 40, 60)] = True
    t2i, _ = rank_both(text, image, np.argwhere(one))
    assert mean_reciprocal_rank(t2i) == pytest.approx(sklearn.label_ranking_average_precision_score(one, scores))


def test_many_positives_to_a_query_are_counted_in_bounded_pieces():
    rng = np.random.default_rng(1)
    text, image = rng.standard_normal((30, 4)).astype(np.float32), rng.standard_normal((25, 4)).astype(np.float32)
    good = rng.random((30, 25)) < 0.7
    small = positive_places(text, image, np.argwhere(good), block=8)
    large = positive_places(text, image, np.argwhere(good), block=1024)
    for a, b in zip(small, large, strict=True):
        assert a.place.tolist() == b.place.tolist()


def test_a_perfect_model_has_everything_at_its_best_and_all_equal_scores_at_its_worst():
    image = np.eye(6, dtype=np.float32)
    pairs = [(c, c // 3) for c in range(18)]
    perfect = positive_places(np.repeat(image, 3, axis=0), image, pairs)
    for places in perfect:
        figures = graded_figures(places, [1, 5])
        assert figures["mAP@R"] == figures["R-precision"] == 100 and figures["nDCG"] == 1
    collapsed = positive_places(np.ones((18, 2), np.float32), np.ones((6, 2), np.float32), pairs)
    assert graded_figures(collapsed[1], [1])["mAP@R"] == 0
    assert (collapsed[1].place.reshape(6, 3) == [16, 17, 18]).all()

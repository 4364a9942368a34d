"""Losses against slow twins, and what must always hold of them."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from vlretrieval.losses import (
    info_nce,
    matching_loss,
    max_hinge,
    positive_pairs,
    sample_hard_negatives,
    sigmoid_loss,
)


def unit(*shape, seed=0):
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


def random_positives(rows, seed):
    ids = torch.randint(0, max(2, rows // 2), (rows,), generator=torch.Generator().manual_seed(seed))
    return ids[:, None] == ids[None]


def info_nce_by_loops(image, text, scale, positives):
    """Each query's mean of -log softmax over its positives, plain Python."""
    total = 0.0
    for queries, gallery in ((image, text), (text, image)):
        for i, query in enumerate(queries.tolist()):
            scores = [scale * sum(a * b for a, b in zip(query, other, strict=True)) for other in gallery.tolist()]
            top = max(scores)
            log_sum = top + math.log(sum(math.exp(s - top) for s in scores))
            own = [j for j in range(len(scores)) if positives[i][j]]
            total += sum(log_sum - scores[j] for j in own) / len(own) / len(queries)
    return total / 2


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 9), seed=st.integers(0, 10**6), scale=st.floats(0.5, 30))
def test_info_nce_equals_its_slow_twin(rows, seed, scale):
    image, text, positives = unit(rows, 5, seed=seed), unit(rows, 5, seed=seed + 1), random_positives(rows, seed)
    ours = info_nce(image, text, torch.tensor(scale), positives)
    assert ours.item() == pytest.approx(info_nce_by_loops(image, text, scale, positives.tolist()), rel=1e-4, abs=1e-5)


def test_info_nce_without_positives_takes_the_diagonal():
    image, text = unit(6, 4), unit(6, 4, seed=1)
    diagonal = info_nce(image, text, torch.tensor(10.0), torch.eye(6, dtype=torch.bool))
    assert info_nce(image, text, torch.tensor(10.0)).item() == pytest.approx(diagonal.item(), rel=1e-6)


def test_collapsed_embeddings_score_chance():
    same = unit(1, 4).expand(8, 4)
    assert info_nce(same, same, torch.tensor(5.0)).item() == pytest.approx(math.log(8))


def test_a_second_caption_of_the_same_image_is_no_negative():
    image = unit(4, 8)
    image = torch.cat([image, image[:1]])  # the first image twice, perfectly matched by its captions
    ids = torch.tensor([0, 1, 2, 3, 0])
    known = info_nce(image, image, torch.tensor(100.0), positive_pairs(ids, torch.arange(5), ids, torch.arange(5)))
    unknown = info_nce(image, image, torch.tensor(100.0))
    assert known < unknown or known.item() == pytest.approx(2 / 5 * math.log(2), abs=1e-3)


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 7), seed=st.integers(0, 10**6))
def test_sigmoid_loss_equals_its_slow_twin(rows, seed):
    image, text, positives = unit(rows, 5, seed=seed), unit(rows, 5, seed=seed + 1), random_positives(rows, seed)
    slow = 0.0
    for i in range(rows):
        for j in range(rows):
            logit = 7.0 * float(image[i] @ text[j]) - 3.0
            slow += math.log1p(math.exp(-logit if positives[i, j] else logit)) / rows
    ours = sigmoid_loss(image, text, torch.tensor(7.0), positives, logit_bias=torch.tensor(-3.0))
    assert ours.item() == pytest.approx(slow, rel=1e-4)


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 7), seed=st.integers(0, 10**6))
def test_max_hinge_equals_its_slow_twin(rows, seed):
    image, text, positives = unit(rows, 5, seed=seed), unit(rows, 5, seed=seed + 1), random_positives(rows, seed)
    slow = 0.0
    for queries, gallery in ((image, text), (text, image)):
        for i in range(rows):
            wrong = [float(queries[i] @ gallery[j]) for j in range(rows) if not positives[i, j]]
            if wrong:
                slow += max(0.0, 0.2 + max(wrong) - float(image[i] @ text[i])) / rows
    assert max_hinge(image, text, positives=positives).item() == pytest.approx(slow, abs=1e-5)


@pytest.mark.parametrize("loss", [info_nce, partial(sigmoid_loss, logit_bias=-2.0), max_hinge])
def test_order_of_the_batch_does_not_matter(loss):
    image, text, positives = unit(9, 6), unit(9, 6, seed=1), random_positives(9, 3)
    turn = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    straight = loss(image, text, torch.tensor(9.0), positives)
    turned = loss(image[turn], text[turn], torch.tensor(9.0), positives[turn][:, turn])
    assert straight.item() == pytest.approx(turned.item(), rel=1e-5)


@pytest.mark.parametrize("loss", [info_nce, partial(sigmoid_loss, logit_bias=-2.0), max_hinge])
def test_a_rank_s_rows_against_all_columns_average_to_the_whole_batch(loss):
    image, text, positives = unit(8, 6), unit(8, 6, seed=1), random_positives(8, 5)
    whole = loss(image, text, torch.tensor(9.0), positives)
    parts = [
        loss(image[rows], text[rows], torch.tensor(9.0), positives[rows], all_image_emb=image, all_text_emb=text)
        if loss is not None
        else None
        for rows in (slice(0, 4), slice(4, 8))
    ]
    assert torch.stack(parts).mean().item() == pytest.approx(whole.item(), rel=1e-5)


@pytest.mark.parametrize("loss", [info_nce, sigmoid_loss, max_hinge])
def test_a_batch_of_one_and_a_batch_of_one_image_are_finite(loss):
    for rows in (1, 5):
        image = unit(rows, 4).requires_grad_()
        value = loss(image, unit(rows, 4, seed=1), torch.tensor(10.0), torch.ones(rows, rows, dtype=torch.bool))
        value.backward()
        assert torch.isfinite(value) and torch.isfinite(image.grad).all()


def test_hard_negatives_are_never_positives():
    positives = random_positives(40, 1)
    index, drawn = sample_hard_negatives(torch.randn(40, 40) * 50, positives, 3)
    assert not positives.gather(1, index)[drawn].any()


def test_a_row_without_a_negative_draws_nothing_and_the_others_go_on():
    positives = torch.zeros(4, 4, dtype=torch.bool)
    positives[0] = True
    index, drawn = sample_hard_negatives(torch.zeros(4, 4), positives, 2)
    assert drawn.tolist() == [False, True, True, True] and (index[0] == 0).all()
    assert not sample_hard_negatives(torch.zeros(3, 3), torch.ones(3, 3, dtype=torch.bool)).drawn.any()


def test_fewer_negatives_than_asked_for_are_repeated_not_padded_with_positives():
    positives = torch.tensor([[True, False, True], [False, True, False], [False, False, True]])
    index, drawn = sample_hard_negatives(torch.zeros(3, 3), positives, 4)
    assert drawn.all() and (index[0] == 1).all() and not positives.gather(1, index).any()


def test_hard_negatives_are_drawn_in_proportion_to_their_exponential():
    scores = torch.tensor([[0.0, math.log(3.0), math.log(6.0)]]).expand(20_000, 3)
    torch.manual_seed(0)
    index, _ = sample_hard_negatives(scores, torch.zeros(20_000, 3, dtype=torch.bool))
    share = torch.bincount(index.flatten(), minlength=3) / 20_000
    assert share.tolist() == pytest.approx([0.1, 0.3, 0.6], abs=0.02)


def test_extreme_scores_still_draw():
    scores = torch.tensor([[1e4, -1e4, 0.0]])
    assert sample_hard_negatives(scores, torch.tensor([[True, False, False]])).index.item() == 2


def test_matching_loss_weighs_true_and_false_pairs_equally():
    true, false = torch.zeros(2), torch.zeros(10)
    assert matching_loss(true, false).item() == pytest.approx(math.log(2))
    sure = matching_loss(torch.full((2,), 9.0), torch.full((10,), -9.0))
    assert sure.item() == pytest.approx(math.log1p(math.exp(-9.0)), rel=1e-4)


def test_matching_loss_leaves_out_what_could_not_be_drawn():
    true = torch.tensor([1.0])
    masked = matching_loss(true, torch.tensor([5.0, -1.0]), torch.tensor([False, True]))
    assert masked.item() == pytest.approx(matching_loss(true, torch.tensor([-1.0])).item())
    none = matching_loss(true, torch.tensor([5.0]), torch.tensor([False]))
    assert none.item() == pytest.approx(math.log1p(math.exp(-1.0)) / 2)

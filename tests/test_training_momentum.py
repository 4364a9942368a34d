"""Momentum encoder, queue and distillation."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_training import tiny_batch, tiny_model

from vlretrieval import losses
from vlretrieval.training.momentum import Momentum, MomentumEncoder
from vlretrieval.training.objective import Objective
from vlretrieval.training.task import RetrievalTask


def unit(*shape, seed=0):
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


def soft_info_nce_by_loops(queries, teachers, gallery, scale, positives, share):
    def softmax(scores):
        top = max(scores)
        weights = [math.exp(s - top) for s in scores]
        return [w / sum(weights) for w in weights]

    total = 0.0
    for query, teacher, good in zip(queries, teachers, positives, strict=True):
        predicted = softmax([scale * float(query @ g) for g in gallery])
        soft = softmax([scale * float(teacher @ g) for g in gallery])
        for p, s, positive in zip(predicted, soft, good.tolist(), strict=True):
            total -= (share * s + (1 - share) * positive / int(good.sum())) * math.log(p) / len(queries)
    return total


@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 5), extra=st.integers(0, 6), share=st.floats(0, 1), seed=st.integers(0, 10**6))
def test_momentum_info_nce_equals_its_slow_twin(rows, extra, share, seed):
    image, text, teacher_image, teacher_text = (unit(rows, 5, seed=seed + i) for i in range(4))
    gallery_image, gallery_text = unit(rows + extra, 5, seed=seed + 5), unit(rows + extra, 5, seed=seed + 6)
    ids = torch.arange(rows + extra) % 4
    positives = ids[:rows, None] == ids
    ours = losses.momentum_info_nce(
        image,
        text,
        torch.tensor(6.0),
        positives,
        teacher_image=teacher_image,
        teacher_text=teacher_text,
        gallery_image=gallery_image,
        gallery_text=gallery_text,
        soft_share=share,
    )
    slow = (
        soft_info_nce_by_loops(image, teacher_image, gallery_text, 6.0, positives, share)
        + soft_info_nce_by_loops(text, teacher_text, gallery_image, 6.0, positives, share)
    ) / 2
    assert ours.item() == pytest.approx(slow, rel=1e-4)


def test_without_soft_targets_and_queue_it_is_info_nce_against_the_twin():
    image, text = unit(6, 4), unit(6, 4, seed=1)
    eye = torch.eye(6, dtype=torch.bool)
    gallery = dict(teacher_image=image, teacher_text=text, gallery_image=image, gallery_text=text)
    ours = losses.momentum_info_nce(image, text, torch.tensor(9.0), eye, soft_share=0.0, **gallery)
    assert ours.item() == pytest.approx(losses.info_nce(image, text, torch.tensor(9.0)).item(), rel=1e-6)


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), max_size=6), queue=st.integers(0, 8))
def test_the_ring_holds_the_last_pairs_whatever_the_batch_sizes(sizes, queue):
    encoder = MomentumEncoder(tiny_model(0, 0), Momentum(queue=queue))
    written = []
    for size in sizes:
        ids = torch.arange(len(written), len(written) + size)
        written += ids.tolist()
        encoder._remember((torch.rand(size, 8), torch.rand(size, 8), ids, ids + 100))
    filled = min(len(written), queue)
    assert sorted(encoder.image_ids[:filled].tolist()) == written[len(written) - filled :]
    assert (encoder.caption_ids[:filled] == encoder.image_ids[:filled] + 100).all()


def test_what_is_not_finite_does_not_enter_the_queue():
    encoder = MomentumEncoder(tiny_model(0, 0), Momentum(queue=4))
    rows = torch.ones(3, 8)
    rows[1, 2] = torch.nan
    encoder._remember((rows, torch.ones(3, 8), torch.arange(3), torch.arange(3)))
    assert encoder.image_ids[:2].tolist() == [0, 2] and int(encoder.written) == 2


def test_the_same_picture_in_the_queue_is_no_negative():
    encoder = MomentumEncoder(tiny_model(), Momentum(queue=20))
    batch = tiny_batch(rows=4)
    encoder.teach(batch)
    again = encoder.teach(batch)
    assert again.gallery_image.shape == (8, 8)
    assert torch.equal(again.positives, torch.cat([torch.eye(4), torch.eye(4)], 1).bool())


def test_the_twin_follows_the_model_and_gets_no_gradient():
    model = tiny_model()
    task = RetrievalTask(model, Objective(losses.info_nce, momentum=Momentum(decay=0.75, queue=6)), None)
    for _ in range(3):  # the queue fills and wraps
        loss, parts = task.objective(model, task.encode(tiny_batch(rows=4)))
    loss.backward()
    twin = task.momentum.twin
    assert torch.isfinite(loss) and all(p.grad is None for p in twin.parameters()) and not twin.training
    before = twin.text_projection.weight.clone()
    with torch.no_grad():
        model.text_projection.weight += 4.0
    task.momentum.update(model)
    torch.testing.assert_close(twin.text_projection.weight, before + 1.0)


def test_soft_targets_grow_in():
    settings_ = Momentum(soft_share=0.4, ramp=0.2)
    assert [settings_.share_at(p) for p in (0.0, 0.1, 0.2, 1.0)] == pytest.approx([0.0, 0.2, 0.4, 0.4])


def test_distillation_is_nought_where_both_agree_and_moves_the_dual_encoder_alone():
    logits = torch.randn(5, 4)
    assert losses.distillation_loss(logits, logits + 3.0).item() == pytest.approx(0.0, abs=1e-6)
    student, teacher = torch.randn(5, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    valid = torch.ones(5, 3, dtype=torch.bool)
    valid[0] = False  # no negative at all
    loss = losses.distillation_loss(student, teacher, valid)
    loss.backward()
    assert loss > 0 and teacher.grad is None and torch.isfinite(student.grad).all() and (student.grad[0] == 0).all()


def test_distillation_equals_its_slow_twin():
    student, teacher = torch.randn(3, 4), torch.randn(3, 4)
    slow = 0.0
    for s, t in zip(student.softmax(1).tolist(), teacher.softmax(1).tolist(), strict=True):
        slow += sum(q * math.log(q / p) for p, q in zip(s, t, strict=True)) / 3
    assert losses.distillation_loss(student, teacher).item() == pytest.approx(slow, rel=1e-4)


@pytest.mark.parametrize(
    "settings_, message",
    [
        (dict(decay=1.0), r"decay=1.0 must be in \[0, 1\)"),
        (dict(queue=-1), "queue=-1 is negative; 0 leaves the queue out"),
    ],
)
def test_impossible_settings_are_refused(settings_, message):
    with pytest.raises(ValueError, match=message):
        Momentum(**settings_)


def test_settings_without_effect_are_refused():
    with pytest.raises(ValueError, match="momentum has no effect with contrastive_weight=0"):
        Objective(losses.info_nce, contrastive_weight=0.0, momentum=Momentum())
    with pytest.raises(ValueError, match="nothing trains the cross-modal heads"):
        Objective(losses.info_nce, matching_weight=0.0, distillation_weight=1.0)
    with pytest.raises(ValueError, match="distillation_weight needs cross-modal heads"):
        RetrievalTask(tiny_model(0, 0), Objective(losses.info_nce, distillation_weight=1.0), None)
    with pytest.raises(ValueError, match="init_logit_bias has no effect on this contrastive loss"):
        RetrievalTask(tiny_model(init_logit_bias=-10.0), Objective(losses.info_nce), None)


def test_the_sigmoid_loss_trains_the_model_s_bias():
    model = tiny_model(0, 0, init_logit_bias=-10.0)
    task = RetrievalTask(model, Objective(losses.sigmoid_loss), None)
    loss, _ = task.objective(model, task.encode(tiny_batch()))
    loss.backward()
    assert model.logit_bias.grad is not None and model.logit_bias.grad != 0

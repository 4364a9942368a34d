"""The objective: who meets whom, and that length buckets do not change the loss."""

from __future__ import annotations

import math

import hydra
import pytest
import torch
from tiny_training import config, tiny_batch, tiny_model

from vlretrieval import losses
from vlretrieval.training.matching import matching_logits
from vlretrieval.training.objective import Objective
from vlretrieval.training.task import RetrievalTask


def loss_and_gradients(model, batch, objective):
    task = RetrievalTask(model, objective, None)
    loss, parts = objective(model, task.encode(batch))
    model.zero_grad()
    loss.backward()
    return loss.detach(), parts, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("buckets", [2, 3, 8])
def test_length_buckets_change_neither_loss_nor_gradients(buckets):
    model, batch = tiny_model(), tiny_batch()
    plain, _, expected = loss_and_gradients(model, batch, Objective(losses.info_nce, matching_negatives=2))
    sorted_, _, got = loss_and_gradients(
        model, batch, Objective(losses.info_nce, matching_negatives=2, length_buckets=buckets)
    )
    assert sorted_.item() == pytest.approx(plain.item(), rel=1e-5)
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-5)


def test_of_a_share_of_the_pairs_only_those_meet_the_data_s_negatives():
    model, batch = tiny_model(), tiny_batch()
    objective = Objective(losses.info_nce, contrastive_weight=0.0, matching_share=0.5)
    before, _, _ = loss_and_gradients(model, batch, objective)
    whole, _, _ = loss_and_gradients(model, batch, Objective(losses.info_nce, contrastive_weight=0.0))
    batch.negative_token_ids[4:] = batch.negative_token_ids[4:].flip(-1)
    after, _, _ = loss_and_gradients(model, batch, objective)
    changed, _, _ = loss_and_gradients(model, batch, Objective(losses.info_nce, contrastive_weight=0.0))
    assert before.item() == after.item() and before.item() != whole.item() != changed.item()


def test_residual_ranking_orders_by_both_scores_and_leaves_the_embeddings_alone():
    model, batch = tiny_model(), tiny_batch()
    settings = dict(contrastive_weight=0.0, matching_weight=0.0, ranking_weight=1.0, matching_negatives=2)
    loss, _, gradients = loss_and_gradients(model, batch, Objective(losses.info_nce, ranking_residual=True, **settings))
    plain, _, _ = loss_and_gradients(model, batch, Objective(losses.info_nce, **settings))
    with torch.no_grad():
        pairs = RetrievalTask(model, Objective(losses.info_nce), None).encode(batch)
        logits = matching_logits(model, pairs, count=2)
    expected = []
    for i in range(len(pairs.image)):
        image, text, scale = pairs.image.embedding[i], pairs.text.embedding[i], model.logit_scale.item()
        true = scale * float(image @ text) + float(logits.by_image[i, 0])
        for false, valid, mine, others in (
            (logits.by_image[i, 1:], logits.image_valid[i], image, logits.image_candidates[i, 1:]),
            (logits.by_text[i], logits.text_valid[i], text, logits.text_candidates[i]),
        ):
            scores = [true]
            for logit, real, other in zip(false, valid, others, strict=True):
                if real:
                    scores.append(scale * float(mine @ other) + float(logit))
            expected.append(math.log(sum(math.exp(score - true) for score in scores)))
    assert loss.item() == pytest.approx(sum(expected) / len(expected), rel=1e-4)
    assert abs(loss.item() - plain.item()) > 1e-3
    for name in ("image_projection.weight", "text_projection.weight", "log_logit_scale"):
        assert not gradients.get(name, torch.zeros(1)).any()
    with pytest.raises(ValueError, match="ranking_residual=true has no effect with ranking_weight=0"):
        Objective(losses.info_nce, ranking_residual=True)


def test_every_part_of_the_model_gets_a_gradient():
    model = tiny_model(joint=2)
    _, parts, gradients = loss_and_gradients(model, tiny_batch(), Objective(losses.info_nce))
    assert set(gradients) == {name for name, _ in model.named_parameters()}
    assert set(parts) == {"contrastive", "matching", "matching_accuracy"}


def test_a_plain_dual_encoder_trains_on_the_contrastive_loss_alone():
    model = tiny_model(0, 0)
    loss, parts, _ = loss_and_gradients(model, tiny_batch(), Objective(losses.info_nce, matching_weight=1.0))
    assert model.crossmodal is None and set(parts) == {"contrastive"} and loss.item() == parts["contrastive"].item()


def test_a_batch_of_one_image_has_no_negatives_and_a_finite_loss():
    loss, _, gradients = loss_and_gradients(tiny_model(), tiny_batch(images=[5] * 8), Objective(losses.info_nce))
    assert torch.isfinite(loss) and all(torch.isfinite(g).all() for g in gradients.values())


def test_a_batch_of_one_pair_is_finite():
    loss, _, gradients = loss_and_gradients(tiny_model(), tiny_batch(rows=1), Objective(losses.info_nce))
    assert torch.isfinite(loss) and all(torch.isfinite(g).all() for g in gradients.values())


def test_weights_of_nothing_are_refused():
    with pytest.raises(ValueError, match="one must be above 0"):
        Objective(losses.info_nce, contrastive_weight=0, matching_weight=0)


def test_activation_checkpointing_by_config_changes_no_gradient(tmp_path):
    parts = ("image_encoder", "text_encoder", "crossmodal")
    words = [f"model.{part}.dropout=0.2" for part in parts] + ["model.image_encoder.patch_dropout=0.3"]

    def step(*more):
        torch.manual_seed(0)
        model = hydra.utils.instantiate(config(tmp_path, *words, *more).model).train()
        torch.manual_seed(1)
        return loss_and_gradients(model, tiny_batch(), Objective(losses.info_nce))

    plain, _, expected = step()
    again, _, got = step(*(f"model.{part}.activation_checkpointing=true" for part in parts))
    assert again.item() == plain.item() and len(expected) > 40
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-5, atol=1e-7, msg=name)

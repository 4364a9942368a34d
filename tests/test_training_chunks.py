"""Gradient caching: a batch computed in chunks has the loss and the gradients of the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_training import tiny_batch, tiny_model

from vlretrieval import losses
from vlretrieval.model.encoded import Encoded
from vlretrieval.training import chunks, matching, task
from vlretrieval.training.objective import Objective
from vlretrieval.training.task import RetrievalTask

TWO_CAPTIONS_OF_ONE = [0, 1, 2, 3, 0, 5, 6, 7]


def step(model, batch, **settings):
    """Loss and gradients of one training step."""
    model.train()
    model.zero_grad()
    settings = dict(ranking_weight=1.0, distillation_weight=0.5, matching_negatives=2) | settings
    module = RetrievalTask(model, Objective(losses.info_nce, **settings), None)
    torch.manual_seed(3)
    loss, _ = module.objective(model, module.encode(batch))
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(one, other):
    assert one[0].item() == pytest.approx(other[0].item(), rel=1e-5)
    assert one[1].keys() == other[1].keys() and len(one[1]) > 40
    for name, gradient in one[1].items():
        torch.testing.assert_close(other[1][name], gradient, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("chunk, buckets", [(1, 1), (3, 1), (4, 2), (8, 1), (100, 3)])
def test_chunks_give_the_whole_batch_s_loss_and_gradients(chunk, buckets):
    model, batch = tiny_model(joint=2), tiny_batch(images=TWO_CAPTIONS_OF_ONE)
    assert_equal(step(model, batch), step(model, batch, chunk=chunk, length_buckets=buckets))


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_with_dropout_the_second_pass_repeats_the_first(monkeypatch, share):
    """Against the same chunks with every activation kept: equal only if each mask is drawn again as it was."""
    model, batch = tiny_model(dropout=0.3, patch_dropout=0.5), tiny_batch(images=TWO_CAPTIONS_OF_ONE)
    cached = step(model, batch, chunk=3, matching_share=share)

    def kept(function, size, *rows, model):
        parts = [function(*(tensor[run] for tensor in rows)) for run in chunks.runs(len(rows[0]), size)]
        mask = None if parts[0].mask is None else torch.cat([p.mask for p in parts])
        return Encoded(torch.cat([p.embedding for p in parts]), torch.cat([p.tokens for p in parts]), mask)

    monkeypatch.setattr(task, "recomputed", kept)
    monkeypatch.setattr(
        matching, "recomputed_logits", lambda f, rows, size: torch.cat([f(r) for r in chunks.runs(rows, size)])
    )
    assert_equal(step(model, batch, chunk=3, matching_share=share), cached)
    without = step(tiny_model(), batch, chunk=3, matching_share=share)
    assert without[0] != cached[0]  # the masks were there


@pytest.mark.parametrize("buckets", [1, 3])
def test_with_dropout_one_chunk_of_everything_is_the_plain_step(buckets):
    model, batch = tiny_model(dropout=0.3, patch_dropout=0.5), tiny_batch(images=TWO_CAPTIONS_OF_ONE)
    plain = step(model, batch, length_buckets=buckets)
    assert_equal(plain, step(model, batch, length_buckets=buckets, chunk=100))
    assert plain[0] != step(tiny_model(), batch, length_buckets=buckets)[0]  # the masks were there


def test_chunks_keep_little_of_the_forward_pass():
    """Bytes that autograd keeps for the backward pass: embeddings and tokens, not what lies between."""
    model, batch = tiny_model(0, 0), tiny_batch(rows=16)

    def kept_bytes(**settings):
        module = RetrievalTask(model, Objective(losses.info_nce, matching_weight=0.0, **settings), None)
        seen = {}

        def pack(tensor):
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss, _ = module.objective(model, module.encode(batch))
        loss.backward()
        return sum(seen.values()) - sum(p.nbytes for p in model.parameters() if p.data_ptr() in seen)

    whole, chunked = kept_bytes(), kept_bytes(chunk=4)
    assert chunked < 0.1 * whole


def test_a_chunk_of_nothing_is_refused():
    with pytest.raises(ValueError, match="chunk=0 must be at least 1; null computes the batch at once"):
        Objective(losses.info_nce, chunk=0)


def test_a_run_in_chunks_trains(tmp_path: Path):
    from tiny_training import STEPS, run

    result = run(tmp_path, "loss.chunk=5", "trainer.max_epochs=3", "checkpoints.every_n_steps=null")
    assert result["step"] == STEPS

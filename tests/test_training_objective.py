"""The objective: who meets whom, and that neither length buckets nor the number of processes change the loss."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from tiny_training import tiny_batch, tiny_model

from vlretrieval import losses
from vlretrieval.data.datasets import Batch
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


TWO_HALVES = [0, 1, 2, 3, 0, 5, 6, 7]  # one image on both ranks
CONTRASTIVES = {"info_nce": losses.info_nce, "sigmoid_loss": losses.sigmoid_loss, "max_hinge": losses.max_hinge}


def _rank(rank: int, world_size: int, folder: str, name: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size
    )
    model = torch.nn.parallel.DistributedDataParallel(_Step(name))
    batch = tiny_batch(images=TWO_HALVES, short=False)
    rows = len(batch) // world_size
    part = Batch(**{k: v[rank * rows : (rank + 1) * rows] for k, v in vars(batch).items()})
    loss = model(part)
    loss.backward()
    torch.distributed.all_reduce(loss.detach())
    if rank == 0:
        gradients = {n: p.grad for n, p in model.module.model.named_parameters() if p.grad is not None}
        torch.save((loss.detach() / world_size, gradients), Path(folder) / "rank0.pt")
    torch.distributed.destroy_process_group()


class _Step(torch.nn.Module):
    """What DDP sees: one step's loss as a forward pass."""

    def __init__(self, name: str):
        super().__init__()
        self.model = tiny_model()
        self.objective = Objective(CONTRASTIVES[name], matching_negatives=2)

    def forward(self, batch: Batch) -> torch.Tensor:
        task = RetrievalTask(self.model, self.objective, None)
        return self.objective(self.model, task.encode(batch))[0]


@pytest.mark.parametrize("name", list(CONTRASTIVES))
def test_two_processes_equal_one_in_loss_and_gradients(name, tmp_path):
    batch = tiny_batch(images=TWO_HALVES, short=False)  # as many negatives on both ranks: their means weigh alike
    whole = _Step(name)
    loss = whole(batch)
    loss.backward()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    mp.start_processes(_rank, args=(2, str(tmp_path), name), nprocs=2, start_method="fork")
    two, gradients = torch.load(tmp_path / "rank0.pt", weights_only=True)
    assert two.item() == pytest.approx(loss.item(), rel=1e-5)
    expected = {n: p.grad for n, p in whole.model.named_parameters() if p.grad is not None}
    assert set(gradients) == set(expected) == {n for n, _ in whole.model.named_parameters()}
    for parameter_name, gradient in expected.items():
        torch.testing.assert_close(gradients[parameter_name], gradient, rtol=1e-5, atol=1e-5)

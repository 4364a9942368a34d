"""Two processes with half a batch each give the loss and the gradients of one with all of it, for every loss; and none
holds a table of everybody against everybody."""

from __future__ import annotations

import copy
import os
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tiny_training import tiny_batch, tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vlretrieval import losses
from vlretrieval.data.datasets import Batch
from vlretrieval.training import gather, momentum, task
from vlretrieval.training.draws import uniform_rows
from vlretrieval.training.momentum import Momentum
from vlretrieval.training.objective import Objective
from vlretrieval.training.sharding import shard, whole
from vlretrieval.training.task import RetrievalTask

TWO_STEPS = dict(momentum=Momentum(queue=11, ramp=0.0))  # the queue fills unevenly, and wraps
CASES = {
    "info_nce": dict(contrastive=losses.info_nce, matching_weight=0.0),
    "label_smoothing": dict(contrastive=partial(losses.info_nce, label_smoothing=0.1), matching_weight=0.0),
    "sigmoid": dict(contrastive=losses.sigmoid_loss, matching_weight=0.0),
    "hinge": dict(contrastive=losses.max_hinge, matching_weight=0.0),
    "matching": dict(contrastive=losses.info_nce, contrastive_weight=0.0, matching_negatives=2),
    "ranking": dict(
        contrastive=losses.info_nce,
        contrastive_weight=0.0,
        matching_weight=0.0,
        ranking_weight=1.0,
        matching_negatives=2,
    ),
    "momentum": dict(contrastive=losses.info_nce, matching_weight=0.0, **TWO_STEPS),
    "distillation": dict(contrastive=losses.info_nce, distillation_weight=1.0, matching_negatives=2),
    "all": dict(
        contrastive=losses.info_nce,
        ranking_weight=0.5,
        distillation_weight=0.5,
        matching_negatives=3,
        length_buckets=2,
        **TWO_STEPS,
    ),
    "recomputed": dict(contrastive=losses.info_nce, matching_negatives=2, checkpointing=True),
    "frozen": dict(contrastive=losses.info_nce, matching_negatives=2, freeze=["image_encoder", "log_logit_scale"]),
}
CHUNKED = {f"{name}, in chunks": settings | dict(chunk=3) for name, settings in CASES.items()}


def batches() -> list[Batch]:
    """Two, with a picture on both ranks and a caption on both; the first rank has fewer hard negatives of the data."""
    batch = tiny_batch(images=[0, 1, 2, 3, 0, 5, 6, 2], short=True)
    batch.caption_ids[6] = batch.caption_ids[1]
    batch.negative_token_mask[2, :] = False  # this caption has none
    later = copy.deepcopy(batch)
    later.image_ids += torch.tensor([9, 9, 0, 9, 9, 0, 9, 9])  # some are still in the queue
    later.pixels = later.pixels.flip(0)
    return [batch, later]


def step(settings: dict, rank: int = 0, ranks: int = 1, way: str = "alone") -> tuple[torch.Tensor, dict]:
    """Loss and gradients of a step, of this rank's part of the batches; what came before it filled the queue."""
    settings = dict(settings)
    freeze, checkpointing = settings.pop("freeze", ()), settings.pop("checkpointing", False)
    bias = {"init_logit_bias": -5.0} if settings["contrastive"] is losses.sigmoid_loss else {}
    model = tiny_model(joint=2, **bias)
    for part in model.modules():
        if hasattr(part, "activation_checkpointing"):
            part.activation_checkpointing = checkpointing
    module = RetrievalTask(model, Objective(**settings), None, freeze=freeze)
    called = _Loss(module)
    if way == "ddp":
        called = torch.nn.parallel.DistributedDataParallel(called, find_unused_parameters=True)
    elif way == "fsdp2":
        mesh = init_device_mesh("cpu", (ranks,))
        shard(module.model, mesh)
        if module.momentum is not None:
            shard(module.momentum.twin, mesh)
    for batch in batches() if module.momentum is not None else batches()[:1]:
        rows = len(batch) // ranks
        module.zero_grad()
        own = {k: v[rank * rows : (rank + 1) * rows] for k, v in vars(batch).items() if v is not None}
        loss = called(Batch(**own))
        loss.backward()
        loss = loss.detach()
        if module.momentum is not None:
            module.momentum.update(module.model)
    if ranks > 1:
        dist.all_reduce(loss)
    gradients = {name: whole(p.grad) for name, p in module.model.named_parameters() if p.grad is not None}
    return loss / ranks, gradients


class _Loss(torch.nn.Module):
    """What DDP sees: one step's loss as a forward pass."""

    def __init__(self, module: RetrievalTask):
        super().__init__()
        self.module = module

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.module.objective(self.module.model, self.module.encode(batch))[0]


EVERY = [f"{way}: {name}" for way in ("ddp", "fsdp2") for name in CASES | CHUNKED]
QUICK = ["ddp: sigmoid", "ddp: hinge", "ddp: all", "fsdp2: all, in chunks"]  # the others are run with -m slow


def _rank(rank: int, folder: str, cases: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    found = {}
    for case in cases:
        way, name = case.split(": ")
        found[case] = step((CASES | CHUNKED)[name], rank, 2, way)
    if rank == 0:
        torch.save(found, Path(folder) / "rank0.pt")
    dist.destroy_process_group()


def in_two_processes(folder: Path, cases: list[str]) -> dict[str, tuple[torch.Tensor, dict]]:
    """What two processes find, all cases in one start."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # Not forked: autograd has threads of its own by then, if an earlier test of this process made it start them.
    mp.start_processes(_rank, args=(str(folder), cases), nprocs=2, start_method="spawn")
    return torch.load(folder / "rank0.pt", weights_only=True)


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> dict[str, tuple[torch.Tensor, dict]]:
    return in_two_processes(tmp_path_factory.mktemp("quick"), QUICK)


@pytest.fixture(scope="module")
def every(tmp_path_factory) -> dict[str, tuple[torch.Tensor, dict]]:
    return in_two_processes(tmp_path_factory.mktemp("every"), [case for case in EVERY if case not in QUICK])


def assert_equal_to_one_process(case: str, two: tuple[torch.Tensor, dict]) -> None:
    name = case.split(": ")[1].removesuffix(", in chunks")
    loss, expected = step(CASES[name])
    assert two[0].item() == pytest.approx(loss.item(), rel=1e-5)
    # a part that a loss does not reach has no gradient, or one of nothing
    trained = {parameter for parameter, gradient in expected.items() if gradient.any()}
    assert trained <= set(two[1]) and len(trained) > 20
    for parameter, gradient in two[1].items():
        wanted = expected.get(parameter, torch.zeros_like(gradient))
        torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-5, msg=f"{parameter} of {case}")


@pytest.mark.parametrize("case", QUICK)
def test_two_processes_equal_one_in_loss_and_gradients(quick, case):
    assert_equal_to_one_process(case, quick[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in EVERY if case not in QUICK])
def test_two_processes_equal_one_for_every_loss_and_way(every, case):
    assert_equal_to_one_process(case, every[case])


def test_draws_are_those_of_the_whole_table_and_uniform():
    everything = uniform_rows(5, range(64), 64)
    parts = [uniform_rows(5, range(start, start + 16), 64) for start in range(0, 64, 16)]
    assert torch.equal(torch.cat(parts, dim=1), everything)
    assert everything.min() >= 0 and everything.max() < 1 and len(everything.unique()) > 0.999 * everything.numel()
    shares = torch.histc(everything, 16, 0, 1) / everything.numel()
    assert (shares - 1 / 16).abs().max() < 0.01
    assert not torch.equal(uniform_rows(6, range(64), 64), everything)
    tables = torch.stack([everything[0].flatten(), everything[1].flatten(), everything[0].T.flatten()])
    assert (torch.corrcoef(tables) - torch.eye(3)).abs().max() < 0.06  # 4 sigma of 4,096 draws


class LargestTensor(TorchDispatchMode):
    """Numbers in the largest tensor that any operation gave."""

    def __init__(self):
        super().__init__()
        self.numel, self.shape = 0, ()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.numel() > self.numel:
                self.numel, self.shape = leaf.numel(), tuple(leaf.shape)
        return result


def largest_of_a_step(monkeypatch, ranks: int, settings: dict) -> LargestTensor:
    """Of a step of 4 pairs among ``ranks`` equal ranks, played by one process; backward pass included."""
    rows = lambda tensor: torch.cat([tensor] * ranks)
    for module in (task, momentum, gather):
        monkeypatch.setattr(module, "gather_rows", rows)
    for module in (task, gather):
        monkeypatch.setattr(module, "world", lambda: (0, ranks))
    monkeypatch.setattr(gather.dist, "all_reduce", lambda *_, **__: None)
    heads = (2, 2) if "matching_negatives" in settings else (0, 0)
    model = tiny_model(*heads, init_logit_bias=settings.pop("bias", None))
    module = RetrievalTask(model, Objective(**settings), None)
    with LargestTensor() as largest:
        loss, _ = module.objective(module.model, module.encode(tiny_batch(rows=4, negatives=0, short=False)))
        loss.backward()
    return largest


@pytest.mark.parametrize("name", ["info_nce", "sigmoid", "hinge", "momentum", "matching"])
def test_a_rank_s_memory_grows_with_the_batch_of_all_and_not_with_its_square(monkeypatch, name):
    settings = dict(CASES[name])
    settings |= {"bias": -5.0} if name == "sigmoid" else {}
    few, many = 512, 1024
    small, large = (largest_of_a_step(monkeypatch, ranks, dict(settings)) for ranks in (few, many))
    assert large.numel <= 2.1 * small.numel, (small.shape, large.shape)
    assert large.numel < (4 * many) ** 2 / 10, large.shape

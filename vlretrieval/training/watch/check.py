"""``vlretrieval-train ... check=true``: can this run learn? One batch is overfitted by a copy; nothing is written.

Seconds to a minute, before hours are spent. Each thing looked at is one line, "ok ..." or "WARNING ...: what to do".
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from vlretrieval.data.datasets import Batch
from vlretrieval.training.frozen_features import image_of, text_of
from vlretrieval.training.objective import Objective
from vlretrieval.training.task import RetrievalTask
from vlretrieval.training.watch.sanity import (
    Finding,
    chance,
    collapse,
    copied_heads,
    distinct,
    gradients,
    head_outputs,
    loader_bound,
    overfitting,
    rail,
)

STEPS = 100  # on the one batch, at most
ENOUGH = 0.2  # of every loss is left: it has been shown that it learns
SECONDS = 60.0  # of those steps together, at most, on this thread's own clock: a busy machine is no fault of the model
PAIRS = 16  # of the one batch, at most: few are soon learnt, and cheap
TIMED = 3  # whole batches that are loaded and computed for their time


@dataclass
class Overfitted:
    """What training on one batch alone came to: losses by name before and after, and the last embeddings."""

    steps: int
    first: dict[str, float]
    last: dict[str, float]
    embeddings: dict[str, Tensor]
    heads: dict[str, Tensor] = field(default_factory=dict)


def check(
    task: RetrievalTask, optimizer: Callable[..., Optimizer], batches: Iterator[Batch], device: torch.device
) -> list[Finding]:
    """Looks at a task that has not been trained, by its first batches. The task's own weights stay as they are.

    Args:
        optimizer: ``model -> Optimizer``, used at its full rate, without a schedule.
        batches: the training loader's; a few are taken.
    """
    waited_s, computed_s, batch, reached = whole_steps(copied(task, device), batches, device)
    one = one_batch(batch)
    done = overfit(copied(task, device), optimizer, one)
    candidates = len(one)
    findings = [
        overfitting(done.first[name], done.last[name], done.steps, f"{name} loss")
        for name in _losses(done.last)
        # a queue fills with the one batch, whose pairs then are each other's negatives: that loss rises
        if name != "contrastive" or task.objective.momentum is None
    ]
    if "contrastive" in done.last and has_chance(task.objective):
        findings.append(chance(done.last["contrastive"], candidates, "the contrastive loss after it"))
    findings += [collapse(embedding, name) for name, embedding in done.embeddings.items()]
    findings.append(copied_heads(task.model, done.heads))
    findings.append(reached)
    findings.append(rail(done.last["logit_scale"]))
    findings.append(loader_bound(waited_s, waited_s + computed_s))
    return findings


def copied(task: RetrievalTask, device: torch.device) -> RetrievalTask:
    """A copy to train on, on the device."""
    return copy.deepcopy(task).to(device)


def has_chance(objective: Objective) -> bool:
    """Whether the contrastive loss of equal scores is ln(candidates): InfoNCE's is, a hinge's or a queue's is not."""
    function = getattr(objective.contrastive, "func", objective.contrastive)
    return getattr(function, "__name__", "") == "info_nce" and objective.momentum is None


def whole_steps(
    task: RetrievalTask, batches: Iterator[Batch], device: torch.device
) -> tuple[float, float, Batch, Finding]:
    """A few steps as in training, without an optimizer: seconds that loading and computing took, the last batch, and
    which parts its gradients reached.

    The first step is not counted: workers start, kernels are chosen.
    """
    task.train()
    waited_s = computed_s = 0.0
    batch: Batch | None = None
    for number in range(TIMED):
        started_at = time.perf_counter()
        following = next(batches, None)
        loaded_at = time.perf_counter()
        if following is None:
            break
        batch = following.to(device)
        task.zero_grad()
        loss, _ = task.objective(task.model, task.encode(batch), 1.0)
        loss.backward()
        _wait(device)
        if number:
            waited_s, computed_s = waited_s + loaded_at - started_at, computed_s + time.perf_counter() - loaded_at
    assert batch is not None, "a loader has at least one batch"
    return waited_s, computed_s, batch, gradients(task.model)


def one_batch(batch: Batch) -> Batch:
    """At most ``PAIRS`` pairs of a batch, no two of one picture or caption, which could not be told apart."""
    rows = distinct(batch.image_ids)
    rows = rows[distinct(batch.caption_ids[rows])][:PAIRS]
    return batch._mapped(lambda tensor: tensor[rows])


def overfit(task: RetrievalTask, optimizer: Callable[..., Optimizer], batch: Batch) -> Overfitted:
    """Trains on ``batch`` alone, without dropout, until that has worked, or ``STEPS`` or ``SECONDS`` are over."""
    task.eval()  # what is asked is whether it can learn, not whether it generalises
    stepping = optimizer(task.model)
    stop_at = time.thread_time() + SECONDS
    first: dict[str, float] = {}
    steps = 0
    while steps < STEPS and (steps < 2 or time.thread_time() < stop_at):
        loss, parts = measured(task, batch)
        first = first or parts
        if all(parts[name] <= ENOUGH * first[name] for name in _losses(parts)):
            break
        stepping.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(task.parameters(), 1.0)
        stepping.step()
        task.after_step()
        steps += 1
    with torch.no_grad(), head_outputs(task.model) as heads:
        _, last = measured(task, batch)
        image, text = image_of(task.model, batch), text_of(task.model, batch)
    return Overfitted(steps, first, last, {"image": image.embedding, "text": text.embedding}, heads)


def measured(task: RetrievalTask, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    """The loss of a batch as at the end of a run, and its parts with the logit scale."""
    loss, parts = task.objective(task.model, task.encode(batch), 1.0)
    values = {name: float(value) for name, value in parts.items()}
    return loss, values | {"logit_scale": float(task.model.logit_scale.detach())}


def _losses(parts: dict[str, float]) -> list[str]:
    # distillation follows the heads, which move: it need not fall
    return [name for name in parts if name in ("contrastive", "matching", "ranking")]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

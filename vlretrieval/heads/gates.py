"""Gates learnt with a price on open heads: which of them a frozen model can do without (L0 or L1)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlretrieval.evaluation.encode import Tell, silent
from vlretrieval.evaluation.inputs import Inputs
from vlretrieval.heads.ablate import gated
from vlretrieval.heads.layers import layers_of
from vlretrieval.heads.pair_loss import pair_loss

LOW, HIGH, BETA = -0.1, 1.1, 2 / 3  # of the hard concrete distribution (arXiv:1712.01312, sec. 4)
OPEN = 2.0  # where the logits of the gates start: nearly open


@dataclass(frozen=True)
class GateSettings:
    """How gates are learnt.

    Args:
        penalty: "l0", the expected share of open heads (arXiv:1712.01312, as for heads in arXiv:1905.09418), or "l1",
            the mean size of the gates, shrunk to exact zeros.
        weight: of the penalty beside the loss in nats; more closes more heads.
        steps, lr, batch_size: of the optimisation of the gates; the weights stay as they are.
        seed: of the draws.
    """

    penalty: str = "l0"
    weight: float = 1.0
    steps: int = 200
    lr: float = 0.05
    batch_size: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if self.penalty not in ("l0", "l1"):
            raise ValueError(f"penalty={self.penalty!r} is not known; choose l0 or l1")
        if self.weight < 0 or self.lr <= 0 or min(self.steps, self.batch_size) < 1:
            raise ValueError(
                f"weight={self.weight}, lr={self.lr}, steps={self.steps}, batch_size={self.batch_size}: the weight may "
                "not be negative, the others must be above 0"
            )


def learn_gates(
    model: Any,
    inputs: Inputs,
    settings: GateSettings = GateSettings(),  # noqa: B008  (frozen)
    tell: Tell = silent,
) -> dict[str, Tensor]:
    """The gates (H,) in 0 .. 1 of every layer, by module name: 0 for heads that are not worth their price.

    Args:
        inputs: a split that the model may learn from, which is not the one it is measured on.
    """
    layers = layers_of(model)
    device = next(model.parameters()).device
    sizes = {layer.name: layer.heads for layer in layers}
    total = sum(sizes.values())
    start = OPEN if settings.penalty == "l0" else 1.0
    values = {name: torch.full((heads,), start, device=device, requires_grad=True) for name, heads in sizes.items()}
    optimizer = torch.optim.Adam(list(values.values()), lr=settings.lr)
    rng = np.random.default_rng(settings.seed)
    generator = torch.Generator().manual_seed(settings.seed)
    training = model.training
    model.eval()
    required = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in required:
            parameter.requires_grad_(False)
        for _ in range(settings.steps):
            rows = np.sort(rng.permutation(len(inputs.split.captions))[: settings.batch_size])
            drawn = {
                name: hard_concrete(value, torch.rand(value.shape, generator=generator).to(device))
                if settings.penalty == "l0"
                else value
                for name, value in values.items()
            }
            with torch.enable_grad(), gated(model, drawn):
                loss = pair_loss(model, inputs, rows)
            if settings.penalty == "l0":
                loss = loss + settings.weight * sum(open_chance(value).sum() for value in values.values()) / total
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if settings.penalty == "l1":
                _shrink(values, settings.lr * settings.weight / total)
            tell("gate steps", 1, settings.steps)
    finally:
        for parameter in required:
            parameter.requires_grad_(True)
        model.train(training)
    return {name: settled(value.detach(), settings.penalty).cpu() for name, value in values.items()}


def hard_concrete(logit: Tensor, uniform: Tensor) -> Tensor:
    """A draw of the gates in 0 .. 1, both ends with a chance of their own; ``uniform`` in [0, 1)."""
    uniform = uniform.clamp(1e-6, 1 - 1e-6)
    soft = torch.sigmoid((uniform.log() - (1 - uniform).log() + logit) / BETA)
    return (soft * (HIGH - LOW) + LOW).clamp(0, 1)


def open_chance(logit: Tensor) -> Tensor:
    """The chance that a gate is not 0, which the L0 penalty counts."""
    return torch.sigmoid(logit - BETA * math.log(-LOW / HIGH))


def settled(value: Tensor, penalty: str) -> Tensor:
    """The gate that is kept of what was learnt."""
    if penalty == "l1":
        return value
    return (torch.sigmoid(value) * (HIGH - LOW) + LOW).clamp(0, 1)


@torch.no_grad()
def _shrink(values: dict[str, Tensor], by: float) -> None:
    """The L1 penalty's own step: towards 0 by so much, and not beyond (soft thresholding)."""
    for value in values.values():
        value.copy_(value.sign() * (value.abs() - by).clamp(min=0))


def open_heads(gates: dict[str, Tensor]) -> int:
    """How many gates are not 0."""
    return int(sum((gate != 0).sum() for gate in gates.values()))

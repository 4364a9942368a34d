"""Exponential moving average of the weights: what is evaluated, exported and called best, if asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vlretrieval.training.sharding import like, whole


class WeightAverage:
    """The average ``decay * average + (1 - decay) * weights``, moved after every optimizer step.

    Args:
        model: its weights are where the average starts.
        decay: below 1; the average looks back about 1 / (1 - decay) steps, and over fewer while fewer have been made.
    """

    def __init__(self, model: nn.Module, decay: float):
        if not 0 <= decay < 1:
            raise ValueError(f"ema_decay={decay} must be in [0, 1); null leaves the average out")
        self.decay, self.steps = decay, 0
        self.weights: dict[str, Tensor] = {name: w.detach().clone() for name, w in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))  # a random start is soon forgotten
        for name, weight in model.state_dict().items():
            average = self.weights[name] = self.weights[name].to(weight.device)
            if weight.is_floating_point():
                average.lerp_(weight, 1 - decay)
            else:
                average.copy_(weight)

    @contextmanager
    def in_place_of(self, model: nn.Module) -> Iterator[None]:
        """Within, the model computes with the average."""
        own = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
        model.load_state_dict(self.weights)
        try:
            yield
        finally:
            model.load_state_dict(own)

    def exchange(self, state_dict: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
        """Puts the average into a state dict under ``prefix`` and returns the weights that were there.

        Where weights are sharded all processes must call it; the state dict is empty on all but rank 0.
        """
        own = {name: state_dict[prefix + name] for name in self.weights if state_dict}
        for name, weight in self.weights.items():
            average = whole(weight)
            if state_dict:
                state_dict[prefix + name] = average.clone()
        return own

    def restore(self, state_dict: dict[str, Tensor], prefix: str, own: Mapping[str, Tensor], steps: int) -> None:
        """The reverse of :meth:`exchange`, for a state dict that was read from a checkpoint."""
        self.weights = {name: like(state_dict[prefix + name].clone(), own_) for name, own_ in self.weights.items()}
        self.steps = steps
        state_dict.update({prefix + name: weight for name, weight in own.items()})

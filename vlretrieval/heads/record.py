"""Looking at a model's heads from outside: hooks put on for a while, and taken off again without a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from vlretrieval.heads.layers import Layer, layers_of

Observer = Callable[[Layer, Tensor], None]


@contextmanager
def record_attention(model: nn.Module, *names: str) -> Iterator[dict[str, Tensor]]:
    """Keep the weights of every head, by module name: ``maps["crossmodal.text_to_image.blocks.0.cross"]``.

    Each is (B, H, Lq, Lk) float32, of the latest call of that module; rows sum to 1 (or are 0 where a query may attend
    to nothing). What the model computes is not changed by a bit. Texts that share a picture's keys are laid side by
    side in one row of queries: (C, H, B / C * L, P).

    Args:
        names: modules to record, or parts of a name that they begin with; none: all.

    Raises:
        ValueError: a name that fits no attention of the model.
    """
    maps: dict[str, Tensor] = {}
    with observing(model, lambda layer, weights: maps.__setitem__(layer.name, weights.detach()), *names):
        yield maps


@contextmanager
def observing(model: nn.Module, observer: Observer, *names: str) -> Iterator[list[Layer]]:
    """Call ``observer(layer, weights (B, H, Lq, Lk))`` for each call of each layer: for statistics that keep no map.

    An observer that was there before still sees everything, and is there alone again afterwards.
    """
    layers = chosen_layers(model, names)
    before = [layer.module.observer for layer in layers]
    try:
        for layer, earlier in zip(layers, before, strict=True):
            layer.module.observer = _both(layer, observer, earlier)
        yield layers
    finally:
        for layer, earlier in zip(layers, before, strict=True):
            layer.module.observer = earlier


def _both(layer: Layer, observer: Observer, earlier: Callable[[Tensor], None] | None) -> Callable[[Tensor], None]:
    def see(weights: Tensor) -> None:
        if earlier is not None:
            earlier(weights)
        observer(layer, weights)

    return see


@contextmanager
def observing_outputs(model: nn.Module, observer: Observer, *names: str) -> Iterator[list[Layer]]:
    """Call ``observer(layer, outputs (B, Lq, H, D))`` with what the heads found, before W_O mixes it."""
    layers = chosen_layers(model, names)
    with ExitStack() as stack:
        for layer in layers:
            hook = layer.module.out.register_forward_pre_hook(_seen_by(layer, observer))
            stack.callback(hook.remove)
        yield layers


def _seen_by(layer: Layer, observer: Observer) -> Callable[[nn.Module, Any], None]:
    def see(_: nn.Module, given: Any) -> None:
        observer(layer, given[0].detach().unflatten(-1, (layer.heads, -1)))

    return see


def chosen_layers(model: nn.Module, names: tuple[str, ...]) -> list[Layer]:
    """The layers of these names, or below them; all for no name."""
    layers = layers_of(model)
    if not names:
        return layers
    for name in names:
        if not any(_within(layer.name, name) for layer in layers):
            there = ", ".join(layer.name for layer in layers)
            raise ValueError(f"the model has no attention called {name!r}; there are {there}")
    return [layer for layer in layers if any(_within(layer.name, name) for name in names)]


def _within(name: str, part: str) -> bool:
    return name == part or name.startswith(part + ".")

"""Low-rank adapters on a tower's linear layers (LoRA, arXiv:2106.09685), by peft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn


def add_lora(
    tower: nn.Module, rank: int, targets: Sequence[str], alpha: float | None = None, dropout: float = 0.0
) -> None:
    """Put adapters beside linear layers of ``tower``, in place; its own weights are not trained any more.

    Args:
        rank: of the added products; one factor of each starts at zero, so that nothing changes at first.
        targets: ends of the names of the layers, e.g. ``[query, value]``.
        alpha: the added product is scaled by alpha / rank; None: by 1.

    Raises:
        ValueError: peft is not installed, or a target names no linear layer.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ValueError("lora needs peft: pip install 'vlretrieval[lora]'") from None
    names = [name for name, module in tower.named_modules() if isinstance(module, nn.Linear)]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            ends = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
            raise ValueError(f"lora.targets: no linear layer is named {target!r}; there are {ends}")
    if not targets:
        raise ValueError("lora.targets is empty; name the layers, e.g. [query, value]")
    scale: Any = rank if alpha is None else alpha  # annotated as an int, and divided by the rank
    settings = LoraConfig(r=rank, lora_alpha=scale, lora_dropout=dropout, target_modules=list(targets))
    inject_adapter_in_model(settings, tower)

"""A changed model written as a checkpoint of this project: it evaluates, exports and trains on like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from vlretrieval import __version__
from vlretrieval.deploy.build import build_model
from vlretrieval.deploy.checkpoint import KEY, MODEL_PREFIX, Checkpoint, load_weights
from vlretrieval.heads.surgery import config_with_counts


def save_changed(path: str | Path, original: Checkpoint, model: nn.Module, how: str) -> Path:
    """Write ``model``, made of the checkpoint ``original``, whole or not at all; its config says the new head counts.

    Args:
        how: what was done, kept in the config as ``made_by``.

    Raises:
        ValueError: the config's counts do not build this model (a kind of tower that says nothing of heads).
    """
    config: dict[str, Any] = config_with_counts(original.config, model)
    config["made_by"] = how
    weights = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    load_weights(build_model(config["model"], str(path)), weights, str(path))  # the config describes these weights
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    torch.save(
        {
            "state_dict": {MODEL_PREFIX + name: value for name, value in weights.items()},
            "global_step": original.step,
            KEY: {
                "version": __version__,
                "config": config,
                "tokenizer": original.tokenizer.to_dict(),
                "step": original.step,
            },
        },
        partial,
    )
    return partial.replace(path)

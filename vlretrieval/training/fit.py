"""One training run, from a composed config to a run folder. The only place where training meets Hydra."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hydra
import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import RichProgressBar
from omegaconf import DictConfig, OmegaConf
from torch import nn

import vlretrieval
from vlretrieval.data.datamodule import RetrievalData
from vlretrieval.evaluation.evaluate import Settings, evaluate
from vlretrieval.evaluation.inputs import Inputs
from vlretrieval.model.retrieval_model import RetrievalModel
from vlretrieval.training.callbacks import Checkpoints, Describe, Validation
from vlretrieval.training.checkpoint_io import AtomicCheckpointIO, checkpoint_fault, newest_first
from vlretrieval.training.task import RetrievalTask

log = logging.getLogger(__name__)


def train(cfg: DictConfig) -> dict[str, Any]:
    """Trains what ``cfg`` describes and returns the best validation figures, with where the checkpoints lie.

    Raises:
        ValueError: for anything in the config, the data or the run folder that a user can put right.
    """
    started_at = time.perf_counter()
    torch.manual_seed(cfg.seed)  # the weights drawn below; each step seeds itself
    data: RetrievalData = hydra.utils.instantiate(cfg.data)
    data.fit_tokenizer()
    model: RetrievalModel = hydra.utils.instantiate(cfg.model)
    say_what_is_built(model)

    folder = Path(cfg.output_dir)
    measure = validation_measure(data, hydra.utils.instantiate(cfg.validation.settings))
    callbacks = [
        Validation(measure, cfg.validation.every_n_epochs),
        Describe(description(cfg, data)),
        Checkpoints(folder / "checkpoints", **cfg.checkpoints),
    ]
    trainer: pl.Trainer = hydra.utils.instantiate(
        cfg.trainer,
        logger=hydra.utils.instantiate(cfg.logger),
        callbacks=[*callbacks, *([RichProgressBar()] if cfg.progress_bar else [])],
        plugins=[AtomicCheckpointIO()],
        default_root_dir=str(folder),
        enable_progress_bar=bool(cfg.progress_bar),
        enable_model_summary=False,
        use_distributed_sampler=False,  # the loader splits batches over ranks itself, and remembers where it is
    )
    task = RetrievalTask(
        model,
        hydra.utils.instantiate(cfg.loss),
        hydra.utils.instantiate(cfg.optimizer),
        hydra.utils.instantiate(cfg.scheduler),
        seed=cfg.seed,
    )
    resumed = resume_path(folder / "checkpoints") if cfg.resume else None
    log.info("set up in %.1f s", time.perf_counter() - started_at)
    trainer.fit(task, datamodule=data, ckpt_path=resumed, weights_only=True)

    keeper = callbacks[-1]
    assert isinstance(keeper, Checkpoints)
    result = {
        "step": trainer.global_step,
        "best_step": keeper.best_step,
        keeper.monitor: keeper.best_value,
        "seconds": round(time.perf_counter() - started_at, 1),
        "checkpoint": str(keeper.folder / "best.ckpt"),
    }
    if trainer.is_global_zero:
        (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
        log.info("done: %s", json.dumps(result))
    return result


def description(cfg: DictConfig, data: RetrievalData) -> dict[str, Any]:
    """What makes a checkpoint self-describing: version, resolved config and tokenizer, all plain data."""
    return {
        "version": vlretrieval.__version__,
        "config": OmegaConf.to_container(cfg, resolve=True),
        "tokenizer": data.tokenizer.to_dict(),
    }


def say_what_is_built(model: RetrievalModel) -> None:
    parameters = sum(p.numel() for p in model.parameters())
    if model.crossmodal is None:
        log.info(
            "a plain dual encoder of %s parameters: no cross-modal heads, so no matching loss and no re-ranking",
            f"{parameters:,}",
        )
        return
    kinds = [
        name for name in ("text_to_image", "image_to_text", "joint") if getattr(model.crossmodal, name) is not None
    ]
    log.info("a dual encoder with %s cross-modal heads, %s parameters", " and ".join(kinds), f"{parameters:,}")


def validation_measure(data: RetrievalData, settings: Settings) -> Callable[[nn.Module], Mapping[str, float]]:
    """``model -> {"val/t2i/R@1": ...}``, on the validation split, made ready once."""
    split = data.split("val")
    inputs = Inputs(split, data.tokenizer, data.transform)

    def measure(model: nn.Module) -> Mapping[str, float]:
        return evaluate(model, split, data.tokenizer, data.transform, settings, inputs=inputs).scalars("val/")

    return measure


def resume_path(folder: Path) -> str:
    """The newest whole checkpoint; a damaged one is named and the one before is taken.

    Raises:
        ValueError: if there is none.
    """
    for path in newest_first(folder):
        fault = checkpoint_fault(path)
        if fault is None:
            log.info("going on from %s", path)
            return str(path)
        log.warning("%s: %s; taking the one before", path, fault)
    raise ValueError(f"resume=true, but {folder} holds no whole checkpoint; start anew with another name=...")

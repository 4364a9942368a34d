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
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch.callbacks import Callback, RichProgressBar
from lightning.pytorch.plugins.environments import SLURMEnvironment
from omegaconf import DictConfig, OmegaConf
from torch import nn

import vlretrieval
from vlretrieval.data.datamodule import RetrievalData
from vlretrieval.evaluation.evaluate import Settings, evaluate
from vlretrieval.evaluation.inputs import Inputs
from vlretrieval.model.hints import head_width_hints
from vlretrieval.model.retrieval_model import RetrievalModel
from vlretrieval.model.seeding import seed_heads
from vlretrieval.training.callbacks import Checkpoints, Describe, Validation
from vlretrieval.training.compiled import compile_parts
from vlretrieval.training.frozen_features import CheckTowers, check_towers
from vlretrieval.training.nonfinite import NonFiniteGuard
from vlretrieval.training.precision import allow_tf32, choose_precision, device_of
from vlretrieval.training.preemption import Preemption, slurm_requeue
from vlretrieval.training.resume import check_same_run, resume_path
from vlretrieval.training.task import RetrievalTask
from vlretrieval.training.warm_start import warm_start

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
    if cfg.head_seed is not None:
        seed_heads(model, cfg.head_seed)
    say_what_is_built(model)

    if cfg.init_from and not cfg.resume:
        warm_start(model, cfg.init_from, cfg.init_parts, strict=cfg.init_strict)
    task = RetrievalTask(
        model,
        hydra.utils.instantiate(cfg.loss),
        hydra.utils.instantiate(cfg.optimizer),
        hydra.utils.instantiate(cfg.scheduler),
        seed=cfg.seed,
        ema_decay=cfg.ema_decay,
        freeze=cfg.freeze,
    )
    if not cfg.resume:
        check_towers(model, data)
    if cfg.compile:
        compile_parts(model)

    folder = Path(cfg.output_dir)
    described = description(cfg, data)
    keeper = Checkpoints(folder / "checkpoints", **cfg.checkpoints)
    callbacks = [
        Validation(
            validation_measure(data, hydra.utils.instantiate(cfg.validation.settings)), cfg.validation.every_n_epochs
        ),
        Describe(described),
        NonFiniteGuard(keeper, folder / "nonfinite.jsonl", **cfg.nonfinite),
        keeper,
        Preemption(keeper, slurm_requeue() if cfg.requeue else None),
        *([CheckTowers(data)] if cfg.resume else []),
    ]
    trainer = build_trainer(cfg, callbacks, keeper.io)
    resumed = None
    if cfg.resume:
        resumed = resume_path(keeper.folder)
        check_same_run(resumed, described["config"])
    log.info("set up in %.1f s", time.perf_counter() - started_at)
    try:
        trainer.fit(task, datamodule=data, ckpt_path=resumed, weights_only=True)
    except RuntimeError as error:
        lost = data.loader.lost_worker(error) if data.loader is not None else None
        if data.loader is None or lost is None:
            raise
        data.loader.close()
        raise lost from error

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


def build_trainer(cfg: DictConfig, callbacks: list[Callback], io: CheckpointIO) -> pl.Trainer:
    """Lightning's Trainer with our loader, our checkpoints and our way to leave."""
    device = device_of(cfg.trainer.accelerator)
    allow_tf32(device)
    plugins: list[Any] = [io]
    if SLURMEnvironment.detect():
        plugins.append(SLURMEnvironment(auto_requeue=False))  # its own saves in the middle of a step
    return hydra.utils.instantiate(
        cfg.trainer,
        precision=choose_precision(cfg.trainer.precision, device),
        logger=hydra.utils.instantiate(cfg.logger),
        callbacks=[*callbacks, *([RichProgressBar()] if cfg.progress_bar else [])],
        plugins=plugins,
        default_root_dir=str(cfg.output_dir),
        enable_progress_bar=bool(cfg.progress_bar),
        enable_model_summary=False,
        use_distributed_sampler=False,  # the loader splits batches over ranks itself, and remembers where it is
    )


def description(cfg: DictConfig, data: RetrievalData) -> dict[str, Any]:
    """What makes a checkpoint self-describing: version, resolved config and tokenizer, all plain data."""
    return {
        "version": vlretrieval.__version__,
        "config": OmegaConf.to_container(cfg, resolve=True),
        "tokenizer": data.tokenizer.to_dict(),
    }


def say_what_is_built(model: RetrievalModel) -> None:
    for hint in head_width_hints(model):
        log.info("hint: %s", hint)
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

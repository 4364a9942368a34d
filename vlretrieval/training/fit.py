"""One training run, from a composed config to a run folder. The only place where training meets Hydra."""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.environments import SLURMEnvironment
from omegaconf import DictConfig, OmegaConf
from torch import nn

import vlretrieval
from vlretrieval.data.datamodule import RetrievalData
from vlretrieval.deploy.build import self_contained
from vlretrieval.evaluation.encode import Tell
from vlretrieval.evaluation.evaluate import Settings, evaluate
from vlretrieval.evaluation.inputs import Inputs
from vlretrieval.evaluation.outcome import Evaluation
from vlretrieval.evaluation.towers import tower_name
from vlretrieval.model.hints import head_width_hints
from vlretrieval.model.retrieval_model import RetrievalModel
from vlretrieval.model.seeding import seed_heads
from vlretrieval.training.callbacks import Checkpoints, Describe, Validation, check_multiple
from vlretrieval.training.compiled import as_written, compile_parts
from vlretrieval.training.frozen_features import CheckTowers, check_towers
from vlretrieval.training.frozen_features import write_features as store_features
from vlretrieval.training.nonfinite import NonFiniteGuard
from vlretrieval.training.precision import allow_tf32, choose_precision, device_of
from vlretrieval.training.preemption import Preemption, slurm_requeue
from vlretrieval.training.result import Result
from vlretrieval.training.resume import check_same_run, resume_path
from vlretrieval.training.sharding import Sharded
from vlretrieval.training.task import RetrievalTask
from vlretrieval.training.warm_start import same_words, warm_start
from vlretrieval.training.watch.check import check as sanity_check
from vlretrieval.training.watch.early_stopping import StopEarly
from vlretrieval.training.watch.first_steps import FirstSteps
from vlretrieval.training.watch.heads import WatchHeads
from vlretrieval.training.watch.pace import Pace, ProgressBar
from vlretrieval.training.watch.pictures import Pictures
from vlretrieval.training.watch.sanity import Finding
from vlretrieval.training.watch.step_flops import StepFlops

log = logging.getLogger(__name__)


def train(cfg: DictConfig) -> Result:
    """Trains what ``cfg`` describes and returns the best validation figures, with where the checkpoints lie.

    Raises:
        ValueError: for anything in the config, the data or the run folder that a user can put right.
    """
    started_at = time.perf_counter()
    folder = Path(cfg.output_dir)
    resumed = resume_path(folder / "checkpoints") if cfg.resume else None
    data, task = build(cfg, resumed)
    if cfg.compile:
        compile_parts(task.model)

    keeper = Checkpoints(folder / "checkpoints", **cfg.checkpoints)
    pace = Pace(step_flops(cfg))
    callbacks = [
        pace,
        Describe(description(cfg, data, task.model)),
        FirstSteps(pace),  # before the guard, which may drop the gradients
        NonFiniteGuard(keeper, folder / "nonfinite.jsonl", **cfg.nonfinite),
        Preemption(keeper, slurm_requeue() if cfg.requeue else None),
        # after it: who is asked to leave does not wait for a validation
        validation(cfg, data),
        *early_stopping(cfg),
        *heads_watch(cfg, data),
        keeper,
        *([CheckTowers(data)] if resumed is not None else []),
        *([ProgressBar(pace)] if cfg.progress_bar else []),
    ]
    trainer = build_trainer(cfg, callbacks, keeper.io)
    log.info("set up in %.1f s", time.perf_counter() - started_at)
    try:
        trainer.fit(task, datamodule=data, ckpt_path=resumed, weights_only=True)
    except RuntimeError as error:
        lost = data.loader.lost_worker(error) if data.loader is not None else None
        if data.loader is None or lost is None:
            raise
        data.loader.close()
        raise lost from error

    figures = {
        "step": trainer.global_step,
        "best_step": keeper.best_step,
        keeper.monitor: keeper.best_value,
        "seconds": round(time.perf_counter() - started_at, 1),
        "parameters": sum(p.numel() for p in task.model.parameters()),
        "checkpoint": str(keeper.folder / "best.ckpt"),
    }
    result = Result(figures, keeper.monitor)
    if trainer.is_global_zero:
        (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
        log.info("done: %s", json.dumps(result))
    return result


def build(cfg: DictConfig, resumed: str | None = None) -> tuple[RetrievalData, RetrievalTask]:
    """The data, its tokenizer fitted, and the model in its task, its weights drawn or read.

    ``resumed`` is the checkpoint that the run goes on from, which must be this run's own.
    """
    data, model = build_model(cfg, resumed)
    task = RetrievalTask(
        model,
        hydra.utils.instantiate(cfg.loss),
        hydra.utils.instantiate(cfg.optimizer),
        hydra.utils.instantiate(cfg.scheduler),
        seed=cfg.seed,
        ema_decay=cfg.ema_decay,
        freeze=cfg.freeze,
    )
    if resumed is None:
        check_towers(model, data)
    return data, task


def build_model(cfg: DictConfig, resumed: str | None = None) -> tuple[RetrievalData, RetrievalModel]:
    """The data, its tokenizer fitted, and the model, its weights drawn or read."""
    torch.manual_seed(cfg.seed)  # the weights drawn below; each step seeds itself
    data: RetrievalData = hydra.utils.instantiate(cfg.data)
    words = True
    if cfg.init_from:
        data.tokenizer, words = same_words(
            data.tokenizer, resumed or cfg.init_from, cfg.init_parts, strict=cfg.init_strict
        )
    data.fit_tokenizer()
    model: RetrievalModel = hydra.utils.instantiate(cfg.model)
    if cfg.head_seed is not None:
        seed_heads(model, cfg.head_seed)
    say_what_is_built(model)
    if resumed is not None:
        check_same_run(resumed, description(cfg, data, model)["config"])
    elif cfg.init_from:
        warm_start(model, cfg.init_from, cfg.init_parts, strict=cfg.init_strict, words=words)
    return data, model


def write_features(cfg: DictConfig, tell: Tell) -> list[Path]:
    """Stores what the frozen towers give of train, val and test where ``cfg.data`` says that training reads it."""
    folders = {"image": cfg.data.image_features, "text": cfg.data.text_features}
    if not any(folders.values()):
        raise ValueError(
            "write_features=true writes to data.image_features and data.text_features; set one to a folder"
        )
    data, model = build_model(cfg)
    written = []
    for part, folder in folders.items():
        if folder is None:
            continue
        name = tower_name(model, part)
        if not any(name == frozen or name.startswith(f"{frozen}.") for frozen in cfg.freeze):
            raise ValueError(
                f"data.{part}_features={folder}, but {name} is trained; set freeze=[{name}], or leave it out"
            )
        for split in map(data.split, ("train", "val", "test")):
            for piece in (part, *(["negatives"] if part == "text" and len(split.negatives) else [])):
                written.append(
                    store_features(
                        model, split, piece, folder, transform=data.transform, tokenizer=data.tokenizer, tell=tell
                    )
                )
            for copy in data.copies() if part == "image" and split.name == "train" else ():
                written.append(
                    store_features(
                        model,
                        split,
                        part,
                        folder,
                        transform=data.transform,
                        tokenizer=data.tokenizer,
                        copy=copy,
                        tell=tell,
                    )
                )
    return written


def check(cfg: DictConfig) -> list[Finding]:
    """What ``check=true`` finds before a run, from a new model and the first batches; writes nothing."""
    with tempfile.TemporaryDirectory() as scratch:
        cfg = cfg.copy()
        if "bad_samples_file" in cfg.data:
            cfg.data.bad_samples_file = f"{scratch}/bad_samples.jsonl"
        data, task = build(cfg)
        device = torch.device(device_of(cfg.trainer.accelerator))
        allow_tf32(device.type)
        return sanity_check(task, hydra.utils.instantiate(cfg.optimizer), iter(data.train_dataloader()), device)


def build_trainer(cfg: DictConfig, callbacks: list[Callback], io: CheckpointIO) -> pl.Trainer:
    """Lightning's Trainer with our loader, our checkpoints and our way to leave."""
    device = device_of(cfg.trainer.accelerator)
    allow_tf32(device)
    plugins: list[Any] = [io]
    if SLURMEnvironment.detect():
        plugins.append(SLURMEnvironment(auto_requeue=False))  # its own saves in the middle of a step
    trainer: pl.Trainer = hydra.utils.instantiate(
        cfg.trainer,
        precision=choose_precision(cfg.trainer.precision, device),
        logger=hydra.utils.instantiate(cfg.logger),
        callbacks=callbacks,
        plugins=plugins,
        default_root_dir=str(cfg.output_dir),
        enable_progress_bar=bool(cfg.progress_bar),
        enable_model_summary=False,
        use_distributed_sampler=False,  # the loader splits batches over ranks itself, and remembers where it is
    )
    if cfg.compile and isinstance(trainer.strategy, Sharded):
        raise ValueError("compile=true does not go with trainer=fsdp2; set compile=false, or take trainer=ddp")
    return trainer


def description(cfg: DictConfig, data: RetrievalData, model: RetrievalModel) -> dict[str, Any]:
    """What makes a checkpoint self-describing: version, resolved config and tokenizer, all plain data.

    Of pretrained towers the architecture, not the files that their weights came from: config.yaml keeps those.
    """
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    config["model"] = self_contained(config["model"], model)
    return {
        "version": vlretrieval.__version__,
        "config": config,
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


def validation(cfg: DictConfig, data: RetrievalData) -> Validation:
    """Measures, and draws, the validation split, which is made ready once."""
    settings: Settings = hydra.utils.instantiate(cfg.validation.settings)
    every, rerank_every = cfg.validation.every_n_epochs, cfg.validation.rerank_every_n_epochs
    if rerank_every is not None and not settings.top_k:
        raise ValueError(
            f"validation.rerank_every_n_epochs={rerank_every} has no effect with validation.settings.top_k=0; set how "
            "many candidates are re-ranked, e.g. validation.settings.top_k=16"
        )
    split = data.split("val")
    inputs = Inputs(settings.protocol.prepare(split), data.tokenizer, data.transform, features=data.features("val"))

    def measure(model: nn.Module, reranked: bool) -> tuple[Mapping[str, float], Evaluation]:
        asked = settings if reranked else replace(settings, top_k=0)
        with as_written():
            outcome = evaluate(model, split, data.tokenizer, data.transform, asked, inputs=inputs)
        return outcome.scalars("val/"), outcome

    show = None
    if cfg.pictures.every_n_epochs is not None:
        check_multiple("pictures.every_n_epochs", cfg.pictures.every_n_epochs, every)
        show = Pictures(Path(cfg.output_dir) / "pictures", inputs, **cfg.pictures)
    return Validation(measure, every, rerank_every, show)


def early_stopping(cfg: DictConfig) -> list[Callback]:
    if cfg.early_stopping.patience is None:
        return []
    return [StopEarly(cfg.checkpoints.monitor, cfg.checkpoints.mode, **cfg.early_stopping)]


def heads_watch(cfg: DictConfig, data: RetrievalData) -> list[Callback]:
    if cfg.heads_watch.every_n_epochs is None:
        return []
    return [WatchHeads(Inputs(data.split("val"), data.tokenizer, data.transform), **cfg.heads_watch)]


def step_flops(cfg: DictConfig) -> StepFlops | None:
    """None for a model whose costs are not known from its config."""
    frozen = tuple(part for part in ("image_encoder", "text_encoder", "crossmodal") if part in cfg.freeze)
    model: Any = OmegaConf.to_container(cfg.model, resolve=True)
    try:
        return StepFlops(model, frozen, teacher=cfg.loss.get("momentum") is not None)
    except ValueError as error:
        log.info("the share of the device's peak is not shown: %s", error)
        return None

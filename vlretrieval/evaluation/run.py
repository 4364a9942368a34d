"""From a command's config to an outcome: the only file here that meets Hydra."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from vlretrieval.data.splits import Source
from vlretrieval.evaluation.evaluate import Evaluation, Settings, choose_weight, evaluate
from vlretrieval.evaluation.protocols import protocol_named
from vlretrieval.evaluation.sharing import Processes
from vlretrieval.evaluation.subject import Subject, open_subject


def evaluate_checkpoint(cfg: DictConfig, processes: Processes) -> tuple[dict[str, Any], Path]:
    """Evaluate what ``cfg`` names; rank 0 writes. Returns the figures and the path of metrics.json."""
    subject = open_subject(cfg.checkpoint).to(cfg.device)
    source = chosen_source(cfg, subject)
    split = source.split(cfg.split)
    weight = cfg.rerank.weight
    if weight == "val":
        val = source.split("val")
        if val.name == split.name:
            raise ValueError(
                "rerank.weight=val would be chosen on the very split that it is measured on; give a number"
            )
        weight = choose_weight(subject.model, val, subject.tokenizer, subject.transform, cfg.rerank.top_k, processes)
    elif weight is not None and not isinstance(weight, int | float):
        raise ValueError(f"rerank.weight={weight} is not a number, null or val")
    settings = Settings(
        ks=tuple(cfg.ks),
        top_k=cfg.rerank.top_k,
        weight=weight,
        hard_negatives=cfg.hard_negatives,
        negatives_per_kind=cfg.negatives_per_kind,
        bootstrap=cfg.bootstrap,
        seed=cfg.seed,
        precision=cfg.precision,
        batch_size=cfg.batch_size,
        protocol=protocol_named(cfg.protocol),
    )
    outcome = evaluate(subject.model, split, subject.tokenizer, subject.transform, settings, processes=processes)
    return outcome.figures, write(outcome, cfg, subject, source, processes)


def write(outcome: Evaluation, cfg: DictConfig, subject: Subject, source: Source, processes: Processes) -> Path:
    outcome.figures["subject"] = {"path": subject.name, "data": source.fingerprint()}
    folder = Path(cfg.output) if cfg.output else default_folder(Path(cfg.checkpoint), cfg.split)
    return outcome.write(folder) if processes.rank == 0 else folder / "metrics.json"


def chosen_source(cfg: DictConfig, subject: Subject) -> Source:
    """The data set named on the command line, or else the one the model was trained on."""
    if cfg.get("data") is None:
        return subject.source()
    with_model = OmegaConf.merge(cfg, {"model": {"image_encoder": {"image_size": subject.transform.image_size}}})
    return hydra.utils.instantiate(with_model.data.source)


def default_folder(checkpoint: Path, split: str) -> Path:
    """evaluation/SPLIT in the run's folder, or beside whatever the checkpoint lies in."""
    run = checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint.parent
    return run / "evaluation" / split

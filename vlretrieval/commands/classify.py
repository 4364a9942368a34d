"""Classify pictures by class names and templates, without training (zero-shot); accuracy with intervals."""

from __future__ import annotations

import json
from pathlib import Path

from omegaconf import DictConfig

from vlretrieval.commands.launch import command


@command("classify", literal=("checkpoint", "images", "output"))
def main(cfg: DictConfig) -> dict:
    """``vlretrieval-classify checkpoint=FILE images=FOLDER`` with one folder a class."""
    from vlretrieval.evaluation.subject import open_subject
    from vlretrieval.evaluation.zero_shot import class_folders, classify

    files, names, labels = class_folders(cfg.images)
    subject = open_subject(cfg.checkpoint).to(cfg.device)
    figures = classify(
        subject.model,
        subject.tokenizer,
        subject.transform,
        files,
        names,
        labels,
        templates=list(cfg.templates),
        batch_size=cfg.batch_size,
        precision=cfg.precision,
        replicates=cfg.bootstrap,
        seed=cfg.seed,
    )
    print(f"{figures['pictures']} pictures, {figures['classes']} classes, {len(cfg.templates)} templates")
    if len(names) <= 5:
        print(f"top_5 takes all {len(names)} classes")
    for name in ("top_1", "top_5", "mean_of_classes"):
        bounds = figures.get("interval", {}).get(name)
        print(f"{name:<16}{figures[name]:6.1f} %" + ("  [{:.1f}, {:.1f}]".format(*bounds) if bounds else ""))
    if cfg.output:
        Path(cfg.output).write_text(json.dumps(figures, indent=2) + "\n")
    return figures


if __name__ == "__main__":
    main()

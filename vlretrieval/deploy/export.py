"""A checkpoint as a folder that opens by itself. All or nothing: a folder under its final name is a whole one."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vlretrieval import __version__
from vlretrieval.deploy.card import evaluations, model_card
from vlretrieval.deploy.checkpoint import Checkpoint, load_checkpoint, weights_hash
from vlretrieval.deploy.loaded import CARD, CONFIG, FORMAT, MANIFEST, TOKENIZER, WEIGHTS, load_folder, sha256


def export(checkpoint: str | Path, output: str | Path | None = None, overwrite: bool = False) -> Path:
    """Write a checkpoint's model as an exported folder, opened once to see that it holds the same weights.

    Args:
        checkpoint: a ``.ckpt`` of vlretrieval-train.
        output: the folder to make; None: ``export/`` in the run folder that the checkpoint lies in.
        overwrite: put the new folder in the place of one that is there.

    Returns:
        The folder.

    Raises:
        ValueError: a bad checkpoint, or a folder that is already there. Nothing is left half-written.
    """
    run = run_folder_of(Path(checkpoint))
    target = Path(output) if output is not None else run / "export"
    check_target(target, overwrite)
    loaded = load_checkpoint(checkpoint)
    model = loaded.build()
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    partial.mkdir(parents=True)
    try:
        write(partial, loaded, model.state_dict(), run)
        check_same(partial, model)
        put_in_place(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def run_folder_of(checkpoint: Path) -> Path:
    """The run folder: the parent of checkpoints/, else the checkpoint's own folder."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint.parent


def check_target(target: Path, overwrite: bool) -> None:
    if target.exists() and not target.is_dir():
        raise ValueError(f"output={target} is a file; give another output=")
    if target.is_dir() and any(target.iterdir()):
        if not overwrite:
            raise ValueError(f"{target} already holds files; give another output= or set overwrite=true")
        if not (target / MANIFEST).is_file():
            raise ValueError(f"{target} is no export, and overwrite=true replaces nothing else; give another output=")


def write(folder: Path, checkpoint: Checkpoint, weights: dict[str, torch.Tensor], run: Path) -> None:
    """Every file of the export, the manifest last."""
    figures = evaluations(run, weights_hash(weights))
    # Contiguous and apart: safetensors refuses tensors that share memory.
    save_file({name: value.detach().clone().contiguous() for name, value in weights.items()}, folder / WEIGHTS)
    config = {
        "format": FORMAT,
        "vlretrieval": __version__,
        "step": checkpoint.step,
        "model": checkpoint.config["model"],
        "preprocess": preprocess_of(checkpoint.config),
        "rerank": {"weight": rerank_weight(figures)},
    }
    write_json(folder / CONFIG, config)
    write_json(folder / TOKENIZER, checkpoint.tokenizer.to_dict())
    (folder / CARD).write_text(model_card(checkpoint, weights, figures), encoding="utf-8")
    names = sorted(path.name for path in folder.iterdir())
    write_json(folder / MANIFEST, {"files": {name: sha256(folder / name) for name in names}})
    for name in (*names, MANIFEST):
        sync(folder / name)


def preprocess_of(config: dict[str, Any]) -> dict[str, Any]:
    """What happens to a picture before the model sees it (which normalises by itself)."""
    return {
        "image_size": config["model"]["image_encoder"]["image_size"],
        "resize": config.get("data", {}).get("resize", "squash"),
    }


def rerank_weight(figures: list[dict[str, Any]]) -> float | None:
    """The weight of the two scores under which the model was measured, chosen on the validation split perhaps."""
    done = [f["protocol"]["rerank"] for f in figures if f["protocol"]["rerank"].get("done") == "yes"]
    return done[0]["weight"] if done else None


def write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False, sort_keys=False) + "\n", encoding="utf-8")


def sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def check_same(folder: Path, model: torch.nn.Module) -> None:
    """The folder, opened as its users will, holds bit by bit the weights that were meant."""
    again = load_folder(folder).model.state_dict()
    for name, value in model.state_dict().items():
        if not torch.equal(again[name], value):
            raise RuntimeError(f"{folder}: {name} came back changed")


def put_in_place(partial: Path, target: Path) -> None:
    """Rename, which happens wholly or not at all; an old export leaves its name first."""
    old = target.parent / f".{target.name}.old-{os.getpid()}"
    if target.exists():
        target.rename(old)
    try:
        partial.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)

"""A checkpoint as a folder that opens by itself. All or nothing: a folder under its final name is a whole one, and its
certificate says how near it is to the model it came from."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vlretrieval import __version__
from vlretrieval.deploy.card import Licences, evaluations, model_card
from vlretrieval.deploy.certificate import Measure, Pairs, certify, inputs_hash, line, random_pairs
from vlretrieval.deploy.checkpoint import Checkpoint, load_checkpoint, weights_hash
from vlretrieval.deploy.export_formats import Format, Ready, check_precision, opened
from vlretrieval.deploy.export_precision import stored
from vlretrieval.deploy.loaded import CARD, CERTIFICATE, FORMAT, MANIFEST, sha256, write_json
from vlretrieval.model.retrieval_model import RetrievalModel


def export(
    checkpoint: str | Path,
    output: str | Path | None = None,
    overwrite: bool = False,
    *,
    format: str = "folder",
    precision: str = "fp32",
    towers_only: bool = False,
    pairs: Pairs | None = None,
    measure: Measure | None = None,
    tolerance: float | None = None,
    licences: Licences = Licences(),  # noqa: B008  (frozen)
) -> Path:
    """Write a checkpoint's model as an exported folder, opened once and held against the model that was meant.

    Args:
        checkpoint: a ``.ckpt`` of vlretrieval-train.
        output: the folder to make; None: ``export/`` in the run folder that the checkpoint lies in (``export_FORMAT/``
            for other formats than "folder").
        overwrite: put the new folder in the place of one that is there.
        format: "folder", "onnx", "torch", "open_clip" or "huggingface".
        precision: "fp32", "fp16", "bf16" or "int8", of the stored weights.
        towers_only: leave out the cross-modal heads.
        pairs: what the export is tried on; None: noise.
        measure: evaluates a model, for the recall before and after; None leaves it out.
        tolerance: see :func:`vlretrieval.deploy.certificate.certify`.

    Returns:
        The folder.

    Raises:
        ValueError: a bad checkpoint, a format that cannot hold it, a folder that is already there, an export that is
            further from its source than the tolerance. Nothing is left half-written.
    """
    run = run_folder_of(Path(checkpoint))
    chosen = check_precision(format, precision)
    target = Path(output) if output is not None else run / ("export" if format == "folder" else f"export_{format}")
    check_target(target, overwrite)
    loaded = load_checkpoint(checkpoint)
    source = loaded.build()
    assert isinstance(source, RetrievalModel)
    figures = evaluations(run, weights_hash(source.state_dict()))
    ready = made_ready(loaded, source, precision, towers_only, figures)
    chosen.check(ready)
    pairs = random_pairs(loaded.tokenizer, ready.image_size) if pairs is None else pairs
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    partial.mkdir(parents=True)
    try:
        kind = chosen.write(partial, ready)
        certificate = certified(partial, kind, chosen, ready, pairs, measure, tolerance)
        certificate["source"] = {"weights": weights_hash(source.state_dict()), "step": loaded.step}
        write_json(partial / CERTIFICATE, certificate)
        card = model_card(loaded, ready.model.state_dict(), figures, certificate, kind, licences)
        (partial / CARD).write_text(card, encoding="utf-8")
        seal(partial, kind)
        put_in_place(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def check_formats(
    checkpoint: str | Path, formats: Sequence[str], precision: str = "fp32", towers_only: bool = False
) -> None:
    """Refuse a list of formats before the first is written.

    Raises:
        ValueError: a format that is unknown, does not hold the precision or cannot hold the checkpoint's model.
    """
    if not formats or len(set(map(str, formats))) < len(formats):
        raise ValueError(f"format={list(formats)}: name at least one, and each once")
    chosen = [check_precision(format, precision) for format in formats]
    if len(chosen) > 1:  # a single one is checked as it is exported
        loaded = load_checkpoint(checkpoint)
        model = loaded.build()
        assert isinstance(model, RetrievalModel)
        for format in chosen:
            format.check(made_ready(loaded, model, precision, towers_only, []))


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


def made_ready(
    checkpoint: Checkpoint,
    model: RetrievalModel,
    precision: str,
    towers_only: bool,
    figures: list[dict[str, Any]],
) -> Ready:
    """The model and the config that the exported folder carries."""
    config = dict(checkpoint.config["model"])
    if towers_only:
        config["crossmodal"] = None
        model = copy.copy(model)  # shares the towers; the caller's keeps its heads
        model._modules = dict(model._modules) | {"crossmodal": None}
    return Ready(
        model,
        checkpoint.tokenizer,
        {
            "format": FORMAT,
            "vlretrieval": __version__,
            "step": checkpoint.step,
            "precision": precision,
            "model": config,
            "preprocess": preprocess_of(checkpoint.config),
            "rerank": {"weight": None if towers_only else rerank_weight(figures)},
        },
        precision,
    )


def certified(
    folder: Path,
    kind: str,
    format: Format,
    ready: Ready,
    pairs: Pairs,
    measure: Measure | None,
    tolerance: float | None,
) -> dict[str, Any]:
    """The certificate of a folder just written.

    Raises:
        ValueError: it is further from its source than the tolerance.
    """
    model = opened(folder, kind)
    if kind == "folder":
        check_same(folder, model, ready)
    certificate = certify(
        ready.model,
        model,
        pairs,
        format=format.name,
        precision=ready.precision,
        tolerance=tolerance,
        measure=measure,
    )
    if certificate["faults"]:
        raise ValueError(
            f"format={format.name} precision={ready.precision}: {certificate['faults'][0]}; nothing is exported. "
            "Take another precision, or allow more with tolerance="
        )
    certificate |= inputs_hash(ready.config["preprocess"], ready.tokenizer)
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    heavy = sum(size for name, size in files.items() if name.split(".")[-1] in ("safetensors", "onnx", "data", "pt2"))
    whole = 4 * sum(value.numel() for value in ready.model.state_dict().values())
    certificate["size"] = {"bytes": heavy, "ratio": heavy / whole, "files": files}
    return {"line": line(certificate)} | certificate


def check_same(folder: Path, model: torch.nn.Module, ready: Ready) -> None:
    """The folder, opened as its users will, holds bit by bit the weights that were meant."""
    again = model.state_dict()
    for name, value in stored(ready.model.state_dict(), ready.precision).items():
        if not torch.equal(again[name], value.to(again[name].dtype)):
            raise RuntimeError(f"{folder}: {name} came back changed")


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


def seal(folder: Path, kind: str) -> None:
    """The manifest, last of all, and everything on the disk."""
    names = sorted(path.name for path in folder.iterdir())
    write_json(folder / MANIFEST, {"kind": kind, "files": {name: sha256(folder / name) for name in names}})
    for name in (*names, MANIFEST):
        sync(folder / name)


def sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


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

"""Embeddings of a split written to disk batch by batch, so that a run that was killed goes on where it stopped.

Each batch has a flag, set when its rows are written. Several processes share the batches and write to the same files; a
batch is the same whoever computes it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from vlretrieval.evaluation.embedding_files import positives_beyond
from vlretrieval.evaluation.encode import evaluating
from vlretrieval.evaluation.inputs import Inputs, by_length, in_order
from vlretrieval.evaluation.sharing import Processes
from vlretrieval.metrics.scores import IntArray, row_norms

STATE = "embed.json"


def embed(
    model: Any,
    inputs: Inputs,
    output: str | Path,
    *,
    batch_size: int = 64,
    precision: str = "float32",
    processes: Processes = Processes(),  # noqa: B008  (frozen)
    tell: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Path:
    """Write all embeddings of a split to a folder of .npy files, or to one .npz if ``output`` ends so.

    Raises:
        ValueError: the folder holds the beginning of another model's or another split's embeddings.
    """
    output = Path(output)
    folder = output.with_name(output.name + ".partial") if output.suffix == ".npz" else output
    split = inputs.split
    wanted = fingerprint(model, inputs, batch_size, precision)
    if processes.rank == 0:
        open_folder(folder, wanted, inputs, batch_size, int(model.embed_dim))
    _wait(processes)
    with evaluating(model, precision) as device:
        image_batches = in_order(len(split.image_ids), batch_size)
        text_batches = by_length(inputs.captions.lengths(), 4 * batch_size)

        def image(rows: IntArray) -> Any:
            return model.encode_image(inputs.pixels(rows).to(device)).embedding

        def text(rows: IntArray) -> Any:
            ids, mask = inputs.token_rows(inputs.captions, rows)
            return model.encode_text(ids.to(device), mask.to(device)).embedding

        for name, batches, compute in (("image", image_batches, image), ("text", text_batches, text)):
            _fill(folder, name, batches, compute, processes, tell)
    _wait(processes)
    if processes.rank == 0:
        for name in ("image", "text"):
            row_norms(np.load(folder / f"{name}_embeddings.npy", mmap_mode="r"), name)
            (folder / f"{name}_done.npy").unlink()
        if output.suffix == ".npz":
            pack(folder, output)
    _wait(processes)
    return output


def fingerprint(model: nn.Module, inputs: Inputs, batch_size: int, precision: str) -> dict[str, Any]:
    """What must be equal for rows of two runs to belong together."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return {
        "weights": digest.hexdigest()[:16],
        "split": inputs.split.hash,
        "batch_size": batch_size,
        "precision": precision,
        **inputs.description(),
    }


def open_folder(folder: Path, wanted: dict[str, Any], inputs: Inputs, batch_size: int, width: int) -> None:
    """Make the files at their full size, or accept those of a run that was stopped."""
    split = inputs.split
    state = folder / STATE
    if state.is_file():
        found = json.loads(state.read_text())
        differing = [key for key in wanted if found.get(key) != wanted[key]]
        if differing:
            key = differing[0]
            raise ValueError(
                f"{folder} holds embeddings of another {key} ({found.get(key)} there, {wanted[key]} here); "
                "remove it or choose another output"
            )
        if not (folder / "text_done.npy").exists():
            raise ValueError(
                f"{folder} already holds these embeddings, finished; choose another output to make them anew"
            )
        return
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty and holds no embeddings of ours; choose another output")
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows, batch in (
        ("image", len(split.image_ids), batch_size),
        ("text", len(split.captions), 4 * batch_size),
    ):
        np.lib.format.open_memmap(folder / f"{name}_embeddings.npy", "w+", np.float32, (rows, width)).flush()
        np.save(folder / f"{name}_done.npy", np.zeros(-(-rows // batch), dtype=np.uint8))
    np.save(folder / "image_ids.npy", np.array(list(split.image_ids)))
    np.save(folder / "text_image_ids.npy", np.array([split.image_ids[i] for i in split.caption_image.tolist()]))
    np.save(folder / "texts.npy", np.array(list(split.captions)))
    np.save(folder / "positives.npy", positives_beyond(split))
    partial = state.with_suffix(".partial")
    partial.write_text(json.dumps(wanted, indent=1))
    partial.replace(state)  # last: a folder with it has all its files


def pack(folder: Path, output: Path) -> None:
    """One .npz of a finished folder, whole or not at all; the folder goes."""
    partial = output.with_name(output.name + ".writing")
    arrays = {file.stem: np.load(file, mmap_mode="r") for file in sorted(folder.glob("*.npy"))}
    with partial.open("wb") as file:
        np.savez(file, **arrays)
    os.replace(partial, output)
    shutil.rmtree(folder)


def _fill(
    folder: Path,
    name: str,
    batches: list[IntArray],
    compute: Callable[[IntArray], Any],
    processes: Processes,
    tell: Callable[[str, int, int], None],
) -> None:
    rows = np.load(folder / f"{name}_embeddings.npy", mmap_mode="r+")
    done = np.load(folder / f"{name}_done.npy", mmap_mode="r+")
    for number in range(processes.rank, len(batches), processes.count):
        if done[number]:
            continue
        rows[batches[number]] = compute(batches[number]).float().cpu().numpy()
        rows.flush()
        done[number] = 1
        done.flush()
        tell(name, int(done.sum()), len(batches))


def _wait(processes: Processes) -> None:
    if processes.count > 1:
        dist.barrier()

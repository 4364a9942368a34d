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
DONE = "done.npy"  # a flag a batch, pictures first; gone when all are written
STARTING = ".starting"  # of a folder that is being made, or removed
UNPACKED = ".partial"  # of the folder that becomes a .npz


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
    folder = output.with_name(output.name + UNPACKED) if output.suffix == ".npz" else output
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

        if (folder / DONE).exists():  # else killed after the last batch, while the .npz was written
            for name, first, batches, compute in (
                ("image", 0, image_batches, image),
                ("text", len(image_batches), text_batches, text),
            ):
                _fill(folder, name, first, batches, compute, processes, tell)
    _wait(processes)
    if processes.rank == 0:
        for name in ("image", "text"):
            row_norms(np.load(folder / f"{name}_embeddings.npy", mmap_mode="r"), name)
        (folder / DONE).unlink(missing_ok=True)
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
        if not (folder / DONE).exists() and folder.suffix != UNPACKED:
            raise ValueError(
                f"{folder} already holds these embeddings, finished; choose another output to make them anew"
            )
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not empty and holds no embeddings of ours; choose another output")
    # made beside and moved in place: a folder that is there has all its files
    made = folder.with_name(folder.name + STARTING)
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    split = inputs.split
    sizes = {"image": (len(split.image_ids), batch_size), "text": (len(split.captions), 4 * batch_size)}
    for name, (rows, _) in sizes.items():
        np.lib.format.open_memmap(made / f"{name}_embeddings.npy", "w+", np.float32, (rows, width)).flush()
    np.save(made / DONE, np.zeros(sum(-(-rows // batch) for rows, batch in sizes.values()), dtype=np.uint8))
    np.save(made / "image_ids.npy", np.array(list(split.image_ids)))
    np.save(made / "text_image_ids.npy", np.array([split.image_ids[i] for i in split.caption_image.tolist()]))
    np.save(made / "texts.npy", np.array(list(split.captions)))
    np.save(made / "positives.npy", positives_beyond(split))
    (made / STATE).write_text(json.dumps(wanted, indent=1))
    made.replace(folder)


def pack(folder: Path, output: Path) -> None:
    """One .npz of a finished folder, whole or not at all; the folder goes."""
    partial = output.with_name(output.name + ".writing")
    arrays = {file.stem: np.load(file, mmap_mode="r") for file in sorted(folder.glob("*.npy"))}
    with partial.open("wb") as file:
        np.savez(file, **arrays)
    os.replace(partial, output)
    gone = folder.with_name(folder.name + STARTING)
    shutil.rmtree(gone, ignore_errors=True)
    folder.replace(gone)  # first out of the way: a folder of that name is never half there
    shutil.rmtree(gone)


def _fill(
    folder: Path,
    name: str,
    first: int,
    batches: list[IntArray],
    compute: Callable[[IntArray], Any],
    processes: Processes,
    tell: Callable[[str, int, int], None],
) -> None:
    rows = np.load(folder / f"{name}_embeddings.npy", mmap_mode="r+")
    done = np.load(folder / DONE, mmap_mode="r+")[first : first + len(batches)]
    for number in range(processes.rank, len(batches), processes.count):
        if done[number]:
            continue
        rows[batches[number]] = compute(batches[number]).float().cpu().numpy()
        rows.flush()
        done[number] = 1
        done.flush()  # after its rows
        tell(name, int(done.sum()), len(batches))


def _wait(processes: Processes) -> None:
    if processes.count > 1:
        dist.barrier()

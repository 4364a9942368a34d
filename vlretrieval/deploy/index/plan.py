"""What an index would cost, from rates measured on a few of its pictures: bytes, hours, machines. Writes nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vlretrieval.data.images import BadImage, open_image
from vlretrieval.deploy.index.made import Settings, flat, made_of, stored
from vlretrieval.deploy.index.sources import Source
from vlretrieval.deploy.index.store import COMMIT, EMBEDDINGS, KEPT, SCALES, Made, check_made, read_commit, read_state
from vlretrieval.deploy.loaded import LoadedModel
from vlretrieval.model.attention import MultiHeadAttention

LOG_BYTES = 200  # of a picture in the log, about


@torch.inference_mode()
def plan(
    model: LoadedModel,
    model_hash: str,
    source: Source,
    output: str | Path,
    settings: Settings,
    sample: int = 128,
    pictures: Sequence[int] = (),
    hours: float = 24,
) -> dict[str, Any]:
    """Figures for this source, and for other numbers of pictures like its.

    Args:
        sample: pictures that are read, embedded and thrown away, to measure rates.
        pictures: numbers to plan for.
        hours: within which as many machines as needed would be done.

    Raises:
        ValueError: the index there is of another model or other settings; no picture of the sample can be read.
    """
    if sample < 1 or hours <= 0 or any(number < 1 for number in pictures):
        raise ValueError("plan.sample, plan.hours and plan.pictures must be above 0")
    made, entries = made_of(model, model_hash, settings), source.entries()
    items, gone, known = {}, 0, Path(output)
    if (known / COMMIT).is_file():
        commit = read_commit(known)
        check_made(known, commit.made, made)
        state = read_state(known, commit)
        items = {**{i.id: i.stamp for i in state.items.values()}, **{k: v[0] for k, v in state.broken.items()}}
        gone = len(items.keys() - {entry.id for entry in entries})
    todo = [entry for entry in entries if items.get(entry.id) != entry.stamp]
    rates = measured(model, made, source, [e.id for e in spread(todo or entries, sample)])
    embedding = sum(size for name, size in made.row_bytes().items() if name in (EMBEDDINGS, SCALES))
    shared = {"as built": made.row_bytes().get(KEPT, 0), **kept_bytes(model, settings)}
    each_s = max(rates["read_s"] / rates["cores"], rates["model_s"])  # reading goes on beside the model
    sizes = {len(todo): "this run", **{number: "" for number in pictures}}
    return {
        "new": sum(entry.id not in items for entry in todo),
        "changed": sum(entry.id in items for entry in todo),
        "gone": gone,
        "unchanged": len(entries) - len(todo),
        **rates,
        "pictures_a_second": 1 / each_s,
        "embedding_bytes": embedding,
        "kept_bytes": shared,
        "thumb_bytes": rates["thumb_bytes"],
        "hours": hours,
        "sizes": [
            {
                "pictures": number,
                "machine_hours": number * each_s / 3600,
                "machines": max(1, math.ceil(number * each_s / 3600 / hours)),
                "embeddings": number * embedding,
                "kept": {name: number * size for name, size in shared.items()},
                "rest": round(number * (LOG_BYTES + rates["thumb_bytes"])),
            }
            for number in sizes
            if number
        ],
    }


def spread(entries: Sequence[Any], count: int) -> list[Any]:
    """Some entries from all over the list."""
    step = max(1, len(entries) // count)
    return list(entries[::step][:count])


def measured(model: LoadedModel, made: Made, source: Source, ids: Sequence[str]) -> dict[str, Any]:
    """Seconds a picture: to read and decode on one core, and in the model; and bytes of a thumbnail."""
    import os

    from vlretrieval.deploy.index.look import thumbnail

    pixels, thumbs, started_at = [], [], time.perf_counter()
    for name in ids:
        try:
            image = open_image(source.read(name), name=name)
        except BadImage as error:
            first_bad = error
            continue
        pixels.append(model.pixels([image]))
        thumbs.append(len(thumbnail(image, made.thumbs)) if made.thumbs else 0)
    read_s = time.perf_counter() - started_at
    if not pixels:
        raise ValueError(f"none of {len(ids)} pictures can be read; the first: {first_bad}")
    batch = torch.cat(pixels)
    for _ in range(2):  # the first one warms up
        started_at = time.perf_counter()
        encoded = model.model.encode_image(batch.to(model.device))
        stored(encoded.embedding.float().cpu().numpy(), made.embeddings)
        if made.kept_values:
            flat(model.model.keep_image(encoded), made.kept)
        model_s = time.perf_counter() - started_at
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "sample": len(pixels),
        "read_s": read_s / len(pixels),
        "model_s": model_s / len(pixels),
        "cores": cores,
        "device": str(model.device),
        "thumb_bytes": float(np.mean(thumbs)),
    }


def kept_bytes(model: LoadedModel, settings: Settings) -> dict[str, int]:
    """Bytes kept of a picture if each text-to-image head had a K/V of its own, some shared one, or all of them.

    GQA stands for a quarter of the K/V heads, of fewer than 8 heads for half of them.
    The tokens that image-to-text heads query with are no K/V, and shrink by none of these.
    """
    crossmodal = model.model.crossmodal
    if crossmodal is None or settings.kept == "none":
        return {}
    size = model.preprocess["image_size"]
    kept = model.model.keep_image(
        model.model.encode_image(torch.zeros(1, 3, size, size, dtype=torch.uint8).to(model.device))
    )
    tokens = 0 if kept.tokens is None else kept.tokens[0].numel()
    found = {}
    blocks = crossmodal.text_to_image.blocks if crossmodal.text_to_image is not None else ()
    for name in ("MHA", "GQA", "MQA"):
        numbers = tokens
        for block, kv in zip(blocks, kept.text_to_image, strict=True):
            assert isinstance(block.cross, MultiHeadAttention)
            heads = block.cross.num_heads
            groups = {"MHA": heads, "GQA": max(1, heads // (4 if heads >= 8 else 2)), "MQA": 1}[name]
            numbers += 2 * groups * kv.key.shape[2] * kv.key.shape[3]
        found[name] = numbers * np.dtype(settings.kept).itemsize
    return found


def printed(figures: dict[str, Any]) -> str:
    """The plan as text."""
    lines = [
        f"to do: {figures['new']:,} new, {figures['changed']:,} changed, {figures['gone']:,} gone; "
        f"{figures['unchanged']:,} as they are (by size and time of change; contents were not read)",
        f"measured on {figures['sample']} pictures: {1e3 * figures['read_s']:.2f} ms to read and decode on one of "
        f"{figures['cores']} cores, {1e3 * figures['model_s']:.2f} ms in the model ({figures['device']}): "
        f"{figures['pictures_a_second']:,.0f} a second on a machine like this",
        f"bytes a picture: embedding {figures['embedding_bytes']:,}; kept "
        + (", ".join(f"{name} {size:,}" for name, size in figures["kept_bytes"].items()) or "nothing")
        + (f"; thumbnail {figures['thumb_bytes']:,.0f}" if figures["thumb_bytes"] else ""),
    ]
    for row in figures["sizes"]:
        lines += [
            f"{row['pictures']:,} pictures: {row['machine_hours']:,.2f} machine hours, "
            f"{row['machines']:,} machine(s) to be done within {figures['hours']:g} h",
            f"    embeddings {amount(row['embeddings'])}, ids and thumbnails about {amount(row['rest'])}",
        ]
        if any(row["kept"].values()):
            lines.append("    kept: " + ", ".join(f"{name} {amount(size)}" for name, size in row["kept"].items()))
    return "\n".join(lines)


def amount(size: float) -> str:
    """Bytes as people say them."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} PB"

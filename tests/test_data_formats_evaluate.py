"""One set in four formats, through the commands: conversion, training of a few steps, evaluation. Figures are equal."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = ROOT / "data" / "sample"
# A folder with dataset_flickr8k.json and images/, which the project cannot bring along.
FLICKR8K = Path(os.environ.get("FLICKR8K", ROOT / "shared" / "data" / "flickr8k"))
SPLITS = ("train", "val", "test")
Run = Callable[..., tuple[int, str, str]]


def ways_to_read(folder: Path) -> dict[str, list[str]]:
    """Words that read what ``convert_all`` wrote to ``folder``."""
    return {
        "csv": ["data=table", f"data.table={folder}/csv/data.csv", f"data.images={folder}/csv/images"],
        "jsonl": ["data=jsonl", f"data.jsonl={folder}/jsonl/data.jsonl", f"data.images={folder}/jsonl/images"],
        "shards": ["data=shards", *(f"data.shards.{split}={folder}/shards/{split}-*.tar" for split in SPLITS)],
    }


def figures_of_all_formats(run: Run, folder: Path, karpathy: list[str], checkpoint: Path, *words: str) -> list[dict]:
    """metrics.json, without where the data lie, read from Karpathy JSON, CSV, JSONL and tar shards."""
    for name in ("csv", "jsonl", "shards"):
        status, _, err = run("data", "convert", *karpathy, f"to={name}", f"output={folder}/{name}", "per_shard=300")
        assert status == 0, err
    found = []
    for name, source in {"karpathy": karpathy, **ways_to_read(folder)}.items():
        output = folder / f"figures-{name}"
        status, _, err = run("evaluate", f"checkpoint={checkpoint}", f"output={output}", "device=cpu", *source, *words)
        assert status == 0, err
        figures = json.loads((output / "metrics.json").read_text())
        data = figures["subject"].pop("data")
        assert data["reader"] == {"karpathy": "KarpathyJson", "csv": "Table", "jsonl": "JsonLines"}.get(
            name, "TarShards"
        )
        found.append(figures)
    return found


def test_the_sample_gives_equal_figures_in_four_formats(
    run_command: Run, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    karpathy = ["data=karpathy", f"data.json={SAMPLE}/data.json", f"data.images={SAMPLE}/images"]
    found = figures_of_all_formats(run_command, tmp_path, karpathy, tiny_checkpoint, "split=train", "bootstrap=20")
    assert {"first_stage", "reranked", "protocol", "subject"} <= set(found[0])
    assert found[0]["protocol"]["split"]["images"] == 8
    for figures in found[1:]:
        assert figures == found[0]


@pytest.mark.slow
@pytest.mark.skipif(not FLICKR8K.is_dir(), reason="set FLICKR8K to the folder of dataset_flickr8k.json and images/")
def test_flickr8k_gives_equal_figures_in_four_formats(run_command: Run, tmp_path: Path) -> None:
    karpathy = ["data=karpathy", f"data.json={FLICKR8K}/dataset_flickr8k.json", f"data.images={FLICKR8K}/images"]
    run = tmp_path / "run"
    small = ["model.image_encoder.image_size=32", "model.image_encoder.depth=1", "model.text_encoder.depth=1"]
    status, _, err = run_command(
        "train", "experiment=flickr8k_small", *karpathy[1:], f"output_dir={run}", *small, "+trainer.max_steps=3",
        "trainer.accelerator=cpu", "loss.matching_start=0", "progress_bar=false", "validation.every_n_epochs=100",
    )  # fmt: skip
    assert status == 0, err
    checkpoint = run / "checkpoints" / "last.ckpt"
    found = figures_of_all_formats(run_command, tmp_path, karpathy, checkpoint, "bootstrap=100", "rerank.top_k=4")
    assert found[0]["protocol"]["split"]["images"] == 1000 and found[0]["protocol"]["split"]["captions"] == 5000
    for figures in found[1:]:
        assert figures == found[0]
    print(json.dumps({key: found[0][key] for key in ("first_stage", "reranked")}))

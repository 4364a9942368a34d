"""Exported models against torch eager, in one run: how many times as fast, how large, how near.

    python scripts/bench/export.py runs/quickstart/checkpoints/best.ckpt        # a few minutes on two cores
    python scripts/bench/export.py FILE --formats onnx,onnx:int8 --batches 1,64 --json export.json

A number above 1 says how many times as fast the export is as the checkpoint's model in torch eager; one thread, the
processor's own time, so that it can be read on a machine in use. Goals are listed at the end, met or not.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from timing import Work, paired

import vlretrieval
from vlretrieval.deploy.certificate import random_pairs
from vlretrieval.deploy.checkpoint import load_checkpoint
from vlretrieval.deploy.export import export
from vlretrieval.deploy.loaded import read_json

GOAL, SMALL = 1.5, 0.3  # times torch eager at batch 1 in onnxruntime; size of int8


def works(model: Any, pixels: torch.Tensor, texts: tuple[torch.Tensor, torch.Tensor], size: int) -> dict[str, Work]:
    """What is timed of a model: both towers, and one text of the batch after the other with its kept shortlist."""
    found: dict[str, Work] = {
        "images": lambda: model.encode_image(pixels),
        "texts": lambda: model.encode_text(*texts),
    }
    if model.crossmodal is not None:
        kept = model.keep_image(model.encode_image(pixels[:1])).index(torch.zeros(size, dtype=torch.int64))
        text = model.encode_text(texts[0][:1], texts[1][:1])
        found[f"one text, {size} kept pictures"] = lambda: model.match_kept(kept, text)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--formats", default="onnx,onnx:int8,torch", help="FORMAT or FORMAT:PRECISION, with commas")
    parser.add_argument("--batches", default="1,7,64")
    parser.add_argument("--length", type=int, default=16, help="tokens of a text")
    parser.add_argument("--shortlist", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", help="write all figures there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load_checkpoint(args.checkpoint)
    source, device = loaded.build(), torch.device("cpu")
    side = loaded.config["model"]["image_encoder"]["image_size"]
    print(f"torch {torch.__version__}, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, one thread")
    found: dict[str, Any] = {}
    goals: list[tuple[bool, str]] = []
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        for name in args.formats.split(","):
            format, _, precision = name.partition(":")
            precision = precision or "fp32"
            made = export(args.checkpoint, Path(folder) / name, format=format, precision=precision)
            certificate = read_json(made / "certificate.json")
            print(f"\n{certificate['line']}")
            model = vlretrieval.load_model(made, trust=True).model
            found[name] = {"size": certificate["size"]["ratio"]}
            for batch in map(int, args.batches.split(",")):
                pairs = random_pairs(loaded.tokenizer, side, batch)
                ids = torch.full((batch, args.length), loaded.tokenizer.start_id)
                texts = (ids, torch.ones_like(ids, dtype=torch.bool))
                sides = [works(side, pairs.pixels, texts, args.shortlist) for side in (model, source)]
                for what in sides[0]:
                    if batch > 1 and "kept" in what:
                        continue
                    seconds, ratios = paired({"export": sides[0][what], "eager": sides[1][what]}, args.rounds, device)
                    print(f"  batch {batch}, {what}: {1e3 * seconds:.2f} ms, {ratios['eager']} x eager")
                    found[name][f"batch {batch}, {what}"] = ratios["eager"].median
                    if name == "onnx" and batch == 1:
                        goals.append((ratios["eager"].median >= GOAL, f"{what}, batch 1: {ratios['eager']} x eager"))
            if precision == "int8":
                ratio = certificate["size"]["ratio"]
                goals.append((ratio <= SMALL, f"int8: {ratio:.3f} of the float32 weights' bytes, at most {SMALL}"))
    print("\nGoals")
    for met, line in goals:
        print(f"  {'met   ' if met else 'MISSED'} {line}")
    if args.json:
        Path(args.json).write_text(json.dumps({"found": found, "goals": goals}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A training step against open_clip's with its own CLIP class: pairs a second and peak memory, in one run.

    python scripts/bench/train.py --captions dataset_flickr8k.json   # on free cores; about 6 minutes on two
    python scripts/bench/train.py --quick                            # small batches and pictures, one thread; a minute
    python scripts/bench/train.py --device cuda                      # the same with CUDA events, in bfloat16
    python scripts/bench/train.py --only text,lightning --json train.json

Both sides have the same towers, batch, captions (open_clip's BPE), InfoNCE and AdamW, and do forward, backward and
optimizer step. "open_clip" is its own training script's step: the optimizer not fused, every caption computed at the
full context of 77. As neither is a matter of its model, it is measured with them put right besides: "fused" has our
optimizer, "short" a context cut to the longest caption of all batches too. "length_buckets" is our own option of that
name, with which captions are computed in runs of like length.

A number above 1 says how many times as fast ours is as what it names; at "floor", the bare matrix products of our step,
it is the share of their speed. Steps take turns in an order drawn anew each round, and ratios are medians over rounds.
With one thread processor time is compared, so that it can be read on a machine in use; with more, wall time, which
needs a quiet one. Without ``--captions`` (a Karpathy JSON) the captions are those of the built-in scenes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from attention_forms import Bench
from timing import Work, interleaved, peak_resident_bytes, ratio
from train_forms import (
    CONTEXT,
    SHAPES,
    Floor,
    OpenClipStep,
    OpenClipText,
    OurStep,
    OurText,
    Shape,
    batches_of,
    captions_of,
    open_clip_model,
    our_model,
)
from train_lightning import TURN, batch_for, take_turns

from vlretrieval.data.datasets import Batch
from vlretrieval.training.precision import allow_tf32

MIB = 2**20
TEXT = Shape("text tower", 32, 16, 64, 1, 512, 6, 256, 32)  # the picture's is there and not used
SMALL = Shape("small", 64, 16, 128, 4, 128, 2, 128, 4)


def longest(batches: list[Batch]) -> int:
    return max(batch.token_ids.shape[1] for batch in batches)


def measured(
    bench: Bench, title: str, works: dict[str, Work], pairs: int, rounds: int | None = None
) -> dict[str, list[float]]:
    """Seconds of each step in each round; prints pairs a second and how many times as fast the first is."""
    seconds = interleaved(works, rounds or bench.rounds, bench.device, warm_up=1)
    ours = seconds[next(iter(works))]
    print(f"  {title}")
    found = {}
    for name, each in seconds.items():
        against = ratio(each, ours)
        rate = pairs / statistics.median(each)
        print(f"    {name:<28}{rate:>9.1f} pairs/s{'' if each is ours else f'   {against}'}", flush=True)
        found[name] = {"pairs_per_s": rate, "ratio": (against.median, against.low, against.high)}
    bench.found[title] = found
    return seconds


def peak(step: OurStep | OpenClipStep, bench: Bench) -> int:
    """Bytes at the height of a step, gradients among them, over weights, moments and batches."""
    step()  # makes the moments
    step.optimizer.zero_grad()
    return peak_resident_bytes(step, bench.device)


def speed(bench: Bench, shape: Shape, captions: list[str]) -> None:
    """Both towers, with all patches and with half of them."""
    batches = batches_of(shape, captions, bench.device)
    short = longest(batches)
    torch.manual_seed(0)
    works: dict[str, Work] = {
        "ours": OurStep(our_model(shape), batches),
        "open_clip": OpenClipStep(open_clip_model(shape), batches),
        "open_clip, fused": OpenClipStep(open_clip_model(shape), batches, fused=True),
        "open_clip, fused, short": OpenClipStep(open_clip_model(shape, context_length=short), batches, fused=True),
        "ours, half": OurStep(our_model(shape, patch_dropout=0.5), batches),
        "open_clip, half": OpenClipStep(open_clip_model(shape, patch_dropout=0.5), batches),
        "open_clip, fused, half": OpenClipStep(open_clip_model(shape, patch_dropout=0.5), batches, fused=True),
        "floor": Floor(shape, batches, bench.device),
    }
    # the large shape takes most of the time, and its steps are long enough to differ little
    rounds = min(bench.rounds, 3) if shape.image_size >= 224 else bench.rounds
    seconds = measured(bench, f"{shape}, captions of {short} tokens at most", works, shape.batch, rounds)

    def times(theirs: str, ours: str) -> float:
        return ratio(seconds[theirs], seconds[ours]).median

    bench.goal(
        times("open_clip", "ours"),
        1.15 if shape.image_size >= 224 else 1.3,
        f"{shape.name}: times open_clip (fused: {times('open_clip, fused', 'ours'):.2f}; fused, short: "
        f"{times('open_clip, fused, short', 'ours'):.2f}; the products alone: {times('open_clip', 'floor'):.2f})",
    )
    bench.goal(
        times("open_clip", "ours, half"),
        2.0,
        f"{shape.name}, half the patches: times open_clip with all (fused: "
        f"{times('open_clip, fused', 'ours, half'):.2f}; ours with all: {times('ours', 'ours, half'):.2f}; "
        f"open_clip with half: {times('open_clip, half', 'ours, half'):.2f}, "
        f"fused: {times('open_clip, fused, half', 'ours, half'):.2f})",
    )


def text(bench: Bench, captions: list[str]) -> None:
    """The text tower alone, against the fixed context."""
    shape = scaled(bench, TEXT)
    batches = batches_of(shape, captions, bench.device)
    short = longest(batches)
    mean = statistics.mean(float(batch.token_mask.sum(1).float().mean()) for batch in batches)
    print(f"\nA step of the text tower alone, {shape.text_depth} x {shape.text_dim}, batch {shape.batch}")
    torch.manual_seed(0)
    works: dict[str, Work] = {
        "ours": OurText(our_model(shape), batches),
        "ours, length_buckets=4": OurText(our_model(shape), batches, buckets=4),
        "open_clip": OpenClipText(open_clip_model(shape), batches),
        "open_clip, fused": OpenClipText(open_clip_model(shape), batches, fused=True),
        "open_clip, fused, short": OpenClipText(open_clip_model(shape, context_length=short), batches, fused=True),
    }
    title = f"captions of {mean:.1f} tokens in the mean, {short} at most, against {CONTEXT}"
    seconds = measured(bench, title, works, shape.batch)

    def times(theirs: str, ours: str) -> float:
        return ratio(seconds[theirs], seconds[ours]).median

    bench.goal(
        times("open_clip", "ours"),
        2.5,
        f"text tower: times open_clip (fused: {times('open_clip, fused', 'ours'):.2f}; with length_buckets=4: "
        f"{times('open_clip', 'ours, length_buckets=4'):.2f}, fused: "
        f"{times('open_clip, fused', 'ours, length_buckets=4'):.2f})",
    )


def memory(bench: Bench, shape: Shape, captions: list[str]) -> None:
    """Both towers' peak, with all patches and with half of them."""
    batches = batches_of(shape, captions, bench.device, count=1)
    # one at a time: weights and moments of all would be gigabytes
    builds: dict[str, Callable[[], OurStep | OpenClipStep]] = {
        "ours": lambda: OurStep(our_model(shape), batches),
        "ours, half": lambda: OurStep(our_model(shape, patch_dropout=0.5), batches),
        "open_clip": lambda: OpenClipStep(open_clip_model(shape), batches),
        "open_clip, half": lambda: OpenClipStep(open_clip_model(shape, patch_dropout=0.5), batches),
    }
    peaks = {name: peak(build(), bench) for name, build in builds.items()}
    print(f"  {shape}: " + "   ".join(f"{name} {peak / MIB:.0f}" for name, peak in peaks.items()), flush=True)
    bench.found[f"memory, {shape}"] = peaks


def chunks(bench: Bench, captions: list[str]) -> None:
    """Gradient caching: what a forward pass more costs and what memory it saves."""
    batch, chunk = (32, 8) if bench.quick else (512, 64)
    shape = replace(SHAPES[0], batch=batch)
    batches = batches_of(shape, captions, bench.device, count=2)
    print("\nGradient caching")
    steps: dict[str, OurStep] = {
        f"chunks of {chunk}": OurStep(our_model(shape), batches, chunk),
        "all at once": OurStep(our_model(shape), batches),
    }
    seconds = measured(bench, str(shape), dict(steps), batch, rounds=min(bench.rounds, 2))
    few = batches_of(replace(shape, batch=chunk), captions, bench.device, count=2)
    steps[f"a batch of {chunk}"] = OurStep(our_model(shape), few)
    peaks = {name: peak(step, bench) for name, step in steps.items()}
    print("    peak memory: " + "   ".join(f"{name} {peak / MIB:.0f} MiB" for name, peak in peaks.items()), flush=True)
    cost = ratio(*(seconds[name] for name in seconds)).median
    saved = peaks["all at once"] / peaks[f"chunks of {chunk}"]
    print(f"    chunks take {cost:.2f} x the time and 1/{saved:.1f} of the memory")
    bench.found["memory, chunks"] = peaks


def grouped(bench: Bench, captions: list[str]) -> None:
    """Shared keys and values in training."""
    shape = scaled(bench, replace(SHAPES[1], batch=32))
    batches = batches_of(shape, captions, bench.device)
    print("\nShared keys and values in training")
    steps: dict[str, OurStep] = {
        "MHA": OurStep(our_model(shape), batches),
        "GQA, half as many": OurStep(our_model(shape, num_kv_heads=2), batches),
        "MQA, one": OurStep(our_model(shape, num_kv_heads=1), batches),
    }
    measured(bench, f"{shape}, 4 heads (below 1: faster than MHA)", dict(steps), shape.batch)
    peaks = {name: peak(step, bench) for name, step in steps.items()}
    print("    peak memory: " + "   ".join(f"{name} {peak / MIB:.0f} MiB" for name, peak in peaks.items()), flush=True)
    bench.found["memory, shared keys and values"] = peaks


def lightning(bench: Bench, captions: list[str]) -> None:
    """What the Trainer adds to a step of 50 ms, and to one as short as it can be."""
    print("\nLightning: a step of our task under its Trainer, against a bare loop of the same arithmetic")
    build = partial(our_model, SMALL)

    def batches(size: int) -> list[Batch]:
        return batches_of(replace(SMALL, batch=size), captions, bench.device)

    size = batch_for(0.05, build, batches)
    found = take_turns(build, batches(size), turns=3 if bench.quick else 15)
    share = ratio(found.lightning_s, found.bare_s)
    bare_ms, ours_ms = (1e3 * statistics.median(each) for each in (found.bare_s, found.lightning_s))
    print(f"  batch {size}: bare {bare_ms:.2f} ms, under Lightning {ours_ms:.2f} ms; {share}, turns of {TURN} steps")
    narrow = replace(SMALL, image_size=16, image_dim=64, text_dim=64, batch=2, vocab=512)
    few = batches_of(narrow, captions, bench.device)
    least = take_turns(partial(our_model, narrow), few, turns=5 if bench.quick else 20)
    added = [1e3 * (with_it - without) for with_it, without in zip(least.lightning_s, least.bare_s, strict=True)]
    cost_ms = statistics.median(added)
    print(f"  the shortest step: bare {1e3 * statistics.median(least.bare_s):.2f} ms, Lightning adds {cost_ms:.2f} ms")
    bench.found["lightning"] = {"bare_ms": bare_ms, "lightning_ms": ours_ms, "added_ms": cost_ms}
    bench.goal(
        cost_ms / 50,
        0.03,
        f"Lightning's share of a 50 ms step (as measured on one: {share.median - 1:+.3f})",
        at_most=True,
    )


def scaled(bench: Bench, shape: Shape, share: int = 10) -> Shape:
    """A smaller batch for a quick run."""
    return replace(shape, batch=max(4, shape.batch // share)) if bench.quick else shape


PARTS = ["speed", "text", "lightning", "memory", "chunks", "gqa"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small batches, few rounds, one thread")
    parser.add_argument("--captions", metavar="FILE", help="a Karpathy JSON (default: the built-in scenes' captions)")
    parser.add_argument("--shapes", help="some of 96,128,224, the sides of the pictures (quick: 96)")
    parser.add_argument("--rounds", type=int, help="rounds of each comparison (5, fewer of the longest; quick 3)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, help="number of threads (default: all cores, quick 1)")
    parser.add_argument("--only", help=f"some of {','.join(PARTS)}")
    parser.add_argument("--json", help="write all figures there")
    args = parser.parse_args()
    parts = args.only.split(",") if args.only else PARTS
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only {','.join(sorted(unknown))}: choose of {','.join(PARTS)}")
    every = [shape.name.split()[0] for shape in SHAPES]
    sizes = args.shapes.split(",") if args.shapes else every[: 1 if args.quick else None]
    chosen = [shape for shape in SHAPES if shape.name.split()[0] in sizes]
    if len(chosen) < len(sizes):
        parser.error(f"--shapes {args.shapes}: choose of {','.join(every)}")

    device = torch.device(args.device)
    allow_tf32(device.type)
    bench = Bench(device, args.rounds or (3 if args.quick else 5), args.quick)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = args.threads or (1 if args.quick else cores)
    torch.set_num_threads(threads)
    here = f"{platform.machine()}, {threads} of {cores} cores"
    name = torch.cuda.get_device_name() if device.type == "cuda" else here
    captions = captions_of(args.captions)
    print(f"torch {torch.__version__}, {name}, {bench.rounds} rounds, {args.captions or 'captions of the scenes'}")
    shapes = [scaled(bench, shape) for shape in chosen]
    if "speed" in parts:
        print("\nA step of both towers")
        for shape in shapes:
            speed(bench, shape, captions)
    for part, measure in (("text", text), ("lightning", lightning)):
        if part in parts:
            measure(bench, captions)
    if "memory" in parts:
        print("\nPeak memory of a step (resident), MiB over weights and moments")
        for shape in shapes:
            memory(bench, shape, captions)
    for part, measure in (("chunks", chunks), ("gqa", grouped)):
        if part in parts:
            measure(bench, captions)

    print("\nGoals")
    for met, line in bench.goals:
        print(f"  {'met   ' if met else 'MISSED'} {line}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(
                {"torch": torch.__version__, "device": name, "found": bench.found, "goals": bench.goals}, file, indent=1
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())

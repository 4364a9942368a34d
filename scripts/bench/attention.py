"""Our attention against the plain form, torch's, timm's, open_clip's and the bare matrix products, in one run.

    python scripts/bench/attention.py                  # on free cores; about 15 minutes on two
    python scripts/bench/attention.py --quick          # under a minute: small batches, one thread
    python scripts/bench/attention.py --device cuda    # the same with CUDA events
    python scripts/bench/attention.py --only memory,gqa --json attention.json

A number above 1 says how many times as fast ours is as what it names; at "floor", the bare products, it is the share of
their speed. With one thread processor time is compared, so that it can be read on a machine in use; with all threads,
wall time, which needs a quiet one. Goals are listed at the end, met or not; the noise of a median, some 6 %, is not
taken off them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import replace

import torch
from attention_forms import CASES, MODES, Bench, Case, Floor, forms, inference, ours, tensors
from attention_questions import alternatives, claims, grouped, kept
from timing import Ratio, peak_bytes
from torch import nn


def speed(bench: Bench, dtype: torch.dtype, cases: list[Case], modes: list[str], rounds: int | None = None) -> None:
    """Every form in every case, with and without padding."""
    threads = torch.get_num_threads()
    where = bench.device.type if bench.device.type == "cuda" else f"{threads} thread{'s' * (threads > 1)}"
    name_of_type = str(dtype).removeprefix("torch.")
    print(f"\nSpeed, {name_of_type}, {where}")
    for case in cases:
        print(f" {case}")
        for mode in modes:
            for masked in (False, True):
                given = tensors(case, dtype, bench.device, masked)
                built: dict[str, nn.Module] = forms(case, masked)
                if not masked:
                    built["floor"] = Floor(case, dtype, bench.device)
                works = {name: MODES[mode](form.to(bench.device, dtype), *given) for name, form in built.items()}
                title = f"{mode}{', padded' if masked else ''}"
                ratios = bench.compare(f"{case.name}, {title}, {name_of_type}, {where}", works, rounds)
                if dtype == torch.float32 or bench.device.type == "cuda":
                    speed_goals(bench, f"{case.name}, {title}, {where}", case, mode, ratios)


def speed_goals(bench: Bench, what: str, case: Case, mode: str, ratios: dict[str, Ratio]) -> None:
    def goal(value: float, bound: float, than: str) -> None:
        reach = f" (the products alone: {value / ratios['floor'].median:.2f})" if "floor" in ratios else ""
        bench.goal(value, bound, f"{what}: times {than}{reach}")

    peers = {name: ratio.median for name, ratio in ratios.items() if name not in ("floor", "plain")}
    fastest = min(peers, key=lambda name: peers[name])
    if mode == "inference":
        if "floor" in ratios:
            bench.goal(ratios["floor"].median, 0.80 if case.queries == 32 else 0.85, f"{what}: of the floor's rate")
        goal(ratios["plain"].median, 1.15, "the plain form")
        goal(peers[fastest], 0.95, f"the fastest peer, {fastest}")
    else:
        goal(ratios["plain"].median, 1.0, "the plain form")
        goal(peers["nn.MHA, weights"], 1.1, "nn.MultiheadAttention as it comes")
        goal(peers["nn.MHA"], 1.1, "nn.MultiheadAttention without weights")


def memory(bench: Bench) -> None:
    """Bytes at the height of one call, over inputs and weights."""
    case = replace(CASES[2], batch=8)
    print(f"\nPeak memory, float32, {case}")
    for mode in MODES:
        for masked in (False, True):
            given = tensors(case, torch.float32, bench.device, masked)
            works = {name: MODES[mode](form.to(bench.device), *given) for name, form in forms(case, masked).items()}
            peaks = {name: peak_bytes(work, bench.device) for name, work in works.items()}
            title = f"{mode}{', padded' if masked else ''}"
            print(f"  {title}: " + "   ".join(f"{name} {peak / 2**20:.1f} MiB" for name, peak in peaks.items()))
            bench.found[f"memory, {title}"] = peaks
            bench.goal(
                peaks["ours"] / peaks["plain"], 0.5, f"peak memory, {title}: over the plain form's", at_most=True
            )
            if masked:
                share = peaks["ours"] / peaks["nn.MHA"]
                bench.goal(share, 0.6, f"peak memory, {title}: over nn.MultiheadAttention's", at_most=True)


def lower_precision(bench: Bench) -> None:
    """bfloat16. On a CPU without units for it a product is 5 to 15 times slower: small batches and few rounds."""
    native = bench.device.type == "cuda" or bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)())
    if native:
        speed(bench, torch.bfloat16, [bench.case(case) for case in CASES], list(MODES))
        return
    print("\nThis processor has no bfloat16 units, so its figures say nothing about those that have: 3 rounds, batch 2")
    cases = [replace(case, batch=2) for case in CASES]
    if bench.quick:
        speed(bench, torch.bfloat16, cases[1:2], ["inference"], rounds=1)
    else:
        speed(bench, torch.bfloat16, cases, list(MODES), rounds=3)
    x = tensors(cases[1], torch.float32, bench.device)
    works = {
        "float32": inference(ours(cases[1]), *x),
        "bfloat16": inference(ours(cases[1]).bfloat16(), *(None if t is None else t.bfloat16() for t in x)),
    }
    bench.compare("ours, text, the same work in both", works, rounds=3)


PARTS = ["speed", "bf16", "gqa", "kept", "claims", "memory", "alternatives"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small batches, few rounds, one thread")
    parser.add_argument("--rounds", type=int, help="rounds of each comparison (21, quick 3)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", help="numbers of threads, e.g. 1,2 (default: 1 and all)")
    parser.add_argument("--only", help=f"some of {','.join(PARTS)}")
    parser.add_argument("--json", help="write all figures there")
    args = parser.parse_args()
    parts = args.only.split(",") if args.only else PARTS[: -1 if args.quick else None]  # the last one has to compile
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only {','.join(sorted(unknown))}: choose of {','.join(PARTS)}")

    device = torch.device(args.device)
    bench = Bench(device, args.rounds or (3 if args.quick else 21), args.quick)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = [int(n) for n in args.threads.split(",")] if args.threads else [1] if args.quick else sorted({1, cores})
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()}, {cores} cores"
    print(f"torch {torch.__version__}, {name}, {bench.rounds} rounds")
    for number in threads if device.type == "cpu" else [1]:
        torch.set_num_threads(number)
        if "speed" in parts:
            speed(bench, torch.float32, [bench.case(case) for case in CASES], list(MODES))
    torch.set_num_threads(1)
    measures = (grouped, kept, claims, memory, lower_precision, alternatives)
    for part, measure in zip(("gqa", "kept", "claims", "memory", "bf16", "alternatives"), measures, strict=True):
        if part in parts:
            measure(bench)

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

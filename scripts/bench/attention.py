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
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from attention_forms import Case, ContiguousHeads, Floor, Plain, RepeatedKeyValues, forms, ours
from timing import Ratio, Work, paired, peak_bytes
from torch import Tensor, nn

CASES = [
    Case("short text", 64, 32, None, 512, 8),
    Case("text", 32, 77, None, 512, 8),
    Case("patches", 32, 197, None, 768, 12),
    Case("text to patches", 32, 77, 197, 512, 8),
]


class Bench:
    """Runs cases and remembers what the goals ask about."""

    def __init__(self, device: torch.device, rounds: int, quick: bool):
        self.device, self.rounds, self.quick = device, rounds, quick
        self.found: dict[str, dict[str, Any]] = {}
        self.goals: list[tuple[bool, str]] = []

    def case(self, case: Case, share: int = 8) -> Case:
        """A smaller batch for a quick run."""
        return replace(case, batch=max(1, case.batch // share)) if self.quick else case

    def goal(self, value: float, bound: float, what: str, at_most: bool = False) -> None:
        met = value <= bound if at_most else value >= bound
        self.goals.append((met, f"{what}: {value:.2f} (goal {'at most' if at_most else 'at least'} {bound:.2f})"))

    def compare(self, title: str, works: dict[str, Work], rounds: int | None = None) -> dict[str, Ratio]:
        seconds, ratios = paired(works, rounds or self.rounds, self.device, warm_up=1 if self.quick else 2)
        print(f"  {title}: {next(iter(works))} {1e3 * seconds:.1f} ms")
        print("    " + "   ".join(f"{name} {ratio}" for name, ratio in ratios.items()))
        values = {name: (ratio.median, ratio.low, ratio.high) for name, ratio in ratios.items()}
        self.found[title] = {"ms": 1e3 * seconds, **values}
        return ratios


def tensors(case: Case, dtype: torch.dtype, device: torch.device, masked: bool = False) -> list[Tensor | None]:
    """x, context and key_mask; masked items are padded at the end, to half of their length and more."""
    torch.manual_seed(0)
    keys = case.keys or case.queries
    x = torch.randn(case.batch, case.queries, case.dim, dtype=dtype, device=device)
    context = torch.randn(case.batch, keys, case.dim, dtype=dtype, device=device) if case.keys else None
    lengths = torch.randint(keys // 2, keys + 1, (case.batch, 1), device=device)
    return [x, context, torch.arange(keys, device=device) < lengths if masked else None]


def inference(form: nn.Module, x: Tensor, context: Tensor | None, key_mask: Tensor | None) -> Work:
    form.eval()
    if getattr(form, "length_first", False):
        x, context = (None if t is None else t.transpose(0, 1).contiguous() for t in (x, context))

    def work() -> None:
        with torch.inference_mode():
            form(x, context, key_mask=key_mask)

    return work


def training(form: nn.Module, x: Tensor, context: Tensor | None, key_mask: Tensor | None) -> Work:
    """Forward and backward, to weights and inputs. Gradients lie ready and are added to, as in accumulation."""
    form.train()
    if isinstance(form, Floor):
        return lambda: (form(x), form.backward())
    if getattr(form, "length_first", False):
        x, context = (None if t is None else t.transpose(0, 1).contiguous() for t in (x, context))
    x, context = (None if t is None else t.detach().clone().requires_grad_() for t in (x, context))
    gradient = torch.randn_like(x)

    def work() -> None:
        form(x, context, key_mask=key_mask).backward(gradient)

    return work


MODES: dict[str, Callable[..., Work]] = {"inference": inference, "training": training}


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
    peers = {name: ratio.median for name, ratio in ratios.items() if name not in ("floor", "plain")}
    fastest = min(peers, key=lambda name: peers[name])
    if mode == "inference":
        if "floor" in ratios:
            bench.goal(ratios["floor"].median, 0.80 if case.queries == 32 else 0.85, f"{what}: of the floor's rate")
            reachable = ratios["plain"].median / ratios["floor"].median
            bench.goal(ratios["plain"].median, 1.15, f"{what}: times the plain form (the floor itself {reachable:.2f})")
        else:
            bench.goal(ratios["plain"].median, 1.15, f"{what}: times the plain form")
        bench.goal(peers[fastest], 0.95, f"{what}: times the fastest peer, {fastest}")
    else:
        bench.goal(ratios["plain"].median, 1.0, f"{what}: times the plain form")
        bench.goal(peers["nn.MHA, weights"], 1.1, f"{what}: times nn.MultiheadAttention as it comes")
        bench.goal(peers["nn.MHA"], 1.1, f"{what}: times nn.MultiheadAttention without weights")


def grouped(bench: Bench) -> None:
    """Sharing K/V: quarter, one; and what copying them for every query head would cost."""
    print(
        "\nShared K/V, float32 (times as fast as MHA; the limit for a quarter of the K/V heads is 1.6 in the products)"
    )
    for case in map(bench.case, CASES):
        given = tensors(case, torch.float32, bench.device)
        quarter = case.heads // 4
        built: dict[str, nn.Module] = {
            "a quarter": ours(case, num_kv_heads=quarter),
            "MHA": ours(case),
            "one": ours(case, num_kv_heads=1),
            "a quarter, copied": ours(case, RepeatedKeyValues, num_kv_heads=quarter),
        }
        for mode in MODES:
            works = {name: MODES[mode](form.to(bench.device), *given) for name, form in built.items()}
            ratios = bench.compare(f"{case.name}, K/V heads, {mode}", works)
            if case.queries >= 77 and mode == "inference":
                bench.goal(ratios["MHA"].median, 1.3, f"{case.name}: a quarter of the K/V heads, times MHA")


def kept(bench: Bench) -> None:
    """Captions of a shortlist meeting one picture: its K/V projected anew for each, or kept."""
    case = bench.case(CASES[3], share=2)
    print("\nKept K/V, float32: each of a batch of captions attends to the same picture")
    for kv_heads in (case.heads, case.heads // 4, 1):
        form = ours(case, num_kv_heads=kv_heads).eval().to(bench.device)
        x, context, _ = tensors(case, torch.float32, bench.device)
        assert x is not None and context is not None
        one = context[:1]
        side_by_side = x.reshape(1, -1, case.dim)
        with torch.inference_mode():
            known = form.project_context(one)

        def anew(form: nn.Module = form, x: Tensor = x, one: Tensor = one) -> None:
            with torch.inference_mode():
                form(x, one.expand(len(x), -1, -1))

        def from_kept(form: nn.Module = form, known: Any = known, side_by_side: Tensor = side_by_side) -> None:
            with torch.inference_mode():
                form(side_by_side, known)

        bench.compare(
            f"{kv_heads} K/V heads, {known.nbytes / 1024:.0f} KiB a picture and layer",
            {"kept": from_kept, "anew": anew},
        )


def claims(bench: Bench) -> None:
    """Two things said of multi-head attention: that the layout of the reshape and batch-first matter."""
    print("\nSaid of it, float32 (above 1: the second is slower than the first)")
    for case in map(bench.case, CASES[2:3] if bench.quick else CASES):
        given = tensors(case, torch.float32, bench.device)
        for mode in MODES:
            pairs: dict[str, dict[str, nn.Module]] = {
                "ours, contiguous heads": {"views": ours(case), "copies": ours(case, ContiguousHeads)},
                "plain, contiguous heads": {
                    "views": Plain(case.dim, case.heads),
                    "copies": Plain(case.dim, case.heads, contiguous=True),
                },
                "torch's, batch first": {
                    "batch first": forms(case, False)["nn.MHA"],
                    "length first": forms(case, False)["nn.MHA, length first"],
                },
            }
            for name, built in pairs.items():
                works = {form: MODES[mode](module.to(bench.device), *given) for form, module in built.items()}
                bench.compare(f"{case.name}, {mode}, {name}", works)


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


PARTS = ["speed", "bf16", "gqa", "kept", "claims", "memory"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small batches, few rounds, one thread")
    parser.add_argument("--rounds", type=int, help="rounds of each comparison (21, quick 3)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", help="numbers of threads, e.g. 1,2 (default: 1 and all)")
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--json", help="write all figures there")
    args = parser.parse_args()
    parts = args.only.split(",")
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
    for part, measure in (
        ("gqa", grouped),
        ("kept", kept),
        ("claims", claims),
        ("memory", memory),
        ("bf16", lower_precision),
    ):
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

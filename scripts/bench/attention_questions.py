"""What else is asked of attention: shared K/V, kept K/V, two things said of it, and other ways to leave padding out."""

from __future__ import annotations

from typing import Any

import torch
from attention_forms import CASES, MODES, Bench, ContiguousHeads, Plain, RepeatedKeyValues, forms, ours, tensors
from timing import Work
from torch import Tensor, nn

from vlretrieval.model.attention import attend


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


def alternatives(bench: Bench) -> None:
    """Other ways to leave padding out, behind the same call: FlexAttention and nested tensors; the core alone."""
    case = bench.case(CASES[1])
    print(f"\nPadding left out by other means, float32, {case} (above 1: slower than ours)")
    torch.manual_seed(0)
    shape, device = (case.batch, case.queries, 3, case.heads, case.dim // case.heads), bench.device
    qkv, lengths = torch.randn(shape, device=device), torch.randint(8, case.queries + 1, (case.batch,), device=device)
    mask = (torch.arange(case.queries, device=device) < lengths[:, None])[:, None, None]

    def masked() -> None:
        with torch.no_grad():
            attend(*qkv.permute(2, 0, 3, 1, 4).unbind(), mask)

    def flex() -> Work:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        allowed = create_block_mask(
            lambda b, h, i, j: j < lengths[b], case.batch, None, case.queries, case.queries, device=str(device)
        )
        compiled = torch.compile(flex_attention, fullgraph=True)

        def work() -> None:
            with torch.no_grad():
                compiled(*qkv.permute(2, 0, 3, 1, 4).unbind(), block_mask=allowed)

        return work

    def nested() -> Work:
        rows = [item[:length] for item, length in zip(qkv, lengths.tolist(), strict=True)]
        packed = torch.nested.nested_tensor(rows, layout=torch.jagged)

        def work() -> None:
            with torch.no_grad():
                q, k, v = (part.squeeze(2).transpose(1, 2) for part in packed.chunk(3, dim=2))
                torch.nn.functional.scaled_dot_product_attention(q, k, v)

        return work

    for name, build in (("FlexAttention", flex), ("nested tensors", nested)):
        try:
            work = build()
            work()
        except Exception as error:  # any: what is missing (a compiler, a kernel for this device) is told in many ways
            print(f"  {name}: does not run here: {str(error).splitlines()[0][:90]}")
            continue
        bench.compare(f"text, {name}", {"masked": masked, name: work})

"""Re-ranking a shortlist with kept keys and values, against the same heads that compute everything for every pair.

    python scripts/bench/rerank.py            a few minutes on one core
    python scripts/bench/rerank.py --quick    fewer rounds

All forms have the same weights, take turns within each round, and must give the same scores:

    kept            as vlretrieval-search does it: rows of the index are read from its mapped file, what the text alone
                    decides runs once, the last layer runs for the pooled token alone
    batched         the cross-encoder as it is usually written: all pairs in one batch, the picture's keys and values
                    projected and the text's layers run for each pair, all tokens in every layer
    one by one      the same, a pair at a time

Picture tokens and text tokens are given to all three; the towers are no part of it. A wider MLP is work that nothing
kept can spare, and so are image-to-text heads, whose queries are the patches; and with fewer K/V heads there is less
to project anew. Those rows are shown, and not held to the goals of the first two.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from timing import Work, paired
from torch import Tensor

from vlretrieval.deploy.index.made import flat, parts_of, unflat
from vlretrieval.model.crossmodal import CrossModal, CrossModalHead
from vlretrieval.model.encoded import Encoded

DIM, HEADS, PATCHES, LENGTH, SHORTLIST = 256, 4, 65, 14, 32  # 14 tokens: the mean of real captions
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """Cross-modal heads to measure, and the ratios that they should reach (None: none is asked)."""

    name: str
    depth: int
    kv: int | None = None
    both: bool = False
    mlp_ratio: float = 2.0  # conf/model/crossmodal/default.yaml
    batched_goal: float | None = None
    single_goal: float | None = None

    def heads(self) -> CrossModal:
        torch.manual_seed(0)
        return CrossModal(
            DIM,
            DIM,
            HEADS,
            HEADS if self.both else 0,
            text_to_image_depth=self.depth,
            num_kv_heads=self.kv,
            text_self_heads=HEADS,
            text_self_position="rotary",
            mlp_ratio=self.mlp_ratio,
        ).eval()


CASES = [
    Case("2 layers", 2, batched_goal=3, single_goal=6),
    Case("4 layers", 4, batched_goal=2),
    Case("2 layers, GQA (2 K/V heads)", 2, kv=2, single_goal=6),
    Case("2 layers, MQA", 2, kv=1, single_goal=6),
    Case("2 layers, MLP of ratio 4", 2, mlp_ratio=4.0),
    Case("4 layers, MLP of ratio 4", 4, mlp_ratio=4.0),
    Case("2 layers, and 1 of image to text", 2, both=True),
]


def every_layer(
    head: CrossModalHead, queries: Tensor, mask: Tensor | None, context: Tensor, other: Tensor | None
) -> Tensor:
    """(B,) logits, nothing kept and nothing left out."""
    normed = head.context_norm(context)
    x, rotate = queries, head.positions.rotate((queries.shape[1],), queries.device)
    for block in head.blocks:
        x = block(x, key_mask=mask, rotate=rotate, context=normed, context_mask=other)
    pooled = x[:, 0] if head.pool == "first" else x.mean(1)
    return head.logit(head.norm(pooled)).squeeze(-1)


def recomputed(heads: CrossModal, images: Tensor, texts: Tensor, mask: Tensor) -> Tensor:
    """(B,) logits of B pairs: images (B, P, dim), texts (B, L, dim), mask (B, L)."""
    assert heads.text_to_image is not None
    logits = every_layer(heads.text_to_image, texts, mask, images, None)
    if heads.image_to_text is not None:
        logits = logits + every_layer(heads.image_to_text, images, None, texts, mask)
    return logits


def works(case: Case, gallery: int, folder: Path) -> tuple[dict[str, Work], float, int]:
    """The three forms, the largest difference of their scores, and bytes kept of a picture."""
    heads = case.heads()
    random = torch.Generator().manual_seed(1)
    tokens = torch.randn(gallery, PATCHES, DIM, generator=random)
    text = torch.randn(1, LENGTH, DIM, generator=random)
    mask = torch.ones(1, LENGTH, dtype=torch.bool)
    rows = np.random.default_rng(2).choice(gallery, SHORTLIST, replace=False)
    with torch.inference_mode():
        kept = heads.keep_image(Encoded(torch.empty(gallery, 0), tokens))
        shapes = [tuple(part.shape[1:]) for part in parts_of(kept)]
        stored = flat(kept, "float32")
    path = folder / "kept.bin"
    stored.tofile(path)
    mapped = np.memmap(path, dtype=np.float32, mode="r", shape=stored.shape)
    encoded = Encoded(torch.empty(1, 0), text, mask)
    chosen = tokens[torch.from_numpy(rows)]

    def from_kept() -> Tensor:
        with torch.inference_mode():
            return heads(unflat(mapped[rows], shapes, CPU), encoded)

    def batched() -> Tensor:
        with torch.inference_mode():
            return recomputed(heads, chosen, text.expand(SHORTLIST, -1, -1), mask.expand(SHORTLIST, -1))

    def one_by_one() -> Tensor:
        with torch.inference_mode():
            return torch.cat([recomputed(heads, chosen[[i]], text, mask) for i in range(SHORTLIST)])

    scores = [form() for form in (from_kept, batched, one_by_one)]
    apart = max(float((score - scores[0]).abs().max()) for score in scores)
    return {"kept": from_kept, "batched": batched, "one by one": one_by_one}, apart, stored[0].nbytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="--rounds 10")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--gallery", type=int, default=1000, help="pictures in the mapped file")
    parser.add_argument("--output", help="a JSON file for the figures")
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    print(
        f"{SHORTLIST} pictures for a text of {LENGTH} tokens; {DIM} wide, {HEADS} heads, {PATCHES} picture tokens, "
        f"{torch.get_num_threads()} thread(s)\nratios are medians over the rounds, with quartiles\n"
    )
    print(f"{'':<34}{'kept, ms':>9}{'batched / kept':>20}{'one by one / kept':>22}{'apart':>10}{'KiB a picture':>15}")
    met, rows = [], []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            forms, apart, size = works(case, arguments.gallery, Path(folder))
            seconds, ratios = paired(forms, 10 if arguments.quick else arguments.rounds, CPU)
        batched, single = ratios["batched"], ratios["one by one"]
        print(
            f"{case.name:<34}{1e3 * seconds:>9.2f}{batched!s:>20}{single!s:>22}{apart:>10.1e}{size / 1024:>15.0f}",
            flush=True,
        )
        rows.append({"case": case.name, "kept_s": seconds, "batched": batched.median, "one_by_one": single.median})
        rows[-1] |= {"apart": apart, "bytes": size}
        met.append((f"{case.name}: scores within {apart:.1e} (goal 1e-06)", apart <= 1e-6))
        for form, ratio, goal in (("batched", batched, case.batched_goal), ("one by one", single, case.single_goal)):
            if goal is not None:
                met.append((f"{case.name}: {ratio.median:.2f} x {form} (goal {goal:g})", ratio.median >= goal))
    print()
    for said, good in met:
        print(("reached  " if good else "MISSED   ") + said)
    if arguments.output:
        Path(arguments.output).write_text(json.dumps(rows, indent=1))
    return 0 if all(good for _, good in met) else 1


if __name__ == "__main__":
    raise SystemExit(main())

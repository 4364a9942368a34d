"""The bench of training compares like with like, and prints its goals."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

BENCH = Path(__file__).resolve().parent.parent / "scripts" / "bench"
CPU = torch.device("cpu")
CAPTIONS = [f"a dog number {i} runs beside a brown horse" + " near the trees" * (i % 3) for i in range(40)]


@pytest.fixture(scope="module")
def forms() -> Iterator[ModuleType]:
    """The bench's own file, which lies beside the package."""
    sys.path.insert(0, str(BENCH))
    import train_forms

    yield train_forms
    sys.path.remove(str(BENCH))


def small(forms, **changes):
    shape = forms.Shape("small", 32, 16, 64, 2, 128, 1, 32, batch=8, vocab=512)
    return replace(shape, **changes)


def parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_both_sides_have_the_same_towers(forms):
    """open_clip's has a norm before the blocks and no bias on its patches; nothing else differs, at any shape."""
    with torch.device("meta"):
        for shape in (small(forms), small(forms, image_size=64, image_depth=3, embed_dim=16), *forms.SHAPES):
            ours, theirs = forms.our_model(shape), forms.open_clip_model(shape)
            assert parameters(theirs) - parameters(ours) == 2 * shape.image_dim - shape.image_dim
            for tower in (ours.image_encoder, ours.text_encoder):
                assert tower.transformer.blocks[0].attention.head_dim == 64
            assert theirs.visual.transformer.resblocks[0].attn.head_dim == 64
            assert theirs.transformer.resblocks[0].attn.head_dim == 64


def test_both_sides_begin_at_chance_and_learn_the_same_batch(forms):
    shape = small(forms, embed_dim=512)  # so wide that cosines of random vectors are small beside the scale of 14
    batches = forms.batches_of(shape, CAPTIONS, CPU, count=1)
    torch.manual_seed(0)
    ours, theirs = forms.our_model(shape), forms.open_clip_model(shape)
    for step in (forms.OurStep(ours, batches), forms.OpenClipStep(theirs, batches)):
        losses = [float(step()) for _ in range(8)]
        assert losses[0] == pytest.approx(math.log(shape.batch), abs=0.5)
        assert losses[-1] < losses[0]


def test_they_meet_the_same_captions_in_the_same_order(forms):
    shape = small(forms)
    batches = forms.batches_of(shape, CAPTIONS, CPU, count=2)
    ours = forms.OurStep(forms.our_model(shape), batches)
    theirs = forms.OpenClipStep(forms.open_clip_model(shape), batches)
    for _ in range(3):
        batch, (pixels, token_ids) = next(ours.batches), next(theirs.batches)
        length = batch.token_ids.shape[1]
        assert torch.equal(token_ids[:, :length], batch.token_ids) and not token_ids[:, length:].any()
        assert token_ids.shape[1] == 77 and length < 30
        assert (batch.token_mask.sum(1) == (batch.token_ids != 0).sum(1)).all()
        assert pixels.shape == batch.pixels.shape


def test_the_floor_has_the_products_of_our_step(forms):
    """Counted by torch in both; attention's with its products written out, as torch does not count the fused ones."""
    shape = small(forms)
    batches = forms.batches_of(shape, CAPTIONS, CPU, count=1)

    def flops(work):
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            work()
        return counter.get_total_flops()

    floor, ours = flops(forms.Floor(shape, batches, CPU)), flops(forms.OurStep(forms.our_model(shape), batches))
    assert floor == ours


def test_shared_keys_and_dropped_patches_reach_the_model(forms):
    shape = small(forms, text_dim=128, image_dim=128)
    model = forms.our_model(shape, num_kv_heads=1, patch_dropout=0.5)
    assert parameters(model) < parameters(forms.our_model(shape))
    assert model.train().encode_image(torch.zeros(1, 3, 32, 32)).tokens.shape[1] == 1 + 2
    assert forms.open_clip_model(shape, patch_dropout=0.5).visual.patch_dropout.prob == 0.5


@pytest.mark.slow
def test_the_bench_runs_and_says_which_goals_are_met(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(BENCH / "train.py"), "--quick", "--rounds", "1", "--shapes", "96"]
    run = subprocess.run(
        [*command, "--json", str(figures)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stderr
    for heading in ("both towers", "text tower alone", "Lightning", "Peak memory", "Gradient caching", "Shared keys"):
        assert heading in run.stdout
    found = json.loads(figures.read_text())
    assert len(found["goals"]) == 4
    chunked, whole, _ = found["found"]["memory, chunks"].values()
    assert chunked < whole

"""Seconds a training step with a frozen image tower: from its stored features, against from pixels. Ratios are paired.

    python scripts/bench/features.py                # a minute on one free core
    python scripts/bench/features.py --device cuda

Forward, backward and optimizer of the contrastive and matching losses; pixels lie decoded in memory, so that decoding,
which features spare as well, is not counted. The same pairs, both ways in turn.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import hydra  # noqa: E402  (after the threads are set)
import numpy as np  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402
from timing import paired  # noqa: E402

from vlretrieval.commands.launch import conf_dir  # noqa: E402
from vlretrieval.data.datamodule import RetrievalData  # noqa: E402
from vlretrieval.data.splits import Split  # noqa: E402
from vlretrieval.data.tokenizers import BpeTokenizer  # noqa: E402
from vlretrieval.data.transforms import EvalTransform  # noqa: E402
from vlretrieval.training.frozen_features import check_towers, write_features  # noqa: E402
from vlretrieval.training.task import RetrievalTask  # noqa: E402

MODELS = {
    "flickr8k_small (96 px, 5 blocks, 192 wide)": ["experiment=flickr8k_small", "data.json=x", "data.images=x"],
    "model=small (ViT-S/16, 224 px)": ["model=small", "name=x", "tokenizer.vocab_size=4000", "data.batch_size=32"],
}


class Noise:
    """A data set of noise pictures with captions of some ten words."""

    def __init__(self, items: int, size: int) -> None:
        rng = np.random.default_rng(0)
        words = [f"word{number}" for number in range(500)]
        texts = [" ".join(rng.choice(words, int(rng.integers(6, 15)))) for _ in range(items)]
        pixels = rng.integers(0, 256, (items, size, size, 3), dtype=np.uint8)
        ids = [str(number) for number in range(items)]
        self._split = Split("train", ids, texts, np.arange(items), lambda index: Image.fromarray(pixels[index]))

    def split(self, name: str) -> Split:
        return self._split

    def fingerprint(self) -> dict:
        return {}


def stepper(cfg, model, data: RetrievalData, device: torch.device) -> Callable[[], None]:
    """A function that takes one training step, on the next batch."""
    objective = hydra.utils.instantiate(cfg.loss)
    task = RetrievalTask(model, objective, torch.optim.AdamW, freeze=["image_encoder"]).train()
    check_towers(model, data)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    batches = (batch for _ in iter(int, 1) for batch in data.train_dataloader())

    def step() -> None:
        loss, _ = objective(model, task.encode(next(batches).to(device)), 1.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def measure(words: list[str], rounds: int, device: torch.device) -> str:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        cfg = hydra.compose("train", overrides=words)
    size, batch = cfg.model.image_encoder.image_size, cfg.data.batch_size
    source = Noise(2 * batch, size)
    tokenizer = BpeTokenizer(cfg.tokenizer.vocab_size, cfg.tokenizer.context_length)
    tokenizer.fit(source.split("train").captions)
    torch.manual_seed(0)
    model = hydra.utils.instantiate(cfg.model).to(device)
    with tempfile.TemporaryDirectory() as folder:
        path = write_features(
            model, source.split("train"), "image", folder, transform=EvalTransform(size), tokenizer=tokenizer
        )
        held = sum(file.stat().st_size for file in path.iterdir()) / (2 * batch)
        steps = {
            name: stepper(cfg, model, RetrievalData(source, tokenizer, size, batch, image_features=where), device)
            for name, where in (("features", folder), ("pixels", None))
        }
        seconds, ratios = paired(steps, rounds, device)
    ratio = ratios["pixels"]
    return (
        f"batch {batch}: {seconds:.3f} s a step from features, {seconds * ratio.median:.3f} s from pixels: "
        f"{ratio} times as fast; {held / 1e3:.1f} kB a picture on disk"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    for name, words in MODELS.items():
        print(f"{name}\n    {measure(words, asked.rounds, torch.device(asked.device))}", flush=True)


if __name__ == "__main__":
    main()

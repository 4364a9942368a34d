"""Features of frozen towers: training from them is training from pixels, and none but the right ones are taken."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_data import tiny_records, write_karpathy
from tiny_training import TINY, weights
from torch import nn

from vlretrieval.commands import data as command
from vlretrieval.data.datamodule import RetrievalData
from vlretrieval.data.features import FeatureWriter, half, open_features
from vlretrieval.data.readers.karpathy import KarpathyJson
from vlretrieval.data.records import Record, Records
from vlretrieval.data.splits import HardNegative
from vlretrieval.data.tokenizers import BpeTokenizer
from vlretrieval.data.transforms import EvalTransform
from vlretrieval.evaluation.subject import open_subject
from vlretrieval.losses import info_nce
from vlretrieval.training.frozen_features import check_towers, write_features
from vlretrieval.training.momentum import Momentum
from vlretrieval.training.objective import Objective
from vlretrieval.training.task import RetrievalTask

SIZES = {"train": 24, "val": 4, "test": 4}
FROZEN = {"image": "image_encoder", "text": "text_encoder"}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A data set of 24 pictures and a checkpoint whose dropout would show, were a tower not in evaluation mode."""
    from vlretrieval.training.fit import train

    folder = tmp_path_factory.mktemp("features")
    write_karpathy(folder, SIZES)
    train(config(folder, "start", "trainer.max_epochs=1"))
    return folder


def config(place: Path, name: str, *overrides: str):
    from hydra import compose, initialize_config_dir
    from tiny_training import CONF

    tiny = [word for word in TINY if not word.startswith(("data.source", "trainer.max_epochs"))]
    words = ["data=karpathy", f"data.json={place}/data.json", f"data.images={place}/images", "data.batch_size=8"]
    words += [f"output_dir={place}/{name}", "model.text_encoder.dropout=0.1", "validation.every_n_epochs=100"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", overrides=[*tiny, *words, *overrides])


def source_of(place: Path) -> Records:
    return Records(KarpathyJson(str(place / "data.json"), str(place / "images")))


def checkpoint(place: Path) -> Path:
    return place / "start" / "checkpoints" / "last.ckpt"


@pytest.fixture(scope="module")
def features(place) -> Path:
    """The command's own output, both towers."""
    before, sys.argv = sys.argv, ["vlretrieval-data", "features", f"checkpoint={checkpoint(place)}"]
    sys.argv += [f"output={place}/features", "parts=[image,text]", "batch_size=5", "device=cpu"]
    try:
        command.main()
    finally:
        sys.argv = before
    return place / "features"


def losses_and_gradients(place, batches, objective) -> list[dict[str, torch.Tensor]]:
    """Of each batch, by a task with both towers frozen: "loss", and the gradient of every weight that is trained."""
    task = RetrievalTask(
        open_subject(checkpoint(place)).model.train(), objective, torch.optim.SGD, freeze=list(FROZEN.values())
    )
    found = []
    for batch in batches:
        task.zero_grad()
        loss, _ = task.train().objective(task.model, task.encode(batch))
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in task.named_parameters() if p.grad is not None}
        found.append({"loss": loss.detach(), **gradients})
    return found


@pytest.mark.parametrize(
    ("parts", "settings"),
    [
        (("image",), {}),
        (("text",), {"chunk": 3}),
        (("image", "text"), {"momentum": Momentum(queue=16), "length_buckets": 2, "distillation_weight": 0.5}),
    ],
    ids=str,
)
def test_a_step_from_features_is_a_step_from_the_inputs_to_half_precision(place, features, parts, settings):
    read = {f"{part}_features": str(features) if part in parts else None for part in FROZEN}
    of = [list(stored(place, **given)[1].train_dataloader())[:2] for given in (NOTHING, read)]
    inputs, cached = (losses_and_gradients(place, batches, Objective(info_nce, **settings)) for batches in of)
    assert len(inputs) == 2
    for one, other in zip(inputs, cached, strict=True):
        assert one.keys() == other.keys() and len(one) > 20 and not any("encoder" in name for name in one)
        largest = max(float(value.norm()) for value in one.values())
        for name, value in one.items():
            # dropout draws in the heads are those of the same seed, so what is left is rounding
            assert (other[name] - value).norm() <= 5e-3 * value.norm() + 1e-4 * largest, name


def test_training_refuses_features_of_a_tower_that_it_trains(place, features):
    from vlretrieval.training.fit import train

    with pytest.raises(ValueError, match=r"this run trains it; set freeze=.image_encoder., or leave out data.image_fe"):
        train(config(place, "refused", f"init_from={checkpoint(place)}", f"data.image_features={features}"))
    assert not (place / "refused" / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.parametrize("part", FROZEN)
def test_a_run_from_features_ends_where_one_from_the_inputs_does(place, features, part):
    from vlretrieval.training.fit import train

    common = [f"init_from={checkpoint(place)}", f"freeze=[{FROZEN[part]}]", "trainer.max_epochs=2"]
    train(config(place, f"{part}-inputs", *common))
    train(config(place, f"{part}-features", *common, f"data.{part}_features={features}"))
    inputs, cached = (weights(place / f"{part}-{end}" / "checkpoints" / "last.ckpt") for end in ("inputs", "features"))
    start, moved = weights(checkpoint(place)), 0.0
    for name, value in inputs.items():
        # AdamW moves a weight by the learning rate however small its gradient: compare what the whole tensor did
        step = float((value - start[name]).norm())
        assert (cached[name] - value).norm() <= 0.05 * step + 1e-6, name
        assert not step or not name.startswith(f"model.{FROZEN[part]}."), name
        moved += step
    assert moved > 0.1
    # The weights of a resumed run come with its checkpoint, and are held against the features then.
    with pytest.raises(ValueError, match="stale: the hash of the") as caught:
        other = place / "other" / part
        shutil.copytree(place / "features", other)
        change_about(other, part, weights="0")
        again = [*common, f"data.{part}_features={other}", "resume=true", "trainer.max_epochs=3"]
        train(config(place, f"{part}-features", *again))
    assert "leave out data." in str(caught.value)
    resumed = train(config(place, f"{part}-features", *common, f"data.{part}_features={features}", "resume=true"))
    assert resumed["step"] == 6


NOTHING = {"image_features": None, "text_features": None}


def stored(place, **changes):
    source = source_of(place)
    subject = open_subject(checkpoint(place))
    settings = {"image_features": str(place / "features"), "text_features": str(place / "features"), **changes}
    return subject, RetrievalData(source, settings.pop("tokenizer", subject.tokenizer), 32, 8, **settings)


def test_what_is_read_is_what_the_tower_says_to_half_precision(place, features):
    subject, data = stored(place)
    batch = next(iter(data.train_dataloader()))
    pixels = next(iter(RetrievalData(data.source, subject.tokenizer, 32, 8).train_dataloader()))
    assert batch.pixels is None and batch.image_ids.tolist() == pixels.image_ids.tolist()
    with torch.no_grad():
        for rows, hidden in (
            (batch.image, subject.model.image_encoder(pixels.pixels)),
            (batch.text, subject.model.text_encoder(pixels.token_ids, pixels.token_mask)),
        ):
            assert rows.pooled.dtype == rows.tokens.dtype == torch.float16
            assert torch.allclose(rows.pooled.float(), hidden.pooled, rtol=1e-3, atol=1e-3)
            mask = torch.ones(hidden.tokens.shape[:2], dtype=torch.bool) if hidden.mask is None else hidden.mask
            assert torch.allclose(rows.tokens.float()[mask], hidden.tokens[mask], rtol=1e-3, atol=1e-3)
            assert rows.mask is None or torch.equal(rows.mask, mask)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_any_number_of_workers_reads_the_same_features(place, features, num_workers):
    _, data = stored(place, num_workers=num_workers)
    sums = [(batch.image.tokens.float().sum().item(), batch.index.tolist()) for batch in data.train_dataloader()]
    _, alone = stored(place)
    assert sums == [(b.image.tokens.float().sum().item(), b.index.tolist()) for b in alone.train_dataloader()]


def change_about(folder: Path, part: str, **values):
    path = folder / "train" / part / "about.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def reword(path: Path) -> None:
    path.write_text(path.read_text().replace("said way 3", "said way three"))


def other_weights(model):
    with torch.no_grad():
        model.image_encoder.transformer.norm.weight[0] += 1e-3


def other_pooling(model):
    model.image_encoder.pool = "mean"


def other_mean(model):
    model.image_encoder.mean.add_(20)


def unfrozen(model):
    model.image_encoder.requires_grad_(True)


IMAGE = "features/train/image"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda place: shutil.rmtree(place / IMAGE), "no such features"),
        (lambda place: (place / IMAGE).rename(place / "features/train/.image.partial"), "not finished"),
        (lambda place: (place / "images/003.png").write_bytes((place / "images/004.png").read_bytes()), "stale: files"),
        (lambda place: write_karpathy(place, {**SIZES, "train": 25}), "stale: items is 25 now and was 24"),
        (lambda place: {"resize": "crop"}, "stale: resize is 'crop' now and was 'squash'"),
        (lambda place: {"tokenizer": BpeTokenizer(300, 64).fit(["other"])}, "stale: tokenizer is"),
        (lambda place: reword(place / "data.json"), "features/train/text: stale: texts is"),
        (lambda place: os.truncate(place / IMAGE / "tokens.f16", 999), "damaged: tokens.f16 has 999 bytes"),
        (lambda place: (place / IMAGE / "lengths.i32").unlink(), "damaged"),
        (lambda place: (place / IMAGE / "about.json").write_text("{"), "damaged"),
        (lambda place: (place / IMAGE / "blocks.jsonl").write_text(""), "damaged: blocks.jsonl does not cover it"),
        (lambda place: flip(place / IMAGE / "tokens.f16", 10_000), "damaged: items 15 to 20 fail their checksum"),
        (lambda place: change_about(place / "features", "image", version=0), "stale: version is 1 now and was 0"),
        (lambda place: other_weights, "stale: the hash of the image_encoder's weights is"),
        (lambda place: other_pooling, "stale: the image_encoder has these weights, but other settings"),
        (lambda place: other_mean, "stale: the image_encoder has these weights, but other settings"),
        (lambda place: unfrozen, r"this run trains it; set freeze=\[image_encoder\], or leave out data.image_features"),
    ],
)  # fmt: skip
def test_stale_and_damaged_features_are_refused_in_one_line_with_both_ways_out(
    change, message, place, features, tmp_path
):
    for name in ("features", "images", "start"):
        shutil.copytree(place / name, tmp_path / name)
    shutil.copy2(place / "data.json", tmp_path)
    changed = change(tmp_path)
    subject = open_subject(checkpoint(tmp_path))
    source = source_of(tmp_path)
    given = {"tokenizer": subject.tokenizer, **(changed if isinstance(changed, dict) else {})}
    data = RetrievalData(
        source, image_size=32, batch_size=8, image_features=f"{tmp_path}/features",
        text_features=f"{tmp_path}/features", **given,
    )  # fmt: skip
    subject.model.requires_grad_(False)
    if callable(changed):
        changed(subject.model)
    with pytest.raises(ValueError, match=message) as caught:
        check_towers(subject.model, data)
    said = str(caught.value)
    assert "\n" not in said and "leave out data." in said
    assert "vlretrieval-data features checkpoint=" in said or "set freeze=" in said


def test_the_right_features_are_taken(place, features):
    subject, data = stored(place)
    subject.model.requires_grad_(False)
    check_towers(subject.model, data)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"augment": lambda pixels, key, may_flip: pixels}, "augment makes the copies; set both, or neither"),
        ({"cache": "x"}, "cache has no effect with image_features="),
    ],
)
def test_what_has_no_effect_beside_features_is_refused(place, settings, message):
    with pytest.raises(ValueError, match=message):
        stored(place, **settings)


def test_a_killed_run_goes_on_and_leaves_nothing_that_passes_for_whole(place, features, tmp_path):
    subject = open_subject(checkpoint(place))
    split = source_of(place).split("train")
    common = {"transform": subject.transform, "tokenizer": subject.tokenizer, "batch_size": 5}
    pid = os.fork()
    if pid == 0:

        def slow(what, done, total):
            time.sleep(0.2)

        write_features(subject.model, split, "image", tmp_path, tell=slow, **common)
        os._exit(0)
    partial = tmp_path / "train" / ".image.partial" / "blocks.jsonl"
    while not partial.is_file() or len(partial.read_text().splitlines()) < 2:
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert not (tmp_path / "train" / "image").exists()
    with open(partial.with_name("tokens.f16"), "ab") as file:
        file.write(b"half a block")
    with open(partial, "a") as file:
        file.write('{"items": 15, "to')
    asked = []
    picture = split._picture
    split._picture = lambda index: (asked.append(index), picture(index))[1]
    write_features(subject.model, split, "image", tmp_path, **common)
    assert 0 < len(asked) <= 14 and min(asked) >= 10  # two blocks of five were done
    for name in ("tokens.f16", "pooled.f16", "lengths.i32", "blocks.jsonl", "about.json"):
        assert (tmp_path / "train/image" / name).read_bytes() == (features / "train/image" / name).read_bytes()
    asked.clear()
    write_features(subject.model, split, "image", tmp_path, **common)
    assert not asked  # there already


class Tower(nn.Module):
    """The contract of a tower, as a pretrained one has it: other widths for pooled and tokens, and a mask."""

    dim = 3

    def __init__(self, scale: float = 1.0):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, pixels):
        tokens = pixels.float().flatten(2)[:, :, :10].transpose(1, 2) * self.scale  # (B, 10, 3)
        mask = torch.arange(10)[None] < 4 + pixels[:, 0, 0, :1] % 5
        return torch.cat([tokens.mean(1), tokens.amax(1)], 1), tokens, mask


class Towers(nn.Module):
    def __init__(self, scale: float = 1.0):
        super().__init__()
        self.image_encoder = Tower(scale)


def test_any_tower_of_the_contract_can_be_stored(tmp_path):
    split = tiny_records(tmp_path).split("train")
    transform, tokenizer = EvalTransform(16), BpeTokenizer(300, 32).fit(["a"])
    common = {"transform": transform, "tokenizer": tokenizer, "batch_size": 7}
    path = write_features(Towers(), split, "image", tmp_path / "f", **common)
    found = open_features(path, {}, split)
    rows = np.array([3, 0, 3, 11])
    gathered = found.gather(rows)
    with torch.no_grad():
        pooled, tokens, mask = Towers().image_encoder(torch.stack([transform(split.picture(int(i))) for i in rows]))
    assert torch.allclose(gathered.pooled.float(), pooled, rtol=1e-3)
    assert gathered.mask.sum(1).tolist() == mask.sum(1).tolist()
    assert torch.allclose(gathered.tokens[gathered.mask].float(), tokens[mask], rtol=1e-3)
    assert not gathered.tokens[~gathered.mask].any()


@pytest.mark.parametrize("scale", [1e5, float("nan")])
def test_what_half_precision_cannot_hold_is_refused_and_not_stored(tmp_path, scale):
    split = tiny_records(tmp_path).split("train")
    tokenizer = BpeTokenizer(300, 32).fit(["a"])
    with pytest.raises(ValueError, match="does not fit into half precision .65,504 at most"):
        write_features(Towers(scale), split, "image", tmp_path / "f", transform=EvalTransform(16), tokenizer=tokenizer)
    assert not (tmp_path / "f" / "train" / "image").exists()
    assert half(np.array([[65504.0, -1e-9]]))[0].tolist() == [65504.0, 0.0]


def test_a_beginning_of_other_features_is_thrown_away(tmp_path):
    about = {"items": 2, "pooled_dim": 1, "token_dim": 1, "weights": "a"}
    FeatureWriter(tmp_path / "image", about).write(np.ones((1, 1)), np.ones((1, 1)), np.ones(1))
    assert FeatureWriter(tmp_path / "image", about).done == 1
    assert FeatureWriter(tmp_path / "image", {**about, "weights": "b"}).done == 0
    assert (tmp_path / ".image.partial" / "tokens.f16").stat().st_size == 0


def test_hard_negatives_of_the_data_are_read_too(place, tmp_path):
    from vlretrieval.training.frozen_features import negatives_of

    class Drawn:
        def __init__(self, plain):
            self.plain, self.open, self.fingerprint = plain.reader, plain.reader.open, plain.reader.fingerprint

        def records(self):
            for number, r in enumerate(self.plain.records()):
                counts = ((number + place) % 3 for place in range(len(r.captions)))
                wrong = tuple((HardNegative("not so", "swap"),) * count for count in counts)
                yield Record(r.image, r.captions, r.image_id, r.split, negatives=wrong)

    source = Records(Drawn(source_of(place)))
    subject = open_subject(checkpoint(place))
    for part in ("text", "negatives"):
        write_features(
            subject.model, source.split("train"), part, tmp_path,
            transform=subject.transform, tokenizer=subject.tokenizer,
        )  # fmt: skip
    settings = {"negatives_per_caption": 2, "text_features": str(tmp_path)}
    batch = next(iter(RetrievalData(source, subject.tokenizer, 32, 8, **settings).train_dataloader()))
    with torch.no_grad():
        found, valid = negatives_of(subject.model, batch.negatives, 6)
        expected = subject.model.encode_text(
            batch.negative_token_ids[:6].flatten(0, 1), batch.negative_token_mask[:6].flatten(0, 1)
        )
    assert valid.tolist() == batch.negative_token_mask[:6].any(-1).tolist() and 0 < valid.sum() < valid.numel()
    real = valid.flatten()
    assert torch.allclose(found.embedding[real], expected.embedding[real], atol=2e-3)

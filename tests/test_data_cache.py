"""The picture cache: the same batches as from the files, and never those of other pictures or settings."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_data import tiny_records

from vlretrieval.commands import data as command
from vlretrieval.data.cache import open_cache, write_cache
from vlretrieval.data.datamodule import RetrievalData
from vlretrieval.data.tokenizers import BpeTokenizer
from vlretrieval.data.transforms import EvalTransform, TrainTransform

TOKENIZER = BpeTokenizer(300, 32).fit(["picture said way"])


def make(tmp_path, size=16, mode="squash"):
    source = tiny_records(tmp_path / "set")
    write_cache(source.split("train"), EvalTransform(size, mode), tmp_path / "cache")
    return source


@pytest.mark.parametrize("augment", [None, TrainTransform(16, flip=0.5)])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_cache_gives_the_same_batches_as_the_files(tmp_path, augment, num_workers):
    source = make(tmp_path, 16 if augment is None else 18)
    settings = {"augment": augment, "num_workers": num_workers}
    cached = RetrievalData(source, TOKENIZER, 16, 4, cache=str(tmp_path / "cache"), **settings)
    plain = RetrievalData(source, TOKENIZER, 16, 4, **settings)
    for one, other in zip(cached.train_dataloader(), plain.train_dataloader(), strict=True):
        assert torch.equal(one.pixels, other.pixels) and torch.equal(one.token_ids, other.token_ids)
    assert isinstance(cached.pairs.pictures.pixels, np.memmap)


def stale(change: str, tmp_path):
    source = make(tmp_path)
    if change == "another size":
        return source, EvalTransform(17)
    if change == "another way of resizing":
        return source, EvalTransform(16, "crop")
    if change == "another file":
        path = source.reader.open("003.png")
        path.write_bytes(source.reader.open("004.png").read_bytes())
    if change == "another background":
        return tiny_records(tmp_path / "set", background=(0, 0, 0)), EvalTransform(16)
    if change == "more pictures":
        return tiny_records(tmp_path / "set", {"train": 13, "val": 4, "test": 4}), EvalTransform(16)
    if change == "a damaged description":
        (tmp_path / "cache" / "train-squash-16.json").write_text("{")
    if change == "a cut file":
        whole = (tmp_path / "cache" / "train-squash-16.npy").read_bytes()
        (tmp_path / "cache" / "train-squash-16.npy").write_bytes(whole[: len(whole) // 2])
    return source, EvalTransform(16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("another size", "train-squash-17.npy: no such cache; make it with vlretrieval-data cache"),
        ("another way of resizing", "train-crop-16.npy: no such cache"),
        ("another file", "stale: files is"),
        ("another background", "stale: files is"),
        ("more pictures", "stale: pictures is 13 now and was 12"),
        ("a damaged description", "damaged"),
        ("a cut file", "damaged"),
    ],
)
def test_a_stale_or_damaged_cache_is_refused(change, message, tmp_path):
    source, transform = stale(change, tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        open_cache(source.split("train"), transform, tmp_path / "cache")
    assert "\n" not in str(caught.value)


def test_files_copied_elsewhere_pass_by_their_contents_and_one_changed_among_them_does_not(tmp_path, caplog):
    source, transform = make(tmp_path), EvalTransform(16)
    for path in (tmp_path / "set").rglob("*.png"):
        os.utime(path, ns=(1, 1))
    with caplog.at_level("INFO"):
        open_cache(source.split("train"), transform, tmp_path / "cache")
    assert "other times of change than when read, and the same contents" in caplog.text
    path = Path(source.reader.open("003.png"))
    content = bytearray(path.read_bytes())
    content[-20] ^= 1  # as many bytes as before, and the same time
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))
    with pytest.raises(ValueError, match="stale: files is"):
        open_cache(source.split("train"), transform, tmp_path / "cache")


def test_a_stopped_cache_leaves_nothing_that_looks_whole(tmp_path):
    source = tiny_records(tmp_path / "set")
    source.reader.open("005.png").write_bytes(b"no")
    with pytest.raises(ValueError, match="005.png"):
        write_cache(source.split("train"), EvalTransform(16), tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.npy"))


def test_pictures_that_could_not_be_read_take_no_part(tmp_path):
    source = tiny_records(tmp_path / "set")
    source.reader.open("005.png").write_bytes(b"no")
    write_cache(source.split("train"), EvalTransform(16), tmp_path / "cache", on_bad=lambda index, bad: None)
    data = RetrievalData(source, TOKENIZER, 16, 11, cache=str(tmp_path / "cache"))
    assert 5 not in next(iter(data.train_dataloader())).image_ids.tolist()
    about = json.loads((tmp_path / "cache" / "train-squash-16.json").read_text())
    assert list(about["bad"]) == ["5"]


def test_the_command_writes_a_cache_that_training_takes(tmp_path, monkeypatch, capsys):
    source = tiny_records(tmp_path / "set")
    words = [
        f"data.json={source.reader.json}",
        f"data.images={source.reader.images}",
        f"output={tmp_path}/cache",
        "size=20",
    ]
    monkeypatch.setattr(sys, "argv", ["vlretrieval-data", "cache", "data=karpathy", *words])
    command.main()
    assert "train-squash-20.npy: 0.0 MB" in capsys.readouterr().out
    assert RetrievalData(source, TOKENIZER, 20, 4, cache=str(tmp_path / "cache")).train_dataloader() is not None

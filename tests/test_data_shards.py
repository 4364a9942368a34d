"""Tar shards: whatever is wrong with one is named by shard and sample; nothing is written out, nothing is run."""

import io
import json
import os
import pickle
import tarfile

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from image_zoo import encoded
from tiny_data import picture, tiny_records

from vlretrieval.data.convert import convert
from vlretrieval.data.datamodule import RetrievalData
from vlretrieval.data.ordering import shard_order
from vlretrieval.data.readers.shards import TarShards
from vlretrieval.data.records import Records
from vlretrieval.data.shards import (
    BadShard,
    ShardFile,
    expand_braces,
    fetch,
    read_index,
    sample_json,
    write_shard,
)
from vlretrieval.data.tokenizers import BpeTokenizer

PNG = encoded(picture(3), "PNG")


def tar_of(path, members, format=tarfile.PAX_FORMAT):
    """A tar of (name, bytes) or of whole TarInfo objects, in that order."""
    with tarfile.open(path, "w", format=format) as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
                continue
            info = tarfile.TarInfo(member[0])
            info.size = len(member[1])
            tar.addfile(info, io.BytesIO(member[1]))
    return str(path)


def link(name, target, kind=tarfile.SYMTYPE):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def pairs(*keys):
    return [member for key in keys for member in ((f"{key}.png", PNG), (f"{key}.txt", f"said of {key}".encode()))]


def records(path, **settings):
    return list(TarShards(str(path), **settings).records())


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_the_index_finds_what_tarfile_finds(format, tmp_path):
    names = ["a.png", "folder/b.c.png", "./here.png", "d" * 90 + "/" + "e" * 60 + ".png"]
    if format != tarfile.USTAR_FORMAT:
        names += ["long/" * 60 + "name.png", "狗/dog 🐶.png"]
    path = tar_of(tmp_path / "x.tar", [(name, os.urandom(number * 300)) for number, name in enumerate(names)], format)
    with tarfile.open(path) as tar:
        expected = [(m.name.removeprefix("./"), tar.extractfile(m).read()) for m in tar.getmembers()]
    shard = ShardFile(path)
    assert [(m.name, shard.read(m.start, m.size)) for m in read_index(path)] == expected
    assert pickle.loads(pickle.dumps(shard)).read(0, 100) == shard.read(0, 100)


def test_a_sample_may_have_several_captions(tmp_path):
    path = tar_of(
        tmp_path / "x.tar",
        [
            ("a.png", PNG), ("a.txt", b"one\ntwo\n"),
            ("b.0.txt", b"zero"), ("b.1.txt", b"first"), ("b.10.txt", b"tenth"), ("b.2.txt", b"second"), ("b.jpg", PNG),
            ("c.json", json.dumps({"captions": ["in json"], "image_id": 7}).encode()), ("c.png", PNG),
            ("d.png", PNG), ("d.json", b'{"caption": "just one", "width": 3}'),
        ],
    )  # fmt: skip
    found = records(path)
    assert [record.captions for record in found] == [
        ("one", "two"), ("zero", "first", "second", "tenth"), ("in json",), ("just one",),
    ]  # fmt: skip
    assert [record.image_id for record in found] == ["a.png", "b.jpg", "7", "d.png"]


def whole(tmp_path) -> bytes:
    return open(tar_of(tmp_path / "whole.tar", pairs("a", "b", "c")), "rb").read()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "x.tar: empty, 0 bytes"),
        (lambda data: bytes(10240), "x.tar: a tar without files"),
        (lambda data: np.random.default_rng(0).bytes(10240), "x.tar: not a tar"),
        (lambda data: data[:550], r"x.tar: cut within 'a.png', \d+ bytes are missing"),
        (lambda data: data[: 512 + 512 + 512 + 100], "x.tar: cut"),
        (lambda data: data[: data.index(b"c.png") + 512], r"x.tar: cut within 'c.png'"),
        (lambda data: data[: data.index(b"c.png")], "x.tar: cut at byte .*, after sample 'b'"),
        (lambda data: data.replace(b"b.txt", b"b.txu"), "x.tar: damaged at byte .*, after sample 'b'"),
    ],
)
def test_a_damaged_shard_is_named_and_gives_no_half_samples(change, message, tmp_path):
    (tmp_path / "x.tar").write_bytes(change(whole(tmp_path)))
    with pytest.raises(BadShard, match=message) as caught:
        records(tmp_path / "x.tar")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([*pairs("a"), *pairs("a")], "sample 'a' has two members 'png'"),
        ([*pairs("a", "b"), *pairs("a")], "sample 'a' occurs twice, or its members do not stand together"),
        ([("a.png", PNG), *pairs("b"), ("a.txt", b"x")], "sample 'a' .* has no caption|sample 'a' has no caption"),
        ([*pairs("a"), ("b.txt", b"x")], "sample 'b' has no picture; mend the shard, or set data.incomplete=skip"),
        ([*pairs("a"), ("b.png", PNG)], "sample 'b' has no caption"),
        ([("a.png", PNG), ("a.jpg", PNG), ("a.txt", b"x")], "sample 'a' has 2 pictures; set data.image_key"),
        ([("../a.png", PNG), ("../a.txt", b"x")], r"'../a.png' points out of the shard"),
        ([("/etc/a.png", PNG)], r"'/etc/a.png' points out of the shard"),
        ([link("a.png", "/etc/passwd")], "'a.png' is a link or a device"),
        ([link("a.png", "b.png", tarfile.LNKTYPE)], "'a.png' is a link or a device"),
        ([link("a.png", "", tarfile.FIFOTYPE)], "'a.png' is a link or a device"),
        ([("a.png", PNG), ("a.txt", b"\xff\xfe")], "sample 'a': .txt is not UTF-8"),
        ([("a.png", PNG), ("a.json", b"{")], "sample 'a': its .json is not JSON"),
        ([("a.png", PNG), ("a.json", b"[]")], "sample 'a': its .json must be an object"),
    ],
)
def test_a_faulty_sample_is_named_by_shard_and_key(members, message, tmp_path):
    path = tar_of(tmp_path / "x.tar", members)
    before = set(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=f"x.tar: .*({message})|x.tar: ({message})"):
        records(path)
    assert set(tmp_path.rglob("*")) == before


def test_incomplete_samples_can_be_left_out_and_are_counted(tmp_path, caplog):
    path = tar_of(tmp_path / "x.tar", [*pairs("a"), ("b.png", PNG), ("c.txt", b"x"), *pairs("d")])
    assert [record.image for record in records(path, incomplete="skip")] == ["a.png", "d.png"]
    assert "2 samples without picture or caption left out" in caplog.text


class Evil:
    def __reduce__(self):
        return (os.system, ("touch ran",))


def test_a_pickle_in_a_shard_is_never_read_and_a_command_never_run(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    path = tar_of(
        tmp_path / "x.tar", [*pairs("a"), ("a.pyd", pickle.dumps(Evil())), ("a.pickle", pickle.dumps(Evil()))]
    )
    source = Records(TarShards(path))
    source.split("train").picture(0)
    assert "members that are never read: pyd (1), pickle (1)" in caplog.text
    with pytest.raises(ValueError, match="a command is never run"):
        records("pipe:touch ran")
    assert not (tmp_path / "ran").exists()


def test_one_picture_in_two_shards_is_refused(tmp_path):
    for number in range(2):
        tar_of(tmp_path / f"{number}.tar", pairs("a"))
    with pytest.raises(BadShard, match="'a.png' stands in the shards twice"):
        records(tmp_path / "*.tar")


def test_shards_are_named_by_braces_globs_lists_and_splits(tmp_path):
    assert expand_braces("a-{008..010}.tar") == ["a-008.tar", "a-009.tar", "a-010.tar"]
    assert len(expand_braces("{0..1}/{00..02}.tar")) == 6
    for number in range(3):
        tar_of(tmp_path / f"s-{number:02d}.tar", pairs(f"k{number}"))
    names = [["k0.png", "k1.png", "k2.png"]]
    patterns = [f"{tmp_path}/s-{{00..02}}.tar", f"{tmp_path}/s-*.tar", [f"{tmp_path}/s-{n:02d}.tar" for n in range(3)]]
    for pattern in patterns:
        assert [record.image for record in TarShards(pattern).records()] in names
    source = Records(TarShards({"train": f"{tmp_path}/s-{{00..01}}.tar", "test": f"{tmp_path}/s-02.tar", "val": None}))
    assert {name: list(split.image_ids) for name, split in source.splits().items()} == {
        "train": ["k0.png", "k1.png"], "test": ["k2.png"],
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"data.shards.train=.*/none-\*.tar: no such files"):
        records(tmp_path / "none-*.tar")
    with pytest.raises(ValueError, match=r"data.shards.train=.*/none.tar: no such file"):
        records(tmp_path / "none.tar")


def test_a_shard_behind_a_url_is_fetched_once_and_whole(tmp_path):
    import fsspec

    path = tar_of(tmp_path / "x.tar", pairs("a"))
    memory = fsspec.filesystem("memory")
    memory.pipe("/set/x.tar", open(path, "rb").read())
    shards = TarShards("memory://set/x.tar", cache_dir=str(tmp_path / "cache"))
    source = Records(shards)
    assert source.split("train").picture(0).size == (24, 20)
    memory.rm("/set/x.tar")
    assert len(list(shards.records())) == 1
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == ["set_x.tar"]
    with pytest.raises(ValueError, match="memory://set/gone.tar: cannot be fetched"):
        fetch("memory://set/gone.tar", str(tmp_path / "cache"))
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_equal_samples_give_equal_shards_and_nothing_half_written_gets_the_name(tmp_path):
    samples = [("a", {"png": PNG, "json": sample_json({"captions": ["狗"]})})]
    write_shard(tmp_path / "1.tar", samples)
    write_shard(tmp_path / "2.tar", samples)
    assert (tmp_path / "1.tar").read_bytes() == (tmp_path / "2.tar").read_bytes()

    def stops():
        yield samples[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shard(tmp_path / "3.tar", stops())
    assert not (tmp_path / "3.tar").exists()


@given(sizes=st.lists(st.integers(0, 6), min_size=1, max_size=8), epoch=st.integers(0, 3), together=st.integers(1, 4))
def test_the_sequential_order_is_a_permutation_that_keeps_few_shards_open(sizes, epoch, together):
    shards = np.repeat(np.arange(len(sizes)), sizes)
    order = shard_order(shards, 0, epoch, together)
    assert sorted(order.tolist()) == list(range(sum(sizes)))
    shard_of = shards[order]
    first = {s: int(np.flatnonzero(shard_of == s)[0]) for s in set(shard_of.tolist())}
    last = {s: int(np.flatnonzero(shard_of == s)[-1]) for s in first}
    assert all(sum(first[s] <= at <= last[s] for s in first) <= together for at in range(len(order)))
    assert np.array_equal(order, shard_order(shards, 0, epoch, together))
    names = np.asarray([7, 3, 100, 5, 1, 0, 9, 2])[shards]  # numbers with gaps, as an excluded or a val shard leaves
    assert sorted(shard_order(names, 0, epoch, together).tolist()) == list(range(sum(sizes)))


@pytest.fixture(scope="module")
def four_shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("set")
    convert(tiny_records(folder, {"train": 24, "val": 4, "test": 4}), "shards", str(folder / "shards"), per_shard=6)
    return folder / "shards"


def sequential(folder, together=1, batch_size=3, **settings):
    source = Records(TarShards({split: f"{folder}/{split}-*.tar" for split in ("val", "train", "test")}))
    tokenizer = BpeTokenizer(300, 32).fit(["a"])
    data = RetrievalData(source, tokenizer, 16, batch_size, shards_together=together, cache_in_memory=False, **settings)
    return data.train_dataloader()


@pytest.mark.parametrize("mode", ["one", "all"])
def test_training_reads_one_shard_after_the_other(four_shards, mode):
    orders = []
    for batches in (list(loader) for loader in [sequential(four_shards, captions_per_image=mode)] * 2):
        images = torch.cat([batch.image_ids for batch in batches])
        assert sorted(images.tolist()) == sorted(list(range(24)) * (1 if mode == "one" else 5))
        shards = (images // 6).tolist()
        assert [shard for at, shard in enumerate(shards) if not at or shards[at - 1] != shard] == list(
            dict.fromkeys(shards)
        )
        orders.append(images.tolist())
    assert orders[0] != orders[1]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_sequential_order_is_the_same_for_any_number_of_workers_and_after_a_resume(four_shards, num_workers):
    whole = [batch.index.tolist() for _ in range(2) for batch in sequential(four_shards, 2)]
    loader = sequential(four_shards, 2)
    seen = [batch.index.tolist() for batch, _ in zip(loader, range(3), strict=False)]
    resumed = sequential(four_shards, 2, num_workers=num_workers)
    resumed.load_state_dict(loader.state_dict())
    handed_out = loader.state_dict()["handed_out"]
    again = [batch.index.tolist() for batch in resumed]
    assert whole[:3] == seen and whole[handed_out : handed_out + len(again)] == again and len(again) == 8 - handed_out
    with pytest.raises(ValueError, match="shards_together was 2 in the checkpoint and is 1 now"):
        sequential(four_shards, 1).load_state_dict(loader.state_dict())


def test_a_sequence_of_shards_is_refused_where_there_are_none(tmp_path):
    data = RetrievalData(tiny_records(tmp_path), BpeTokenizer(300, 32), 16, 4, shards_together=2)
    with pytest.raises(ValueError, match="shards_together=2 has no effect: this data set has no tar shards"):
        data.train_dataloader()

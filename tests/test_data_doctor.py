"""The doctor finds what was planted, and nothing else."""

import json
import shutil
import sys

import numpy as np
import pytest
from image_zoo import BAD, GOOD, encoded
from PIL import Image, ImageEnhance

from vlretrieval.commands import data as command
from vlretrieval.data.doctor import examine
from vlretrieval.data.doctor.duplicates import gradient_hash, pairs_alike
from vlretrieval.data.doctor.page import page, summary
from vlretrieval.data.exclude import write_fix_list
from vlretrieval.data.readers.karpathy import KarpathyJson
from vlretrieval.data.records import Records
from vlretrieval.data.tokenizers import BpeTokenizer


def photo(seed: int, size=(120, 90)) -> Image.Image:
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)


class Planted:
    """A healthy set of 30 pictures, to be made ill."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "images").mkdir(parents=True)
        self.entries = []
        for number in range(30):
            self.add(f"{number:02d}.jpg", ("train",) * 8 + ("val", "test"), number)

    def add(self, name, splits, number, captions=None, data=None):
        split = splits if isinstance(splits, str) else splits[number % 10]
        sentences = captions if captions is not None else [f"picture {number} seen this way", f"number {number} it is"]
        self.entries.append({"filename": name, "split": split, "sentences": [{"raw": text} for text in sentences]})
        (self.folder / "images" / name).write_bytes(data or encoded(photo(number), "JPEG", quality=92))

    def source(self, name="planted", **settings) -> Records:
        file = self.folder / "data.json"
        file.write_text(json.dumps({"dataset": name, "images": self.entries}))
        return Records(KarpathyJson(str(file), str(self.folder / "images")), **settings)


@pytest.fixture
def planted(tmp_path):
    return Planted(tmp_path / "set")


def titles(report, weight=None):
    return {finding.title: finding.count for finding in report.findings if weight in (None, finding.weight)}


def test_a_healthy_set_has_no_findings(planted):
    report = examine(planted.source())
    assert report.findings == [] and report.fixes == []
    assert report.sizes == {"train": (24, 48), "val": (3, 6), "test": (3, 6)}


def test_a_test_picture_in_train_is_found_and_the_train_copy_goes(planted):
    shutil.copy(planted.folder / "images" / "09.jpg", planted.folder / "images" / "copy.jpg")
    planted.add("copy.jpg", "train", 0, ["a copy"], (planted.folder / "images" / "09.jpg").read_bytes())
    report = examine(planted.source())
    assert titles(report, "fault") == {"the same picture in two splits": 1}
    assert report.fixes == [{"split": "train", "image_id": "copy.jpg", "reason": "the same picture as test: 09.jpg"}]
    write_fix_list(planted.folder / "fix.jsonl", report.fixes)
    assert examine(planted.source(exclude=str(planted.folder / "fix.jsonl"))).findings == []


@pytest.mark.parametrize(
    ("change", "title"),
    [
        (lambda im: im.transpose(Image.Transpose.FLIP_LEFT_RIGHT), "a mirror image in two splits"),
        (lambda im: im.resize((80, 60)), "nearly the same picture in two splits"),
        (lambda im: ImageEnhance.Brightness(im).enhance(0.8), "nearly the same picture in two splits"),
        (lambda im: im.crop((2, 2, 118, 88)), "nearly the same picture in two splits"),
    ],
    ids=["mirrored", "resized", "darker", "trimmed"],
)
def test_a_changed_copy_is_found(planted, change, title):
    data = encoded(change(photo(9)), "JPEG", quality=60)
    planted.add("copy.jpg", "train", 0, ["a copy"], data)
    report = examine(planted.source())
    assert titles(report, "fault") == {title: 1}
    assert [fix["image_id"] for fix in report.fixes] == ["copy.jpg"]


def test_the_same_picture_in_another_format_is_the_same_picture(planted):
    planted.add("a.png", "train", 0, ["one"], encoded(photo(77), "PNG"))
    planted.add("a.bmp", "train", 0, ["two"], encoded(photo(77), "BMP"))
    report = examine(planted.source())
    assert titles(report) == {"the same picture twice in a split": 1}
    assert report.fixes == [{"split": "train", "image_id": "a.bmp", "reason": "the same picture as train: a.png"}]


def test_copies_within_test_are_told_but_never_taken_out(planted):
    planted.add("copy.jpg", "test", 9)
    report = examine(planted.source())
    assert titles(report, "note")["the same picture twice in a split"] == 1 and report.fixes == []


def test_plain_surfaces_are_not_called_copies(planted):
    for number, colour in enumerate([(200, 200, 200), (10, 10, 10), (201, 200, 199)]):
        planted.add(f"plain{number}.png", "train", 0, ["plain"], encoded(Image.new("RGB", (60, 60), colour), "PNG"))
    assert not any("picture" in title and "split" in title for title in titles(examine(planted.source()), "fault"))


def test_pictures_that_cannot_be_opened_are_listed_with_their_reason(planted):
    for name in ("empty", "html", "jpeg_truncated"):
        planted.add(f"{name}.jpg", "train", 0, [name], BAD[name] or b" ")
    (planted.folder / "images" / "empty.jpg").write_bytes(b"")
    (planted.folder / "images" / "00.jpg").unlink()
    report = examine(planted.source())
    assert titles(report, "fault") == {"pictures that cannot be opened": 4}
    assert {fix["image_id"]: fix["reason"].split(":")[0] for fix in report.fixes} == {
        "00.jpg": "no such file", "empty.jpg": "empty, 0 bytes", "html.jpg": "not an image of a known kind",
        "jpeg_truncated.jpg": "broken",
    }  # fmt: skip


def test_how_pictures_are_stored_is_told(planted):
    kinds = {
        "exif_6": "turned or mirrored by EXIF", "rgba": "transparent", "palette_transparency": "transparent",
        "cmyk": "CMYK", "grey16": "more than 8 bits", "gif_animated": "several frames", "extreme": "longer than 4 to 1",
        "tiny": "smaller than 32 pixels",
    }  # fmt: skip
    for name in kinds:
        planted.add(f"{name}.img", "train", 0, [f"it is {name}"], GOOD[name])
    found = titles(examine(planted.source()), "note")
    for name, kind in kinds.items():
        assert found.get(f"pictures {kind}", 0) >= 1, name


def test_faults_of_captions_are_found_and_empty_ones_are_fixed(planted):
    captions = [
        "",
        "  ",
        "a dog \ufffd",
        "a cafÃ© table",
        "itâ€™s a dog",
        "a\x07bell",
        "fish &amp; chips",
        "<b>dog</b>",
    ]
    planted.add("new.jpg", "train", 99, captions)
    report = examine(planted.source())
    faults = titles(report, "fault")
    assert faults["empty captions"] == 2 and faults["captions that look decoded twice (Ã© for é)"] == 2
    assert faults["captions with markup (&amp;, <b>)"] == 2 and faults["captions with control characters"] == 1
    assert faults["captions with the replacement character (decoded wrongly)"] == 1
    assert [(fix["image_id"], fix["caption"]) for fix in report.fixes] == [("new.jpg", ""), ("new.jpg", "  ")]


@pytest.mark.parametrize(
    "text", ["a café à côté", "naïve Ångström", "价格 5 < 6 & 7", "ÂNGELA", "it’s “fine” — really…", "x <3 y"]
)
def test_good_captions_are_let_be(planted, text):
    planted.add("new.jpg", "train", 99, [text])
    assert examine(planted.source()).findings == []


def test_shared_repeated_and_long_captions_are_told(planted):
    planted.add("a.jpg", "train", 50, ["a dog runs", "A dog runs."])
    planted.add("b.jpg", "test", 51, ["a dog runs"])
    planted.add("c.jpg", "val", 52, ["word " * 61])
    planted.add("d.jpg", "val", 53, [])
    assert titles(examine(planted.source())) == {
        "pictures without captions": 1, "captions of more than 60 words": 1, "captions twice at one picture": 1,
        "captions shared by pictures of two splits": 1,
    }  # fmt: skip
    tokenizer = BpeTokenizer(300, 64).fit(["nothing"])
    assert titles(examine(planted.source(), tokenizer=tokenizer))["captions longer than 64 tokens"] == 1


def test_a_known_set_of_the_wrong_size_is_a_fault(planted):
    assert titles(examine(planted.source("flickr8k")), "fault") == {"split sizes that are not the published ones": 3}


def test_page_and_summary_tell_the_same_and_need_nothing_beside_them(planted):
    planted.add("copy.jpg", "train", 9, ["<script>alert(1)</script>"])
    report = examine(planted.source())
    html = page(report, "Data doctor")
    assert html.count("data:image/jpeg;base64,") >= 2 and "<script>" not in html and "http" not in html
    text = summary(report)
    for finding in report.findings:
        assert f"{finding.title}: {finding.count}" in text
    assert "FAULT  the same picture in two splits: 1" in text


def test_the_hash_of_a_mirror_image_is_the_hash_mirrored():
    prints = np.random.default_rng(0).integers(0, 256, (40, 24, 24), dtype=np.uint8)
    assert len(set(gradient_hash(prints).tolist())) == 40
    assert list(pairs_alike(prints)) == []
    doubled = np.concatenate([prints, prints[:3], prints[5:7, :, ::-1]])
    assert set(pairs_alike(doubled, block=16)) == {
        (0, 40, False),
        (1, 41, False),
        (2, 42, False),
        (5, 43, True),
        (6, 44, True),
    }


def test_the_command_writes_page_and_fix_list(planted, monkeypatch, capsys, tmp_path):
    planted.add("bad.jpg", "train", 0, ["x"], BAD["html"])
    reader = planted.source().reader
    words = [f"data.json={reader.json}", f"data.images={reader.images}", f"output={tmp_path}/out"]
    monkeypatch.setattr(sys, "argv", ["vlretrieval-data", "doctor", "data=karpathy", *words])
    command.main()
    assert "FAULT  pictures that cannot be opened: 1" in capsys.readouterr().out
    assert (tmp_path / "out" / "report.html").read_text().startswith("<!doctype html>")
    assert json.loads((tmp_path / "out" / "fix_list.jsonl").read_text())["image_id"] == "bad.jpg"

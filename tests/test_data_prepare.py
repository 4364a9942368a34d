"""A downloaded set is checked and laid out; what is missing is named, with where it is had."""

import json
import tarfile
import zipfile
from pathlib import Path

import pytest
from PIL import Image

from vlretrieval.commands import data as command
from vlretrieval.data import prepare as room
from vlretrieval.data.prepare import NotReady, prepare
from vlretrieval.data.readers.karpathy import KarpathyJson
from vlretrieval.data.records import Records

SIZES = {"train": 3, "val": 2, "test": 2}


@pytest.fixture
def downloaded(tmp_path, monkeypatch) -> Path:
    """A tiny Flickr30k: split file in its zip, pictures in their tar."""
    monkeypatch.setitem(room.KNOWN_SIZES, "flickr30k", SIZES)
    names = [f"{i}.jpg" for i in range(7)]
    splits = [split for split, count in SIZES.items() for _ in range(count)]
    images = [
        {"filename": name, "split": split, "sentences": [{"raw": f"caption of {name}"}]}
        for name, split in zip(names, splits, strict=True)
    ]
    made, folder = tmp_path / "made", tmp_path / "downloads"
    (made / "flickr30k-images").mkdir(parents=True)
    folder.mkdir()
    for name in names:
        Image.new("RGB", (8, 8)).save(made / "flickr30k-images" / name)
    with zipfile.ZipFile(folder / "caption_datasets.zip", "w") as zipped:
        zipped.writestr("dataset_flickr30k.json", json.dumps({"images": images, "dataset": "flickr30k"}))
    with tarfile.open(folder / "flickr30k-images.tar.gz", "w:gz") as tarred:
        tarred.add(made / "flickr30k-images", "flickr30k-images")
    return folder


def test_archives_are_unpacked_and_read_as_karpathy(downloaded):
    told: list[str] = []
    done = prepare("flickr30k", downloaded, told.append)
    assert done.counts == SIZES and any("unpacking" in line for line in told)
    records = Records(KarpathyJson(str(done.json), str(done.images)))
    assert len(records.split("train").image_ids) == 3
    assert records.split("test").picture(1).size == (8, 8)
    told.clear()
    assert prepare("flickr30k", downloaded, told.append) == done and not told  # a second run finds it done


def test_pictures_that_lie_unpacked_are_linked_not_copied(downloaded):
    with tarfile.open(downloaded / "flickr30k-images.tar.gz") as tarred:
        tarred.extractall(downloaded)
    (downloaded / "flickr30k-images.tar.gz").unlink()
    done = prepare("flickr30k", downloaded, lambda line: None)
    assert done.images.is_symlink() and len(list(done.images.iterdir())) == 7


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda f: (f / "caption_datasets.zip").unlink(), "no dataset_flickr30k.json. Fetch .*Terms"),
        (lambda f: (f / "flickr30k-images.tar.gz").unlink(), "neither the pictures nor an archive.*Terms"),
        (lambda f: (f / "flickr30k-images.tar.gz").write_bytes(b"no tar"), "is not whole"),
        (lambda f: (f / "caption_datasets.zip").write_bytes(b"no zip"), "is not whole"),
        (lambda f: (f / "dataset.json").write_text("{}"), "no Karpathy split file"),
    ],
)
def test_what_is_missing_is_named_with_where_it_is_had(downloaded, spoil, said):
    spoil(downloaded)
    with pytest.raises(NotReady, match=said):
        prepare("flickr30k", downloaded, lambda line: None)
    assert not (downloaded / "images").exists()


def test_a_lost_picture_and_another_split_are_found(downloaded):
    done = prepare("flickr30k", downloaded, lambda line: None)
    (done.images / "3.jpg").unlink()
    with pytest.raises(NotReady, match=r"lacks 1 of 7 pictures \(3.jpg"):
        prepare("flickr30k", downloaded, lambda line: None)
    (done.images / "3.jpg").touch()
    with pytest.raises(NotReady, match="empty"):
        prepare("flickr30k", downloaded, lambda line: None)
    content = json.loads(done.json.read_text())
    content["images"].pop()
    done.json.write_text(json.dumps(content))
    with pytest.raises(NotReady, match="pictures by split are"):
        prepare("flickr30k", downloaded, lambda line: None)


def test_the_command_names_the_set_and_the_next_one(downloaded, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["vlretrieval-data", "prepare", "dataset=flickr30k", f"folder={downloaded}"])
    command.main()
    assert "flickr30k is whole" in (said := capsys.readouterr().out) and "data=karpathy data.json=" in said

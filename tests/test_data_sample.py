"""The sample: every format of it, read through its own configuration, is the same set."""

import importlib.util
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from vlretrieval.data.readers.karpathy import KarpathyJson
from vlretrieval.data.records import Records

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = ROOT / "data" / "sample"
CHOICES = {
    "karpathy": [f"data.json={SAMPLE}/data.json", f"data.images={SAMPLE}/images"],
    "table": [f"data.table={SAMPLE}/data.csv", f"data.images={SAMPLE}/images"],
    "jsonl": [f"data.jsonl={SAMPLE}/data.jsonl", f"data.images={SAMPLE}/images"],
    "coco": [
        *(f"data.json.{split}={SAMPLE}/captions_{split}.json" for split in ("train", "val", "test")),
        f"data.images={SAMPLE}/images",
    ],
    "folder": [f"data.folder={SAMPLE}/folder"],
    "shards": [f"data.shards.{split}={SAMPLE}/shards/{split}-*.tar" for split in ("train", "val", "test")],
    "huggingface": [f"data.path={SAMPLE}/huggingface"],
}


def composed(choice: str, overrides: list[str]):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("train", overrides=["name=x", f"data={choice}", *overrides])


@pytest.mark.parametrize("choice", CHOICES)
def test_every_format_of_the_sample_is_the_same_set(choice):
    if choice == "huggingface":
        pytest.importorskip("datasets")
    data = instantiate(composed(choice, CHOICES[choice]).data)
    expected = Records(KarpathyJson(f"{SAMPLE}/data.json", f"{SAMPLE}/images"))
    for name, images in (("train", 8), ("val", 2), ("test", 2)):
        split, same = data.split(name), expected.split(name)
        assert len(split.image_ids) == images and split.hash == same.hash
        assert [split.picture(i).tobytes() for i in range(images)] == [same.picture(i).tobytes() for i in range(images)]


def test_every_reader_is_among_the_choices():
    readers = {path.stem for path in (ROOT / "vlretrieval" / "data" / "readers").glob("[!_]*.py")} - {"files"}
    assert readers == set(CHOICES)


@pytest.mark.parametrize("choice", ["light", "strong"])
def test_every_augmentation_builds(choice):
    data = instantiate(composed("karpathy", [*CHOICES["karpathy"], f"augment={choice}", "data.batch_size=4"]).data)
    batch = next(iter(data.train_dataloader()))
    assert batch.pixels.shape == (4, 3, data.image_size, data.image_size)


def test_a_fix_list_is_taken_from_the_command_line(tmp_path):
    (tmp_path / "fix.jsonl").write_text('{"split": "train", "image_id": "train/00_red_circle.png"}\n')
    data = instantiate(composed("karpathy", [*CHOICES["karpathy"], f"data.exclude={tmp_path}/fix.jsonl"]).data)
    assert len(data.split("train").image_ids) == 7


def test_the_script_draws_the_sample_that_is_here(tmp_path):
    spec = importlib.util.spec_from_file_location("make_sample", ROOT / "scripts" / "make_sample.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(tmp_path / "sample")
    for name in ("data.csv", "data.json", "data.jsonl", "captions_val.json"):
        assert (tmp_path / "sample" / name).read_bytes() == (SAMPLE / name).read_bytes()
    assert sum(path.stat().st_size for path in SAMPLE.rglob("*") if path.is_file()) < 200_000

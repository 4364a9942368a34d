"""An export is all or nothing, opens by itself, and gives the checkpoint's numbers bit by bit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import CAPTIONS, save_tiny_checkpoint

import vlretrieval
from vlretrieval.data.images import open_image
from vlretrieval.data.tokenizers import pad
from vlretrieval.data.transforms import eval_transform
from vlretrieval.deploy import export as export_module
from vlretrieval.deploy.checkpoint import load_checkpoint, weights_hash
from vlretrieval.deploy.export import export


def test_exported_embeddings_and_matches_equal_the_checkpoints_bit_by_bit(
    tiny_checkpoint: Path, tiny_export: Path, photos: Path
) -> None:
    files = sorted(photos.iterdir())
    exported = vlretrieval.load_model(tiny_export)
    trained, tokenizer = load_checkpoint(tiny_checkpoint).build(), load_checkpoint(tiny_checkpoint).tokenizer
    with torch.inference_mode():
        pixels = torch.stack([eval_transform(32)(open_image(file)) for file in files])
        image = trained.encode_image(pixels)
        text = trained.encode_text(*pad(tokenizer(CAPTIONS), tokenizer.pad_id, limit=tokenizer.context_length))
        one_each = trained.match(image.index(torch.arange(3)), text)
    assert torch.equal(exported.encode_images(files), image.embedding)
    assert torch.equal(exported.encode_texts(CAPTIONS), text.embedding)
    torch.testing.assert_close(exported.match(files[:3], CAPTIONS).diagonal(), one_each)
    assert exported.match(files, CAPTIONS).shape == exported.similarity(files, CAPTIONS).shape == (5, 3)


def test_the_batch_size_changes_no_result(tiny_export: Path, photos: Path) -> None:
    model, files = vlretrieval.load_model(tiny_export), sorted(photos.iterdir())
    torch.testing.assert_close(model.encode_images(files, batch_size=2), model.encode_images(files))
    torch.testing.assert_close(model.encode_texts(CAPTIONS, batch_size=1), model.encode_texts(CAPTIONS))
    torch.testing.assert_close(model.match(files, CAPTIONS, batch_size=1), model.match(files, CAPTIONS))


def test_pictures_may_be_files_or_pil_images_and_lone_items_are_refused(tiny_export: Path, photos: Path) -> None:
    model, file = vlretrieval.load_model(tiny_export), sorted(photos.iterdir())[0]
    assert torch.equal(model.encode_images([file]), model.encode_images([open_image(file)]))
    assert torch.equal(model.encode_images([file]), model.encode_images([str(file)]))
    assert model.encode_images([]).shape == (0, 8) and model.encode_texts([]).shape == (0, 8)
    with pytest.raises(ValueError, match="texts takes a list"):
        model.encode_texts("a red circle")
    with pytest.raises(ValueError, match="images takes a list"):
        model.encode_images(file)


def test_loading_an_export_meets_neither_lightning_nor_hydra(tiny_export: Path) -> None:
    program = (
        "import sys, vlretrieval; vlretrieval.load_model(sys.argv[1]).encode_texts(['a star']);"
        "heavy = ('lightning', 'pytorch_lightning', 'hydra', 'omegaconf', 'open_clip', 'wandb', 'torchvision');"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tiny_export)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_folder_holds_what_it_promises(tiny_export: Path) -> None:
    names = {path.name for path in tiny_export.iterdir()}
    model = {"model.safetensors", "config.json", "tokenizer.json"}
    assert names == model | {"README.md", "certificate.json", "manifest.json"}
    config = json.loads((tiny_export / "config.json").read_text())
    assert config["vlretrieval"] == vlretrieval.__version__
    assert config["preprocess"] == {"image_size": 32, "resize": "squash"}
    assert set(json.loads((tiny_export / "manifest.json").read_text())["files"]) == names - {"manifest.json"}


def test_the_card_carries_the_runs_measured_figures_and_says_when_there_are_none(tmp_path: Path) -> None:
    checkpoint = save_tiny_checkpoint(tmp_path / "runs" / "a" / "checkpoints" / "best.ckpt")
    assert "Not evaluated" in (export(checkpoint, tmp_path / "first") / "README.md").read_text()
    path = tmp_path / "runs" / "a" / "evaluation" / "test" / "metrics.json"
    path.parent.mkdir(parents=True)
    ways = {way: {"R@1": 61.25, "R@5": 80.0} for way in ("t2i", "i2t")}
    split = {"name": "test", "images": 1000, "captions": 5000, "hash": "abc"}
    rerank = {"done": "yes", "weight": 0.5}
    protocol = {"ks": [1, 5], "split": split, "ties": "against the model", "positives": "own pairs", "rerank": rerank}
    negatives = {"swap_colour": {"pairs": 1200, "cosine": {"accuracy": 55.0}, "match": {"accuracy": 91.5}}}
    figures = {"protocol": protocol, "first_stage": ways, "hard_negatives": negatives}
    weights = weights_hash(load_checkpoint(checkpoint).weights)
    path.write_text(json.dumps(figures | {"subject": {"weights": weights}}))
    card = (export(checkpoint, tmp_path / "second") / "README.md").read_text()
    assert "| first stage | t2i | 61.2 | 80.0 |" in card and "| swap_colour | 1,200 | 55.0 | 91.5 |" in card
    assert "Split test: 1,000 pictures, 5,000 captions, hash abc; ties count against the model" in card
    assert "model.match(" in card
    assert vlretrieval.load_model(tmp_path / "second").rerank_weight == 0.5
    path.write_text(json.dumps(figures | {"subject": {"weights": "of another checkpoint of the run"}}))
    assert "Not evaluated" in (export(checkpoint, tmp_path / "other") / "README.md").read_text()
    path.write_text("{}")
    with pytest.raises(ValueError, match="not what vlretrieval-evaluate writes"):
        export(checkpoint, tmp_path / "third")
    assert not (tmp_path / "third").exists()


def test_a_dual_encoder_exports_and_says_that_it_cannot_match(
    dual_checkpoint: Path, tmp_path: Path, photos: Path
) -> None:
    folder = export(dual_checkpoint, tmp_path / "dual")
    model = vlretrieval.load_model(folder)
    assert not model.can_match and "plain dual encoder" in (folder / "README.md").read_text()
    with pytest.raises(ValueError, match="plain dual encoder"):
        model.match(sorted(photos.iterdir()), CAPTIONS)


def test_the_default_folder_lies_in_the_run(tmp_path: Path) -> None:
    checkpoint = save_tiny_checkpoint(tmp_path / "a" / "checkpoints" / "last.ckpt")
    assert export(checkpoint) == tmp_path / "a" / "export"


def test_an_export_that_fails_leaves_nothing(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "model card")

    monkeypatch.setattr(export_module, "model_card", full)
    with pytest.raises(OSError):
        export(tiny_checkpoint, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_old_export_is_kept_unless_overwriting_is_asked_for(tiny_checkpoint: Path, tmp_path: Path) -> None:
    export(tiny_checkpoint, tmp_path / "out")
    (tmp_path / "out" / "README.md").write_text("edited")
    with pytest.raises(ValueError, match="already holds files; give another output= or set overwrite=true"):
        export(tiny_checkpoint, tmp_path / "out")
    assert (tmp_path / "out" / "README.md").read_text() == "edited"
    vlretrieval.load_model(tmp_path / "out")  # the card may be edited
    export(tiny_checkpoint, tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "README.md").read_text() != "edited"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_overwriting_never_replaces_a_folder_of_something_else(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="is no export"):
        export(tiny_checkpoint, tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / "thesis.txt").exists()


@pytest.fixture
def copied(tiny_export: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_export, tmp_path / "copied"))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "manifest.json"])
def test_a_file_missing_from_an_export_is_named_and_no_weights_are_random(copied: Path, name: str) -> None:
    (copied / name).unlink()
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        vlretrieval.load_model(copied)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_one_flipped_bit_in_an_export_is_found(copied: Path, name: str) -> None:
    content = bytearray((copied / name).read_bytes())
    content[-20] ^= 1
    (copied / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}.*damaged or was changed"):
        vlretrieval.load_model(copied)


def test_a_manifest_cannot_point_outside_its_folder(copied: Path) -> None:
    manifest = json.loads((copied / "manifest.json").read_text())
    manifest["files"]["../../etc/passwd"] = "0"
    (copied / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="not a file of the folder"):
        vlretrieval.load_model(copied)


def test_a_folder_that_is_no_export_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        vlretrieval.load_model(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="is not an exported model"):
        vlretrieval.load_model(tmp_path)

"""An export that is not near enough to its source does not come to be, and the certificate says how near it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import save_tiny_checkpoint
from torch import nn

from vlretrieval.deploy import export as export_module
from vlretrieval.deploy.certificate import (
    certify,
    difference,
    embedding_difference,
    faults,
    flat,
    line,
    random_pairs,
)
from vlretrieval.deploy.checkpoint import load_checkpoint
from vlretrieval.deploy.export import export

Run = Callable[..., tuple[int, str, str]]
SCENES = ("data=scenes", "data.source.train=8", "data.source.val=4", "data.source.test=12")


def test_differences_are_over_the_largest_value_and_nan_is_infinitely_far() -> None:
    source = torch.tensor([[3.0, -4.0], [0.0, 1.0]])
    exported = source + torch.tensor([[0.0, 0.002], [-0.001, 0.0]])
    assert difference(source, exported) == pytest.approx({"max_abs": 0.002, "max_rel": 0.0005}, rel=1e-3)
    row = embedding_difference(source, -source)
    assert row["mean_cosine"] == pytest.approx(-1) and row["max_rel"] == pytest.approx(2)
    broken = embedding_difference(source, source * torch.nan)
    assert broken["max_rel"] == float("inf") and broken["mean_cosine"] == -1
    assert faults([{"what": "images", "batch": 1} | broken], "fp32", 1e9)
    assert faults([{"what": "images", "batch": 1} | broken], "int8", 0.5)


def test_a_model_is_its_own_equal_and_another_one_is_not(tiny_checkpoint: Path) -> None:
    loaded = load_checkpoint(tiny_checkpoint)
    model, pairs = loaded.build(), random_pairs(loaded.tokenizer, 32)
    same = certify(model, model, pairs, format="folder", precision="fp32")
    assert same["faults"] == [] and same["order"] == {"queries": 16, "shortlist": 16, "same": 16}
    sizes = {(row["what"], row["batch"], row.get("length")) for row in same["parity"]}
    lengths = {length for what, batch, length in sizes if what == "texts" and batch == 16}
    assert len({batch for _, batch, _ in sizes}) == 2
    assert len({row.get("length") for row in same["parity"] if row["what"] == "matches"}) >= 2 and 24 in lengths
    other = loaded.build()
    with torch.no_grad():
        other.text_projection.weight[0, 0] += 0.05
    apart = certify(model, other, pairs, format="folder", precision="fp32")
    assert apart["faults"] and all("texts" in fault for fault in apart["faults"])
    assert "speed" not in apart, "nobody waits for figures of an export that is thrown away"


def test_an_export_over_the_tolerance_fails_and_leaves_nothing(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slightly_off(folder: Path, kind: str) -> nn.Module:
        model = load_checkpoint(tiny_checkpoint).build()
        with torch.no_grad():
            model.image_projection.weight.add_(1e-3 * torch.randn_like(model.image_projection.weight))
        return model

    monkeypatch.setattr(export_module, "opened", slightly_off)
    monkeypatch.setattr(export_module, "check_same", lambda *_: None)
    with pytest.raises(ValueError, match=r"images \(batch 1\) differ by .* 1e-05 may be; nothing is exported"):
        export(tiny_checkpoint, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    folder = export(tiny_checkpoint, tmp_path / "out", tolerance=0.5)
    assert json.loads((folder / "certificate.json").read_text())["tolerance"] == {"of": "max_rel", "most": 0.5}


def test_the_command_certifies_on_the_data_and_prints_the_line(
    tiny_checkpoint: Path, tmp_path: Path, run_command: Run
) -> None:
    status, out, err = run_command("export", f"checkpoint={tiny_checkpoint}", "output=made", *SCENES, "pairs=10")
    assert (status, err) == (0, "")
    certificate = json.loads((tmp_path / "made" / "certificate.json").read_text())
    assert out.splitlines()[-1] == certificate["line"] and "no recall lost" in certificate["line"]
    assert certificate["pairs"]["images"] == 10 and certificate["pairs"]["split"] == "test"
    figures = certificate["figures"]
    assert figures["before"] == figures["after"] and set(figures["lost"].values()) == {0.0}
    assert {"first_stage t2i R@1", "reranked i2t R@10", "hard negatives, match"} <= figures["before"].keys()
    assert certificate["tokenizer_hash"] and certificate["preprocess"] == {"image_size": 32, "resize": "squash"}
    assert certificate["size"]["files"]["model.safetensors"] == certificate["size"]["bytes"]
    assert certificate["speed"]["batch"] == 1 and certificate["line"] in (tmp_path / "made" / "README.md").read_text()


def test_without_data_the_command_says_how_to_go_on(tmp_path: Path, run_command: Run) -> None:
    def gone(config: dict) -> None:
        config["data"]["source"] = {
            "_target_": "vlretrieval.data.records.Records",
            "reader": {
                "_target_": "vlretrieval.data.readers.karpathy.KarpathyJson",
                "json": "gone.json",
                "images": "gone",
            },
        }

    checkpoint = save_tiny_checkpoint(tmp_path / "a" / "checkpoints" / "best.ckpt", gone)
    status, _, err = run_command("export", f"checkpoint={checkpoint}", "output=made")
    assert status == 2 and len(err.splitlines()) == 1 and "gone.json" in err and "pairs=0" in err
    status, out, _ = run_command("export", f"checkpoint={checkpoint}", "output=made", "pairs=0")
    assert status == 0 and "recall not measured" in out
    assert json.loads((tmp_path / "made" / "certificate.json").read_text())["pairs"]["drawn"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["format=tflite"], "format=tflite is not known; choose folder, onnx, torch, open_clip, huggingface"),
        (["precision=fp8"], "precision=fp8 is not known; choose fp32, fp16, bf16, int8"),
        (["precision=int8"], "format=folder cannot hold precision=int8"),
        (["format=[folder,open_clip]", "precision=int8"], "cannot hold precision=int8"),
        (["format=open_clip"], "holds open_clip's own towers"),
        (["format=[folder,open_clip]"], "holds open_clip's own towers"),
        (["format=[folder,folder]"], "name at least one, and each once"),
    ],
    ids=str,
)
def test_what_a_format_cannot_hold_is_one_line_and_nothing_is_written(
    tiny_checkpoint: Path, tmp_path: Path, run_command: Run, words: list[str], said: str
) -> None:
    status, _, err = run_command("export", f"checkpoint={tiny_checkpoint}", "output=made", "pairs=0", *words)
    assert status == 2 and len(err.splitlines()) == 1 and said in err
    assert list(tmp_path.iterdir()) == []


def test_several_formats_each_get_a_folder_and_the_heads_may_be_left_out(
    tiny_checkpoint: Path, tmp_path: Path, run_command: Run
) -> None:
    words = ("output=made", "pairs=0", "format=[folder,huggingface]", "towers_only=true", "license=apache-2.0")
    status, _, err = run_command("export", f"checkpoint={tiny_checkpoint}", *words)
    assert (status, err) == (0, "")
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == ["folder", "huggingface"]
    card = (tmp_path / "made" / "folder" / "README.md").read_text()
    assert "heads were left out" in card and "license: apache-2.0" in card and "model.match(" not in card
    assert "licence of the training data | not stated" in card


def test_the_line_names_what_was_lost_most(tiny_checkpoint: Path) -> None:
    loaded = load_checkpoint(tiny_checkpoint)
    model = loaded.build()
    answers = iter([80.0, 78.5])

    def measure(_: object) -> dict:
        ways = {way: {"R@1": 50.0} for way in ("t2i", "i2t")}
        return {
            "protocol": {"ks": [1]},
            "first_stage": ways | {"i2t": {"R@1": next(answers)}},
            "hard_negatives": {"all": {"cosine": {"accuracy": 60.0}}},
        }

    certificate = certify(
        model, model, random_pairs(loaded.tokenizer, 32), format="onnx", precision="fp32", measure=measure
    )
    assert "most lost: 1.50 points of first_stage i2t R@1" in line(certificate)
    assert certificate["figures"]["before"]["hard negatives, cosine"] == 60.0


def test_flat_figures_of_a_dual_encoder_hold_no_second_stage() -> None:
    ways = {way: {"R@1": 1.0, "R@5": 2.0} for way in ("t2i", "i2t")}
    assert flat({"protocol": {"ks": [1, 5]}, "first_stage": ways}) == {
        "first_stage t2i R@1": 1.0,
        "first_stage t2i R@5": 2.0,
        "first_stage i2t R@1": 1.0,
        "first_stage i2t R@5": 2.0,
    }

"""Runs on frozen pretrained towers, from stored features with augmented copies, offline and from config alone."""

import json
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from tiny_data import write_karpathy
from tiny_training import CONF, weights

from vlretrieval.commands import evaluate as evaluate_command
from vlretrieval.commands import train as train_command
from vlretrieval.evaluation.subject import open_subject

transformers = pytest.importorskip("transformers")

SIZES = {"train": 24, "val": 6, "test": 6}
BERT = dict(
    vocab_size=400, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48,
    max_position_embeddings=40,
)  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained")
    write_karpathy(folder, SIZES)
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(**BERT)).save_pretrained(folder / "bert")
    import timm

    torch.save(timm.create_model("test_efficientnet").state_dict(), folder / "image.pt")
    return folder


def words(place: Path, name: str, *overrides: str) -> list[str]:
    return [
        "model=pretrained", "data=karpathy", f"data.json={place}/data.json", f"data.images={place}/images",
        f"name={name}", f"output_dir={place}/{name}", "tokenizer.vocab_size=400", "tokenizer.context_length=32",
        "model.image_encoder.base.name=test_efficientnet", f"model.image_encoder.base.pretrained={place}/image.pt",
        "model.image_encoder.image_size=64", f"model.text_encoder.base.pretrained={place}/bert",
        "model.image_encoder.dim=16", "model.text_encoder.dim=16", "model.embed_dim=8", "heads.text=2", "heads.image=2",
        "freeze=[image_encoder.base,text_encoder.base]", "data.batch_size=8", "trainer.max_epochs=2",
        "trainer.accelerator=cpu", "progress_bar=false", *overrides,
    ]  # fmt: skip


def run(place: Path, name: str, *overrides: str) -> Path:
    from vlretrieval.training.fit import train

    with initialize_config_dir(str(CONF), version_base="1.3"):
        train(compose("train", overrides=words(place, name, *overrides)))
    return place / name / "checkpoints" / "last.ckpt"


FROM = (
    "data.image_features={}/features",
    "data.text_features={}/features",
    "data.image_feature_copies=2",
    "augment=light",
)


def stored(place: Path) -> list[str]:
    return [word.format(place) for word in FROM]


def command(main, monkeypatch, name: str, *given: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *given])
    main()


def test_written_once_trained_from_and_evaluated_from(place, monkeypatch, capsys):
    given = words(place, "features", *stored(place), "write_features=true")
    command(train_command.main, monkeypatch, "vlretrieval-train", *given)
    made = {path.relative_to(place / "features").as_posix() for path in (place / "features").glob("*/*")}
    assert made == {
        *(f"{split}/{part}" for split in SIZES for part in ("image", "text")), "train/image_1", "train/image_2",
    }  # fmt: skip
    assert not (place / "features" / "checkpoints").exists()

    checkpoint = run(place, "cached", *stored(place))
    assert not list((place / "cached").glob("*.pt"))
    before = weights(run(place, "short", "trainer.max_epochs=1"))  # of pixels: the tower is the same, and stays so
    tower = {k: v for k, v in weights(checkpoint).items() if ".base." in k}
    assert tower and all(torch.equal(v, before[k]) for k, v in tower.items())

    both = []
    for read in ([], [f"image_features={place}/features", f"text_features={place}/features"]):
        output = place / f"evaluated_{len(read)}"
        command(
            evaluate_command.main, monkeypatch, "vlretrieval-evaluate", f"checkpoint={checkpoint}", f"output={output}",
            "rerank.weight=val", "bootstrap=0", "device=cpu", *read,
        )  # fmt: skip
        both.append(json.loads((output / "metrics.json").read_text()))
    pixels, cached = both
    for way in ("t2i", "i2t"):  # half precision moves no more than a near tie
        assert abs(pixels["first_stage"][way]["MRR"] - cached["first_stage"][way]["MRR"]) < 0.05
    assert pixels["subject"]["weights"] == cached["subject"]["weights"]


def test_a_checkpoint_needs_none_of_the_files_it_came_from(place):
    checkpoint = run(place, "moved", "trainer.max_epochs=1")
    for path in (place / "image.pt", place / "bert"):
        path.rename(path.with_name(path.name + ".away"))
    try:
        subject = open_subject(checkpoint)
        assert subject.transform.image_size == 64
        with torch.no_grad():
            subject.model.encode_image(torch.zeros(1, 3, 64, 64, dtype=torch.uint8))
    finally:
        for path in (place / "image.pt", place / "bert"):
            path.with_name(path.name + ".away").rename(path)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.image_feature_copies=2"], "has no effect without image_features"),
        (["data.image_features=x", "data.image_feature_copies=2"], "augment makes the copies"),
        (["data.image_features=x", "augment=light"], "augment makes the copies"),
    ],
)
def test_copies_without_what_makes_them_are_refused(place, overrides, said):
    with pytest.raises(Exception, match=said):
        run(place, "refused", *overrides)


def test_features_are_not_written_of_a_tower_that_is_trained(place, monkeypatch, capsys):
    given = words(place, "trained", "write_features=true", f"data.image_features={place}/other", "freeze=[]")
    with pytest.raises(SystemExit):
        command(train_command.main, monkeypatch, "vlretrieval-train", *given)
    assert "image_encoder.base is trained; set freeze=[image_encoder.base]" in capsys.readouterr().err

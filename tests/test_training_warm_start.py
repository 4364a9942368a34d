"""Weights to start from: whole or in part, whatever wrapped them, and nothing that does not fit in silence."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_training import run, tiny_model
from torch import nn

from vlretrieval.data.tokenizers import BpeTokenizer
from vlretrieval.deploy.export import export
from vlretrieval.model.encoders import ImageEncoder
from vlretrieval.training.warm_start import same_words, warm_start

PICTURES = ["image_encoder", "image_projection"]


def other_model(**image):
    """The tiny model's shapes with other weights; ``image`` changes the image encoder."""
    model = tiny_model()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    if image:
        model.image_encoder = ImageEncoder(**dict(image_size=32, patch_size=8, dim=16, depth=1, num_heads=2) | image)
    return model


def saved(path: Path, state: dict[str, torch.Tensor]) -> Path:
    torch.save(state, path)
    return path


def test_every_weight_is_taken_from_under_the_names_that_wrappers_put_around_them(tmp_path):
    source = other_model()
    plain = source.state_dict()
    lightning = {"model." + name: value for name, value in plain.items()} | {"momentum.twin.x": torch.ones(1)}
    files = {
        "plain": saved(tmp_path / "plain.pt", plain),
        "ddp": saved(tmp_path / "ddp.pt", {"module." + name: value for name, value in plain.items()}),
        "compiled": saved(tmp_path / "c.pt", {"module._orig_mod." + name: value for name, value in plain.items()}),
        "part compiled": saved(
            tmp_path / "p.pt", {n.replace("image_encoder.", "image_encoder._orig_mod."): v for n, v in plain.items()}
        ),
        "lightning": saved(tmp_path / "l.ckpt", {"state_dict": lightning}),
        "lightning in ddp": saved(
            tmp_path / "ld.ckpt", {"state_dict": {f"module.{name}": value for name, value in lightning.items()}}
        ),
        "safetensors": tmp_path / "model.safetensors",
        "folder": tmp_path,
    }
    save_file({name: value.clone() for name, value in plain.items()}, files["safetensors"])
    for kind, path in files.items():
        model = tiny_model()
        warm_start(model, path)
        for name, value in model.state_dict().items():
            assert torch.equal(value, plain[name]), (kind, name)


def test_a_part_is_taken_and_the_rest_stays(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    source, model, before = other_model(), tiny_model(), tiny_model().state_dict()
    # nothing but those parts need fit: the source has another text encoder, and no cross-modal heads
    state = {n: v for n, v in source.state_dict().items() if not n.startswith(("crossmodal", "text_encoder"))}
    warm_start(model, saved(tmp_path / "w.pt", state), PICTURES)
    taken = 0
    for name, value in model.state_dict().items():
        mine = name.startswith(("image_encoder.", "image_projection."))
        assert torch.equal(value, source.state_dict()[name] if mine else before[name]), name
        taken += mine
    assert f"{taken} of {len(before)} weights start from" in caplog.text and taken > 10


def test_everything_that_does_not_fit_is_listed_and_refused_unless_asked_for(tmp_path, caplog):
    state = other_model().state_dict()
    del state["image_projection.weight"]
    state["surplus.weight"] = torch.ones(2)
    state["text_projection.weight"] = torch.ones(4, 16)
    path = saved(tmp_path / "w.pt", state)
    model, before = tiny_model(), tiny_model().state_dict()
    with pytest.raises(ValueError) as refused:
        warm_start(model, path)
    for said in (
        "missing: image_projection.weight",
        "left over: surplus.weight",
        "of another shape: text_projection.weight (4, 16) for (8, 16)",
        "init_strict=false takes what fits",
    ):
        assert said in str(refused.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())  # nothing half-taken
    warm_start(model, path, strict=False)
    assert "missing: image_projection.weight" in caplog.text and "left over: surplus.weight" in caplog.text
    assert torch.equal(model.text_encoder.embedding.weight, state["text_encoder.embedding.weight"])
    assert torch.equal(model.text_projection.weight, before["text_projection.weight"])


def test_a_part_that_is_not_there_is_named(tmp_path):
    path = saved(tmp_path / "w.pt", {n: v for n, v in other_model().state_dict().items() if "crossmodal" not in n})
    with pytest.raises(ValueError, match="the model has no part 'vision'; it has crossmodal, image_encoder"):
        warm_start(tiny_model(), path, ["vision"])
    with pytest.raises(ValueError, match="w.pt has no part 'crossmodal'; it has image_encoder"):
        warm_start(tiny_model(), path, ["crossmodal"])


@pytest.mark.parametrize("size", [48, 24])
def test_positions_of_another_picture_size_are_what_the_source_computes_at_that_size(tmp_path, caplog, size):
    caplog.set_level(logging.INFO)
    source, model = other_model().eval(), other_model(image_size=size).eval()
    warm_start(model, saved(tmp_path / "w.pt", source.state_dict()))
    pixels = torch.randint(0, 256, (2, 3, size, size), dtype=torch.uint8)
    torch.testing.assert_close(model.encode_image(pixels).tokens, source.encode_image(pixels).tokens)
    assert f"positions.weight: fitted from 17 to {1 + (size // 8) ** 2} places" in caplog.text


def test_another_patch_size_is_refused(tmp_path):
    path = saved(tmp_path / "w.pt", tiny_model().state_dict())
    with pytest.raises(ValueError, match=r"of another shape: image_encoder.patches.weight \(16, 192\) for \(16, 768\)"):
        warm_start(other_model(patch_size=16), path)


@pytest.mark.parametrize("kind", ["code", "torn", "flipped", "missing", "empty folder", "address", "text"])
def test_what_cannot_be_read_safely_is_refused(tmp_path, kind):
    path = tmp_path / "w.pt"
    if kind == "code":
        torch.save({"state_dict": print}, path)
    elif kind == "text":
        path.write_text("weights")
    elif kind in ("torn", "flipped"):
        content = bytearray(saved(path, tiny_model().state_dict()).read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content if kind == "flipped" else content[: len(content) // 2])
    elif kind == "empty folder":
        path = tmp_path
    elif kind == "address":
        path = "https://example.org/w.pt"
    before = tiny_model().state_dict()
    model = tiny_model()
    with pytest.raises(ValueError, match=r"w\.pt|folder without model.safetensors|is an address"):
        warm_start(model, path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def fitted(*captions: str, **settings) -> BpeTokenizer:
    return BpeTokenizer(**dict(vocab_size=300, context_length=16) | settings).fit(captions or ["a red circle"] * 9)


def holding(path: Path, tokenizer: BpeTokenizer) -> Path:
    torch.save({"state_dict": tiny_model().state_dict(), "vlretrieval": {"tokenizer": tokenizer.to_dict()}}, path)
    return path


def test_a_tokenizer_that_is_still_to_be_fitted_is_the_source_s(tmp_path):
    path = holding(tmp_path / "w.ckpt", fitted())
    ours, words = same_words(BpeTokenizer(300, 24), path)
    assert words and ours(["a red circle"]) == fitted()(["a red circle"]) and ours.context_length == 24


@pytest.mark.parametrize(
    "ours, said",
    [
        (BpeTokenizer(400, 16), "tokenizer.vocab_size is 400 here and 300 there"),
        (BpeTokenizer(300, 16, lowercase=False), "tokenizer.lowercase is False here and True there"),
        (fitted(*["quite another set of words"] * 9), "the vocabularies differ"),
    ],
)
def test_another_tokenizer_is_refused_where_words_are_taken(tmp_path, ours, said, caplog):
    path = holding(tmp_path / "w.ckpt", fitted())
    with pytest.raises(ValueError, match=f"another tokenizer .{said}.*leave text_encoder out of init_parts"):
        same_words(ours, path)
    assert same_words(ours, path, PICTURES) == (ours, True)  # pictures know no words
    assert same_words(ours, path, strict=False) == (ours, False) and "starts anew" in caplog.text
    model, before = tiny_model(), tiny_model().state_dict()
    for parameter in (source := tiny_model()).parameters():
        nn.init.normal_(parameter)
    warm_start(model, saved(tmp_path / "s.pt", source.state_dict()), words=False)
    new = {name for name, value in model.state_dict().items() if torch.equal(value, before[name])}
    assert new == {"text_encoder.embedding.weight"}


def test_weights_without_a_tokenizer_are_taken_on_trust_and_that_is_said(tmp_path, caplog):
    ours = BpeTokenizer(300, 16)
    assert same_words(ours, saved(tmp_path / "w.pt", tiny_model().state_dict())) == (ours, True)
    assert "holds no tokenizer" in caplog.text


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A run of one epoch; its best checkpoint is exported to export/."""
    folder = tmp_path_factory.mktemp("source")
    run(folder, "trainer.max_epochs=1")
    export(folder / "checkpoints/last.ckpt", folder / "export")
    return folder


STILL = ["optimizer.lr=0.0", "trainer.max_epochs=1", "data.source.train=48"]  # other captions; no step moves anything


def start(folder: Path) -> tuple[dict, dict]:
    content = torch.load(folder / "checkpoints/last.ckpt", weights_only=True)
    return content["state_dict"], content["vlretrieval"]["tokenizer"]


def test_a_run_starts_from_a_checkpoint_with_its_tokenizer(source, tmp_path):
    run(tmp_path, *STILL, f"init_from={source}/checkpoints/last.ckpt")
    begun, tokenizer = start(tmp_path)
    there, theirs = start(source)
    assert tokenizer == theirs and all(torch.equal(value, there[name]) for name, value in begun.items())


@pytest.mark.slow
def test_a_run_starts_from_an_exported_folder_or_a_part_of_it_and_resumes(source, tmp_path):
    there, theirs = start(source)
    run(tmp_path / "whole", *STILL, f"init_from={source}/export")
    begun, tokenizer = start(tmp_path / "whole")
    assert tokenizer == theirs and all(torch.equal(value, there[name]) for name, value in begun.items())
    run(tmp_path / "whole", *STILL, f"init_from={source}/export", "trainer.max_epochs=2", "resume=true")
    assert start(tmp_path / "whole")[1] == theirs

    parts = "init_parts=[image_encoder,image_projection]"
    run(tmp_path / "part", *STILL, f"init_from={source}/export", parts, "seed=3")
    begun, tokenizer = start(tmp_path / "part")
    same = {name.split(".")[1] for name, value in begun.items() if torch.equal(value, there[name]) and value.std() > 0}
    assert same == {"image_encoder", "image_projection"} and tokenizer != theirs

    larger = ["model.image_encoder.image_size=48", "data.source.image_size=48"]
    run(tmp_path / "larger", *STILL, *larger, f"init_from={source}/export")
    begun, _ = start(tmp_path / "larger")
    other = {name for name, value in begun.items() if not value.shape == there[name].shape}
    assert other == {"model.image_encoder.positions.weight"}

    with pytest.raises(ValueError, match="tokenizer.lowercase is False here and True there"):
        run(tmp_path / "words", *STILL, f"init_from={source}/export", "tokenizer.lowercase=false")

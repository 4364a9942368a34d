"""A checkpoint is opened by what it says of itself, and nothing that lies in it is run."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from conftest import tiny_config
from hypothesis import given
from hypothesis import strategies as st

from vlretrieval.deploy.build import build_model
from vlretrieval.deploy.checkpoint import load_checkpoint, model_weights


def test_a_checkpoint_gives_back_config_tokenizer_and_weights(tiny_checkpoint: Path) -> None:
    loaded = load_checkpoint(tiny_checkpoint)
    assert (loaded.version, loaded.step, loaded.config["name"]) == ("0.0.test", 7, "tiny")
    assert loaded.tokenizer(["a red circle"])[0][-1] == loaded.tokenizer.end_id
    model = loaded.build()
    assert not model.training
    assert all(torch.equal(value, loaded.weights[name]) for name, value in model.state_dict().items())


def test_prefixes_of_wrappers_are_stripped() -> None:
    state = {"model._orig_mod.a.weight": torch.zeros(1), "module.model.b": torch.ones(1), "teacher.c": torch.ones(1)}
    assert model_weights(state).keys() == {"a.weight", "b"}


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.ckpt", b"", "not a checkpoint (0 bytes"),
        ("page.ckpt", b"<html>not found</html>", "not a checkpoint"),
        ("picture.png", b"\x89PNG\r\n\x1a\n" + b"\0" * 40, "not a checkpoint"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_named(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    path = written(tmp_path / name, content)
    with pytest.raises(ValueError) as error:
        load_checkpoint(path)
    assert str(path) in str(error.value) and said in str(error.value)


def test_a_missing_file_a_folder_and_an_address_are_told_apart(tmp_path: Path, tiny_checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        load_checkpoint(tmp_path / "nothing.ckpt")
    with pytest.raises(ValueError, match="is a folder; did you mean .*last.ckpt"):
        load_checkpoint(tiny_checkpoint.parent.parent)
    with pytest.raises(ValueError, match="is an address; download it"):
        load_checkpoint("https://example.org/a.ckpt")


def test_a_truncated_checkpoint_is_refused_at_every_length(tmp_path: Path, tiny_checkpoint: Path) -> None:
    whole = tiny_checkpoint.read_bytes()
    for share in (0.01, 0.3, 0.9, 0.999):
        with pytest.raises(ValueError, match="checkpoint"):
            load_checkpoint(written(tmp_path / "cut.ckpt", whole[: int(len(whole) * share)]))


def test_one_flipped_bit_in_a_tensor_is_found(tmp_path: Path, tiny_checkpoint: Path) -> None:
    whole = bytearray(tiny_checkpoint.read_bytes())
    weight = load_checkpoint(tiny_checkpoint).weights["text_encoder.embedding.weight"]
    start = bytes(whole).find(weight.numpy().tobytes()[:64])
    whole[start + 10] ^= 1
    with pytest.raises(ValueError, match="damaged"):
        load_checkpoint(written(tmp_path / "flipped.ckpt", bytes(whole)))


def test_a_pickled_call_is_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "was_run"

    class Payload:
        def __reduce__(self):
            return (open, (str(marker), "w"))

    torch.save({"state_dict": {}, "vlretrieval": Payload()}, tmp_path / "evil.ckpt")
    with pytest.raises(ValueError, match="cannot be read|can be read safely"):
        load_checkpoint(tmp_path / "evil.ckpt")
    assert not marker.exists()


def test_a_checkpoint_of_another_program_is_told_by_what_it_holds(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "state_dict": {}}, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match="of something else: it holds epoch, state_dict"):
        load_checkpoint(tmp_path / "other.ckpt")


def test_weights_that_do_not_fit_are_counted_and_named(tiny_checkpoint: Path) -> None:
    loaded = load_checkpoint(tiny_checkpoint)
    loaded.weights["stray"] = torch.zeros(1)
    del loaded.weights["log_logit_scale"]
    loaded.weights["image_projection.weight"] = torch.zeros(2, 2)
    with pytest.raises(ValueError) as error:
        loaded.build()
    for part in ("1 missing (log_logit_scale)", "1 surplus (stray)", "1 of another shape (image_projection.weight)"):
        assert part in str(error.value)


HOSTILE = [
    "os.system",
    "builtins.eval",
    "builtins.open",
    "pathlib.Path.touch",
    "torch.load",
    "torch.hub.load",
    "torch.nn.Linear",
    "numpy.load",
    "vlretrieval.load_model",
    "vlretrieval.data.images.open_image",
    "vlretrieval.data.tokenizers.HuggingFaceTokenizer",
    "vlretrieval.model.encoders.torch",
    "vlretrieval.model.encoders.torch.load",
    "vlretrieval.model.encoders.nn.Linear",
    "vlretrieval.model.encoders.Tensor",
    "vlretrieval.model.encoders.Transformer",  # imported there, defined elsewhere
    "vlretrieval.model.crossmodal.Encoded",  # no module
    "vlretrieval.model.crossmodal.checkpoint",
    "vlretrieval.model.retrieval_model.RetrievalModel.similarity",
    "vlretrieval.model.nowhere.Nothing",
    "vlretrieval.model..Nothing",
    "",
    None,
    ["vlretrieval.model.encoders.TextEncoder"],
]


@pytest.mark.parametrize("target", HOSTILE, ids=str)
@pytest.mark.parametrize("place", ["top", "part"])
def test_only_the_models_own_classes_can_be_built(target: object, place: str) -> None:
    config = tiny_config()["model"]
    (config if place == "top" else config["image_encoder"])["_target_"] = target
    with pytest.raises(ValueError, match="_target_=.* is not a class of vlretrieval.model"):
        build_model(config)


def test_interpolations_in_a_stored_config_read_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hidden")
    config = tiny_config()["model"]
    config["image_encoder"]["pool"] = "${oc.env:SECRET}"
    with pytest.raises(ValueError, match="model.image_encoder.pool=.*interpolation") as error:
        build_model(config)
    assert "hidden" not in str(error.value)


@given(st.sampled_from(["_partial_", "_args_", "_recursive_", "__init__", "a b", "_convert_"]))
def test_odd_arguments_are_refused(name: str) -> None:
    config = tiny_config()["model"]
    config["text_encoder"][name] = 1
    with pytest.raises(ValueError, match="not an argument that a stored model may have"):
        build_model(config)


def test_what_a_constructor_refuses_is_told_with_its_key() -> None:
    config = copy.deepcopy(tiny_config()["model"])
    config["image_encoder"]["num_heads"] = 3
    with pytest.raises(ValueError, match=r"^a\.ckpt: model\.image_encoder: num_heads=3"):
        build_model(config, "a.ckpt")
    config["image_encoder"]["num_heads"] = 2
    config["text_encoder"]["dimm"] = 3
    with pytest.raises(ValueError, match=r"model\.text_encoder: .*dimm"):
        build_model(config, "a.ckpt")

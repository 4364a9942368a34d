"""ONNX files and torch programs give the model's own numbers, at sizes they were not traced with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CAPTIONS, save_tiny_checkpoint
from torch import Tensor

import vlretrieval
from vlretrieval.deploy.checkpoint import load_checkpoint
from vlretrieval.deploy.export import export
from vlretrieval.deploy.export_graphs import graphs_of, text_to_image
from vlretrieval.deploy.loaded import read_json
from vlretrieval.deploy.search import find_images, read_gallery, search_images

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

BATCHES, LENGTHS = (1, 7, 64), (5, 40)


def plain(config: dict[str, Any]) -> None:
    config["model"]["text_encoder"]["context_length"] = 48


def rotary(config: dict[str, Any]) -> None:
    """The quickstart's kind, with shared K/V and normalised queries."""
    model = config["model"]
    model["text_encoder"] |= {"context_length": 48, "position": "rotary"}
    model["image_encoder"] |= {"position": "sinusoidal", "pool": "mean", "num_kv_heads": 1, "qk_norm": True}
    model["crossmodal"] |= {"num_kv_heads": 1, "text_self_heads": 2, "text_self_position": "rotary", "qk_norm": True}


def causal(config: dict[str, Any]) -> None:
    """CLIP's kind of text tower, and the joint stream for heads."""
    model = config["model"]
    model["text_encoder"] |= {"context_length": 48, "pool": "last", "causal": True}
    model["crossmodal"] |= {"text_to_image_depth": 1, "image_to_text": 0, "joint": 2, "joint_depth": 1}


KINDS: dict[str, Callable[[dict[str, Any]], None]] = {"plain": plain, "rotary": rotary, "causal": causal}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return {kind: save_tiny_checkpoint(folder / kind / "best.ckpt", change) for kind, change in KINDS.items()}


SLOW = [pytest.param(("torch", kind), marks=pytest.mark.slow, id=f"torch-{kind}") for kind in ("plain", "causal")]


@pytest.fixture(scope="module", params=[*(("onnx", kind) for kind in KINDS), ("torch", "rotary"), *SLOW], ids="-".join)
def both(
    request: pytest.FixtureRequest, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Any]:
    """The trained model, and what an export of it opens as."""
    format, kind = request.param
    folder = export(checkpoints[kind], tmp_path_factory.mktemp("exports") / "made", format=format)
    return load_checkpoint(checkpoints[kind]).build(), vlretrieval.load_model(folder, trust=True).model


def close(exported: Tensor, source: Tensor) -> None:
    assert exported.shape == source.shape and exported.dtype == source.dtype
    torch.testing.assert_close(exported, source, atol=1e-5, rtol=1e-5)


def some_texts(batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Ids and masks of uneven lengths, one of them the whole length."""
    draw = torch.Generator().manual_seed(batch + length)
    ids = torch.randint(3, 300, (batch, length), generator=draw)
    lengths = torch.randint(1, length + 1, (batch,), generator=draw)
    lengths[0] = length
    return ids, torch.arange(length) < lengths[:, None]


def some_pictures(batch: int) -> Tensor:
    draw = torch.Generator().manual_seed(batch)
    return torch.randint(0, 256, (batch, 3, 32, 32), generator=draw, dtype=torch.uint8)


@torch.inference_mode()
def test_embeddings_and_logits_agree_at_any_batch_length_and_shortlist(both: tuple[Any, Any]) -> None:
    source, exported = both
    for batch in BATCHES:
        pixels = some_pictures(batch)
        close(exported.encode_image(pixels).embedding, source.encode_image(pixels).embedding)
        kept = [model.keep_image(model.encode_image(pixels)) for model in both]
        for length in LENGTHS:
            texts = [model.encode_text(*some_texts(batch, length)) for model in both]
            close(texts[1].embedding, texts[0].embedding)
            close(exported.match_kept(kept[1], texts[1]), source.match_kept(kept[0], texts[0]))
    one, many = [model.encode_text(*some_texts(1, 5)) for model in both], 64
    rows = torch.zeros(many, dtype=torch.int64)
    expected = source.match_kept(kept[0], one[0].index(rows))
    close(exported.match_kept(kept[1], one[1]), expected)  # one text, a shortlist of 64
    few = [k.index(torch.arange(3)) for k in kept]
    nine = [model.encode_text(*some_texts(9, 40)) for model in both]
    close(exported.match_kept(few[1], nine[1]), source.match_kept(few[0], nine[0]))  # three texts to a picture


@torch.inference_mode()
def test_the_exported_scorer_orders_shortlists_as_torch_does_for_100_queries(both: tuple[Any, Any]) -> None:
    ids, mask = some_texts(100, 12)
    pixels, rows = some_pictures(40), torch.arange(100).repeat_interleave(16)
    shortlist = torch.randint(0, 40, (100 * 16,), generator=torch.Generator().manual_seed(0))
    orders = []
    for model in both:
        kept = model.keep_image(model.encode_image(pixels)).index(shortlist)
        text = model.encode_text(ids, mask).index(rows)
        orders.append(model.match_kept(kept, text).view(100, 16).argsort(dim=1, descending=True, stable=True))
    assert torch.equal(*orders)


@torch.inference_mode()
def test_padding_and_a_text_without_any_token_change_nothing_and_are_no_nan(both: tuple[Any, Any]) -> None:
    source, exported = both
    ids, mask = some_texts(3, 5)
    mask[1] = False
    padded = torch.nn.functional.pad(ids, (0, 9)), torch.nn.functional.pad(mask, (0, 9))
    whole = torch.tensor([0, 2])
    close(exported.encode_text(*padded).embedding[whole], source.encode_text(ids, mask).embedding[whole])
    assert torch.isfinite(exported.encode_text(ids, mask).embedding).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_cut_of_the_first_layer_equals_the_head_as_a_whole(checkpoints: dict[str, Path], kind: str) -> None:
    """What the graph of the scorer computes once a text, against the model's own forward."""
    model = load_checkpoint(checkpoints[kind]).build()
    with torch.no_grad():
        kept = model.keep_image(model.encode_image(some_pictures(6)))
        text = model.encode_text(*some_texts(3, 7))
        ours = text_to_image(model.crossmodal.text_to_image, text.tokens, text.mask, kept.text_to_image, 2)
        theirs = model.crossmodal.text_to_image(text.tokens, text.mask, kept.text_to_image)
    torch.testing.assert_close(ours, theirs)


@pytest.fixture(scope="module")
def tiny_onnx(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tiny_checkpoint, tmp_path_factory.mktemp("exports") / "onnx", format="onnx")


def test_an_onnx_export_is_opened_searched_and_evaluated_like_any_other(
    tiny_onnx: Path, tiny_export: Path, photos: Path, run_command: Callable[..., tuple[int, str, str]]
) -> None:
    folder = tiny_onnx
    assert {path.name for path in folder.iterdir()} >= {"image.onnx", "text.onnx", "keep.onnx", "scorer.onnx"}
    ours, theirs = vlretrieval.load_model(folder), vlretrieval.load_model(tiny_export)
    files = find_images(photos)
    torch.testing.assert_close(ours.match(files, CAPTIONS), theirs.match(files, CAPTIONS), atol=1e-5, rtol=1e-5)
    hits = [search_images(model, "a red circle", read_gallery(model, files), top=5) for model in (ours, theirs)]
    assert [hit.item for hit in hits[0]] == [hit.item for hit in hits[1]]
    scenes = ("data=scenes", "data.source.train=8", "data.source.val=4", "data.source.test=8", "bootstrap=0")
    status, out, err = run_command("evaluate", f"checkpoint={folder}", *scenes, "output=out", "device=cpu")
    assert (status, err) == (0, "")


def test_a_torch_export_is_opened_only_by_those_who_say_that_they_trust_it(
    dual_checkpoint: Path, tmp_path: Path
) -> None:
    folder = export(dual_checkpoint, tmp_path / "made", format="torch")
    with pytest.raises(ValueError, match="runs code that lies in them.*trust=True"):
        vlretrieval.load_model(folder)
    assert vlretrieval.load_model(folder, trust=True).encode_texts(CAPTIONS).shape == (3, 8)


def test_a_dual_encoder_has_no_scorer_and_says_so(dual_checkpoint: Path, tmp_path: Path, photos: Path) -> None:
    folder = export(dual_checkpoint, tmp_path / "dual", format="onnx")
    assert sorted(path.name for path in folder.glob("*.onnx")) == ["image.onnx", "text.onnx"]
    model = vlretrieval.load_model(folder)
    assert not model.can_match
    with pytest.raises(ValueError, match="plain dual encoder"):
        model.match(sorted(photos.iterdir()), CAPTIONS)


@pytest.mark.parametrize(
    ("format", "precision"),
    [("folder", "fp16"), ("folder", "bf16"), ("onnx", "bf16"), ("onnx", "fp16"), ("torch", "bf16")],
)
def test_16_bits_are_half_the_bytes_and_the_certificate_tells_what_they_cost(
    dual_checkpoint: Path, tmp_path: Path, format: str, precision: str
) -> None:
    whole, half = (
        export(dual_checkpoint, tmp_path / name, format=format, precision=name) for name in ("fp32", precision)
    )
    certificate = read_json(half / "certificate.json")
    worst = max(row["max_rel"] for row in certificate["parity"])
    assert 1e-5 < worst <= certificate["tolerance"]["most"] and certificate["precision"] == precision
    saved = read_json(whole / "certificate.json")["size"]["bytes"] - certificate["size"]["bytes"]
    parameters = sum(value.numel() for value in load_checkpoint(dual_checkpoint).weights.values())
    assert saved > 0.7 * 2 * parameters, "2 bytes a parameter, less what casts and small vectors take"
    assert vlretrieval.load_model(half, trust=True).encode_texts(CAPTIONS).dtype == torch.float32


def test_8_bits_are_a_third_of_the_bytes_and_keep_the_direction(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def wider(config: dict[str, Any]) -> None:
        for tower in ("image_encoder", "text_encoder"):
            config["model"][tower] |= {"dim": 128, "depth": 2}

    path = tmp_path / "run" / "best.ckpt"
    folder = export(
        save_tiny_checkpoint(path, wider, text_to_image=0, image_to_text=0),
        tmp_path / "made",
        format="onnx",
        precision="int8",
    )
    assert not [record for record in caplog.records if record.levelname == "WARNING"], "no library speaks to the user"
    certificate = read_json(folder / "certificate.json")
    assert min(row["mean_cosine"] for row in certificate["parity"]) >= 0.999
    assert certificate["size"]["ratio"] <= 0.3
    assert "keep a mean cosine of 0.999" in certificate["line"] or "cosine of 1.0" in certificate["line"]
    assert {path.suffix for path in folder.iterdir()} == {".onnx", ".json", ".md"}, "no file of a step between is left"


def test_graphs_carry_no_path_of_the_machine_that_made_them(tiny_onnx: Path) -> None:
    for path in tiny_onnx.glob("*.onnx"):
        assert str(Path(vlretrieval.__file__).parent).encode() not in path.read_bytes()


def test_every_graph_names_its_inputs_and_what_varies(tiny_checkpoint: Path) -> None:
    graphs = {graph.name: graph for graph in graphs_of(load_checkpoint(tiny_checkpoint).build(), 32)}
    assert graphs.keys() == {"image", "text", "keep", "scorer"}
    for graph in graphs.values():
        assert len(graph.inputs) == len(graph.example) == len(graph.axes)
    assert graphs["scorer"].axes[-1] == {0: "texts", 1: "shortlist"}

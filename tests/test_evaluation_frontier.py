"""The frontier of re-ranking, the error page and the overlays of deciding heads, on a tiny model with real heads."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.tiny_retrieval import TRANSFORM, FakeModel, tiny_split, tiny_tokenizer
from vlretrieval.evaluation.error_page import STYLE, error_page, nearest_pairs
from vlretrieval.evaluation.evaluate import Settings, evaluate
from vlretrieval.evaluation.frontier import frontier, smallest_enough
from vlretrieval.evaluation.inputs import Inputs
from vlretrieval.evaluation.names import names_apart
from vlretrieval.evaluation.overlays import deciding_head, maps_of, one_head_off, text_to_image_layers
from vlretrieval.evaluation.subject import open_subject

SCENES = ["data=scenes", "data.source.test=8", "data.source.train=8", "data.source.val=4"]


def tiny_frontier(**settings):
    split = tiny_split()
    return frontier(FakeModel(), Inputs(split, tiny_tokenizer(split), TRANSFORM), timed_queries=2, **settings), split


def test_every_point_of_the_frontier_is_what_evaluating_at_that_top_k_gives():
    found, split = tiny_frontier(top_ks=(1, 3, 8, 1000), k=5)
    for way in ("t2i", "i2t"):
        for point, top_k in zip(found[way], (0, 1, 3, 8, 1000), strict=True):
            settings = Settings(top_k=top_k, ks=(5,), bootstrap=0, hard_negatives=False)
            figures = evaluate(FakeModel(), split, tiny_tokenizer(split), TRANSFORM, settings).figures
            expected = figures["reranked" if top_k else "first_stage"][way]["R@5"]
            assert point["recall"] == pytest.approx(expected)
            assert point["recall"] <= point["ceiling"] + 1e-9
        assert found[way][0]["ceiling"] == found[way][0]["recall"] and found[way][-1]["ceiling"] == 100
    assert found["t2i"][-1]["top_k"] == 23 and found["i2t"][-1]["top_k"] == len(split.captions)
    assert [p["top_k"] for p in tiny_frontier(top_ks=(1, 900, 1000))[0]["t2i"]] == [0, 1, 23], "each length once"
    assert found["bytes"]["embedding"] == 48 and found["bytes"]["kept_a_picture"] == 4 * 12 * 4


def test_the_smallest_top_k_within_a_tenth_of_a_point_is_enough():
    points = [{"top_k": k, "recall": r} for k, r in ((0, 40.0), (4, 55.0), (8, 60.95), (16, 61.0), (32, 60.0))]
    assert smallest_enough(points) == 8


def test_a_frontier_of_a_dual_encoder_is_refused():
    split = tiny_split()
    with pytest.raises(ValueError, match="needs cross-modal heads"):
        frontier(FakeModel(heads=False), Inputs(split, tiny_tokenizer(split), TRANSFORM))
    with pytest.raises(ValueError, match="lengths of 1 or more"):
        tiny_frontier(top_ks=(0, 4))


@pytest.mark.parametrize(
    "paths, names",
    [
        (["runs/a/checkpoints/best.ckpt"], ["a"]),
        (["exports/small"], ["small"]),
        (["r/kv/MHA/seed_1/checkpoints/best.ckpt", "r/kv/MQA/seed_1/checkpoints/best.ckpt"], ["MHA", "MQA"]),
        (["r/a/checkpoints/best.ckpt", "r/a/checkpoints/last.ckpt"], ["best", "last"]),
        (["r/a/checkpoints/best.ckpt", "exports/a"], ["r/a/checkpoints/best", "exports/a"]),
        (["r/a.ckpt", "r/a"], ["a.ckpt", "a"]),
        (["r", "r/a"], ["r", "r/a"]),
        (["r/1/x", "r/2/x", "r/1/y"], ["1/x", "2/x", "1/y"]),
    ],
)
def test_models_are_called_by_what_tells_their_paths_apart(paths, names):
    assert names_apart(paths) == names and len(set(names)) == len(paths)


def test_a_checkpoint_given_twice_is_refused(run_command, tiny_checkpoint):
    status, _, err = run_command("frontier", f"checkpoint={tiny_checkpoint},{tiny_checkpoint}", "output=out", *SCENES)
    assert status == 2 and "is given twice" in err


def test_the_command_draws_several_models_into_one_picture(run_command, tiny_checkpoint, tiny_export, tmp_path):
    pytest.importorskip("matplotlib")
    words = [f"checkpoint={tiny_checkpoint},{tiny_export}", "output=out", "top_ks=[1,4]", "batch_size=8", *SCENES]
    status, out, err = run_command("frontier", *words)
    assert status == 0, err
    assert "bytes kept a picture" in out and (tmp_path / "out/frontier.png").stat().st_size > 10_000
    written = json.loads((tmp_path / "out/frontier.json").read_text())
    assert len(written) == 2 and all(found["heads"] == "MHA: 2 heads" for found in written.values())


def real_tokens(tiny_checkpoint):
    subject = open_subject(tiny_checkpoint)
    split = tiny_split(images=6)
    outcome = evaluate(subject.model, split, subject.tokenizer, subject.transform, Settings(top_k=4, bootstrap=0))
    return subject.model, outcome


def test_looking_at_heads_changes_nothing_and_leaves_nothing_behind(tiny_checkpoint):
    model, outcome = real_tokens(tiny_checkpoint)
    layers = text_to_image_layers(model)
    assert len(layers) == 2
    pair = np.array([0, 1])

    def logits():
        with torch.inference_mode():
            kept = model.keep_image(outcome.images.rows(pair))
            return model.match_kept(kept, outcome.texts.rows(np.array([0, 0])))

    before = logits()
    with maps_of(layers) as maps:
        assert torch.equal(logits(), before)
    assert len(maps) == 2 and maps[0].shape[:2] == (2, 2)
    assert all(layer.observer is None and layer.gate is None for layer in layers)
    with one_head_off(layers[0], 1):
        assert not torch.equal(logits(), before)
    assert torch.equal(logits(), before)


def test_the_deciding_head_is_the_one_whose_loss_costs_most(tiny_checkpoint):
    model, outcome = real_tokens(tiny_checkpoint)
    name, grid = deciding_head(model, outcome.images, outcome.texts, 0, 0, 3)
    assert re.fullmatch(r"layer [12], head [12] of 2", name)
    assert grid.shape == (4, 4) and grid.min() == 0 and grid.max() == pytest.approx(1)
    layers = text_to_image_layers(model)
    with torch.no_grad():  # only layer 2's head 1 is left with something to say
        layers[0].out.weight.zero_()
        layers[1].out.weight[:, layers[1].head_dim :].zero_()
    # it decides in one direction or the other: whichever picture it speaks for
    found = {deciding_head(model, outcome.images, outcome.texts, 0, *pair)[0] for pair in ((0, 3), (3, 0))}
    assert "layer 2, head 1 of 2" in found


def test_near_duplicates_are_found_across_blocks():
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((50, 16)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    rows[41], rows[7] = rows[3], rows[30]
    for block in (8, 1024):
        found = nearest_pairs(rows, 2, block=block)
        assert {pair[1:] for pair in found} == {(3, 41), (7, 30)} and found[0][0] == pytest.approx(1)


def test_the_error_page_holds_everything_in_one_file(run_command, tiny_checkpoint, tmp_path):
    words = [
        f"checkpoint={tiny_checkpoint}",
        "output=out",
        "error_page=true",
        "rerank.top_k=3",
        "bootstrap=0",
        "device=cpu",
    ]
    status, out, err = run_command("evaluate", *words, *SCENES)
    assert status == 0, err
    page = (tmp_path / "out/errors.html").read_text()
    for part in ("find their picture last", "Hubs", "Near-duplicates", "caption length", "number of objects", "looks"):
        assert part in page, part
    assert page.count("data:image/jpeg;base64,") > 50
    assert not re.search(r"(src|href)=['\"]?(https?:)?//", page) and "<script" not in page
    assert re.search(r"[1-6] objects<td>\d+ queries", page)


def test_the_page_s_style_is_whole_and_has_a_dark_side(tmp_path):
    """A line broken within a property's name once took the green border off the right answers."""
    rules = re.sub(r"@media[^{]*\{(.*?\})\s*\}", r"\1", STYLE, flags=re.S)
    for body in re.findall(r"\{([^{}]*)\}", rules):
        for declaration in body.split(";"):
            whole = re.fullmatch(r"\s*-?-?[a-z]+(-[a-z]+)*:\s*\S.*", declaration, re.S)
            assert whole or not declaration.strip(), declaration
    assert "figure.right img { border-color" in STYLE and "prefers-color-scheme: dark" in STYLE


def test_only_queries_with_a_wrong_first_answer_are_shown_as_wrong(tmp_path):
    split = tiny_split(images=6, captions=(1,))
    outcome = evaluate(FakeModel(), split, tiny_tokenizer(split), TRANSFORM, Settings(bootstrap=0))
    perfect = tuple(replace(r, above=0 * r.above, tied=0 * r.tied) for r in outcome.ranks["first_stage"])
    page = error_page(replace(outcome, ranks={"first_stage": perfect}), tmp_path / "page.html").read_text()
    assert page.count("None: the first answer of each is right") == 2


def test_captions_are_text_and_not_markup_in_the_page(tmp_path):
    split = tiny_split(images=6, captions=(2,))
    split.captions[0] = "<script>alert(1)</script> & more"
    outcome = evaluate(FakeModel(), split, tiny_tokenizer(split), TRANSFORM, Settings(bootstrap=0))
    page = error_page(outcome, tmp_path / "page.html", worst=30).read_text()
    assert "<script" not in page and "&lt;script&gt;" in page

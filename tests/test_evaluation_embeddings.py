"""Anybody's embeddings and rankings: read, refused where wrong, written by us, and a killed run that goes on."""

import json
import os
import signal

import numpy as np
import pytest

from tests.tiny_retrieval import TRANSFORM, FakeModel, tiny_split, tiny_tokenizer
from vlretrieval.evaluation.embed import embed
from vlretrieval.evaluation.embedding_files import load_embeddings
from vlretrieval.evaluation.evaluate import Settings, evaluate, evaluate_embeddings
from vlretrieval.evaluation.inputs import Inputs
from vlretrieval.evaluation.rankings import (
    caption_names,
    image_names,
    places_of,
    ranking_figures,
    read_run,
    read_truth,
    truth_of,
    write_run,
    write_truth,
)
from vlretrieval.metrics.graded import average_precision_at_r, ndcg, positive_places

WIDE = np.array([(c, i) for c in range(0, 50, 3) for i in (1, 7, 20)])


class NamedModel(FakeModel):
    embed_dim = 12


def flat(figures, name=""):
    """Nested figures as {"t2i/R@1": number}."""
    if isinstance(figures, dict):
        return {key: value for part, inner in figures.items() for key, value in flat(inner, f"{name}/{part}").items()}
    if isinstance(figures, list):
        return {
            key: value for place, inner in enumerate(figures) for key, value in flat(inner, f"{name}/{place}").items()
        }
    return {} if isinstance(figures, str) else {name: figures}


def some_arrays(seed=0, images=12, captions=3):
    rng = np.random.default_rng(seed)
    image = rng.standard_normal((images, 6)).astype(np.float32)
    owner = np.repeat(np.arange(images), captions)
    text = image[owner] + rng.standard_normal((len(owner), 6)).astype(np.float32)
    return {
        "image_embeddings": image,
        "text_embeddings": text,
        "image_ids": np.array([f"i{n}" for n in range(images)]),
        "text_image_ids": np.array([f"i{n}" for n in owner]),
    }


def first_stage(path, **settings):
    return evaluate_embeddings(load_embeddings(path), Settings(bootstrap=0, **settings)).figures["first_stage"]


def test_embeddings_of_a_checkpoint_give_the_figures_of_the_checkpoint(tmp_path):
    split = tiny_split(positives=WIDE)
    tokenizer = tiny_tokenizer(split)
    inputs = Inputs(split, tokenizer, TRANSFORM)
    whole = evaluate(NamedModel(), split, tokenizer, TRANSFORM, Settings(bootstrap=0, further=True)).figures
    for output in (tmp_path / "file.npz", tmp_path / "folder"):
        embed(NamedModel(), inputs, output, batch_size=5)
        found = evaluate_embeddings(load_embeddings(output), Settings(bootstrap=0, further=True)).figures
        for part in ("first_stage", "by_image_id", "further"):
            assert flat(found[part]) == pytest.approx(flat(whole[part]))
        assert found["protocol"]["split"]["hash"] == whole["protocol"]["split"]["hash"]
        assert found["protocol"]["positives"] == whole["protocol"]["positives"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file.npz", "folder"]


def test_order_scale_type_and_kind_of_id_change_nothing(tmp_path):
    arrays = some_arrays()
    np.savez(tmp_path / "plain.npz", **arrays)
    rng = np.random.default_rng(1)
    order = rng.permutation(len(arrays["text_embeddings"]))
    moved = {
        "image_embeddings": arrays["image_embeddings"] * rng.uniform(0.1, 30, (12, 1)).astype(np.float32),
        "text_embeddings": arrays["text_embeddings"][order].astype(np.float64),
        "image_ids": np.arange(12) + 100,
        "text_image_ids": np.repeat(np.arange(12), 3)[order] + 100,
    }
    np.savez(tmp_path / "moved.npz", **moved)
    (tmp_path / "folder").mkdir()
    for name, array in moved.items():
        np.save(tmp_path / "folder" / f"{name}.npy", array)
    plain = first_stage(tmp_path / "plain.npz")
    assert first_stage(tmp_path / "moved.npz") == plain == first_stage(tmp_path / "folder")


def test_a_folder_stays_on_disk_until_its_rows_are_asked_for(tmp_path):
    for name, array in some_arrays().items():
        np.save(tmp_path / f"{name}.npy", array)
    found = load_embeddings(tmp_path)
    assert isinstance(found.image.array, np.memmap) and isinstance(found.text.array, np.memmap)
    assert np.linalg.norm(found.text[3:9], axis=1) == pytest.approx(1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_ids": None}, "lacks image_ids"),
        ({"image_ids": np.array(["i0"] * 12)}, "holds 'i0' twice"),
        ({"text_image_ids": np.array(["i0"] * 35 + ["x"])}, r"text_image_ids\[35\] is 'x'"),
        ({"image_ids": np.arange(12.0), "text_image_ids": np.arange(36) // 3}, "image_ids are float64, .* int64"),
        ({"text_image_ids": np.array(["i0"] * 7)}, "one id a row"),
        ({"image_embeddings": np.ones((12, 6), np.int64)}, "of a float type"),
        ({"image_embeddings": np.zeros((12, 6), np.float32)}, "image embedding 0 of 12 is all zeros"),
        ({"text_embeddings": np.full((36, 6), np.nan, np.float32)}, "text embedding 0 of 36 is not finite"),
        ({"text_embeddings": np.ones((36, 5), np.float32)}, r"given.npz: image_embeddings are 6 wide.* 5"),
        ({"text_embeddings": np.ones((0, 6), np.float32), "text_image_ids": np.array([], str)}, "given.npz' is empty"),
        ({"positives": np.array([3, 4])}, r"given.npz: positives has shape \(2,\) of int64; wanted \(P, 2\)"),
        ({"positives": np.array([[0.0, 1.0]])}, r"positives has shape \(1, 2\) of float64"),
        ({"positives": np.array([[0, 1], [36, 0]])}, r"positives\[1\] is \[36, 0\]; there are 36 texts and 12 images"),
        ({"texts": np.array(["a"] * 40)}, r"given.npz: texts has shape \(40,\); wanted one a row, \(36,\)"),
        ({"image_ids": np.array([object()] * 12, dtype=object)}, "cannot|not a .npz that can be read safely"),
    ],
)
def test_a_file_that_cannot_be_ranked_is_refused_by_name(tmp_path, change, message):
    arrays = {name: array for name, array in (some_arrays() | change).items() if array is not None}
    np.savez(tmp_path / "given.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        first_stage(tmp_path / "given.npz")


def test_what_is_no_file_of_embeddings_is_refused(tmp_path):
    (tmp_path / "torn.npz").write_bytes(b"PK\x03\x04 torn")
    for path, message in (
        (tmp_path / "no.npz", "no such file"),
        (tmp_path / "torn.npz", "read safely"),
        (tmp_path, "lacks"),
    ):
        with pytest.raises(ValueError, match=message):
            load_embeddings(path)


def test_encoding_goes_on_after_a_kill_and_gives_the_same_file(tmp_path):
    split = tiny_split(images=40, captions=(3,))
    inputs = Inputs(split, tiny_tokenizer(split), TRANSFORM)
    embed(NamedModel(), inputs, tmp_path / "whole", batch_size=4)
    child = os.fork()
    if child == 0:  # killed without warning in the middle of the pictures

        def stop(what, done, total):
            if (what, done) == ("image", 6):
                os.kill(os.getpid(), signal.SIGKILL)

        embed(NamedModel(), inputs, tmp_path / "torn", batch_size=4, tell=stop)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    again = []
    embed(
        NamedModel(), inputs, tmp_path / "torn", batch_size=4, tell=lambda what, done, total: again.append((what, done))
    )
    assert again[0] == ("image", 7) and len([1 for what, _ in again if what == "image"]) == 4
    for name in ("image_embeddings", "text_embeddings", "texts", "positives"):
        assert np.array_equal(np.load(tmp_path / "torn" / f"{name}.npy"), np.load(tmp_path / "whole" / f"{name}.npy"))


@pytest.mark.parametrize("moment", ["pack", "replace", "rmtree"])
def test_a_kill_while_the_npz_is_written_or_the_folder_cleared_is_no_dead_end(tmp_path, monkeypatch, moment):
    from vlretrieval.evaluation import embed as module

    split = tiny_split()
    inputs = Inputs(split, tiny_tokenizer(split), TRANSFORM)
    embed(NamedModel(), inputs, tmp_path / "whole.npz")

    class Killed(BaseException):
        pass

    def kill(*args, **kwargs):
        raise Killed

    with monkeypatch.context() as patch:
        if moment == "pack":
            patch.setattr(module, "pack", kill)
        elif moment == "replace":
            patch.setattr(module.os, "replace", kill)
        else:
            patch.setattr(module.shutil, "rmtree", lambda path, **kwargs: None if kwargs else kill())
        with pytest.raises(Killed):
            embed(NamedModel(), inputs, tmp_path / "torn.npz")
    embed(NamedModel(), inputs, tmp_path / "torn.npz")
    with np.load(tmp_path / "torn.npz") as torn, np.load(tmp_path / "whole.npz") as whole:
        assert set(torn.files) == set(whole.files) >= {"image_embeddings", "texts"}
        assert all(np.array_equal(torn[name], whole[name]) for name in whole.files)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["torn.npz", "whole.npz"]


def test_a_kill_while_the_files_are_laid_out_is_no_dead_end(tmp_path, monkeypatch):
    split = tiny_split()
    inputs = Inputs(split, tiny_tokenizer(split), TRANSFORM)
    with monkeypatch.context() as patch:
        patch.setattr(np, "save", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            embed(NamedModel(), inputs, tmp_path / "out")
    embed(NamedModel(), inputs, tmp_path / "out")
    assert not (tmp_path / "out.starting").exists() and first_stage(tmp_path / "out")


def test_embeddings_of_another_model_are_not_mixed_in(tmp_path):
    split = tiny_split()
    inputs = Inputs(split, tiny_tokenizer(split), TRANSFORM)
    embed(NamedModel(), inputs, tmp_path / "out")
    with pytest.raises(ValueError, match="embeddings of another weights"):
        embed(NamedModel(seed=1), inputs, tmp_path / "out")
    with pytest.raises(ValueError, match="finished"):
        embed(NamedModel(), inputs, tmp_path / "out")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty"):
        embed(NamedModel(), inputs, tmp_path / "other")


def test_a_broken_model_writes_no_finished_file(tmp_path):
    class Broken(NamedModel):
        def encode_image(self, pixels):
            encoded = super().encode_image(pixels)
            encoded.embedding[0] = float("nan")
            return encoded

    split = tiny_split()
    with pytest.raises(ValueError, match="image embedding 0 of 23 is not finite"):
        embed(Broken(), Inputs(split, tiny_tokenizer(split), TRANSFORM), tmp_path / "out.npz")
    assert not (tmp_path / "out.npz").exists()


def test_the_first_answers_are_written_and_measure_as_the_model_did(tmp_path, run_command, tiny_checkpoint):
    scenes = ["data=scenes", "data.source.test=8", "data.source.train=8", "data.source.val=4"]
    words = [
        f"checkpoint={tiny_checkpoint}",
        "output=out",
        "rankings=1000",
        "rerank.top_k=3",
        "bootstrap=0",
        "device=cpu",
    ]
    status, _, err = run_command("evaluate", *words, *scenes)
    assert status == 0, err
    figures = json.loads((tmp_path / "out/metrics.json").read_text())
    for way in ("t2i", "i2t"):
        measured = ranking_figures(
            read_run(tmp_path / f"out/{way}.run"), read_truth(tmp_path / f"out/{way}.qrels"), replicates=0
        )
        for k in (1, 5, 10):
            assert measured[f"R@{k}"] == pytest.approx(figures["reranked"][way][f"R@{k}"])
        assert measured["MRR"] == pytest.approx(figures["reranked"][way]["MRR"])
    status, out, err = run_command("evaluate", "ranking=out/t2i.run", "output=by_data", "bootstrap=20", *scenes)
    assert status == 0, err
    by_data = json.loads((tmp_path / "by_data/metrics.json").read_text())
    assert by_data["R@1"] == pytest.approx(figures["reranked"]["t2i"]["R@1"]) and by_data["without_list"] == 0


def test_figures_of_a_run_equal_those_of_its_scores():
    split = tiny_split(positives=WIDE)
    rng = np.random.default_rng(0)
    text = rng.standard_normal((len(split.captions), 4)).astype(np.float32)
    image = rng.standard_normal((len(split.image_ids), 4)).astype(np.float32)
    truth = truth_of(split)["t2i"]
    names = list(truth)
    scores = text @ image.T
    run = {names[c]: {split.image_ids[i]: float(scores[c, i]) for i in range(len(image))} for c in range(len(text))}
    figures = ranking_figures(run, truth, replicates=20)
    places, _ = positive_places(text, image, split.positives)
    assert figures["mAP@R"] == pytest.approx(100 * average_precision_at_r(places).mean())
    assert figures["nDCG"] == pytest.approx(ndcg(places).mean())
    assert figures["interval"]["mAP@R"][0] < figures["mAP@R"] < figures["interval"]["mAP@R"][1]


def test_ids_with_blanks_mean_the_same_in_a_run_and_in_the_truth_of_the_data(tmp_path):
    plain = tiny_split(images=4, captions=(2,))
    split = type(plain)(
        "test", ["a photo", "b\tphoto", "c\u00a0photo", "d"], plain.captions, plain.caption_image, plain.picture
    )
    truths = truth_of(split)
    write_run(tmp_path / "t2i.run", caption_names(split), image_names(split), split.caption_image[:, None])
    write_truth(tmp_path / "t2i.qrels", truths["t2i"])
    for truth in (truths["t2i"], read_truth(tmp_path / "t2i.qrels")):
        figures = ranking_figures(read_run(tmp_path / "t2i.run"), truth, replicates=0)
        assert figures["R@1"] == 100 and figures["without_list"] == 0
    same = type(plain)("test", ["a b", "a_b", "c", "d"], plain.captions, plain.caption_image, plain.picture)
    with pytest.raises(ValueError, match="two images are called 'a_b'"):
        image_names(same)


def test_figures_of_a_run_carry_what_they_were_made_from(tmp_path, run_command):
    (tmp_path / "a.run").write_text("q1 Q0 a 1 1.0 t\nq1 Q0 b 2 1.0 t\n")
    (tmp_path / "a.qrels").write_text("q1 0 a 1\nq2 0 b 1\n")
    words = ["ranking=a.run", "qrels=a.qrels", "output=out", "ks=[1,2]", "bootstrap=10"]
    status, _, err = run_command("evaluate", *words)
    assert status == 0, err
    figures = json.loads((tmp_path / "out/metrics.json").read_text())
    assert (figures["R@1"], figures["R@2"]) == (0, 50), "the tie counts against the run, the missing list is a miss"
    assert figures["protocol"]["ks"] == [1, 2] and figures["protocol"]["intervals"]["replicates"] == 10
    assert figures["protocol"]["versions"]["numpy"] == np.__version__
    assert len(figures["subject"]["run_hash"]) == len(figures["subject"]["qrels_hash"]) == 16
    (tmp_path / "b.qrels").write_text("q7 0 a 1\n")
    status, _, err = run_command("evaluate", *words, "qrels=b.qrels")
    assert status == 2 and "a.run: no query of it is in the truth; the first are 'q1' and 'q7'" in err
    (tmp_path / "b.qrels").write_text("q1 0 a --1\n")
    status, _, err = run_command("evaluate", *words, "qrels=b.qrels")
    assert status == 2 and "b.qrels:1: the relevance '--1' is not a whole number" in err


def test_figures_of_embeddings_carry_what_they_were_made_from(tmp_path, run_command):
    arrays = some_arrays()
    np.savez(tmp_path / "a.npz", **arrays | {"image_embeddings": arrays["image_embeddings"].astype(np.float16)})
    status, _, err = run_command("evaluate", "embeddings=a.npz", "output=out", "bootstrap=10")
    assert status == 0, err
    figures = json.loads((tmp_path / "out/metrics.json").read_text())
    assert figures["protocol"]["dtype"] == {"image": "float16", "text": "float32"}
    assert figures["protocol"]["precision"] is None and len(figures["subject"]["files_hash"]) == 16
    further = figures["further"]
    assert set(further["text_to_text"]["interval"]) >= {"R@1", "R@5", "R@10"}
    low, high = further["hubs"]["corrected"]["t2i"]["interval"]["R@5"]
    assert low <= further["hubs"]["corrected"]["t2i"]["R@5"] <= high


def test_ties_of_a_run_count_against_it_and_missing_lists_are_misses():
    assert places_of({"a": 1.0, "b": 1.0, "c": 0.0}, {"a", "c"}) == [2, 3]
    figures = ranking_figures({"q1": {"a": 1.0}, "q9": {"a": 1.0}}, {"q1": {"a"}, "q2": {"b"}}, (1,), replicates=0)
    assert figures["R@1"] == 50 and figures["without_list"] == 1 and figures["unknown_queries"] == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("q Q0 d 1 0.5", r":2: 5 fields"),
        ("q Q0 d 1 high tag", r":2: the score 'high' is not a number"),
        ("q Q0 d 1 nan tag", r":2: .* not finite"),
        ("q Q0 a 1 0.5 tag", r":2: 'a' is named twice for 'q'"),
    ],
)
def test_a_line_that_is_no_ranking_is_named(tmp_path, line, message):
    (tmp_path / "given.run").write_text(f"q Q0 a 1 0.9 tag\n{line}\n")
    with pytest.raises(ValueError, match=message):
        read_run(tmp_path / "given.run")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give one of checkpoint=, embeddings= or ranking= (none given)"),
        (["embeddings=a.npz", "ranking=b"], "(embeddings and ranking given)"),
        (["embeddings=a.npz"], "embeddings=a.npz: no such file or folder"),
        (["embeddings=a.npz", "data=scenes"], "data= has no effect on embeddings="),
        (["embeddings=a.npz", "text_edits=true"], "embeddings= has no model"),
        (["embeddings=a.npz", "qrels=b"], "qrels= is the truth of ranking="),
        (["ranking=a.run", "protocol=coco_1k"], "protocol= has no effect on ranking="),
        (["ranking=a.run", "rankings=3"], "rankings= has no effect on ranking="),
        (["embeddings=a.npz", "protocol=coco_1k", "rankings=3"], "protocol=coco_1k has several"),
        (["ranking=a.run"], "a.run: no such file"),
    ],
)
def test_the_command_says_what_is_missing(run_command, words, message):
    status, _, err = run_command("evaluate", *words)
    assert status == 2 and message in err and err.count("\n") == 1

"""Paired comparison: noise is called noise, a real difference is found, unlike protocols are refused."""

import json

import numpy as np
import pytest

from tests.tiny_retrieval import TRANSFORM, FakeModel, tiny_split, tiny_tokenizer
from vlretrieval.data.splits import HardNegatives
from vlretrieval.evaluation.compare import Difference, compare, load_run
from vlretrieval.evaluation.evaluate import Settings, evaluate

PROTOCOL = {
    "split": {"hash": "h", "images": 200, "captions": 1000},
    "ks": [1, 5],
    "positives": "own",
    "ties": "against",
}


def write_run(folder, rank_of_caption, rank_of_image=None):
    """A run whose first stage gives the captions these ranks (and the images)."""
    captions = len(rank_of_caption)
    images = captions // 5
    ranks = {
        "t2i": np.asarray(rank_of_caption),
        "i2t": np.ones(images, int) if rank_of_image is None else rank_of_image,
    }
    folder.mkdir(parents=True)
    arrays = {"caption_image": np.arange(captions) // 5}
    for way, rank in ranks.items():
        zeros = np.zeros(len(rank), int)
        arrays |= {f"first_stage/{way}/query": np.arange(len(rank)), f"first_stage/{way}/above": rank - 1}
        arrays |= {f"first_stage/{way}/tied": zeros, f"first_stage/{way}/good": zeros + 1}
    np.savez(folder / "queries.npz", **arrays)
    protocol = {**PROTOCOL, "split": {"hash": "h", "images": images, "captions": captions}}
    figures = {"protocol": protocol, "first_stage": {"t2i": {"gallery": images}, "i2t": {"gallery": captions}}}
    (folder / "metrics.json").write_text(json.dumps(figures))
    return load_run(folder)


def found(differences, name):
    return next(d for d in differences["first_stage"] if d.name == name)


def test_a_small_but_consistent_gain_is_found_where_single_intervals_overlap(tmp_path):
    rng = np.random.default_rng(0)
    rank = rng.integers(1, 4, 1000)
    better = np.where(rng.random(1000) < 0.04, 1, rank)  # a few queries move, none gets worse
    result = compare([write_run(tmp_path / "a", rank)], [write_run(tmp_path / "b", better)])
    gain = found(result, "t2i/R@1")
    assert gain.verdict == "better" and 0 < gain.low < gain.value < gain.high < 6
    assert found(result, "t2i/mean_rank").verdict == "better"  # lower is better
    assert found(result, "i2t/R@1").verdict == "noise" and found(result, "i2t/R@1").value == 0
    assert found(result, "rsum").value == pytest.approx(
        sum(found(result, f"{w}/R@{k}").value for w in ("t2i", "i2t") for k in (1, 5))
    )


def test_another_draw_of_the_same_model_is_noise(tmp_path):
    rng = np.random.default_rng(1)
    runs = [write_run(tmp_path / str(n), rng.integers(1, 4, 1000)) for n in range(2)]
    assert found(compare(runs[:1], runs[1:]), "t2i/R@1").verdict == "noise"


def test_the_false_alarm_rate_is_about_one_in_twenty(tmp_path):
    rng = np.random.default_rng(2)
    alarms = 0
    for trial in range(60):
        runs = [write_run(tmp_path / f"{trial}{n}", rng.integers(1, 4, 300)) for n in range(2)]
        alarms += found(compare(runs[:1], runs[1:], replicates=300, seed=trial), "t2i/R@1").verdict != "noise"
    assert alarms <= 9


def test_seeds_that_disagree_make_a_gain_noise(tmp_path):
    rng = np.random.default_rng(3)

    def seed_run(name, right):
        return write_run(tmp_path / name, np.where(rng.random(1000) < right, 1, 3))

    first = [seed_run(f"a{n}", right) for n, right in enumerate((0.40, 0.50, 0.60))]
    second = [seed_run(f"b{n}", right) for n, right in enumerate((0.45, 0.55, 0.65))]
    assert found(compare(first[1:2], second[1:2]), "t2i/R@1").verdict == "better", "one lucky pair of seeds"
    assert found(compare(first, second), "t2i/R@1").verdict == "noise"


def test_the_sentence_says_difference_or_noise():
    assert str(Difference("t2i/R@1", 40, 41.2, 0.3, 2.1)) == "difference +1.20 [+0.30, +2.10]"
    assert str(Difference("t2i/R@1", 40, 41.2, -0.3, 2.1)).startswith("noise: ")
    assert Difference("t2i/mean_rank", 40, 41.2, 0.3, 2.1).verdict == "worse"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ties": "optimistic"}, "differ in ties"),
        ({"positives": "every true pair"}, "differ in positives"),
        ({"ks": [1, 10]}, "differ in ks"),
        ({"split": {"hash": "other", "images": 40, "captions": 200}}, "differ in split hash"),
    ],
)
def test_unlike_protocols_are_refused_with_both_values(tmp_path, change, message):
    runs = [write_run(tmp_path / str(n), np.ones(200, int)) for n in range(2)]
    runs[1].figures["protocol"] |= change
    with pytest.raises(ValueError, match=message):
        compare(runs[:1], runs[1:])


@pytest.mark.parametrize(
    ("figures", "queries"),
    [("{}", None), ("[1]", None), ('{"protocol": 3}', None), ("{", None), (None, b"x"), (None, b"")],
)
def test_what_is_no_evaluation_is_refused_by_name(tmp_path, figures, queries):
    write_run(tmp_path / "a", np.ones(20, int))
    if figures is not None:
        (tmp_path / "a/metrics.json").write_text(figures)
    if queries is not None:
        (tmp_path / "a/queries.npz").write_bytes(queries)
    with pytest.raises(ValueError, match="a is not an evaluation that can be compared: ") as refused:
        load_run(tmp_path / "a")
    assert "unsafely" not in str(refused.value)


def test_other_hard_negatives_of_the_same_kinds_are_refused(tmp_path):
    split = tiny_split()
    tokenizer = tiny_tokenizer(split)
    other = tiny_split()
    other.negatives = HardNegatives(
        [f"{text} above" for text in split.negatives.texts], split.negatives.kinds, split.negatives.caption
    )
    for name, measured in (("a", split), ("b", other)):
        evaluate(FakeModel(), measured, tokenizer, TRANSFORM, Settings(bootstrap=0)).write(tmp_path / name)
    runs = [load_run(tmp_path / name) for name in "ab"]
    with pytest.raises(ValueError, match="different hard negatives"):
        compare(runs[:1], runs[1:])


def test_real_evaluations_are_compared_by_the_command(tmp_path, run_command):
    split = tiny_split()
    tokenizer = tiny_tokenizer(split)
    for seed in range(3):
        settings = Settings(top_k=4, bootstrap=0)
        evaluate(FakeModel(seed=seed), split, tokenizer, TRANSFORM, settings).write(tmp_path / f"run{seed}")
    status, out, err = run_command("compare", "run0", "run1,run2", "bootstrap=100", "output=found.json")
    assert status == 0, err
    assert "re-ranked" in out and "hard negatives" in out and "Means over 1 and 2 seeds" in out
    written = json.loads((tmp_path / "found.json").read_text())
    assert {"first_stage", "reranked", "hard negatives"} == set(written[0]["differences"])
    assert "other/match" in written[0]["differences"]["hard negatives"]
    status, _, err = run_command("compare", "run0", "nowhere")
    assert status == 2 and "nowhere/metrics.json: no such file" in err
    status, _, err = run_command("compare", "run0")
    assert status == 2 and "compare two or more" in err

"""vlretrieval-evaluate from the outside: a table, metrics.json, and errors of one line."""

import json

import pytest
import torch

from tests.conftest import save_tiny_checkpoint

SCENES = ["data=scenes", "data.source.test=6", "data.source.train=8", "data.source.val=4", "device=cpu"]


def test_a_checkpoint_is_evaluated_on_the_test_split_beside_its_run(run_command, tmp_path):
    checkpoint = save_tiny_checkpoint(tmp_path / "runs" / "tiny" / "checkpoints" / "best.ckpt")
    status, out, err = run_command("evaluate", f"checkpoint={checkpoint}", *SCENES, "rerank.top_k=3", "bootstrap=20")
    assert status == 0, err
    assert "re-ranked" in out and "cross-modal" in out
    figures = json.loads((tmp_path / "runs/tiny/evaluation/test/metrics.json").read_text())
    assert figures["protocol"]["split"]["images"] == 6
    assert figures["protocol"]["preprocessing"] == "EvalTransform(32, 'squash')"
    assert figures["protocol"]["rerank"]["top_k"] == {"t2i": 3, "i2t": 3}
    assert figures["subject"]["checkpoint"] == str(checkpoint)
    assert {"first_stage", "reranked", "hard_negatives"} <= set(figures)


def test_metrics_json_says_how_to_make_its_numbers_again(run_command, tiny_checkpoint, tmp_path):
    words = ["rerank.top_k=3", "rerank.weight=0.4", "bootstrap=15", "seed=4", "ks=[1,3]", "negatives_per_kind=2"]
    status, _, err = run_command("evaluate", f"checkpoint={tiny_checkpoint}", "output=first", *SCENES, *words)
    assert status == 0, err
    first = json.loads((tmp_path / "first/metrics.json").read_text())
    data = [f"data.source.{name}={first['subject']['data'][name]}" for name in ("train", "val", "test", "seed")]
    settings = dict(first["settings"])
    rerank = settings.pop("rerank")
    again = [f"rerank.{key}={value}" for key, value in rerank.items()]
    again += [f"{key}={'null' if value is None else value}" for key, value in settings.items()]
    subject = f"checkpoint={first['subject']['checkpoint']}"
    status, _, err = run_command("evaluate", subject, "output=second", "data=scenes", *data, *again)
    assert status == 0, err
    assert json.loads((tmp_path / "second/metrics.json").read_text()) == first


def test_an_exported_folder_and_its_checkpoint_give_the_same_figures(
    run_command, tiny_checkpoint, tiny_export, tmp_path
):
    found = []
    for number, subject in enumerate((tiny_checkpoint, tiny_export)):
        words = [f"checkpoint={subject}", f"output={tmp_path / str(number)}", *SCENES, "bootstrap=0"]
        status, _, err = run_command("evaluate", *words)
        assert status == 0, err
        found.append(json.loads((tmp_path / str(number) / "metrics.json").read_text()))
    for part in ("first_stage", "reranked", "hard_negatives"):
        assert found[0][part] == found[1][part]


def test_the_fusion_weight_can_be_chosen_on_val_but_not_on_what_is_measured(run_command, tiny_checkpoint, tmp_path):
    words = [f"checkpoint={tiny_checkpoint}", f"output={tmp_path}", *SCENES, "rerank.weight=val", "bootstrap=0"]
    status, _, err = run_command("evaluate", *words)
    assert status == 0, err
    status, _, err = run_command("evaluate", *words, "split=val")
    assert status == 2 and "the very split" in err and err.count("\n") == 1


def test_a_dual_encoder_says_that_it_does_not_re_rank(run_command, dual_checkpoint, tmp_path):
    status, out, err = run_command("evaluate", f"checkpoint={dual_checkpoint}", f"output={tmp_path}", *SCENES)
    assert status == 0, err
    assert "not re-ranked: the model has no cross-modal heads" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["checkpoint=nothing.ckpt"], "nothing.ckpt: no such file"),
        (["split=nowhere", *SCENES], "nowhere"),
        (["rerank.topk=3"], "rerank.top_k"),
        (["rerank.weight=much", *SCENES], "rerank.weight=much is not a number"),
        (["precision=float8", *SCENES], "precision='float8' is not known"),
        ([*SCENES[:-1], "device=cuda:9"], "device=cuda:9"),
        (["ks=[0]", *SCENES], "each 1 or more"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(run_command, tiny_checkpoint, tmp_path, words, message):
    given = [f"checkpoint={tiny_checkpoint}", f"output={tmp_path / 'out'}"]
    status, _, err = run_command("evaluate", *[w for w in given if w.split("=")[0] not in " ".join(words)], *words)
    assert status == 2 and message in err and err.count("\n") == 1, err
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_names_foreign_code_as_its_data_runs_none_of_it(run_command, tmp_path):
    checkpoint = save_tiny_checkpoint(tmp_path / "runs" / "evil" / "checkpoints" / "best.ckpt")
    content = torch.load(checkpoint, weights_only=True)
    for target in (
        "os.mkdir",
        "pathlib.Path.touch",
        "vlretrieval.deploy.export.export",
        "vlretrieval.data.images.open_image",
    ):
        content["vlretrieval"]["config"]["data"]["source"] = {"_target_": target, "path": str(tmp_path / "made")}
        torch.save(content, checkpoint)
        status, _, err = run_command("evaluate", f"checkpoint={checkpoint}", "device=cpu")
        assert status == 2 and "is no data set of ours" in err and not (tmp_path / "made").exists()

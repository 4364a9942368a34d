"""What a run says of itself, in runs of seconds: pace, first steps, re-ranked validation, early stopping, pictures."""

from __future__ import annotations

import csv
import json
import logging
import math
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from tiny_retrieval import tiny_split
from tiny_training import STEPS, assert_same_bits, config, last_weights, run, tiny_batch, tiny_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vlretrieval import losses
from vlretrieval.data.loader import TrainLoader
from vlretrieval.training import fit
from vlretrieval.training.callbacks import Checkpoints, Validation
from vlretrieval.training.objective import Objective
from vlretrieval.training.task import RetrievalTask
from vlretrieval.training.watch import check as watch_check
from vlretrieval.training.watch import first_steps, pace, sanity
from vlretrieval.training.watch.clock import Clock
from vlretrieval.training.watch.early_stopping import StopEarly
from vlretrieval.training.watch.peak import measured_flops, peak_bytes
from vlretrieval.training.watch.step_flops import StepFlops, Work

WATCHED = [
    "validation.settings.top_k=4",
    "validation.rerank_every_n_epochs=2",
    "checkpoints.monitor=val/reranked/rsum",
    "pictures.every_n_epochs=2",
    "pictures.queries=2",
    "trainer.log_every_n_steps=2",
]


@pytest.fixture(scope="module")
def watched(tmp_path_factory) -> tuple[Path, str]:
    """A run that shows all it can, and its log; the first steps are looked at early."""
    folder = tmp_path_factory.mktemp("watched")
    lines: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    ours = logging.getLogger("vlretrieval")
    before = ours.level
    ours.setLevel(logging.INFO)
    ours.addHandler(listener)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_steps, "EARLY", 3)
        patch.setattr(first_steps, "LATE", (5, 5))
        run(folder, *WATCHED)
    ours.removeHandler(listener)
    ours.setLevel(before)
    return folder, "\n".join(lines)


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_looking_changes_no_bit_of_a_run(watched, tmp_path, monkeypatch):
    for callback in (pace.Pace, first_steps.FirstSteps):
        for hook in [name for name in vars(callback) if name.startswith("on_")]:
            monkeypatch.setattr(callback, hook, lambda *a, **k: None)
    run(tmp_path)
    assert_same_bits(last_weights(watched[0]), last_weights(tmp_path))


def test_the_figures_of_the_pace_stand_beside_the_losses(watched):
    measured = [row for row in rows(watched[0]) if row["train/pairs_per_s"]]
    assert len(measured) == STEPS // 2
    assert all(row["train/contrastive"] for row in measured), "one row a step"
    for row in measured:
        shares = [float(row[f"train/{phase}_percent"]) for phase in pace.PHASES]
        assert all(share >= 0 for share in shares) and 50 < sum(shares) <= 100.5
        assert float(row["train/pairs_per_s"]) > 0 and float(row["train/peak_memory_gb"]) > 0.1
        assert 0 < float(row["train/flops_percent_of_peak"]) < 100


def test_each_epoch_ends_with_a_line_on_its_pace_and_the_time_left(watched):
    lines = [line for line in watched[1].splitlines() if "pairs/s" in line]
    assert [line.split(":")[0] for line in lines] == ["epoch 1", "epoch 2", "epoch 3"]
    assert all(word in lines[0] for word in ("data", "forward", "backward", "optimizer", "peak memory", " s left"))
    assert "left" not in lines[-1]


def test_the_first_steps_are_looked_at(watched):
    said = watched[1]
    assert "sanity after the first step: ok: gradients reach every part that is trained" in said
    assert "sanity after 3 steps: ok: most alike: heads" in said
    assert "sanity after 5 steps" in said and "chance is ln(16)" in said and "logit scale" in said


def test_a_part_that_is_cut_off_is_named_in_the_first_step(caplog):
    task = RetrievalTask(tiny_model(), Objective(losses.info_nce, matching_start=0.5), lambda m: None)
    pairs = task.encode(tiny_batch())
    pairs.text.embedding = pairs.all_text.embedding = pairs.text.embedding.detach()
    loss, _ = task.objective(task.model, pairs, 0.0)
    loss.backward()
    looking, trainer = first_steps.FirstSteps(pace.Pace()), SimpleNamespace(is_global_zero=True, global_step=0)
    task._trainer, task._total_steps = trainer, 100
    looking.on_before_optimizer_step(trainer, task, None)
    assert "WARNING  no gradient reaches text_encoder, text_projection:" in caplog.text, "not the heads: matching waits"
    trainer.global_step, before = 60, caplog.text
    looking.on_before_optimizer_step(trainer, task, None)
    assert "no gradient reaches text_encoder, crossmodal, text_projection:" in caplog.text.removeprefix(before)
    task._trainer = None


def test_reranking_happens_every_second_epoch_and_at_the_end_and_best_is_by_it(watched):
    folder = watched[0]
    measured = [row for row in rows(folder) if row["val/rsum"]]
    assert [bool(row["val/reranked/rsum"]) for row in measured] == [False, True, True]
    best = json.loads((folder / "result.json").read_text())
    assert best["best_step"] in (8, 12)
    assert best["val/reranked/rsum"] == max(float(row["val/reranked/rsum"] or 0) for row in measured)


def test_pictures_come_every_second_epoch_and_at_the_end(watched):
    names = sorted(path.name for path in (watched[0] / "pictures").iterdir())
    assert names == ["epoch_002.png", "epoch_002.txt", "epoch_003.png", "epoch_003.txt"]


def test_a_setting_without_effect_is_refused_before_training(tmp_path):
    split = tiny_split(negatives=False)
    data = SimpleNamespace(split=lambda name: split, tokenizer=None, transform=None, features=lambda name: {})
    plain = config(tmp_path)
    for override, message in [
        ("validation.rerank_every_n_epochs=1", "has no effect with validation.settings.top_k=0"),
        ("pictures.every_n_epochs=0", "pictures.every_n_epochs=0 must be a multiple of validation.every_n_epochs=1"),
        ("early_stopping.patience=0", "early_stopping.patience=0 must be at least 1"),
        ("checkpoints.monitor=train/loss", "monitor=train/loss must be measured on the validation split"),
        ("pictures={every_n_epochs: 1, font: README.md}", "pictures.font=README.md cannot be read as a font"),
    ]:
        cfg = OmegaConf.merge(plain, OmegaConf.from_dotlist([override]))
        with pytest.raises(ValueError, match=message):
            fit.validation(cfg, data)
            fit.early_stopping(cfg)
            Checkpoints(tmp_path, **cfg.checkpoints)


def test_a_metric_that_is_never_measured_is_told_with_the_nearest(tmp_path):
    measured = Validation(lambda model, reranked: ({}, None))
    measured.figures, measured.complete, measured.step = {"val/rsum": 300.0, "val/t2i/R@1": 10.0}, True, 4
    keeper = Checkpoints(tmp_path, "val/rsumm")
    keeper.save = lambda trainer: True
    with pytest.raises(ValueError, match=r"monitor=val/rsumm is not measured; did you mean val/rsum"):
        keeper.on_train_epoch_end(SimpleNamespace(callbacks=[measured], global_step=4, is_global_zero=True), None)


STOP = ["early_stopping.patience=1", "early_stopping.min_delta=1000", "trainer.log_every_n_steps=4"]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A run whose second validation is no better than its first, by far enough, which ends it."""
    folder = tmp_path_factory.mktemp("stopped")
    assert run(folder, *STOP)["step"] == 8
    return folder


def test_the_state_of_early_stopping_survives_a_resume(stopped, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    shutil.copy(stopped / "checkpoints/step-00000006.ckpt", tmp_path / "checkpoints")
    assert run(tmp_path, *STOP, "resume=true")["step"] == 8, "the first validation was before the cut"


def test_a_figure_is_counted_once_and_an_old_one_not_again():
    measured, stop = Validation(lambda model, reranked: ({}, None)), StopEarly("val/rsum", "max", 2)
    trainer = SimpleNamespace(callbacks=[measured], global_step=4, should_stop=False, is_global_zero=True)
    measured.figures, measured.step = {"val/rsum": 300.0}, 4
    for _ in range(3):
        stop.on_train_epoch_end(trainer, None)
    assert stop.wait_count == 0
    trainer.global_step = 8  # an epoch without a validation
    stop.on_train_epoch_end(trainer, None)
    assert stop.wait_count == 0 and not trainer.should_stop
    for step in (12, 16):
        trainer.global_step = measured.step = step
        stop.on_train_epoch_end(trainer, None)
    assert trainer.should_stop and stop.wait_count == 2
    again = StopEarly("val/rsum", "max", 2)
    again.load_state_dict(stop.state_dict())
    trainer.should_stop = False
    again.on_train_start(trainer, None)
    assert trainer.should_stop, "stopped is stopped"


@pytest.mark.slow
def test_a_run_that_was_stopped_early_stays_so_until_it_may_wait_longer(stopped, tmp_path, caplog):
    shutil.copytree(stopped, tmp_path / "again")
    assert run(tmp_path / "again", *STOP, "resume=true")["step"] == 8
    assert "early_stopping.patience=2 goes on" in caplog.text
    assert run(tmp_path / "again", "early_stopping.patience=2", *STOP[1:], "resume=true")["step"] == STEPS


def test_check_passes_a_model_that_learns_names_one_that_does_not_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(watch_check, "PAIRS", 8)
    monkeypatch.setattr(watch_check, "ENOUGH", 0.6)
    cfg = config(tmp_path / "run", "optimizer.lr=0.01")
    good = fit.check(cfg)
    assert [str(finding) for finding in good if not finding.good] == []
    assert any("contrastive loss" in finding.seen and "->" in finding.seen for finding in good)

    monkeypatch.setattr(watch_check, "STEPS", 5)
    cfg.optimizer.lr = 1e-9
    wrong = [finding.seen for finding in fit.check(cfg) if not finding.good]
    assert any("contrastive loss" in seen for seen in wrong)
    assert list(tmp_path.iterdir()) == []


def test_check_asks_nothing_of_a_contrastive_loss_against_a_queue_of_the_one_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(watch_check, "PAIRS", 8)
    monkeypatch.setattr(watch_check, "ENOUGH", 0.6)
    found = fit.check(config(tmp_path / "run", "optimizer.lr=0.01", "loss=momentum"))
    assert [str(finding) for finding in found if not finding.good] == []
    assert not any("contrastive loss" in finding.seen for finding in found)
    assert any("matching loss" in finding.seen for finding in found)


def test_the_command_prints_a_line_each_and_its_status_tells(run_command, tmp_path, monkeypatch):
    found = [sanity.Finding("scale 14"), sanity.Finding("loss 4 -> 4", "look")]
    monkeypatch.setattr(fit, "check", lambda cfg: found)
    left, out, _ = run_command("train", "experiment=quickstart", "check=true")
    assert left == 1 and out.splitlines()[:2] == [str(finding) for finding in found]
    assert "1 of 2" in out and list(tmp_path.iterdir()) == []


def test_a_clock_gives_each_phase_its_time(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 10.0, 14.0])
    monkeypatch.setattr("vlretrieval.training.watch.clock.time.perf_counter", lambda: next(now))
    clock = Clock(torch.device("cpu"))
    clock.mark("before a start nothing counts")
    clock.start()
    clock.mark("forward")
    clock.mark("backward")
    clock.stop()
    clock.start()
    clock.mark("forward")
    assert clock.read() == {"forward": 5.0, "backward": 2.0} and clock.read() == {}


def test_the_loader_knows_how_long_it_was_waited_for(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr("vlretrieval.data.loader.time.perf_counter", lambda: float(next(now)))
    loader = TrainLoader.__new__(TrainLoader)
    loader.epoch = loader.handed_out = 0
    loader.waited_s, loader._resumed = 0.0, False
    loader._batches = lambda epoch, first: iter("abc")  # type: ignore[method-assign, assignment, return-value]
    assert "".join(loader) == "abc" and loader.waited_s == 4.0 and loader.handed_out == 3


@pytest.mark.parametrize("seconds, said", [(12.4, "12 s"), (600, "10 min"), (11100, "3 h 05 min")])
def test_durations_are_said_as_people_say_them(seconds, said):
    assert pace.duration(seconds) == said


def test_the_peak_is_that_of_a_matrix_product_and_draws_nothing():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert 1e8 < measured_flops(torch.device("cpu"), seconds=0.01) < 1e14
    assert torch.equal(before, torch.get_rng_state())
    assert peak_bytes(torch.device("cpu")) > 1e7


def test_looking_costs_less_than_a_hundredth_of_a_step_of_50_ms():
    task = RetrievalTask(tiny_model(), Objective(losses.info_nce), lambda m: None)
    batch, written = tiny_batch(rows=128), []
    trainer = SimpleNamespace(
        global_step=0,
        precision="32-true",
        is_global_zero=True,
        log_every_n_steps=10,
        train_dataloader=SimpleNamespace(waited_s=0.0),
        loggers=[SimpleNamespace(log_metrics=lambda figures, step: written.append(figures))],
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=1)),
    )
    measured = pace.Pace(StepFlops(TINY_MODEL), peak_flops=1e9)
    looking = first_steps.FirstSteps(measured)
    for callback in (measured, looking):
        callback.on_train_start(trainer, task)
    looking._unreached, looking._steps = set(), looking._late  # the first steps are over
    began = time.process_time()
    for _ in range(200):
        measured.on_train_batch_start(trainer, task, batch, 0)
        measured.on_before_zero_grad(trainer, task, None)
        measured.on_before_backward(trainer, task, None)
        measured.on_after_backward(trainer, task)
        looking.on_before_optimizer_step(trainer, task, None)
        measured.on_train_batch_end(trainer, task)
        looking.on_train_batch_end(trainer, task)
        trainer.global_step += 1
    each_s = (time.process_time() - began) / 200
    assert len(written) == 20
    assert each_s < 0.01 * 0.050, f"{1e6 * each_s:.0f} us"
    print(f"{1e6 * each_s:.0f} us of processor time a step")


TINY_MODEL = {
    "_target_": "vlretrieval.model.retrieval_model.RetrievalModel",
    "embed_dim": 8,
    "image_encoder": {
        "_target_": "vlretrieval.model.encoders.ImageEncoder",
        **{"image_size": 32, "patch_size": 8, "dim": 16, "depth": 1, "num_heads": 2},
    },
    "text_encoder": {
        "_target_": "vlretrieval.model.encoders.TextEncoder",
        **{"vocab_size": 50, "context_length": 16, "dim": 16, "depth": 1, "num_heads": 2},
    },
    "crossmodal": {
        "_target_": "vlretrieval.model.crossmodal.CrossModal",
        **{"text_dim": 16, "image_dim": 16, "text_to_image": 2, "image_to_text": 2, "text_self_heads": 2},
    },
}


@pytest.mark.parametrize("weight", [0.0, 1.0])
@pytest.mark.parametrize("patch_dropout", [0.0, 0.5])
def test_the_flops_of_a_step_are_those_that_torch_counts_where_nothing_is_padded(weight, patch_dropout):
    model = tiny_model(patch_dropout=patch_dropout)
    task = RetrievalTask(model, Objective(losses.info_nce, matching_weight=weight), lambda m: None)
    batch = tiny_batch(rows=16, short=False)
    for mask in (batch.token_mask, batch.negative_token_mask):
        mask.fill_(True)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # fused attention is not counted
        loss, _ = task.objective(model, task.encode(batch), 1.0)
        loss.backward()
    work, tokens = pace.work_of(task.objective, batch, matches=weight > 0)
    config = {**TINY_MODEL, "image_encoder": {**TINY_MODEL["image_encoder"], "patch_dropout": patch_dropout}}
    counted = StepFlops(config)(work + Work(text_tokens=int(tokens)))
    of_pixels = 16 * 2 * (3 * 8 * 8) * 16 * 16  # a gradient that nobody asks for, but that the usual count has
    assert counted == pytest.approx(counter.get_total_flops() + of_pixels, rel=0.02)


def test_frozen_parts_cost_their_forward_pass_only():
    work = Work(images=8, texts=8, text_tokens=80)
    whole, frozen = StepFlops(TINY_MODEL), StepFlops(TINY_MODEL, frozen=("image_encoder",))
    image = whole._parts(10)["image encoder"].flops
    assert whole(work) - frozen(work) == 2 * 8 * image
    assert StepFlops(TINY_MODEL, teacher=True)(work) > whole(work)
    assert whole(Work()) == 0


def test_a_callback_of_the_run_folder_refuses_a_mode_it_does_not_know(tmp_path):
    with pytest.raises(ValueError, match="mode='top'"):
        Checkpoints(tmp_path, "val/rsum", mode="top")
    with pytest.raises(ValueError, match="min_delta=-1"):
        StopEarly("val/rsum", "max", 3, min_delta=-1)
    with pytest.raises(ValueError, match="rerank_every_n_epochs=3 must be a multiple"):
        Validation(lambda model, reranked: ({}, None), 2, 3)
    assert math.isinf(float(StopEarly("val/rsum", "max", 3).best_score))

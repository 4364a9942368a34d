"""A second logger may fail at any moment: the run goes on, the figures are in the file, and it is one run to it."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.pytorch.loggers import Logger

from vlretrieval.training.mirror import Mirror


class Service(Logger):
    """Remembers what it is given, and fails from call ``fails_at`` on."""

    name, version = "service", ""

    def __init__(self, id: str, fails_at: int | None = None):
        super().__init__()
        self.id, self.fails_at, self.seen = id, fails_at, []
        if fails_at == 0:
            raise TimeoutError("no network")

    def log_hyperparams(self, params) -> None: ...

    def log_metrics(self, metrics, step=None) -> None:
        if self.fails_at is not None and len(self.seen) + 1 >= self.fails_at:
            raise ConnectionResetError(104, "Connection reset by peer")
        self.seen.append((step, metrics))


def mirror(folder: Path, started: list[Service], fails_at: int | None = None) -> Mirror:
    def to(id: str) -> Logger:
        started.append(Service(id, fails_at))
        return started[-1]

    return Mirror(folder / "metrics.csv", to, folder / "logger_id.txt")


def steps(folder: Path) -> list[int]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


@pytest.mark.parametrize("fails_at", [0, 1, 3])
def test_a_logger_that_fails_is_given_up_with_one_line_and_the_file_has_everything(tmp_path, caplog, fails_at):
    started: list[Service] = []
    log = mirror(tmp_path, started, fails_at)
    for step in range(6):
        log.log_metrics({"loss": 1.0}, step)
        log.save()
    log.finalize("success")
    assert steps(tmp_path) == list(range(6))
    assert len(started) <= 1 and sum(len(service.seen) for service in started) == max(0, fails_at - 1)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "gets no more figures; training goes on" in line and "metrics.csv has them all" in line


def test_a_run_that_goes_on_is_the_same_run_to_it(tmp_path):
    started: list[Service] = []
    for first in (0, 3):
        log = mirror(tmp_path, started)
        for step in range(first, first + 3):
            log.log_metrics({"loss": 1.0}, step)
        log.finalize("success")
    assert started[0].id == started[1].id != "" and [s for s, _ in started[1].seen] == [3, 4, 5]
    other: list[Service] = []
    mirror(tmp_path / "other", other).log_metrics({"loss": 1.0}, 0)
    assert other[0].id != started[0].id


def wandb_run(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    from tiny_training import TINY

    command = [sys.executable, "-m", "vlretrieval.commands.train", *TINY, "logger=wandb", *words]
    # no HOME, no login
    variables = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    variables |= {"HOME": str(folder), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=580)


@pytest.mark.slow
def test_wandb_offline_goes_on_as_one_run(tmp_path):
    for words in (["trainer.max_epochs=1"], ["resume=true"]):
        done = wandb_run(tmp_path, f"output_dir={tmp_path}/a", *words)
        assert done.returncode == 0, done.stdout + done.stderr
    known = (tmp_path / "a/logger_id.txt").read_text().strip()
    files = list((tmp_path / "a/wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2 and {file.name for file in files} == {f"run-{known}.wandb"}


@pytest.mark.slow
@pytest.mark.parametrize("key", ["", "0" * 40], ids=["no key", "no network"])
def test_wandb_that_cannot_be_reached_stops_no_run(tmp_path, key):
    beyond = {"WANDB_BASE_URL": "http://127.0.0.1:9", **({"WANDB_API_KEY": key} if key else {})}
    done = wandb_run(tmp_path, f"output_dir={tmp_path}/a", "logger.to.offline=false", **beyond)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "training goes on" in done.stdout and (tmp_path / "a/result.json").is_file()
    assert steps(tmp_path / "a")[-1] == 11

"""Ends real training processes at random moments, resumes them, and holds the end against a run nobody disturbed.

    python scripts/chaos/kill_resume.py      # 30 by SIGKILL, then 10 by SIGTERM: about half an hour on two cores
    python scripts/chaos/kill_resume.py --sigkill 3 --sigterm 1 --seed 7 --folder runs/chaos
    python scripts/chaos/kill_resume.py --warm       # processes forked after the imports, which are most of their time

A trial is one run of ``vlretrieval-train`` on drawn scenes with everything on that has a state: shuffling, loader
workers, dropout, hard negatives, matching, a momentum encoder with its queue, an average of the weights. It is ended
once or several times and resumed each time, until it is through. It passes if its last and its best checkpoint
(weights, optimizer, schedule, queue, average, best metric) are the undisturbed run's to the last bit, and so are the
figures in metrics.csv.
Moments are drawn over the whole life of a process, over its training alone, and from within a save. Exit status 1 if
any trial fails.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

EPOCHS, STEPS_AN_EPOCH, SAVE_EVERY = 3, 8, 2
STEPS = EPOCHS * STEPS_AN_EPOCH
BATCH = 8
WORDS = [
    "name=chaos",
    f"data.source.train={STEPS_AN_EPOCH * BATCH + 5}",  # with a partial batch, which is left out
    "data.source.val=8",
    "data.source.test=8",
    "data.source.image_size=32",
    f"data.batch_size={BATCH}",
    "data.num_workers=2",
    "data.captions_per_image=one",
    "model.embed_dim=8",
    "model.image_encoder.image_size=32",
    "model.image_encoder.dim=16",
    "model.image_encoder.depth=1",
    "model.image_encoder.dropout=0.1",
    "model.image_encoder.patch_dropout=0.25",
    "model.text_encoder.dim=16",
    "model.text_encoder.depth=1",
    "model.text_encoder.dropout=0.1",
    "model.crossmodal.dropout=0.1",
    "loss=momentum",
    "loss.momentum.queue=20",
    "loss.distillation_weight=0.5",
    "loss.ranking_weight=0.5",
    "loss.matching_share=0.5",
    "loss.matching_start=0.2",
    "ema_decay=0.9",
    "validation.settings.negatives_per_kind=5",
    "progress_bar=false",
    "trainer.accelerator=cpu",
    f"trainer.max_epochs={EPOCHS}",
    "trainer.log_every_n_steps=1",
    f"checkpoints.every_n_steps={SAVE_EVERY}",
]
PATIENCE_S = 600  # for one wait: the machine may be busy
PATHS = {"output_dir", "resume", "path", "save_dir", "bad_samples_file"}  # of the config, these differ between runs
PACE = re.compile(r"train/(pairs_per_s|\w+_percent\w*|peak_memory_gb)")  # times and memory are no two runs' the same
LOOK_S = 0.02  # between two looks; while a save is waited for, a twentieth


class Process(Protocol):
    """What of a ``subprocess.Popen`` is needed."""

    def poll(self) -> int | None: ...
    def wait(self, timeout: float) -> int: ...
    def send_signal(self, sig: int, /) -> None: ...
    def kill(self) -> None: ...


Start = Callable[[Path], Process]  # of vlretrieval-train in a folder; resumed where an earlier process has begun it


@dataclass
class Life:
    """When an undisturbed process begins to train and when it ends, in seconds of its life."""

    training_s: float
    end_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sigkill", type=int, default=30, help="trials ended by SIGKILL")
    parser.add_argument("--sigterm", type=int, default=10, help="trials ended by SIGTERM")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--warm", action="store_true", help="fork each process from one that has imported everything")
    parser.add_argument("--folder", type=Path, help="where the runs go; failed ones stay there")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"  # bits are equal for equal thread counts only
    if arguments.warm:
        import vlretrieval.commands.train
        import vlretrieval.training.fit  # noqa: F401

    started_at = time.monotonic()
    start = Forked if arguments.warm else start_command
    life = undisturbed(folder / "whole", start)
    say(f"undisturbed: {STEPS} steps, trained from {life.training_s:.1f} s to {life.end_s:.1f} s of the process's life")
    failed = {}
    for name, count in (("SIGKILL", arguments.sigkill), ("SIGTERM", arguments.sigterm)):
        rngs = [random.Random(f"{arguments.seed} {name} {number}") for number in range(count)]
        failed[name] = sum(
            not trial(folder, f"{name} {number}/{count}", signal.Signals[name], rng, life, start)
            for number, rng in enumerate(rngs, start=1)
        )
        say(f"{name}: {count - failed[name]}/{count} end with the same bits as the undisturbed run")
    say(f"{(time.monotonic() - started_at) / 60:.0f} minutes")
    if not any(failed.values()) and arguments.folder is None:
        shutil.rmtree(folder)
    raise SystemExit(any(failed.values()))


def undisturbed(run: Path, start: Start) -> Life:
    """The run that all others are held against."""
    clear(run)
    began = time.monotonic()
    process = start(run)
    wait_for(process, lambda: sessions(run) > 0)
    training_s = time.monotonic() - began
    if process.wait(PATIENCE_S):
        raise SystemExit(f"the undisturbed run failed: {last_line(run)}")
    return Life(training_s, time.monotonic() - began)


def trial(folder: Path, title: str, signum: signal.Signals, rng: random.Random, life: Life, start: Start) -> bool:
    """Whether a run that is ended at least once ends as the undisturbed one; says what happened on one line."""
    run = folder / title.replace(" ", "-").split("/")[0].lower()
    clear(run)
    told: list[str] = []
    faults: list[str] = []
    wanted, endings, attempts = rng.choice((1, 1, 2, 3)), 0, 0
    status: int | None = None
    while endings < wanted and status != 0 and attempts < 10:
        attempts += 1
        before, earlier = saved_step(run), sessions(run)
        process = start(run)
        moment = "training" if attempts > 4 else draw_moment(rng, signum)
        seconds = wait_for_moment(process, run, moment, rng, life)
        process.send_signal(signum)
        status = process.wait(PATIENCE_S)
        if status == 0 and not endings:  # through before the moment came: once more, from the beginning
            clear(run)
            status = None
            continue
        told.append(
            f"{seconds:.1f} s in {phase(run, earlier)}, {saved(run)}" if status else "no other: through before it"
        )
        endings += status != 0
        if status not in (0, -signum, 128 + signum):
            faults.append(f"left with {status}: {last_line(run)}")
        if signum == signal.SIGTERM and status == 143 and saved_step(run) <= max(before, 0):
            faults.append(f"left with 143 and no new checkpoint: {saved_step(run)} after {before}")
        if signum == signal.SIGTERM and status == -signum:  # before there was anything to save
            endings -= 1
    if endings < 1:
        faults.append(f"was never ended in {attempts} attempts")
    if status != 0:
        status = start(run).wait(PATIENCE_S)
        if status:
            faults.append(f"the last resume left with {status}: {last_line(run)}")
    faults += differences_of_runs(folder / "whole", run)
    rows = rows_that_differ(folder / "whole", run)
    # Lightning logs a step's figures after the callbacks that save it; a kill between the two loses that row, no other
    if len(rows) > (endings if signum == signal.SIGKILL else 0):
        faults.append(f"metrics.csv: the figures of steps {rows} differ")
    resumed = re.findall(r"going on from \S+?step-0*(\d+)|(starting at step 0)", text_of(run / "train.log"))
    froms = ", ".join(step or "the start" for step, _ in resumed) or "the start"
    note = f"; metrics.csv lacks step {', '.join(map(str, rows))}" if rows else ""
    say(f"{title}: {'FAILED' if faults else 'same'}; ended at {', '.join(told)}; resumed from {froms}{note}")
    for fault in faults[:8]:
        say(f"    {fault}")
    if not faults:
        clear(run)
    return not faults


def draw_moment(rng: random.Random, signum: signal.Signals) -> str:
    """Anywhere in a process's life, in its training, or within a save; in start-up SIGTERM has nothing to save."""
    if signum == signal.SIGTERM:
        return rng.choices(("training", "save"), (7, 3))[0]
    return rng.choices(("anywhere", "training", "save"), (2, 4, 4))[0]


def wait_for_moment(process: Process, run: Path, moment: str, rng: random.Random, life: Life) -> float:
    """Waits until it has come, or the process has ended; seconds that the process lived so far."""
    began = time.monotonic()
    if moment == "anywhere":
        delay = rng.uniform(0, life.end_s)
        wait_for(process, lambda: time.monotonic() > began + delay)
        return time.monotonic() - began
    earlier = sessions(run)
    wait_for(process, lambda: sessions(run) > earlier)
    if moment == "training":
        delay, trained = rng.uniform(0, life.end_s - life.training_s), time.monotonic()
        wait_for(process, lambda: time.monotonic() > trained + delay)
        return time.monotonic() - began
    for _ in range(rng.randint(1, 6)):  # one of the next saves
        wait_for(process, lambda: not saving(run), LOOK_S / 20)
        wait_for(process, lambda: saving(run), LOOK_S / 20)
    time.sleep(rng.choice((0, 0, 0.001, 0.002, 0.004)))
    return time.monotonic() - began


def start_command(run: Path) -> Process:
    """As a user starts it."""
    command = [sys.executable, str(Path(sys.executable).with_name("vlretrieval-train")), *words(run)]
    with output_of(run).open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, cwd=run.parent)


def words(run: Path) -> list[str]:
    return [*WORDS, f"output_dir={run}", f"resume={str((run / 'config.yaml').is_file()).lower()}"]


class Forked:
    """The same as a fork of this process, with the few methods of ``Popen`` that are needed."""

    def __init__(self, run: Path) -> None:
        self.process = multiprocessing.get_context("fork").Process(target=train_here, args=(run,))
        self.process.start()

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            raise SystemExit(f"a process had not ended after {timeout:.0f} s")
        return self.process.exitcode

    def send_signal(self, signum: int) -> None:
        if self.process.exitcode is None:
            os.kill(self.process.pid, signum)

    def kill(self) -> None:
        self.process.kill()


def train_here(run: Path) -> None:
    with output_of(run).open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.argv = ["vlretrieval-train", *words(run)]
    os.chdir(run.parent)
    sys.modules["vlretrieval.commands.train"].main()


def wait_for(process: Process, come: Callable[[], bool], every_s: float = LOOK_S) -> None:
    """Until ``come()``, or the process has ended."""
    began = time.monotonic()
    while not come() and process.poll() is None:
        if time.monotonic() > began + PATIENCE_S:
            process.kill()
            raise SystemExit(f"nothing happened for {PATIENCE_S} s")
        time.sleep(every_s)


def sessions(run: Path) -> int:
    """How many processes have begun to train in the folder."""
    return text_of(run / "train.log").count("set up in")


def saving(run: Path) -> bool:
    """Whether a checkpoint is being written, or was when its process ended."""
    try:
        return any(entry.name.endswith(".partial") for entry in os.scandir(run / "checkpoints"))
    except FileNotFoundError:
        return False


def phase(run: Path, earlier: int) -> str:
    """What the process that has ended was doing, when ``earlier`` ones had begun to train."""
    if sessions(run) == earlier:
        return "start-up"
    return "a save" if saving(run) else "training"


def saved_step(run: Path) -> int:
    """Of the newest checkpoint; -1 without one."""
    return max((int(path.stem[5:]) for path in run.glob("checkpoints/step-*.ckpt")), default=-1)


def saved(run: Path) -> str:
    step = saved_step(run)
    return f"step {step} saved" if step >= 0 else "nothing saved"


def differences_of_runs(whole: Path, run: Path) -> list[str]:
    """Where the checkpoints and figures of two runs differ."""
    import torch

    found = []
    # A run that was killed between its last save and the validation after it makes up for that when it is resumed, and
    # has nothing more to save: its last checkpoint does not say so.
    validated_later = re.search(rf"going on from \S+step-{STEPS:08d}", text_of(run / "train.log")) is not None
    for name in (f"step-{STEPS:08d}.ckpt", "best.ckpt", "last.ckpt"):
        try:
            pair = [torch.load(folder / "checkpoints" / name, weights_only=True) for folder in (whole, run)]
        except (OSError, RuntimeError) as error:
            found.append(f"{name}: {error}")
            continue
        for content in pair:
            content.pop("loops")  # counters of progress; the loader's place in them is seen in the weights
            if name == "best.ckpt" or validated_later:  # the best by a validation made up for says so in later ones
                content.pop("callbacks")
        found += [f"{name}: {difference}" for difference in differences(*pair)]
    return found


def rows_that_differ(whole: Path, run: Path) -> list[int]:
    """Steps whose figures in metrics.csv are not those of the undisturbed run."""
    tables = []
    for folder in (whole, run):
        with (folder / "metrics.csv").open(newline="", encoding="utf-8") as file:
            rows = [
                {name: text for name, text in row.items() if not PACE.fullmatch(name)} for row in csv.DictReader(file)
            ]
            tables.append({int(row["step"]): row for row in rows})
    expected, got = tables
    return sorted(step for step in expected.keys() | got.keys() if expected.get(step) != got.get(step))


def differences(expected: Any, got: Any, key: str = "") -> Iterator[str]:
    """Leaves of two nested contents that are not equal to the last bit."""
    import torch

    if isinstance(expected, dict) and isinstance(got, dict):
        for name in expected.keys() | got.keys():
            if name in PATHS:
                continue
            if name in expected and name in got:
                yield from differences(expected[name], got[name], f"{key}.{name}")
            else:
                yield f"{key}.{name} is in one of both"
    elif isinstance(expected, list | tuple) and isinstance(got, list | tuple) and len(expected) == len(got):
        for number, pair in enumerate(zip(expected, got, strict=True)):
            yield from differences(*pair, f"{key}.{number}")
    elif isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor):
        if expected.shape != got.shape or not torch.equal(expected, got):
            yield f"{key} differs"
    elif expected != got:
        yield f"{key}: {expected} and {got}"


def clear(run: Path) -> None:
    shutil.rmtree(run, ignore_errors=True)
    output_of(run).unlink(missing_ok=True)


def output_of(run: Path) -> Path:
    return run.with_suffix(".output")


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def last_line(run: Path) -> str:
    return (text_of(output_of(run)).splitlines() or ["it said nothing"])[-1]


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()

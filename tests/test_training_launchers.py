"""Two real processes, started by torchrun and by Lightning's own launcher: the same losses as one, and they leave and
go on together, whichever of them is signalled; a killed one ends the other."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_training import TINY, assert_same_bits, weights

from vlretrieval.training.checkpoint_io import checkpoint_fault, newest_first

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
STEPS = 40
LONGER = [
    "trainer.max_epochs=10",
    "trainer.log_every_n_steps=1",
    "data.num_workers=1",
    "loss=momentum",
    "loss.momentum.queue=24",
]
# what makes more than rounding of two processes: masks of a rank's own, and Adam's steps by the sign of a tiny gradient
COMPARABLE = ["model.image_encoder.dropout=0.0", "optimizer.eps=0.01", "data.negatives_per_caption=0"]
BIN = Path(sys.executable).parent
LAUNCHERS = {
    "torchrun": [str(BIN / "torchrun"), "--nproc-per-node", "2", str(ROOT / "scripts/train.py")],
    "lightning": [str(BIN / "vlretrieval-train")],
}
PATIENCE_S = 900


def start(folder: Path, launcher: str, *words: str) -> subprocess.Popen[str]:
    two = [] if launcher == "one" else ["trainer=ddp", "trainer.devices=2"]
    command = LAUNCHERS.get(launcher, LAUNCHERS["lightning"])
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*command, *TINY, *LONGER, f"output_dir={folder}", *two, *words],
        env=environment,
        stdout=(folder.parent / f"{folder.name}.output").open("a"),
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> int:
    try:
        return process.wait(PATIENCE_S)
    finally:
        process.kill()


def ranks(process: subprocess.Popen[str], launcher: str) -> list[int]:
    """The processes that train, in the order of their ranks."""
    children = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and parent_of(int(entry.name)) == process.pid:
            environment = (entry / "environ").read_bytes().split(b"\0")
            local = [v.split(b"=")[1] for v in environment if v.startswith(b"LOCAL_RANK=")]
            # not loader workers, which are forks of rank 0
            if local and (entry / "cmdline").read_bytes() != Path(f"/proc/{process.pid}/cmdline").read_bytes():
                children.append((int(local[0]), int(entry.name)))
            elif local and launcher == "lightning" and local[0] == b"1":
                children.append((1, int(entry.name)))
    found = [pid for _, pid in sorted(children)]
    return found if launcher == "torchrun" else [process.pid, *found]


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except (OSError, IndexError):
        return -1


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_for(come: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    began = time.monotonic()
    while not come():
        assert process.poll() is None and time.monotonic() < began + PATIENCE_S
        time.sleep(0.001)


def signalled(folder: Path, launcher: str, rank: int, signum: signal.Signals) -> tuple[int, float]:
    """Signals one rank after the first checkpoint; the exit status of the launcher, and seconds until all are gone."""
    process = start(folder, launcher)
    wait_for(lambda: next(newest_first(folder / "checkpoints"), None) is not None, process)
    pids = ranks(process, launcher)
    assert len(pids) == 2
    os.kill(pids[rank], signum)
    told_at = time.monotonic()
    status = end(process)
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < told_at + PATIENCE_S, "a rank did not end"
        time.sleep(0.05)
    return status, time.monotonic() - told_at


def losses_of(folder: Path) -> list[float]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]


@pytest.fixture(scope="module", params=LAUNCHERS)
def whole(request, tmp_path_factory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param) / "whole"
    assert end(start(folder, request.param)) == 0
    return request.param, folder


def test_two_processes_end_with_the_losses_of_one(tmp_path):
    assert end(start(tmp_path / "one", "one", *COMPARABLE)) == 0
    expected = losses_of(tmp_path / "one")
    assert len(expected) == STEPS
    for launcher in LAUNCHERS:
        assert end(start(tmp_path / launcher, launcher, *COMPARABLE)) == 0
        assert losses_of(tmp_path / launcher) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("rank, signum", [(0, signal.SIGTERM), (1, signal.SIGTERM), (1, signal.SIGUSR1)])
def test_one_rank_s_signal_ends_both_and_they_go_on_to_the_same_bits(whole, tmp_path, rank, signum):
    launcher, undisturbed = whole
    status, seconds = signalled(tmp_path / "run", launcher, rank, signum)
    # torchrun has a status of its own for ranks that left with another than 0
    assert status == (1 if launcher == "torchrun" else 143)
    newest = next(newest_first(tmp_path / "run/checkpoints"))
    said = (tmp_path / "run/train.log").read_text()
    assert f"asked to leave: saved at step {int(newest.stem[5:])};" in said and checkpoint_fault(newest) is None
    if launcher == "torchrun":
        # the first to leave says so; torchrun's own SIGTERM may still meet the other one on its way out
        root_cause = (tmp_path / "run.output").read_text().rpartition("Root Cause")[2]
        assert "exitcode  : 143" in root_cause
    assert end(start(tmp_path / "run", launcher, "resume=true")) == 0
    last = f"checkpoints/step-{STEPS:08d}.ckpt"
    assert_same_bits(weights(undisturbed / last), weights(tmp_path / "run" / last))
    print(f"{launcher}, rank {rank}, {signum.name}: all gone after {seconds:.1f} s")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_killed_rank_ends_the_other_and_loses_no_checkpoint(tmp_path, launcher, rank):
    status, seconds = signalled(tmp_path / "run", launcher, rank, signal.SIGKILL)
    assert status != 0
    assert all(checkpoint_fault(path) is None for path in newest_first(tmp_path / "run/checkpoints"))
    print(f"{launcher}, rank {rank} killed: status {status}, all gone after {seconds:.1f} s")


def test_a_checkpoint_of_one_process_goes_on_in_two_with_the_same_batches(tmp_path):
    assert end(start(tmp_path / "one", "one", *COMPARABLE)) == 0
    (tmp_path / "two/checkpoints").mkdir(parents=True)
    name = "checkpoints/step-00000021.ckpt"
    (tmp_path / "two" / name).write_bytes((tmp_path / "one" / name).read_bytes())
    assert end(start(tmp_path / "two", "torchrun", *COMPARABLE, "resume=true")) == 0
    last = f"checkpoints/step-{STEPS:08d}.ckpt"
    expected, got = weights(tmp_path / "one" / last), weights(tmp_path / "two" / last)
    for name in ("momentum.image_ids", "momentum.caption_ids"):  # the last 24 pairs: none lost, none twice
        assert sorted(expected[name].tolist()) == sorted(got[name].tolist())
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-3, atol=1e-4)

"""What every command shares: how it starts, sweeps, hands over to other ranks, and what it says."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from vlretrieval import __version__
from vlretrieval.commands import front_door
from vlretrieval.commands.launch import command
from vlretrieval.commands.log import log_to_console

Start = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Start:
    """Run a stand-in for vlretrieval-train with some words; what each call of it saw."""
    monkeypatch.chdir(tmp_path)
    seen: list[dict[str, Any]] = []

    @command("train")
    def main(cfg: DictConfig) -> None:
        seen.append(
            {
                "seed": cfg.seed,
                "output_dir": cfg.output_dir,
                "argv": list(sys.argv),
                "hydra": HydraConfig.initialized(),
                "full_error": os.environ.get("HYDRA_FULL_ERROR"),
            }
        )
        if cfg.seed == 13:
            raise ValueError("seed=13 is unlucky; take another")
        if cfg.seed == 14:
            raise RuntimeError("ours")

    def run(*words: str) -> list[dict[str, Any]]:
        seen.clear()
        monkeypatch.setattr(sys, "argv", ["vlretrieval-train", *words])
        main()
        return list(seen)

    return run


def test_a_command_sees_its_own_argv_and_no_hydra(start: Start, tmp_path: Path) -> None:
    """Lightning starts the other ranks by repeating argv, and would add hydra.* overrides if it saw Hydra."""
    (call,) = start("name=a", "seed=3")
    assert call == {
        "seed": 3,
        "output_dir": "runs/a",
        "argv": ["vlretrieval-train", "name=a", "seed=3"],
        "hydra": False,
        "full_error": None,
    }
    assert list(tmp_path.iterdir()) == [], "Hydra writes nothing of its own"


def test_each_job_of_a_sweep_has_its_own_folder_and_an_argv_that_repeats_it_alone(start: Start) -> None:
    calls = start("-m", "name=a", "seed=1,2", "heads.kv=1")
    assert [call["seed"] for call in calls] == [1, 2]
    assert [call["output_dir"] for call in calls] == ["runs/a/0_seed-1", "runs/a/1_seed-2"]
    for call in calls:
        (again,) = start(*call["argv"][1:])
        assert (again["seed"], again["output_dir"]) == (call["seed"], call["output_dir"])


def test_flags_and_keys_may_be_mixed(start: Start) -> None:
    assert len(start("name=a", "-m", "seed=1,2")) == 2
    (call,) = start("-m", "name=a", "~experiment")
    assert call["output_dir"] == "runs/a/0"


def test_a_name_can_be_swept(start: Start) -> None:
    assert [call["output_dir"] for call in start("-m", "name=a,b")] == ["runs/a/0", "runs/b/1"]


def test_a_job_that_fails_does_not_stop_the_sweep_but_its_status_tells(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        start("-m", "name=a", "seed=12,13,15")
    assert leaving.value.code == 2
    err = capfd.readouterr().err
    assert "vlretrieval-train: error: seed=13 is unlucky; take another" in err and "Traceback" not in err


def test_an_error_of_ours_keeps_its_traceback(start: Start) -> None:
    with pytest.raises(RuntimeError, match="ours"):
        start("name=a", "seed=14")


def test_the_composed_config_can_be_shown(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    start("name=a", "seed=5", "--cfg", "job")
    assert "seed: 5" in capfd.readouterr().out


def test_a_folder_of_the_users_own_configs_is_found(
    start: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "experiment" / "own.yaml").write_text("# @package _global_\nname: own\nseed: 8\n")
    (call,) = start("--config-dir", "mine", "experiment=own")
    assert (call["seed"], call["output_dir"]) == (8, "runs/own")
    (job,) = start("-m", "--config-dir", "mine", "experiment=own")
    assert start(*job["argv"][1:])[0]["seed"] == 8


def test_the_front_door_lists_every_command_with_what_it_does(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["vlretrieval"])
    front_door.main()
    out = capfd.readouterr().out
    for name in ("train", "evaluate", "export", "search"):
        (line,) = [line for line in out.splitlines() if line.startswith(f"  vlretrieval {name} ")]
        assert len(line.split(name, 1)[1].strip()) > 20
    assert "(not installed)" not in out


def test_the_front_door_becomes_the_command_and_eats_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[Any] = []

    def execv(path: str, argv: list[str]) -> None:
        became.extend([path, argv])
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(sys, "argv", ["vlretrieval", "train", "name=a", "--cfg", "job"])
    with pytest.raises(SystemExit):
        front_door.main()
    path, argv = became
    assert Path(path).name == "vlretrieval-train" and argv == [path, "name=a", "--cfg", "job"]


def test_the_front_door_tells_a_misspelt_command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["vlretrieval", "trian"])
    with pytest.raises(SystemExit) as leaving:
        front_door.main()
    assert leaving.value.code == 2
    assert capfd.readouterr().err == "vlretrieval: error: no command 'trian'; did you mean train?\n"
    monkeypatch.setattr(sys, "argv", ["vlretrieval", "--version"])
    front_door.main()
    assert capfd.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize("rank", [0, 1])
def test_lines_go_to_stdout_from_rank_0_and_warnings_from_all(capfd: pytest.CaptureFixture[str], rank: int) -> None:
    log_to_console(rank)
    logging.getLogger("vlretrieval.somewhere").info("a line")
    logging.getLogger("elsewhere").info("chatter")
    logging.getLogger("elsewhere").warning("careful")
    text = warnings.formatwarning(UserWarning("look here"), UserWarning, "some/file.py", 3, "warn(...)")
    logging.getLogger("py.warnings").warning("%s", text)
    logging.getLogger("py.warnings").warning("%s", "some/file.py:7: look there too\n")
    out, err = capfd.readouterr()
    assert err == ""
    warned = ["careful", "warning: look here", "warning: look there too"]
    assert out.splitlines() == [*(["a line"] if rank == 0 else []), *warned]


def test_a_checkout_runs_its_commands_as_scripts(tmp_path: Path) -> None:
    scripts = Path(__file__).resolve().parent.parent / "scripts"
    for name in ("train", "evaluate", "export"):
        done = subprocess.run(
            [sys.executable, str(scripts / f"{name}.py"), "--help"], capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 0 and f"vlretrieval-{name}" in done.stdout, done.stderr

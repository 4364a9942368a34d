"""A run folder is made once, is never mixed with another run, and is not left behind by an error."""

from __future__ import annotations

import logging
import multiprocessing
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from vlretrieval.commands.run_folder import holds_run, run_folder


def config(folder: Path, resume: bool = False) -> DictConfig:
    return OmegaConf.create({"name": "a", "output_dir": str(folder), "resume": resume, "twice": "${name}${name}"})


def finished(folder: Path) -> Path:
    with run_folder(config(folder)):
        (folder / "metrics.csv").write_text("step\n")
    return folder


def test_it_holds_the_resolved_config_and_what_was_logged(tmp_path: Path) -> None:
    with run_folder(config(tmp_path / "runs" / "a")) as folder:
        logging.getLogger("vlretrieval.somewhere").warning("something to know")
        (folder / "metrics.csv").write_text("")
    assert OmegaConf.load(folder / "config.yaml")["twice"] == "aa"
    assert "something to know" in (folder / "train.log").read_text()
    logging.getLogger("vlretrieval").warning("after the run")
    assert "after the run" not in (folder / "train.log").read_text()


def test_a_folder_that_holds_a_run_is_refused_with_both_ways_out(tmp_path: Path) -> None:
    folder = finished(tmp_path / "a")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(
        ValueError, match=r"already holds a run; continue it with resume=true or start another with name="
    ):
        with run_folder(config(folder)):
            pass
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    with run_folder(config(folder, resume=True)):
        pass


def test_resuming_what_never_ran_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no run"):
        with run_folder(config(tmp_path / "a", resume=True)):
            pass
    assert list(tmp_path.iterdir()) == []


def test_a_run_killed_in_start_up_may_be_resumed_or_started(tmp_path: Path) -> None:
    for resume in (True, False):
        folder = tmp_path / str(resume)
        folder.mkdir()
        (folder / "config.yaml").write_text("name: a\n")  # what a killed process had written so far
        with run_folder(config(folder, resume=resume)):
            pass


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt()])
def test_an_error_before_the_first_result_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)):
        with run_folder(config(tmp_path / "runs" / "a")):
            raise error
    assert list(tmp_path.iterdir()) == []
    finished(tmp_path / "runs" / "a")  # so the corrected command can simply be run again


def test_an_error_after_the_first_result_keeps_everything(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        with run_folder(config(tmp_path / "a")) as folder:
            (folder / "checkpoints").mkdir()
            raise RuntimeError
    assert holds_run(tmp_path / "a")


def test_a_folder_the_user_made_is_used_and_not_removed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError):
        with run_folder(config(tmp_path / "a")):
            raise ValueError
    assert (tmp_path / "a").is_dir()
    finished(tmp_path / "a")


def test_a_file_in_the_folders_place_is_told(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        with run_folder(config(tmp_path / "a")):
            pass


def test_other_ranks_write_nothing_and_check_nothing(tmp_path: Path) -> None:
    with run_folder(config(tmp_path / "a"), rank=1):
        pass
    assert list(tmp_path.iterdir()) == []


def hold(folder: str, entered, leave) -> None:
    with run_folder(config(Path(folder))):
        entered.set()
        leave.wait(30)


def test_two_processes_cannot_write_to_one_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    entered, leave = context.Event(), context.Event()
    other = context.Process(target=hold, args=(str(tmp_path / "a"), entered, leave))
    other.start()
    assert entered.wait(60)
    with pytest.raises(ValueError, match="another process is writing"):
        with run_folder(config(tmp_path / "a")):
            pass
    leave.set()
    other.join(60)
    assert other.exitcode == 0

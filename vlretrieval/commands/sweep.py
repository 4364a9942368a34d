"""``vlretrieval-train -m ...``: names each job's folder, notes how each ended, and sums the sweep up at its end.

Each job leaves a note in SWEEP/jobs/, so that it does not matter which process or machine it ran on. Hydra leaves
out ``on_multirun_end`` when a job has failed: the command calls :func:`finish` in any case.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from vlretrieval.commands.explain import flat, one_line
from vlretrieval.training.watch.sweep_summary import (
    Job,
    plot,
    print_table,
    settings_of,
    value_at,
    write_jobs,
    write_summary,
)

log = logging.getLogger(__name__)

QUOTES = "'\""
LONGEST = 120  # letters of a folder's name
_running: list[SweepSummary] = []  # at most one


class SweepSummary(Callback):
    """Hydra's callback: notes jobs, and writes summary.csv, jobs.csv, summary.png and a table at the end.

    Args:
        metric: what is compared, of each job's best checkpoint.
        repeats: keys in which the jobs of one setting differ.
    """

    def __init__(self, metric: str, repeats: Sequence[str] = ("seed",)):
        self.metric, self.repeats = metric, list(repeats)
        self.folder: Path | None = None  # None outside a sweep
        self.swept: list[str] = []
        self._started_at = 0.0

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        from vlretrieval.commands.launch import process_rank

        if process_rank() > 0:
            return
        self.folder = Path(config.hydra.sweep.dir)
        self.swept = swept_keys(config.hydra.overrides.task, sweeper_params(config))
        for note in self.notes():
            note.unlink()  # of an earlier sweep in the same folder
        _running[:] = [self]

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._started_at = time.perf_counter()
        if self.folder is not None:  # a job that is killed leaves this
            self._note(config, config.hydra.overrides.task, error="it was stopped before its end")

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        if self.folder is None:
            return
        result = job_return._return_value  # return_value would raise a failed job's error
        overrides, taken = job_return.overrides or [], {"seconds": round(time.perf_counter() - self._started_at, 1)}
        if job_return.status != JobStatus.COMPLETED:
            error = said(result)
            self._note(config, overrides, **taken, error=error)
            log.warning("job %d failed: %s", config.hydra.job.num, error)
        else:
            self._note(config, overrides, **taken, result=dict(result) if isinstance(result, Mapping) else {})

    def _note(self, config: DictConfig, overrides: Iterable[str], **more: Any) -> None:
        assert self.folder is not None
        number = int(config.hydra.job.num)
        note = {
            "number": number,
            "setting": {key: value for key, value in given(overrides) if key in self.swept},
            "output_dir": f"{config.output_dir}/{job_folder(number, overrides, self.swept)}",
            **more,
        }
        (self.folder / "jobs").mkdir(parents=True, exist_ok=True)
        (self.folder / "jobs" / f"{number:04d}.json").write_text(json.dumps(note) + "\n", encoding="utf-8")

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        finish()

    def notes(self) -> list[Path]:
        """What the jobs left."""
        assert self.folder is not None
        return sorted((self.folder / "jobs").glob("[0-9]*.json"))

    def write(self) -> None:
        """Everything but the notes."""
        assert self.folder is not None
        jobs = [self._job(json.loads(note.read_text(encoding="utf-8"))) for note in self.notes()]
        if not jobs:
            return
        settings = settings_of(jobs, self.repeats)
        write_jobs(self.folder / "jobs.csv", jobs, self.metric)
        write_summary(self.folder / "summary.csv", settings, self.metric)
        print_table(settings, self.metric, f"{len(jobs)} jobs in {self.folder}: {self.metric} of the best checkpoint")
        if not any(job.value is not None for job in jobs):
            log.warning("no job has %s (sweep.metric); is it measured in validation?", self.metric)
        try:
            plot(self.folder / "summary.png", settings, self.metric)
        except ImportError:
            log.warning("no plot without matplotlib (pip install 'vlretrieval[plots]'); the rest is written")
        log.info("written: %s and what is beside it", self.folder / "summary.csv")

    def _job(self, note: dict[str, Any]) -> Job:
        result = note.get("result", {})
        value = result.get(self.metric)
        if value is None and "best_step" in result:
            value = value_at(Path(note["output_dir"]) / "metrics.csv", self.metric, result["best_step"])
        return Job(
            note["number"],
            note["setting"],
            note["output_dir"],
            value,
            result.get("parameters"),
            result.get("seconds", note.get("seconds")),  # its own count leaves out the start of the first job
            note.get("error"),
        )


def said(error: Exception) -> str:
    """A job's error as the command would say it, in one line."""
    from vlretrieval.commands.launch import conf_dir

    return one_line(error, conf_dir(), "train", []) or flat(f"{type(error).__name__}: {error}")


def finish() -> None:
    """Sums up the sweep that this process runs, once; nothing outside a sweep."""
    while _running:
        try:
            _running.pop().write()
        except OSError as error:
            log.warning("the sweep's summary could not be written: %s", error)


def job_folder(number: int, overrides: Iterable[str], swept: Sequence[str]) -> str:
    """ "3_heads.image-4_seed-1": a job's number and what is its own; no letter that a shell or Hydra minds."""
    parts = [f"{key}-{value.strip(QUOTES)}" for key, value in given(overrides) if key in swept and key != "name"]
    return re.sub(r"[^\w.+-]+", "-", "_".join([str(number), *parts]))[:LONGEST].rstrip("-_.")


def swept_keys(words: Iterable[str], params: Iterable[str] = ()) -> list[str]:
    """Keys with several values among overrides (``seed=1,2``), and those that a sweeper was given by a config."""
    found = OverridesParser.create().parse_overrides([word for word in words if "=" in word and word[0] != "-"])
    return list(dict.fromkeys([o.get_key_element() for o in found if o.is_sweep_override()] + list(params)))


def sweeper_params(config: DictConfig) -> list[str]:
    """Keys of ``hydra.sweeper.params``, where a sweep can be written down instead of given on the command line."""
    return list(OmegaConf.select(config, "hydra.sweeper.params") or {})


def given(overrides: Iterable[str]) -> list[tuple[str, str]]:
    """Overrides of one job as (key, value)."""
    return [(key.lstrip("+~"), value) for key, equals, value in (word.partition("=") for word in overrides) if equals]

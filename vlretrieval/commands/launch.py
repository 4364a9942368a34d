"""What every command shares: Hydra's command line, the checks before torch is met, errors as one line.

Deliberately holds nothing about retrieval. A command is a function of its config:

    @command("train")
    def main(cfg: DictConfig) -> None: ...

and ``main()`` then understands ``key=value``, ``--help``, ``--cfg job``, ``--config-dir DIR`` and ``-m``.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from vlretrieval.commands.check import check_config, compose_without_values
from vlretrieval.commands.explain import one_line
from vlretrieval.commands.log import log_to_console
from vlretrieval.commands.sweep import finish, job_folder, sweeper_params, swept_keys
from vlretrieval.commands.threads import set_threads

USER_ERROR = 2  # the exit status of everything the user can put right
# The names that torchrun, Lightning's own launcher, SLURM and jsrun give the number of a process.
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")


def conf_dir() -> Path:
    """The folder of the YAML files: beside the package in a checkout, inside it in an installed wheel."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "train.yaml").is_file():
            return folder
    raise FileNotFoundError(f"no conf/ beside or inside {package}; the installation is incomplete")


def process_rank() -> int:
    """The rank of this process, 0 when it is alone. Needs no torch: the launchers say it in the environment."""
    for name in RANK_VARIABLES:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0


def command(
    config_name: str, literal: tuple[str, ...] = (), bare: str | None = None
) -> Callable[[Callable[[DictConfig], Any]], Callable[[], Any]]:
    """Make a console script of a function that takes the composed, checked config ``conf/<config_name>.yaml``.

    The values of the keys in ``literal`` (texts, paths) never pass through Hydra, which would stumble over a comma, an
    apostrophe or the ``=`` in ``epoch=3.ckpt``, and would take ``model=FOLDER`` for a choice among conf/model. A word
    that is neither a flag nor ``key=value`` is the value of the key ``bare``, if a command has one.

    The function is called once, or once a job under ``-m``. What a user can put right (a misspelt key, a wrong
    value, a missing file, any ValueError) ends as one line on stderr and exit status 2; the traceback of it is shown
    when HYDRA_FULL_ERROR=1. Anything else is ours, and keeps its traceback.
    """

    def decorate(function: Callable[[DictConfig], Any]) -> Callable[[], Any]:
        @functools.wraps(function)
        def main() -> Any:
            show_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
            program, (words, values) = sys.argv[0], split_literals(with_key(sys.argv[1:], bare), literal)

            @functools.wraps(function)
            def job(cfg: DictConfig) -> Any:
                for key, value in values.items():
                    cfg[key] = None if value in ("", "null") else escaped(value)
                # What the command starts must not inherit the setting below.
                with environment("HYDRA_FULL_ERROR", "1" if show_traceback else None):
                    if HydraConfig.get().mode == RunMode.MULTIRUN:
                        return one_job_of_many(function, cfg, program, words)
                    # Here and not only further out: Hydra would put a line of its own before ours.
                    with errors_as_one_line(config_name, show_traceback):
                        return checked_call(function, cfg)

            with (
                errors_as_one_line(config_name, show_traceback),
                environment("HYDRA_FULL_ERROR", "1"),
                arguments([program, *flags_first(words)]),
            ):
                check_flags(sys.argv[1:])
                log_to_console(process_rank())
                try:
                    # Hydra prints errors in its own way and exits, unless the variable is set.
                    hydra.main(config_path=str(conf_dir()), config_name=config_name, version_base="1.3")(job)()
                finally:
                    finish()

        return main

    return decorate


def flags_first(words: list[str]) -> list[str]:
    """``a=1 -m b=2`` as ``-m a=1 b=2``: the parser of Hydra takes overrides in one piece only."""
    overrides = [word for word in words if not word.startswith("-") and ("=" in word or word.startswith("~"))]
    return [word for word in words if word not in overrides] + overrides


def check_flags(words: list[str]) -> None:
    """Refuse a flag that does not exist in one line, where argparse would print its usage."""

    def refuse(message: str) -> NoReturn:
        raise ValueError(f"{message}; keys are given as key=value, and --help shows them")

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    parser.parse_args(words)


def checked_call(function: Callable[[DictConfig], Any], cfg: DictConfig) -> Any:
    overrides = list(HydraConfig.get().overrides.task)
    choices = HydraConfig.get().runtime.choices
    base = compose_without_values(HydraConfig.get().job.config_name or "", overrides, choices)
    check_config(cfg, base)
    set_threads(cfg)
    with hydra_out_of_sight():
        return function(cfg)


def one_job_of_many(function: Callable[[DictConfig], Any], cfg: DictConfig, program: str, words: list[str]) -> Any:
    """A job of a multirun: its own folder below the run folder, and an argv that names this job alone.

    ``program`` and ``words`` are what the sweep was started with: the job may run in another process. Lightning starts
    the other ranks by repeating argv: with ``-m`` in it, every rank would start the sweep anew.
    """
    overrides = list(HydraConfig.get().overrides.task)
    words = flags_first(words)
    swept = swept_keys(words, sweeper_params(OmegaConf.create({"hydra": HydraConfig.get()})))
    folder = job_folder(HydraConfig.get().job.num, overrides, swept)
    if "output_dir" in cfg and not OmegaConf.is_missing(cfg, "name"):
        with open_dict(cfg):
            cfg.output_dir = f"{cfg.output_dir}/{folder}"
        overrides = [o for o in overrides if not o.startswith("output_dir=")] + [f"output_dir='{cfg.output_dir}'"]
    environment_before = dict(os.environ)
    with arguments([program, *config_flags(words), *overrides]):
        try:
            return checked_call(function, cfg)
        finally:
            # The next job starts ranks of its own; this one's address, rank and group are not theirs.
            distributed = sys.modules.get("torch.distributed")
            if distributed is not None and distributed.is_available() and distributed.is_initialized():
                distributed.destroy_process_group()
            os.environ.clear()
            os.environ.update(environment_before)


def config_flags(argv: list[str]) -> list[str]:
    """The flags of a command line that say where configs lie, without the mode and the overrides."""
    args = get_args_parser().parse_args(argv)
    flags = []
    for flag, value in (("--config-dir", args.config_dir), ("--config-name", args.config_name)):
        if value is not None:
            flags += [flag, value]
    return flags


@contextmanager
def errors_as_one_line(config_name: str, show_traceback: bool = False) -> Iterator[None]:
    """Turn what the user can put right into one line on stderr and exit status 2."""
    program = f"vlretrieval-{config_name.replace('_', ' ')}"
    try:
        yield
    except KeyboardInterrupt:
        print(f"{program}: stopped from the keyboard", file=sys.stderr)
        raise SystemExit(130) from None
    except Exception as error:
        message = None if show_traceback else one_line(error, conf_dir(), config_name, sys.argv[1:])
        if message is None:
            raise
        rank = process_rank()
        where = f" [rank {rank}]" if rank else ""
        print(f"{program}{where}: error: {message}", file=sys.stderr)
        raise SystemExit(USER_ERROR) from None


def with_key(words: list[str], bare: str | None) -> list[str]:
    """``"two dogs"`` as ``text=two dogs``, for a command that takes such a word; the values of flags are left alone."""
    if bare is None:
        return words
    takes_value = {f for a in get_args_parser()._actions if a.nargs is None for f in a.option_strings}
    keyed, before = [], ""
    for word in words:
        free = "=" not in word and not word.startswith(("-", "~")) and before not in takes_value
        keyed.append(f"{bare}={word}" if free else word)
        before = word
    return keyed


def split_literals(words: list[str], literal: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    """The words that are Hydra's, and the values of literal keys (of a key given twice, the last)."""
    values, rest = {}, []
    for word in words:
        key, equals, value = word.partition("=")
        if equals and key in literal:
            values[key] = value
        else:
            rest.append(word)
    return rest, values


def escaped(value: str) -> str:
    """A value as OmegaConf must be given it to interpolate nothing."""
    return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value)


@contextmanager
def arguments(argv: list[str]) -> Iterator[None]:
    """Another command line for a while."""
    before, sys.argv = sys.argv, argv
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def environment(name: str, value: str | None) -> Iterator[None]:
    """Set (or with None remove) an environment variable for a while."""

    def put(text: str | None) -> None:
        if text is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = text

    before = os.environ.get(name)
    put(value)
    try:
        yield
    finally:
        put(before)


@contextmanager
def hydra_out_of_sight() -> Iterator[None]:
    """Hide Hydra from Lightning, which otherwise restarts other ranks with overrides of hydra.* of its own."""
    instance = HydraConfig.instance()
    before, instance.cfg = instance.cfg, None
    try:
        yield
    finally:
        instance.cfg = before

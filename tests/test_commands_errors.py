"""What a user gets wrong on the command line is one line on stderr, status 2, and nothing on disk."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from vlretrieval.commands.check import ConfigError, check_config, check_targets, fits
from vlretrieval.commands.explain import nearest
from vlretrieval.commands.launch import escaped, split_literals

Run = Callable[..., tuple[int, str, str]]

WRONG = [
    # keys
    ("trainer.max_epoch=3", "no key 'trainer.max_epoch' in the config; did you mean trainer.max_epochs?"),
    ("+trainer.max_epoch=3", "trainer.max_epoch: Trainer has no such argument; did you mean trainer.max_epochs?"),
    ("model.image_encoder.num_head=3", "did you mean model.image_encoder.num_heads"),
    ("heads.txt=4", "no key 'heads.txt' in the config; did you mean heads.text"),
    ("+sede=1", "no key 'sede' in the config; did you mean seed"),
    ("weight_decay=0.1", "did you mean optimizer.weight_decay?"),
    ("logger.offline=true", "no key 'logger.offline'"),
    ("+heads.joint=2", "no key 'heads.joint'"),
    # types
    ("trainer.max_epochs=abc", "trainer.max_epochs=abc: Trainer takes Optional[int] here"),
    ("seed=1e", "seed=1e is not a whole number"),
    ("seed=null", "seed=null is not a whole number"),
    ("seed=1.5", "seed=1.5 is not a whole number"),
    ("resume=maybe", "resume=maybe is not true or false"),
    ("heads.text=four", "heads.text=four is not a whole number"),
    ("heads.kv=x", "num_kv_heads=x"),
    ("optimizer.lr=high", "optimizer.lr=high: adamw takes float here"),
    ("checkpoints.keep=two", "checkpoints.keep=two is not a whole number"),
    # choices
    ("heads=crss", "heads=crss: no such choice; there are cross, cross_4, dual; did you mean heads=cross?"),
    ("experiment=quickstrat", "did you mean experiment=quickstart?"),
    ("logger=tensorbord", "logger=tensorbord: no such choice; there are csv, tensorboard, wandb; did you mean"),
    ("modl=small", "no key 'modl' in the config; did you mean model?"),
    # missing
    ("data=karpathy", "data.json, data.images have no value; give data.json=... data.images=..."),
    ("name=???", "name has no value; give name=..."),
    # grammar
    ("name=[1", "cannot read the override 'name=[1'"),
    ("name", "cannot read the override 'name'"),
    ("--max-epochs=3", "unrecognized arguments: --max-epochs=3; keys are given as key=value"),
    ("name=${nope}", "nope"),
    ("name=${oc.env:NO_SUCH_VARIABLE}", "NO_SUCH_VARIABLE"),
    # targets
    (
        "model.image_encoder._target_=vlretrieval.model.encoders.ImageEncodr",
        "there is no such thing; did you mean ImageEncoder?",
    ),
]


@pytest.mark.parametrize(("word", "said"), WRONG, ids=[word for word, _ in WRONG])
def test_a_wrong_word_is_told_in_one_line(run_command: Run, tmp_path: Path, word: str, said: str) -> None:
    name = [] if word.startswith(("experiment", "name")) else ["name=a"]
    status, out, err = run_command("train", word, *name)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1 and err.startswith("vlretrieval-train: error: ")
    assert said in err
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_a_name_is_told(run_command: Run) -> None:
    assert run_command("train")[2] == "vlretrieval-train: error: name has no value; give name=...\n"


def test_a_run_folder_in_use_is_told_before_anything_is_built(run_command: Run, tmp_path: Path) -> None:
    (tmp_path / "runs" / "a" / "checkpoints").mkdir(parents=True)
    status, _, err = run_command("train", "name=a")
    assert status == 2 and "runs/a already holds a run; continue it with resume=true or start another with name=" in err


@pytest.mark.parametrize("words", [["--help"], ["name=a", "trainer.max_epoch=3"]], ids=" ".join)
def test_help_and_errors_come_without_torch(tmp_path: Path, words: list[str]) -> None:
    program = (
        "import sys\ntry:\n from vlretrieval.commands.train import main; main()\n"
        "finally:\n print('torch' in sys.modules, file=sys.stdout)"
    )
    started_at = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, cwd=tmp_path)
    elapsed_s = time.perf_counter() - started_at
    assert done.stdout.strip().endswith("False")
    assert done.returncode == (0 if words == ["--help"] else 2)
    assert elapsed_s < 30  # about 0.6 s on an idle core; the bound only finds an import of torch on a busy one


def test_the_traceback_is_there_for_who_asks(run_command: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ConfigError):
        run_command("train", "name=a", "seed=1e")
    assert os.environ["HYDRA_FULL_ERROR"] == "1"


def test_other_ranks_say_which_they_are(run_command: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    assert run_command("train", "name=a", "seed=1e")[2].startswith("vlretrieval-train [rank 3]: error: ")


@given(st.text(max_size=30), st.text(max_size=10))
def test_literal_values_arrive_as_they_were_typed(value: str, other: str) -> None:
    rest, values = split_literals([f"text={value}", f"top={other}", "--cfg", "text"], ("text",))
    assert (rest, values) == ([f"top={other}", "--cfg", "text"], {"text": value})
    cfg = OmegaConf.create({"text": None})
    cfg.text = escaped(value)
    assert cfg.text == value


@pytest.mark.parametrize(
    ("value", "annotation", "right"),
    [
        (3, "int", True), (True, "int", False), (3.0, "int", False), ("3", "int", False), (None, "int", False),
        (3, "float", True), (0.5, "float", True), (False, "float", False), ("high", "float", False),
        (None, "int | None", True), ("x", "int | None", False),
        (None, "Optional[int]", True), (2, "Optional[int]", True),
        (1, "bool", False), (True, "bool", True), ("a", "str", True), (1, "str", False),
        ("crop", "Literal['squash', 'crop']", True), ("crp", "Literal['squash', 'crop']", False),
        (["a"], "Sequence[str]", True), ("a", "Sequence[str]", False), ([1, "a"], "list[int]", False),
        ([1, 2], "tuple[int, int]", True), ({"a": 1}, "dict[str, int]", True), (3, "dict[str, int]", False),
        ("auto", "Union[int, str]", True), (None, "Union[int, str]", False),
        (3, "'int'", True), ("a", "'int | None'", False),
        ({"_target_": "x"}, "nn.Module", True), (3, "SomethingUnknown", True), (3, "Any", True),
    ],
)  # fmt: skip
def test_a_value_is_held_against_its_annotation(value: object, annotation: str, right: bool) -> None:
    import ast

    assert fits(value, ast.parse(annotation, mode="eval").body) is right


def test_a_required_argument_that_no_one_gave_is_told() -> None:
    with pytest.raises(ConfigError, match="model.text_encoder.vocab_size has no value; TextEncoder needs one"):
        encoder = {"_target_": "vlretrieval.model.encoders.TextEncoder", "dim": 8, "depth": 1, "num_heads": 2}
        check_targets({"model": {"text_encoder": encoder | {"context_length": 8}}})


def test_a_good_config_passes() -> None:
    cfg = OmegaConf.create({"seed": 3, "name": 2024, "rate": 1, "on": True, "free": "x"})
    check_config(cfg, OmegaConf.create({"seed": 0, "name": "???", "rate": 0.5, "on": False, "free": None}))


def test_the_nearest_key_is_looked_for_in_its_own_block_first() -> None:
    known = ["optimizer.lr", "optimizer.weight_decay", "trainer.max_epochs", "trainer.max_steps", "model.lrs"]
    assert nearest("trainer.max_epoch", known)[0] == "trainer.max_epochs"
    assert nearest("lr", known) == ["optimizer.lr"]
    assert nearest("model.weight_decay", known) == ["optimizer.weight_decay"]
    assert nearest("zzz", known) == []


def test_every_command_has_its_console_script_and_its_config() -> None:
    import tomllib

    from vlretrieval.commands.launch import conf_dir

    root = Path(__file__).resolve().parent.parent
    scripts = tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"]
    files = sorted((root / "vlretrieval" / "commands").glob("*.py"))
    found = {path.stem: re.findall(r"^@command\(\s*\"(\w+)\"", path.read_text(), re.MULTILINE) for path in files}
    assert sum(map(bool, found.values())) >= 4
    for module, configs in found.items():
        if configs:
            assert scripts[f"vlretrieval-{module}"] == f"vlretrieval.commands.{module}:main"
        for config in configs:
            assert (conf_dir() / f"{config}.yaml").is_file()

"""The direction of imports, and what may be imported where: the layout of the house, walked and not listed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "vlretrieval"
FILES = sorted(PACKAGE.rglob("*.py"))

# What each room may import of the others. A room that is not named here fails the test below.
MAY_IMPORT = {
    "": {"deploy"},  # vlretrieval/__init__.py: load_model
    "losses": set(),
    "metrics": set(),
    "data": set(),
    "model": set(),
    "training": {"model", "losses", "metrics", "data", "evaluation", "deploy", "heads"},
    "evaluation": {"model", "metrics", "data", "deploy"},
    "heads": {"model", "losses", "metrics", "data", "evaluation", "deploy"},
    "deploy": {"model", "data", "metrics"},
    "report": {"metrics", "data", "evaluation", "heads"},
    "commands": {"", "model", "losses", "metrics", "data", "training", "evaluation", "heads", "deploy", "report"},
}
# The floors of the model, lowest first: a file imports only files above it in this list.
FLOORS = [
    "positions attention modes",
    "transformer seeding encoded",
    "encoders lora",
    "timm_tower hugging_face_tower open_clip_towers crossmodal",
    "on_top",
    "retrieval_model",
    "costs",
    "measured_costs",
    "hints",
]
# Slow or optional libraries, and the one file (or room, with a slash) that may import each at module level.
OWNERS = {
    "open_clip": [],
    "timm": [],
    "transformers": [],
    "peft": [],
    "tokenizers": [],
    "datasets": [],
    "webdataset": ["data/shards.py"],
    "matplotlib": [],
    "sklearn": [],
    "pandas": [],
    "onnx": [],
    "onnxruntime": [],
    "faiss": [],
    "fastapi": [],
    "uvicorn": [],
    "wandb": [],
    "lightning": ["training/", "data/datamodule.py"],
    "pytorch_lightning": [],
    "hydra": ["commands/", "training/fit.py", "evaluation/run.py"],
    "omegaconf": ["commands/", "training/fit.py", "evaluation/run.py"],
}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def room(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def imports(path: Path, nested: bool = True) -> list[tuple[str, int]]:
    """(dotted module, line) of every import; if not ``nested``, without those in functions or under TYPE_CHECKING."""

    def walk(node: ast.AST) -> list[ast.AST]:
        found = []
        for child in ast.iter_child_nodes(node):
            typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            if not nested and (typing_only or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
                continue
            found += [child, *walk(child)]
        return found

    modules = []
    for node in walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: relative import; write vlretrieval...."
            modules += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return modules


def our_rooms(path: Path) -> list[tuple[str, int]]:
    found = []
    for module, line in imports(path):
        if module.split(".")[0] == "vlretrieval":
            second = (module.split(".") + [""])[1]
            exists = (PACKAGE / second).is_dir() or (PACKAGE / f"{second}.py").is_file()
            found.append((second if exists else "", line))
    return found


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_rooms_import_only_what_lies_below_them(path: Path) -> None:
    here = room(path)
    assert here in MAY_IMPORT, f"{here} is a new room; say in this test what it may import"
    version = {""}  # vlretrieval.__version__
    for there, line in our_rooms(path):
        allowed = MAY_IMPORT[here] | {here} | version
        assert there in allowed, f"{name_of(path)}:{line}: {here} may not import {there or 'the package'}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "model").glob("*.py")), ids=name_of)
def test_the_floors_of_the_model_are_climbed_upwards(path: Path) -> None:
    floor = {name: height for height, names in enumerate(FLOORS) for name in names.split()}
    if path.stem == "__init__":
        return
    assert path.stem in floor, f"model/{path.name} is a new floor; say in this test where it stands"
    for module, line in imports(path):
        parts = module.split(".")
        if parts[:2] == ["vlretrieval", "model"] and len(parts) > 2:
            assert floor[parts[2]] < floor[path.stem], f"{name_of(path)}:{line} imports {parts[2]}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_slow_and_optional_libraries_are_imported_at_module_level_only_where_they_belong(path: Path) -> None:
    for module, line in imports(path, nested=False):
        owners = OWNERS.get(module.split(".")[0])
        if owners is not None:
            name = name_of(path)
            assert any(name == o or o.endswith("/") and name.startswith(o) for o in owners), f"{name}:{line}: {module}"


@pytest.mark.parametrize("path", [f for f in FILES if room(f) in ("losses", "metrics")], ids=name_of)
def test_losses_and_metrics_know_nothing_of_processes(path: Path) -> None:
    assert "distributed" not in path.read_text(encoding="utf-8").replace("distributed as", "")
    assert not any("distributed" in module for module, _ in imports(path))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_the_experiment_trackers_name_appears_in_no_code(path: Path) -> None:
    """It comes from conf/logger/wandb.yaml as Lightning's logger, and could be any other."""
    assert not re.search(r"wandb|weights.and.biases", path.read_text(encoding="utf-8"), re.IGNORECASE)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_file_is_a_drawer_for_everything(path: Path) -> None:
    assert path.stem not in ("utils", "util", "helpers", "helper", "common", "misc")
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), "its first line says what it is"


def test_importing_the_package_and_a_command_meets_no_torch() -> None:
    modules = [
        "vlretrieval",
        *(f"vlretrieval.commands.{path.stem}" for path in (PACKAGE / "commands").glob("[a-z]*.py")),
    ]
    program = f"import sys, importlib; [importlib.import_module(m) for m in {modules}]; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_walk_found_the_files() -> None:
    assert len(FILES) >= 30

"""What arguments a ``_target_`` takes, read from its source without importing it.

The constructor's signature is the schema of a config; but importing torch to read one costs seconds, and a misspelt
key should be told at once. So the source is parsed: classes, functions, re-exports in ``__init__.py``, inherited
constructors, dataclasses. What cannot be found this way is not judged (the constructor itself will).
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Signature:
    """The keyword arguments of a callable. ``annotations[name]`` is None where the source gives none."""

    annotations: dict[str, ast.expr | None] = field(default_factory=dict)
    required: set[str] = field(default_factory=set)
    takes_any: bool = False  # **kwargs


def signature_of(target: str) -> Signature | None:
    """The signature of a dotted name, None when its source does not tell."""
    found = locate(target)
    if found is None:
        return None
    node, module = found
    return of_class(node, module) if isinstance(node, ast.ClassDef) else of_function(node, skip_first=False)


def exists(target: str) -> bool | None:
    """Whether a dotted name is defined; None when the source does not tell."""
    if locate(target) is not None:
        return True
    path, rest = module_of(target)
    if path is None:
        return False
    tree = parse(path)
    if any(isinstance(n, ast.FunctionDef) and n.name == "__getattr__" for n in tree.body) or len(rest) != 1:
        return None
    return rest[0] in names_in(target)


def names_in(target: str) -> list[str]:
    """The names that the module of ``target`` defines or imports, for a hint."""
    path, _ = module_of(target)
    names: list[str] = []
    for node in parse(path).body if path else []:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names += [a.asname or a.name for a in node.names]
        elif isinstance(node, ast.Assign):
            names += [t.id for t in node.targets if isinstance(t, ast.Name)]
    return names


def module_of(target: str) -> tuple[Path | None, list[str]]:
    """The source file of the longest module in a dotted name, and the names that remain."""
    root, *rest = target.split(".")
    try:
        spec = importlib.util.find_spec(root)  # of a top-level name: imports nothing
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None, rest
    path = Path(spec.origin)
    while rest and path.name == "__init__.py":
        package, module = path.parent / rest[0] / "__init__.py", path.parent / f"{rest[0]}.py"
        found = next((p for p in (package, module) if p.is_file()), None)
        if found is None:
            break
        path, rest = found, rest[1:]
    return path, rest


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


Found = tuple[ast.ClassDef | ast.FunctionDef, Path]


def locate(target: str, depth: int = 8) -> Found | None:
    path, rest = module_of(target)
    if path is None or not rest or depth == 0:
        return None
    found = in_module(rest[0], path, depth)
    for name in rest[1:]:  # Class.method
        if found is None or not isinstance(found[0], ast.ClassDef):
            return None
        method = next((n for n in found[0].body if isinstance(n, ast.FunctionDef) and n.name == name), None)
        found = (without_first(method), found[1]) if method else None
    return found


def without_first(method: ast.FunctionDef) -> ast.FunctionDef:
    """A classmethod as its caller sees it."""
    if any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in method.decorator_list):
        return method
    args = ast.arguments(**{**{f: getattr(method.args, f) for f in method.args._fields}, "args": method.args.args[1:]})
    return ast.FunctionDef(**{**{f: getattr(method, f, None) for f in method._fields}, "args": args})  # type: ignore[arg-type]


def in_module(name: str, path: Path, depth: int) -> Found | None:
    """A class or function by its name in a file, following the imports of that file."""
    for node in parse(path).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node, path
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return locate(f"{absolute(node, path)}.{alias.name}", depth - 1)
    return None


def absolute(node: ast.ImportFrom, path: Path) -> str:
    """The dotted module of ``from .x import y`` found in ``path``."""
    if not node.level:
        return node.module or ""
    folder = path.parent
    for _ in range(node.level - 1):
        folder = folder.parent
    parts: list[str] = []
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join([*parts, *([node.module] if node.module else [])])


def of_class(node: ast.ClassDef, path: Path, depth: int = 6) -> Signature | None:
    """The constructor's signature: its own, a dataclass's fields, or the first base's that can be found."""
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return of_function(item, skip_first=True)
    if any("dataclass" in ast.unparse(d) for d in node.decorator_list):
        return of_fields(node)
    for base in node.bases:
        found = in_module(base.id, path, depth) if isinstance(base, ast.Name) and depth else None
        if found and isinstance(found[0], ast.ClassDef):
            return of_class(found[0], found[1], depth - 1)
    return None


def of_fields(node: ast.ClassDef) -> Signature | None:
    if node.bases:
        return None
    signature = Signature()
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            signature.annotations[item.target.id] = item.annotation
            if item.value is None:
                signature.required.add(item.target.id)
    return signature


def of_function(node: ast.FunctionDef, skip_first: bool) -> Signature:
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args][1 if skip_first else 0 :]
    defaults: list[Any] = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    pairs = [*zip(positional, defaults, strict=False), *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return Signature(
        annotations={argument.arg: argument.annotation for argument, _ in pairs},
        required={argument.arg for argument, default in pairs if default is None},
        takes_any=arguments.kwarg is not None,
    )

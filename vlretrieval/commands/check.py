"""A composed config against what it will build, before torch is imported: keys, types, missing values.

Hydra refuses an unknown key, but takes ``trainer.max_epochs=abc``, ``seed=1e`` and ``+trainer.max_epoch=3`` without a
word. Two sources say what is right: the signature of each ``_target_`` (read from its source), and for the plain
settings around them the type of the default in the YAML.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from vlretrieval.commands.explain import dotted_keys, unknown_key
from vlretrieval.commands.signature import exists, names_in, signature_of

HYDRA_KEYS = {"_target_", "_partial_", "_args_", "_recursive_", "_convert_"}


class ConfigError(ValueError):
    """A config that cannot be what was meant. The message names the key, the value, the rule and the way out."""


def compose_without_values(config_name: str, overrides: list[str], choices: Mapping[str, Any]) -> DictConfig | None:
    """The config with the user's choices of groups but none of the user's values: what the defaults look like."""
    if not GlobalHydra.instance().is_initialized():  # a job that another process runs for a sweep
        return None
    groups = [o for o in overrides if o.lstrip("+~").split("=")[0] in choices]
    return compose(config_name, overrides=groups)


def check_config(cfg: DictConfig, base: DictConfig | None = None) -> None:
    """Refuse what is missing, unknown or of the wrong type.

    Raises:
        ConfigError: one line with the full key.
    """
    missing = missing_keys(OmegaConf.to_container(cfg, resolve=False))
    if missing:
        have = "has no value" if len(missing) == 1 else "have no value"
        raise ConfigError(f"{', '.join(missing)} {have}; give {' '.join(f'{key}=...' for key in missing)}")
    if base is not None:
        check_settings(cfg, base)
    check_targets(OmegaConf.to_container(cfg, resolve=True))


def missing_keys(node: Any, prefix: str = "") -> list[str]:
    """Keys whose value is still ``???``, in the order of the config."""
    if isinstance(node, dict):
        return [
            key for name, value in node.items() for key in missing_keys(value, f"{prefix}.{name}" if prefix else name)
        ]
    return [prefix] if node == "???" else []


def check_settings(cfg: DictConfig, base: DictConfig) -> None:
    """The plain settings (not under a ``_target_``): known, and of their default's type."""
    defaults = OmegaConf.to_container(base, resolve=False)
    known = list(dotted_keys(defaults))
    for key, value in settings(OmegaConf.to_container(cfg, resolve=False)):
        if key not in known:
            raise ConfigError(unknown_key(key, known))
        default: Any = defaults
        for part in key.split("."):
            default = default[part]
        if default is None or default == "???" or is_interpolation(value) or is_interpolation(default):
            continue
        if not same_kind(value, default):
            raise ConfigError(f"{key}={show(value)} is not {kind(default)} (the default is {show(default)})")


def settings(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves that no constructor will see: everything above and beside the blocks that have a ``_target_``."""
    if isinstance(node, dict):
        if "_target_" in node:
            return
        for key, value in node.items():
            if isinstance(value, dict) and value:
                yield from settings(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", value


def is_interpolation(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def same_kind(value: Any, default: Any) -> bool:
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    if isinstance(default, float):
        return isinstance(value, int | float)
    if isinstance(default, str):  # name=2024 is a name, though YAML reads a number
        return isinstance(value, str | int | float)
    return isinstance(value, type(default))


def kind(default: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", list: "a list"}
    return names.get(type(default), f"a {type(default).__name__}")


def show(value: Any) -> str:
    """A value as it is written on the command line."""
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def check_targets(node: Any, key: str = "") -> None:
    """Walk a resolved config; every block with a ``_target_`` is held against the signature of that target."""
    if isinstance(node, list):
        for index, item in enumerate(node):
            check_targets(item, f"{key}[{index}]")
    if not isinstance(node, dict):
        return
    if "_target_" in node:
        check_target(node, key)
    for name, value in node.items():
        check_targets(value, f"{key}.{name}" if key else str(name))


def check_target(node: dict[str, Any], key: str) -> None:
    target = str(node["_target_"])
    signature = signature_of(target)
    if signature is None:
        if target.startswith("vlretrieval.") and exists(target) is False:
            name = target.rpartition(".")[2]
            guess = difflib.get_close_matches(name, names_in(target), n=1)
            hint = f"; did you mean {guess[0]}?" if guess else ""
            raise ConfigError(f"{key}._target_={target}: there is no such thing{hint}")
        return
    given = {name: value for name, value in node.items() if name not in HYDRA_KEYS}
    for name, value in given.items():
        if name not in signature.annotations:
            if signature.takes_any:
                continue
            guess = difflib.get_close_matches(name, signature.annotations, n=1)
            hint = f"did you mean {key}.{guess[0]}?" if guess else f"it takes {', '.join(signature.annotations)}"
            raise ConfigError(f"{key}.{name}: {target.rpartition('.')[2]} has no such argument; {hint}")
        annotation = signature.annotations[name]
        if annotation is not None and not fits(value, annotation):
            wanted = ast.unparse(annotation).strip("'\"")
            raise ConfigError(f"{key}.{name}={show(value)}: {target.rpartition('.')[2]} takes {wanted} here")
    if not node.get("_partial_") and not node.get("_args_"):
        for name in sorted(signature.required - given.keys()):
            raise ConfigError(f"{key}.{name} has no value; {target.rpartition('.')[2]} needs one")


def fits(value: Any, annotation: ast.expr) -> bool:
    """Whether a YAML value can be meant by an annotation. What the annotation does not settle is let through."""
    match annotation:
        case ast.Constant(value=None):
            return value is None
        case ast.Constant(value=str(text)):
            return fits(value, ast.parse(text, mode="eval").body)
        case ast.BinOp(op=ast.BitOr()):
            return fits(value, annotation.left) or fits(value, annotation.right)
        case ast.Name(id=name):
            return fits_name(value, name)
        case ast.Subscript(value=ast.Name(id=name), slice=inner):
            return fits_subscript(value, name, inner)
    return True


def fits_name(value: Any, name: str) -> bool:
    match name:
        case "bool":
            return isinstance(value, bool)
        case "int":
            return isinstance(value, int) and not isinstance(value, bool)
        case "float":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "str":
            return isinstance(value, str)
        case "list" | "List" | "tuple" | "Tuple" | "Sequence":
            return isinstance(value, list) or is_target(value)
        case "dict" | "Dict" | "Mapping":
            return isinstance(value, dict)
    return True


def is_target(value: Any) -> bool:
    return isinstance(value, dict) and "_target_" in value


def fits_subscript(value: Any, name: str, inner: ast.expr) -> bool:
    parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
    match name:
        case "Optional":
            return value is None or fits(value, inner)
        case "Union":
            return any(fits(value, part) for part in parts)
        case "Literal":
            allowed = [part.value for part in parts if isinstance(part, ast.Constant)]
            return value in allowed or len(allowed) != len(parts)
        case "list" | "List" | "Sequence" | "Iterable":
            return is_target(value) or isinstance(value, list) and all(fits(item, parts[0]) for item in value)
        case "tuple" | "Tuple":
            return fits_name(value, name)
        case "dict" | "Dict" | "Mapping":
            return isinstance(value, dict)
    return True

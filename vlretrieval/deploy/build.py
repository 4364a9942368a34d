"""A model from plain data (the ``model`` block of a resolved config), where the data is not trusted.

A checkpoint or an exported folder may come from anyone, and a ``_target_`` can name any callable. So only one kind of
thing is built here: a class that a module of ``vlretrieval.model`` itself defines and that is an ``nn.Module``.
Nothing is interpolated, so that a ``${oc.env:...}`` in a foreign file reads no secrets. Hydra is not needed.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from typing import Any

from torch import nn

ALLOWED = re.compile(r"vlretrieval\.model\.[a-z][a-z0-9_]*\.[A-Z][A-Za-z0-9]*")


def build_model(config: dict[str, Any], source: str = "the config") -> nn.Module:
    """Build the module that ``config`` describes, its parts inside out.

    Args:
        config: ``{"_target_": "vlretrieval.model....", argument: value, ...}``, blocks nested in it likewise.
        source: what to call the origin of the config in errors.

    Raises:
        ValueError: with the key: a target outside ``vlretrieval.model``, an interpolation, what a constructor refuses.
    """
    built = _build(config, "model", source)
    if not isinstance(built, nn.Module):
        raise ValueError(f"{source}: model has no _target_")
    return built


def self_contained(config: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """``config`` of a built ``model`` as it can be built again without the files that pretrained towers came from.

    A tower says by ``stored()`` which arguments change; it stands in the model where its block stands in the config.
    """
    told = dict(config)
    for name, value in config.items():
        part = getattr(model, name, None)
        if isinstance(value, dict) and isinstance(part, nn.Module):
            told[name] = self_contained(value, part)
    stored = getattr(model, "stored", None)
    return told if stored is None else told | stored()


def allowed_class(target: Any, key: str, source: str) -> type[nn.Module]:
    """The class a ``_target_`` names, refused unless it is one of the model's own."""
    refusal = ValueError(
        f"{source}: {key}._target_={target} is not a class of vlretrieval.model; a checkpoint may name no other, "
        "since anything that can be named could be run"
    )
    if not isinstance(target, str) or not ALLOWED.fullmatch(target):
        raise refusal
    module_name, _, class_name = target.rpartition(".")
    if importlib.util.find_spec(module_name) is None:
        raise refusal
    found = getattr(importlib.import_module(module_name), class_name, None)
    # Defined there, not imported into there: torch's own modules are visible in these files too.
    if not isinstance(found, type) or not issubclass(found, nn.Module) or found.__module__ != module_name:
        raise refusal
    return found


def _build(node: Any, key: str, source: str) -> Any:
    if isinstance(node, str) and "${" in node:
        raise ValueError(f"{source}: {key}={node} holds an interpolation; a stored config must be resolved")
    if isinstance(node, list):
        return [_build(item, f"{key}[{i}]", source) for i, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    arguments = {name: _build(value, f"{key}.{name}", source) for name, value in node.items() if name != "_target_"}
    if "_target_" not in node:
        return arguments
    cls = allowed_class(node["_target_"], key, source)
    odd = [name for name in arguments if not name.isidentifier() or name.startswith("_")]
    if odd:
        raise ValueError(f"{source}: {key}.{odd[0]} is not an argument that a stored model may have")
    try:
        return cls(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source}: {key}: {error}") from error

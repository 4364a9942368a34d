"""What is evaluated, opened: a checkpoint or an exported folder, with the tokenizer and preprocessing it needs."""

from __future__ import annotations

import importlib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vlretrieval.data.splits import Source
from vlretrieval.data.tokenizers import Tokenizer
from vlretrieval.data.transforms import EvalTransform

# Of the data room alone, and classes alone: a checkpoint may come from anyone, and a _target_ can name any callable.
ALLOWED = re.compile(r"vlretrieval\.data\.[a-z_.]+\.[A-Z][A-Za-z0-9]*")


@dataclass
class Subject:
    """A model with all that decides what it is shown.

    Attributes:
        name: where it came from.
        data: the resolved ``data`` block of the config it was trained with; None in an exported folder.
    """

    name: str
    model: Any
    tokenizer: Tokenizer
    transform: EvalTransform
    data: dict[str, Any] | None = None

    def to(self, device: str) -> Subject:
        """Move the model: "cpu", "cuda", "cuda:1", ... or "auto", which is a GPU where there is one."""
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            self.model.to(torch.device(device))
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"device={device}: {str(error).splitlines()[0]}") from None
        return self

    def source(self) -> Source:
        """The data set it was trained on.

        Raises:
            ValueError: an exported folder knows none; or the config names a class that is no data set of ours.
        """
        if not self.data or "source" not in self.data:
            raise ValueError(f"{self.name} does not say what it was trained on; give data=..., e.g. data=scenes")
        return build_source(self.data["source"], self.name)


def open_subject(path: str | Path) -> Subject:
    """A ``.ckpt`` of ``vlretrieval-train``, or a folder of ``vlretrieval-export``.

    Raises:
        ValueError: it is neither, or is damaged.
    """
    if Path(path).is_dir() and any((Path(path) / name).exists() for name in ("model.safetensors", "manifest.json")):
        from vlretrieval.deploy.loaded import load_folder

        loaded = load_folder(path)
        size, mode = loaded.preprocess["image_size"], loaded.preprocess["resize"]
        return Subject(str(path), loaded.model, loaded.tokenizer, EvalTransform(size, mode))
    from vlretrieval.deploy.checkpoint import load_checkpoint

    checkpoint = load_checkpoint(path)
    config = checkpoint.config
    data = config.get("data") or {}
    transform = EvalTransform(config["model"]["image_encoder"]["image_size"], data.get("resize", "squash"))
    return Subject(str(path), checkpoint.build(), checkpoint.tokenizer, transform, data)


def build_source(config: Any, origin: str, key: str = "data.source") -> Any:
    """Build a data set from the plain data of a checkpoint, its parts inside out.

    Raises:
        ValueError: with the key: a class outside ``vlretrieval.data``, an interpolation, what a constructor refuses.
    """
    if isinstance(config, str) and "${" in config:
        raise ValueError(f"{origin}: {key}={config} holds an interpolation; a stored config must be resolved")
    if isinstance(config, list):
        return [build_source(item, origin, f"{key}[{place}]") for place, item in enumerate(config)]
    if not isinstance(config, dict):
        return config
    arguments = {
        name: build_source(value, origin, f"{key}.{name}") for name, value in config.items() if name != "_target_"
    }
    if "_target_" not in config:
        return arguments
    found = _data_class(config["_target_"])
    if found is None:
        raise ValueError(
            f"{origin}: {key}._target_={config['_target_']} is no data set of ours; give data=... on the command line"
        )
    try:
        return found(**arguments)
    except TypeError as error:
        raise ValueError(f"{origin}: {key}: {error}; give data=... on the command line") from error


def _data_class(target: Any) -> type | None:
    if not isinstance(target, str) or not ALLOWED.fullmatch(target):
        return None
    module_name, _, class_name = target.rpartition(".")
    if importlib.util.find_spec(module_name) is None:
        return None
    found = getattr(importlib.import_module(module_name), class_name, None)
    if isinstance(found, type) and found.__module__.startswith("vlretrieval.data."):
        return found
    return None

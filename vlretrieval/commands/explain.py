"""An exception as one line: what was given, the rule, the way out. Knows Hydra's and OmegaConf's errors by heart."""

from __future__ import annotations

import difflib
import re
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hydra.errors import ConfigCompositionException, HydraException, InstantiationException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationKeyError,
    OmegaConfBaseException,
)
from yaml import YAMLError

OUR_ROOMS = ("/vlretrieval/", "/hydra/", "/omegaconf/")


def one_line(error: Exception, conf_dir: Path, config_name: str, argv: list[str]) -> str | None:
    """The line for stderr, or None when the error is not one a user can put right (so its traceback is wanted)."""
    if isinstance(error, InstantiationException):
        return instantiation(error)
    if isinstance(error, OverrideParseException):
        return flat(f"cannot read the override {error.override!r}: {first_line(error)}; write key=value")
    if isinstance(error, HydraException | OmegaConfBaseException):
        return flat(composition(error, conf_dir, config_name, argv))
    if isinstance(error, YAMLError):
        return flat(f"a YAML file cannot be read: {error}")
    if isinstance(error, OSError) and error.filename is not None:
        return flat(f"{error.strerror}: {error.filename}")
    if isinstance(error, ValueError):
        return flat(str(error) or type(error).__name__) + raised_elsewhere(error)
    if type(error).__name__ == "MisconfigurationException":  # Lightning's; importing it here would cost seconds
        return flat(str(error))
    return None


def flat(text: str) -> str:
    """Any text as one line."""
    return re.sub(r"\s*\n\s*", "; ", text.strip())


def first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def raised_elsewhere(error: Exception) -> str:
    """A note on where a ValueError comes from when it is not of our making, since its words won't tell."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or any(room in frames[-1].filename for room in OUR_ROOMS):
        return ""
    where = Path(frames[-1].filename)
    return f" (raised in {'/'.join(where.parts[-2:])}:{frames[-1].lineno}; HYDRA_FULL_ERROR=1 shows the traceback)"


def instantiation(error: InstantiationException) -> str:
    """Hydra wraps what a constructor says: give the constructor's words and the key of the config."""
    text = str(error)
    key = re.search(r"full_key: (\S+)", text)
    cause = error.__cause__
    while isinstance(cause, InstantiationException) and cause.__cause__ is not None:
        key = re.search(r"full_key: (\S+)", str(cause)) or key
        cause = cause.__cause__
    said = str(cause) if cause is not None else re.sub(r"\n?full_key: \S+", "", text)
    return flat(f"{key.group(1)}: {said}" if key else said)


def composition(error: Exception, conf_dir: Path, config_name: str, argv: list[str]) -> str:
    cause = error.__cause__
    absent = re.search(r"Missing mandatory value: (\S+)", str(error))
    if absent:
        return f"{absent.group(1)} has no value; give {absent.group(1)}=..."
    if isinstance(error, InterpolationKeyError):
        key = getattr(error, "full_key", None)
        return f"{key}: {first_line(error)}" if key else first_line(error)
    if isinstance(error, ConfigCompositionException) and isinstance(cause, ConfigAttributeError | ConfigKeyError):
        key = cause.full_key or str(cause.key)
        return unknown_key(key, known_keys(conf_dir, config_name, argv))
    missing = re.search(r"Could not override '([^']+)'\.\s*No match in the defaults list", str(error))
    if missing:
        return unknown_key(missing.group(1), known_keys(conf_dir, config_name, argv))
    option = re.search(r"Could not find '([^']+)'", str(error))
    if option:
        return unknown_option(option.group(1), conf_dir)
    return f"{error}; {cause}" if cause is not None and str(cause) not in str(error) else str(error)


def unknown_key(key: str, known: Iterable[str]) -> str:
    """``trainer.max_epoch`` -> "no key 'trainer.max_epoch'; did you mean trainer.max_epochs?"."""
    guesses = nearest(key, list(known))
    way_out = f"did you mean {' or '.join(guesses)}?" if guesses else "--help lists the keys"
    return f"no key {key!r} in the config; {way_out}"


def nearest(key: str, known: list[str]) -> list[str]:
    """Up to two known keys that a slip of the keyboard away gives ``key``: in its own block first."""
    block, _, name = key.rpartition(".")
    here = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == block}
    close = [here[n] for n in difflib.get_close_matches(name, here, n=2, cutoff=0.6)]
    # The right name in the wrong block, optimizer.weight_decay for trainer.weight_decay, is the better guess.
    same = [k for k in known if k.rpartition(".")[2] == name]
    return (same or close or difflib.get_close_matches(key, known, n=2, cutoff=0.7))[:2]


def unknown_option(path: str, conf_dir: Path) -> str:
    """``model/huge`` -> what the group offers."""
    group, _, name = path.rpartition("/")
    options = sorted(p.stem for p in (conf_dir / group).glob("*.yaml")) if (conf_dir / group).is_dir() else []
    if not options:
        return f"no config {path!r} in {conf_dir}"
    guess = difflib.get_close_matches(name, options, n=1)
    way_out = f"; did you mean {group}={guess[0]}?" if guess else ""
    return f"{group}={name}: no such choice; there are {', '.join(options)}{way_out}"


def known_keys(conf_dir: Path, config_name: str, argv: list[str]) -> list[str]:
    """Every dotted key of the config as it is without the user's values, but with the user's choices of groups."""
    from hydra import compose, initialize_config_dir

    words = [word.lstrip("+~") for word in argv if "=" in word and not word.startswith("-")]
    choices = [w for w in words if (conf_dir / w.split("=")[0].split("@")[0]).is_dir() and "," not in w]
    for overrides in (choices, []):
        try:
            with initialize_config_dir(str(conf_dir), version_base="1.3"):
                return list(dotted_keys(OmegaConf.to_container(compose(config_name, overrides=overrides))))
        except Exception:  # the choices themselves may be what is wrong
            continue
    return []


def dotted_keys(node: Any, prefix: str = "") -> Iterator[str]:
    """Every key of nested dicts, blocks included: model, model.image_encoder, model.image_encoder.dim, ..."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield f"{prefix}{key}"
            yield from dotted_keys(value, f"{prefix}{key}.")

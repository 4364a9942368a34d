"""Parts of a model that are not trained: neither weights nor norms and dropout change (LiT, arXiv:2111.07991)."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn


def freeze_parts(model: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """Takes the gradient from every parameter that a pattern names, and puts wholly frozen modules in evaluation mode.

    Args:
        patterns: a part ("image_encoder", "image_encoder.transformer.blocks.0") or a shell pattern over whole names of
            parameters ("*.norm*.weight").

    Returns:
        The modules all of whose parameters are frozen, which must stay in evaluation mode.

    Raises:
        ValueError: for a pattern that names nothing.
    """
    names = [name for name, _ in model.named_parameters()]
    frozen: set[str] = set()
    for pattern in patterns:
        found = {n for n in names if n == pattern or n.startswith(pattern + ".") or fnmatchcase(n, pattern)}
        if not found:
            parts = ", ".join(dict.fromkeys(n.split(".")[0] for n in names))
            raise ValueError(f"freeze={pattern!r} names no parameter; the parts are {parts}")
        frozen |= found
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    if not frozen:
        return []
    whole = [m for m in model.modules() if any(True for _ in m.parameters()) and not _trained(m)]
    for module in whole:
        module.eval()
    return whole


def _trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())

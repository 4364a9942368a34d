"""``vlretrieval-train ... dry_run=true``: what the model would cost, as a table; no data is read.

Of our own encoders the config says it all and no weight is drawn; a model of pretrained towers is built and tried.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf


def show(cfg: DictConfig) -> dict[str, dict[str, int]]:
    """Prints the costs of every part of ``cfg.model`` and returns them: part -> column -> number."""
    import hydra
    import torch

    from vlretrieval.model.costs import FLOAT32, Cost, costs
    from vlretrieval.model.hints import head_width_hints
    from vlretrieval.model.measured_costs import measured_costs

    model: Any = OmegaConf.to_container(cfg.model, resolve=True)
    length = int(cfg.tokenizer.context_length)
    if any("base" in model[encoder] for encoder in ("image_encoder", "text_encoder")):
        built = hydra.utils.instantiate(cfg.model)
        parts = measured_costs(built, int(model["image_encoder"]["image_size"]), length)
    else:
        with torch.device("meta"):  # shapes only: whatever a constructor would refuse is refused here too
            built = hydra.utils.instantiate(cfg.model)
        parts = costs(model, length)
    parts["total"] = sum(parts.values(), Cost())
    rows = {
        part: {
            "parameters": cost.parameters,
            "flops_per_pair": cost.flops,
            "flops_per_pair_with_kept_kv": cost.flops - cost.flops_saved,
            "activation_bytes_per_pair": FLOAT32 * cost.activations,
            "kept_bytes_per_picture": FLOAT32 * cost.kept,
        }
        for part, cost in parts.items()
    }
    print_table(rows, f"{cfg.name}: one picture, one caption of {length} tokens (the longest), float32")
    for hint in head_width_hints(built):
        print(f"hint: {hint}")
    return rows


def print_table(rows: dict[str, dict[str, int]], title: str) -> None:
    """Parts down, costs across; fits 80 columns."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("part", no_wrap=True)
    headings = ("parameters", "MFLOPs\na pair", "with K/V\nkept", "activations\nKiB a pair", "kept, KiB\na picture")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for part, row in rows.items():
        parameters, flops, flops_kept, activations, kept = row.values()
        table.add_row(
            part,
            f"{parameters:,}",
            f"{flops / 1e6:,.1f}",
            f"{flops_kept / 1e6:,.1f}",
            f"{activations / 1024:,.0f}",
            f"{kept / 1024:,.1f}",
        )
    Console().print(table)

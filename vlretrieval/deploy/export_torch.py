"""The model's graphs as torch.export programs, NAME.pt2, which run without this project's code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.export.graph_signature import InputKind

from vlretrieval.deploy.export_graphs import Graph, quiet, traced
from vlretrieval.deploy.export_precision import HALF, worth_storing_in_half


def write_torch(folder: Path, graphs: Sequence[Graph], context_length: int, precision: str) -> None:
    """NAME.pt2 of every graph; fp16 and bf16 store the weights so and compute in float32."""
    for graph in graphs:
        program = traced(graph, context_length)
        if precision in HALF:
            store_half(program, HALF[precision])
        forget_sources(program)
        with quiet():
            torch.export.save(program, folder / f"{graph.name}.pt2")


def forget_sources(program: torch.export.ExportedProgram) -> None:
    """Drop the lines and paths of source code at every node: they tell of the machine, and outweigh a small graph."""
    for node in program.graph_module.graph.nodes:
        for name in ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node"):
            node.meta.pop(name, None)


def store_half(program: torch.export.ExportedProgram, dtype: torch.dtype) -> None:
    """Weights in 16 bits, each with a cast to float32 behind it, in place."""
    graph = program.graph_module.graph
    nodes = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    first_work = next(node for node in graph.nodes if node.op != "placeholder")
    for spec in program.graph_signature.input_specs:
        if spec.kind != InputKind.PARAMETER or spec.target is None:
            continue
        value = program.state_dict[spec.target]
        if not worth_storing_in_half(value):
            continue
        node = nodes[spec.arg.name]
        with graph.inserting_before(first_work):
            cast = graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": torch.float32})
        cast.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(cast, delete_user_cb=lambda user, cast=cast: user is not cast)
        node.meta["val"] = node.meta["val"].to(dtype)
        program.state_dict[spec.target] = nn.Parameter(value.detach().to(dtype), requires_grad=False)
    program.graph_module.recompile()

"""The model's graphs as ONNX files, whole or with 8-bit weights. Needs the extra [onnx]."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vlretrieval.deploy.export_graphs import Graph, quiet, traced
from vlretrieval.deploy.export_precision import HALF, stored

OPSET = 18
LARGEST = 1_800_000_000  # bytes of one file; beyond, the format wants the weights beside it


def check_installed(names: Sequence[str] = ("onnx", "onnxscript", "onnxruntime")) -> None:
    """Refuse before anything is done.

    Raises:
        ValueError: a library is missing; says how to get it.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"format=onnx needs {', '.join(missing)}; run: pip install 'vlretrieval[onnx]'")


def write_onnx(folder: Path, graphs: Sequence[Graph], context_length: int, precision: str) -> None:
    """NAME.onnx of every graph.

    Args:
        precision: fp32; fp16 or bf16 store the weights so and compute in float32; int8 stores 8-bit weights and
            multiplies 8-bit numbers, activations being scaled as they come.
    """
    for graph in graphs:
        path = folder / f"{graph.name}.onnx"
        proto = onnx_model(graph, context_length)
        if precision in HALF:
            store_half(proto, precision)
        save(proto, path)
        if precision == "int8":
            quantize(path)


def onnx_model(graph: Graph, context_length: int) -> Any:
    """The ModelProto of one graph, without the traces of source lines that the exporter leaves at every node."""
    program = traced(graph, context_length)
    with quiet(), torch.no_grad():
        exported = torch.onnx.export(
            program,
            input_names=list(graph.inputs),
            output_names=list(graph.outputs),
            opset_version=OPSET,
            verbose=False,
        )
    assert exported is not None
    proto = exported.model_proto
    for node in proto.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    del proto.graph.value_info[:]
    del proto.graph.metadata_props[:]
    del proto.metadata_props[:]
    return proto


def save(proto: Any, path: Path) -> None:
    import onnx

    onnx.save_model(proto, path, save_as_external_data=proto.ByteSize() > LARGEST, location=f"{path.name}.data")


def quantize(path: Path) -> None:
    """8-bit weights of products and tables, in place.

    Weights are unsigned: signed ones meet, on processors without VNNI, an instruction that saturates at 16 bits, and
    the embeddings then keep a cosine of 0.95 only. A scale for every output column.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    folded = path.with_name(f"{path.name}.folded")
    try:
        fold_constants(path, folded)
        with quiet():
            quantize_dynamic(
                folded,
                path,
                op_types_to_quantize=["MatMul", "Gemm", "Gather"],
                per_channel=True,
                weight_type=QuantType.QUInt8,
                extra_options={"MatMulConstBOnly": True},
            )
    finally:
        folded.unlink(missing_ok=True)


def fold_constants(path: Path, folded: Path) -> None:
    """What follows from weights alone is computed (a part of a merged projection): only weights are quantized."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(folded)
    options.log_severity_level = 3
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def store_half(proto: Any, precision: str) -> None:
    """Weights in 16 bits, each with a cast to float32 behind it, which the runtime does once, as it loads."""
    import onnx
    from onnx import numpy_helper

    kind = onnx.TensorProto.FLOAT16 if precision == "fp16" else onnx.TensorProto.BFLOAT16
    casts = []
    for tensor in proto.graph.initializer:
        if tensor.data_type != onnx.TensorProto.FLOAT:
            continue
        name, values = tensor.name, torch.from_numpy(numpy_helper.to_array(tensor).copy())
        half = stored({name: values}, precision)[name]
        if half.dtype == values.dtype:
            continue
        new = onnx.TensorProto(name=f"{name}_stored", dims=list(half.shape), data_type=kind)
        new.raw_data = half.view(torch.int16).numpy().tobytes()
        tensor.CopyFrom(new)
        casts.append(onnx.helper.make_node("Cast", [new.name], [name], name=f"{name}_cast", to=onnx.TensorProto.FLOAT))
    nodes = list(proto.graph.node)
    del proto.graph.node[:]
    proto.graph.node.extend(casts + nodes)

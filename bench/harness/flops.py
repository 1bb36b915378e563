"""Counts the multiply-adds of an ONNX graph from its shapes. The number is the same for every
system.

A multiply-add of MatMul, Gemm, Conv, ConvTranspose, Einsum and Attention counts as 2 FLOPs. Nothing
else counts, so no schedule can be faster than this number at the machine's peak.
"""

from __future__ import annotations

import tempfile
from math import prod
from pathlib import Path
from types import MappingProxyType

import onnx

from gtco.frontend.dimensions import Shapes, inputs_of, set_sizes

Shape = tuple[int | None, ...]
COUNTED = ("MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "Attention")


def count_flops(path: str | Path, sizes: Shapes = MappingProxyType({})) -> tuple[float, list[str]]:
    """FLOPs of the model at ``path``, and the nodes whose shapes are unknown (the sum does not
    include them). ``sizes``: the sizes of symbolic dimensions, in the form of ``--shape``.
    """
    shapes, model = _shapes(path, sizes)
    total, unknown = 0.0, []
    for node in model.graph.node:
        if node.op_type not in COUNTED:
            continue
        try:
            total += _flops(node, shapes)
        except (KeyError, TypeError, IndexError, NotImplementedError):
            unknown.append(f"{node.op_type} {node.name or node.output[0]}")
    return total, unknown


def _shapes(path: str | Path, sizes: Shapes) -> tuple[dict[str, Shape], onnx.ModelProto]:
    with tempfile.TemporaryDirectory() as folder:  # by path: a model may pass protobuf's 2 GB
        inferred = Path(folder) / "inferred.onnx"
        try:
            if sizes:
                path = _bound(path, sizes, Path(folder) / "bound.onnx")
            onnx.shape_inference.infer_shapes_path(str(path), str(inferred), data_prop=True)
        except onnx.shape_inference.InferenceError:
            inferred = Path(path)
        model = onnx.load(inferred, load_external_data=False)
    graph = model.graph
    shapes: dict[str, Shape] = {i.name: tuple(i.dims) for i in graph.initializer}
    for value in [*graph.input, *graph.value_info, *graph.output]:
        if value.type.tensor_type.HasField("shape"):
            shapes[value.name] = tuple(
                d.dim_value if d.HasField("dim_value") else None
                for d in value.type.tensor_type.shape.dim
            )
    for node in graph.node:
        if node.op_type == "Constant":
            tensor = next((a.t for a in node.attribute if a.name == "value"), None)
            if tensor is not None:
                shapes[node.output[0]] = tuple(tensor.dims)
    return shapes, model


def _bound(path: str | Path, sizes: Shapes, bound: Path) -> Path:
    """The model at ``bound``, its inputs of these sizes. What follows from the sizes, the outputs
    and the shapes in between, is left for inference to find. Weights outside of the file stay
    there: shapes are all that is read of it."""
    model = onnx.load(path, load_external_data=False)
    set_sizes(inputs_of(model.graph), sizes)
    del model.graph.value_info[:]
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    onnx.save(model, bound)
    return bound


def _flops(node: onnx.NodeProto, shapes: dict[str, Shape]) -> float:
    """FLOPs of one node; ``TypeError`` or ``KeyError`` if a shape is unknown."""
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    first, second, out = shapes[node.input[0]], shapes[node.input[1]], shapes[node.output[0]]
    if node.op_type == "MatMul":
        return 2.0 * _product(out) * _product(first[-1:])
    if node.op_type == "Gemm":
        return 2.0 * _product(out) * _product((first[0 if attributes.get("transA") else 1],))
    if node.op_type == "Conv":  # weight [O, I/groups, kernel...]
        return 2.0 * _product(out) * _product(second[1:])
    # weight [I, O/groups, kernel...]: every input element meets it once
    if node.op_type == "ConvTranspose":
        return 2.0 * _product(first) * _product(second[1:])
    if node.op_type == "Einsum":
        return 2.0 * _einsum(attributes["equation"].decode(), first, second)
    if len(first) != 4:  # Attention of opset 23 on [batch, heads, rows, depth]
        raise NotImplementedError("packed heads")
    value = shapes[node.input[2]]
    return 2.0 * _product(first) * _product(second[2:3]) + 2.0 * _product(out) * _product(
        value[2:3]
    )


def _einsum(equation: str, first: Shape, second: Shape) -> int:
    terms = equation.replace(" ", "").split("->")[0].split(",")
    if len(terms) != 2 or "." in equation:
        raise NotImplementedError(equation)
    sizes = dict(zip(terms[0], first, strict=True)) | dict(zip(terms[1], second, strict=True))
    return _product(tuple(sizes.values()))


def _product(shape: Shape) -> int:
    known = [d for d in shape if d is not None]
    if len(known) != len(shape):
        raise TypeError("a dimension is unknown")
    return prod(known)

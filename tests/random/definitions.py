"""Operators that cancel inside, written out by their definitions.

If terms cancel inside an operator, an engine's rounding of them is not a small change of its input
or output. GELU's tail is x (1 - 0.999999), which is good to 4e-7 of x and no better. An
InstanceNormalization of one element is its bias; in ONNX Runtime it is a difference of two products
with 1 / sqrt(epsilon). Written out, these differences are tensors of their own.

ONNX Runtime's Sigmoid is off by up to 6e-8, and 0 below -18. Where a graph keeps only such a tail,
that is all of the output. Written out, it has the accuracy of an exponential and a division.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import pi
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper


def written_out(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without Gelu, Celu, Sigmoid and InstanceNormalization."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        define = DEFINITIONS.get(node.op_type)
        if define is None:
            nodes.append(node)
            continue
        writer = _Writer(node.output[0], model.opset_import[0].version)
        result = define(writer, node)
        writer.nodes.append(helper.make_node("Identity", [result], [node.output[0]]))
        nodes += writer.nodes
        made.graph.initializer.extend(writer.constants)
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    return made


@dataclass
class _Writer:
    """Nodes in a row; the names of their outputs begin with ``prefix``."""

    prefix: str
    opset: int
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)

    def add(self, kind: str, *inputs: str, **attrs: Any) -> str:
        name = f"{self.prefix}_{kind}{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], **attrs))
        return name

    def constant(self, value: float | Sequence[int]) -> str:
        """A constant of one float, or of int64s."""
        name = f"{self.prefix}_constant{len(self.constants)}"
        array = np.asarray(value, np.float32 if isinstance(value, float) else np.int64)
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def mean(self, x: str, axis: int) -> str:
        if self.opset >= 18:
            return self.add("ReduceMean", x, self.constant([axis]))
        return self.add("ReduceMean", x, axes=[axis])


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def _gelu(w: _Writer, node: onnx.NodeProto) -> str:
    (x,) = node.input
    if _attributes(node).get("approximate", b"none") == b"tanh":
        cube = w.add("Mul", w.add("Mul", w.add("Mul", x, x), x), w.constant(0.044715))
        gate = w.add("Tanh", w.add("Mul", w.add("Add", x, cube), w.constant((2 / pi) ** 0.5)))
    else:
        gate = w.add("Erf", w.add("Mul", x, w.constant(0.5**0.5)))
    both = w.add("Add", gate, w.constant(1.0))
    return w.add("Mul", w.add("Mul", x, w.constant(0.5)), both)


def _celu(w: _Writer, node: onnx.NodeProto) -> str:
    """max(0, x) + min(0, alpha (exp(x / alpha) - 1)), where the last difference cancels."""
    (x,) = node.input
    alpha, zero = w.constant(float(_attributes(node).get("alpha", 1.0))), w.constant(0.0)
    grown = w.add("Sub", w.add("Exp", w.add("Div", x, alpha)), w.constant(1.0))
    return w.add("Add", w.add("Max", x, zero), w.add("Min", w.add("Mul", alpha, grown), zero))


def _sigmoid(w: _Writer, node: onnx.NodeProto) -> str:
    (x,) = node.input
    one = w.constant(1.0)
    return w.add("Div", one, w.add("Add", one, w.add("Exp", w.add("Neg", x))))


def _instance_normalization(w: _Writer, node: onnx.NodeProto) -> str:
    x, *affine = node.input
    rows = w.add("Reshape", x, w.constant([0, 0, -1]))
    centred = w.add("Sub", rows, w.mean(rows, 2))
    variance = w.mean(w.add("Mul", centred, centred), 2)
    epsilon = w.constant(float(_attributes(node).get("epsilon", 1e-5)))
    deviation = w.add("Sqrt", w.add("Add", variance, epsilon))
    scale, bias = (w.add("Reshape", v, w.constant([1, -1, 1])) for v in affine)
    scaled = w.add("Mul", w.add("Div", centred, deviation), scale)
    return w.add("Reshape", w.add("Add", scaled, bias), w.add("Shape", x))


DEFINITIONS: dict[str, Callable[[_Writer, onnx.NodeProto], str]] = {
    "Celu": _celu,
    "Gelu": _gelu,
    "InstanceNormalization": _instance_normalization,
    "Sigmoid": _sigmoid,
}

"""Quantized operators with drawn shapes, types, scales and zero points, and ONNX Runtime's results.

ONNX Runtime has no kernels for int8 by uint8. There an int8 operand is shifted by 128 together with
its zero point, which changes no value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import helper, numpy_helper

from tests.few_nodes import by_onnxruntime

Arrays = dict[str, np.ndarray]
MICROSOFT = "com.microsoft"
OPSET = 21


@dataclass
class Case:
    """A node: ``order`` names its inputs ("" for one that is left out), ``inputs`` are those at run
    time. ``steps``: by how much an integer may differ; ``share``: in which part of the elements.
    """

    op: str
    order: Sequence[str]
    inputs: Arrays
    constants: Arrays
    result: str  # the output's dtype
    domain: str = ""
    opset: int = OPSET
    attrs: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    share: float = 0.0

    def node(self, prefix: str = "") -> onnx.NodeProto:
        order = [prefix + name if name else "" for name in self.order]
        output = [f"{prefix}out"]
        node = helper.make_node(self.op, order, output, name=f"{prefix}n", domain=self.domain)
        node.attribute.extend(helper.make_attribute(k, v) for k, v in self.attrs.items())
        return node


def model_of(cases: Sequence[Case], prefixes: Sequence[str] = ("",)) -> onnx.ModelProto:
    """The nodes side by side; all names of a node get its prefix."""
    inputs, outputs, constants, nodes = [], [], [], []
    for case, prefix in zip(cases, prefixes, strict=True):
        nodes.append(case.node(prefix))
        for name, value in case.inputs.items():
            kind = helper.np_dtype_to_tensor_dtype(value.dtype)
            inputs.append(helper.make_tensor_value_info(prefix + name, kind, value.shape))
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(case.result))
        outputs.append(helper.make_tensor_value_info(f"{prefix}out", kind, None))
        constants += [numpy_helper.from_array(v, prefix + k) for k, v in case.constants.items()]
    graph = helper.make_graph(nodes, "quantized", inputs, outputs, constants)
    opsets = [helper.make_opsetid("", cases[0].opset), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def wanted(case: Case) -> np.ndarray:
    """ONNX Runtime's result."""
    shifted = _unsigned(case)
    return by_onnxruntime(model_of([shifted]), shifted.inputs)[0]


# Operands of products, as tensor and zero point.
_OPERANDS = {"a": "az", "x": "xz"}


def _unsigned(case: Case) -> Case:
    """The case with uint8 for an int8 operand beside uint8 weights."""
    weights = {case.constants[k].dtype for k in ("b", "w") if k in case.constants}
    tensors = {**case.inputs, **case.constants}
    first = next((k for k in _OPERANDS if k in tensors), None)
    if first is None or np.dtype(np.uint8) not in weights or tensors[first].dtype != np.int8:
        return case
    inputs, constants = dict(case.inputs), dict(case.constants)
    for place in (first, _OPERANDS[first]):
        kept = inputs if place in inputs else constants
        kept[place] = (kept[place].astype(int) + 128).astype(np.uint8)
    return Case(**{**vars(case), "inputs": inputs, "constants": constants})


def compare(case: Case, got: np.ndarray, want: np.ndarray, label: str) -> tuple[int, int]:
    """Asserts that the result is right. The numbers of elements that differ and of all."""
    assert got.dtype == want.dtype and got.shape == want.shape, label
    if got.dtype.kind == "f":
        scale = np.abs(want.astype(np.float64)).max(initial=1e-30)
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * scale, err_msg=label)
        return 0, got.size
    apart = np.abs(got.astype(np.int64) - want.astype(np.int64))
    assert apart.max(initial=0) <= case.steps, f"{label}: {apart.max()} steps"
    assert (apart > 0).mean() <= case.share + 3 / max(apart.size, 1) * (case.steps > 0), label
    return int((apart > 0).sum()), apart.size


# drawing ------------------------------------------------------------------------------------------
@dataclass
class Drawing:
    rng: np.random.Generator

    def pick(self, options: Sequence[Any]) -> Any:
        return options[self.rng.integers(len(options))]

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def size(self, most: int = 9) -> int:
        return int(self.rng.integers(1, most + 1))

    def bytes(self, dtype: str, *shape: int) -> np.ndarray:
        bounds = ml_dtypes.iinfo(np.dtype(dtype))
        return self.rng.integers(bounds.min, bounds.max + 1, shape).astype(dtype)

    def scale(self, *shape: int, least: float = 1e-3, most: float = 0.05) -> np.ndarray:
        return np.asarray(np.exp(self.rng.uniform(np.log(least), np.log(most), shape)), np.float32)

    def floats(self, *shape: int, spread: float = 1.0) -> np.ndarray:
        return (self.rng.standard_normal(shape) * spread).astype(np.float32)

    def steps(self, *shape: int) -> np.ndarray:
        return self.rng.integers(-9999, 9999, shape).astype(np.int32)

    def parameters(self, case: Case, name: str, dtype: str, n: int = 0, zero: bool = True) -> None:
        """Adds a scale ``NAMEs`` and a zero point ``NAMEz``, both of ``n`` elements if n > 0, or of
        the shape [1], which means the same as none.
        """
        shape = (n,) if n else self.pick([(), (), (1,)])
        case.constants[f"{name}s"] = self.scale(*shape)
        if zero:
            case.constants[f"{name}z"] = self.bytes(dtype, *shape)

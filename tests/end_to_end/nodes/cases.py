"""Which of ONNX's backend node tests are run, and as which model.

The tests pass everything as a graph input, also shapes and axes. In a model these are constants
(gtco compiles static shapes), so they become initializers with the test's own values, and so do
tensors of 4 and 2 bits. Other data stays an input.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

# The operators that 359 public graphs of the ViT family use, their near relations, and those of
# quantized models.
OPERATORS = frozenset(
    """
    Abs Acos Add And ArgMax ArgMin Asin Atan Attention AveragePool BatchNormalization Cast Ceil Celu
    Clip Col2Im Concat Constant ConstantOfShape Conv ConvInteger ConvTranspose Cos CumSum DFT
    DeformConv DepthToSpace DequantizeLinear Div Dropout DynamicQuantizeLinear Einsum Elu Equal Erf
    Exp Expand EyeLike Flatten Floor Gather GatherElements GatherND Gelu Gemm GlobalAveragePool
    GlobalMaxPool Greater GreaterOrEqual GridSample GroupNormalization HardSigmoid HardSwish
    Identity If InstanceNormalization IsInf IsNaN LayerNormalization LeakyRelu Less LessOrEqual Log
    LogSoftmax Loop MatMul MatMulInteger Max MaxPool Mean Min Mish Mod Mul Neg Not OneHot Or PRelu
    Pad Pow QLinearConv QLinearMatMul QuantizeLinear RMSNormalization Range Reciprocal ReduceL1
    ReduceL2 ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Resize
    RotaryEmbedding Round STFT Scan ScatterElements ScatterND Selu Shape Sigmoid Sign Sin Size Slice
    Softmax Softplus Softsign SpaceToDepth Split Sqrt Squeeze Sub Sum Swish Tan Tanh Tile TopK
    Transpose Trilu Unsqueeze Upsample Where Xor
    """.split()
)

# Inputs (by position) that are constants in a model: shapes, axes and fill values.
PARAMETERS = {
    "Col2Im": (1, 2),
    "ConstantOfShape": (0,),
    "CumSum": (1,),
    "DFT": (1, 2),
    "Expand": (1,),
    "If": (0,),
    "Loop": (0, 1),
    "OneHot": (1, 2),
    "Pad": (1, 2, 3),
    "Range": (0, 1, 2),
    **dict.fromkeys(
        "ReduceL1 ReduceL2 ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum "
        "ReduceSumSquare".split(),
        (1,),
    ),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "STFT": (1, 3),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Trilu": (1,),
    "Unsqueeze": (1,),
    "Upsample": (1,),
}

# Types that only constants may have.
NARROW = ("int2", "int4", "uint2", "uint4")

# More tests in one model save little: each still costs its own kernels.
GROUP = 24


@dataclass(frozen=True)
class NodeCase:
    """One test: the model, its inputs and the expected outputs, with the test's own tolerances."""

    name: str
    model: onnx.ModelProto
    inputs: dict[str, np.ndarray]
    outputs: list[np.ndarray]
    rtol: float
    atol: float


@cache
def cases() -> dict[str, NodeCase]:
    """By name, every test of an operator in the table, and the same tests with the operator written
    out as ONNX defines it (``..._expanded``).
    """
    from onnx.backend.test.loader import load_node_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tests = load_node_model_tests()
    names = {t.name for t in tests if {n.op_type for n in t.model.graph.node} <= OPERATORS}
    wanted = {n for n in names if "_expanded" not in n}
    return {t.name: _case(t) for t in tests if t.name.partition("_expanded")[0] in wanted}


def kinds() -> list[str]:
    """All tests, but of written-out operators only the first of each kind: of the same nodes in the
    same order, on inputs of the same types. The others have other sizes. An attention is written
    out into 80 nodes, and there are a hundred of them.
    """
    seen, found = set(), []
    for name, case in sorted(cases().items()):
        nodes = tuple(node.op_type for node in case.model.graph.node)
        kind = nodes, tuple(str(getattr(v, "dtype", "")) for v in case.inputs.values())
        if "_expanded" not in name or kind not in seen:
            found.append(name)
            seen.add(kind)
    return found


def groups(names: Collection[str], alone: Collection[str]) -> list[list[str]]:
    """These tests in groups that fit into one model: of one version, at most :data:`GROUP` of them.
    Each test of ``alone`` is a group.
    """
    by_version: dict[object, list[str]] = {}
    for name in sorted(names):
        model = cases()[name].model
        version = (model.ir_version, str(model.opset_import))
        by_version.setdefault(name if name in alone else version, []).append(name)
    return [
        names[start : start + GROUP]
        for names in by_version.values()
        for start in range(0, len(names), GROUP)
    ]


def _case(test: Any) -> NodeCase:
    (inputs, outputs), *_ = test.data_sets
    model = onnx.ModelProto()
    model.CopyFrom(test.model)
    given = zip((v.name for v in model.graph.input), map(_array, inputs), strict=True)
    values = dict(given)
    fixed = {
        node.input[position]
        for node in model.graph.node
        for position in PARAMETERS.get(node.op_type, ())
        if position < len(node.input)
    }
    fixed |= {name for name, value in values.items() if str(getattr(value, 'dtype', '')) in NARROW}
    for name in sorted(fixed & values.keys()):
        model.graph.initializer.append(numpy_helper.from_array(values.pop(name), name))
    kept = [v for v in model.graph.input if v.name in values]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    return NodeCase(test.name, model, values, list(map(_array, outputs)), test.rtol, test.atol)


def _array(value: Any) -> Any:
    """A tensor becomes a numpy array; a sequence is unchanged."""
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    return np.asarray(value) if isinstance(value, np.generic) else value

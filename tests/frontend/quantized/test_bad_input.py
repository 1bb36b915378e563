"""Quantized nodes that are wrong: the error names the node, says what is wrong, and what to do."""

from __future__ import annotations

import math
import re
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from gtco.frontend.onnx import load_onnx
from gtco.graph.lower.walk import lower
from gtco.support.errors import GtcoError, InternalError, ModelError, UnsupportedError
from tests.frontend.quantized.draws import DRAWS
from tests.frontend.quantized.nodes import MICROSOFT, Case, Drawing, model_of
from tests.frontend.test_refusals import FOREIGN
from tests.kernels import fresh_seed

# The scales of each operator that is drawn.
SCALES = {
    "qlinear_matmul": ("as", "bs", "ys"),
    "qlinear_conv": ("xs", "ws", "ys"),
    "qgemm": ("as", "bs", "ys"),
    "matmul_integer_to_float": ("as", "bs"),
    "dynamic_quantize_matmul": ("bs",),
    "qlinear_add": ("xs", "ys", "zs"),
    "qlinear_mul": ("xs", "ys", "zs"),
    "qlinear_sigmoid": ("xs", "ys"),
    "qlinear_leaky_relu": ("xs", "ys"),
    "qlinear_global_average_pool": ("xs", "ys"),
    "qlinear_average_pool": ("xs", "ys"),
    "qlinear_softmax": ("xs", "ys"),
    "qlinear_concat": ("ys", "x0s", "x1s"),
    "qlinear_where": ("xs", "ys", "zs"),
    "quantize_linear": ("s",),
}


def drawn(name: str, seed: int = 1) -> Case:
    return DRAWS[name](Drawing(np.random.default_rng(seed)))


def refusal(case: Case) -> str:
    with pytest.raises(GtcoError) as caught:
        load_onnx(model_of([case]), simplify=False)
    said = str(caught.value)
    assert not FOREIGN.search(said), said
    assert "node 'n'" in said, said
    return said


@pytest.mark.parametrize("value", [0.0, -0.5, math.nan, math.inf])
@pytest.mark.parametrize("name", SCALES)
def test_scales_that_are_no_positive_numbers(name: str, value: float) -> None:
    for scale in SCALES[name]:
        seed = next(s for s in range(99) if scale in drawn(name, s).order)
        case = drawn(name, seed)
        case.constants[scale] = case.constants[scale].copy()
        case.constants[scale].reshape(-1)[-1] = value
        said = refusal(case)
        assert f"its scale '{scale}' is {value:g}" in said
        assert "have to be positive and finite. Quantize the model again" in said


@pytest.mark.parametrize("scale", ["xs", "ys"])
def test_scales_of_a_mean_are_positive_numbers_too(scale: str) -> None:
    """It is not drawn: ONNX Runtime has no kernel for it."""
    case = Case("QLinearReduceMean", ["x", "xs", "xz", "ys", "yz"], {}, {}, "uint8", MICROSOFT)
    case.inputs["x"] = np.zeros((2, 3), np.uint8)
    case.constants = {name: np.float32(name != scale) for name in ("xs", "ys")}
    case.constants |= {name: np.uint8(3) for name in ("xz", "yz")}
    case.attrs = {"axes": [1], "keepdims": 1}
    assert f"its scale '{scale}' is 0" in refusal(case)


def test_scales_of_blocks_may_be_zero_or_negative_but_no_nan() -> None:
    """ONNX Runtime's quantizer of weights writes both."""
    case = drawn("matmul_nbits")
    for value in (0.0, -0.5):
        case.constants["s"].flat[0] = value
        load_onnx(model_of([case]), simplify=False)
    case.constants["s"].flat[1] = math.nan
    assert "its scale 's' is nan at place 1, and scales have to be finite" in refusal(case)


def test_a_large_scale_that_is_stored_apart_is_checked_too() -> None:
    """More than 32 KB of floats are taken out of the message before it is read."""
    x, scale = np.zeros((4, 9000), np.int8), np.ones(9000, np.float32)
    scale[77] = 0
    case = Case("DequantizeLinear", ["x", "s"], {"x": x}, {"s": scale}, "float32")
    case.attrs["axis"] = 1
    assert "its scale 's' is 0 at place 77" in refusal(case)


def test_a_scale_in_a_constant_node_is_checked_too() -> None:
    text = """<ir_version: 9, opset_import: ["" : 17]> g (float[3] x) => (uint8[3] y) {
        s = Constant <value_float = -1.0> () z = Constant <value = uint8 {3}> ()
        [n] y = QuantizeLinear(x, s, z)
    }"""
    with pytest.raises(ModelError, match=r"its scale 's' is -1, and"):
        load_onnx(onnx.parser.parse_model(text))


def changed(name: str, seed: int = 1, **changes: Any) -> Case:
    """A drawn case; an array replaces the input or constant of that name, anything else is an
    attribute.
    """
    case = drawn(name, seed)
    for key, value in changes.items():
        if not isinstance(value, np.ndarray):
            case.attrs[key] = value
        elif key in case.inputs:
            case.inputs[key] = value
        else:
            case.constants[key] = value
    return case


def with_bias() -> int:
    return next(seed for seed in range(99) if "bias" in drawn("qlinear_conv", seed).order)


U8, I8, F = np.uint8, np.int8, np.float32
PACKED = np.zeros((3, 2, 8), U8)


def nbits(**changes: Any) -> Case:
    """Weights of 4 bits, [32, 3] in blocks of 16."""
    case = Case(
        "MatMulNBits", ["a", "b", "s", "z", "g", "bias"], {"a": np.zeros((5, 32), F)}, {},
        "float32", MICROSOFT, attrs={"K": 32, "N": 3, "bits": 4, "block_size": 16},
    )  # fmt: skip
    case.constants = {"b": PACKED, "s": np.ones((3, 2), F), "z": np.zeros((3, 1), U8)}
    for key, value in changes.items():
        if key == "a":
            case.inputs[key] = value
        elif isinstance(value, np.ndarray):
            case.constants[key] = value
        else:
            case.attrs[key] = value
    case.order = [name if name in {"a", *case.constants} else "" for name in case.order]
    return case


def table(b: np.ndarray, scales: np.ndarray, **attrs: Any) -> Case:
    """Rows of a table of 4 bits with scales of blocks of 16."""
    given = {"ids": np.zeros(2, np.int64)}
    case = Case("GatherBlockQuantized", ["b", "ids", "s"], given, {}, "float32", MICROSOFT)
    case.attrs = {"bits": 4, "block_size": 16, **attrs}
    case.constants = {"b": b, "s": scales}
    return case


def linear(op: str, x: np.ndarray, scale: np.ndarray, zero: np.ndarray, **attrs: Any) -> Case:
    constants = {"s": scale, "z": zero}
    case = Case(op, ["x", "s", "z"], {"x": x}, constants, "float32", attrs=attrs)
    case.result = "float32" if op == "DequantizeLinear" else str(zero.dtype)
    return case


X = np.zeros((4, 6), F)
WRONG: dict[str, tuple[Case, str]] = {
    "zero point of another type": (
        changed("qlinear_add", yz=np.array(3, np.int16)),
        r"its zero point 'yz' is int16 and its tensor u?int8: they have to be equal",
    ),
    "too many scales": (
        changed("qlinear_mul", xs=np.ones(3, F)),
        r"its 'xs' has the shape \[3\]: the elements have to be 1",
    ),
    "scales for another number of columns": (
        changed("qlinear_matmul", bs=np.ones(41, F)),
        r"its 'bs' has the shape \[41\]: the elements have to be 1 or \d+",
    ),
    "a bias of floats": (
        changed("qlinear_conv", with_bias(), bias=np.ones(1, F)),
        r"its bias 'bias' has to be \d+ numbers of int32",
    ),
    "a tensor of floats": (
        changed("qlinear_sigmoid", x=np.zeros((2, 3), F)),
        r"its input 'x' is float32, and has to be int8 or uint8",
    ),
    "a scale of integers": (
        changed("qlinear_leaky_relu", xs=np.array(3, np.int32)),
        r"its scale 'xs' is int32, and has to be a float32",
    ),
    "an axis that is none": (
        changed("qlinear_softmax", axis=7),
        r"its axis 7 is none of the \d of its input",
    ),
    "3 bits": (nbits(bits=3), r"its weights have 3 bits, and gtco reads 2, 4, 8"),
    "a block of 24": (nbits(block_size=24), r"the block a power of two of 16 or more"),
    "k of another size": (
        nbits(a=np.zeros((5, 33), F)),
        r"its input has the shape \[5, 33\], whose last axis has to be 32",
    ),
    "packed weights of another size": (
        nbits(b=np.zeros((3, 2, 9), U8)),
        r"its weights 'b' are uint8\[3, 2, 9\], and have to be uint8\[3, 2, 8\]",
    ),
    "scales of another size": (
        nbits(s=np.ones((3, 3), F)),
        r"its scales 's' are float32\[3, 3\], and have to be float32\[3, 2\]",
    ),
    "zero points of another size": (
        nbits(z=np.zeros((3, 2), U8)),
        r"its zero points 'z' are uint8\[3, 2\], and have to be uint8\[3, 1\]",
    ),
    "an order of its own": (
        nbits(g=np.zeros(32, np.int32)),
        r"its weights are in an order of their own \(g_idx 'g'\).*quantize the model again",
    ),
    "packed for one machine": (nbits(weight_prepacked=1), r"packed for one machine"),
    "a bias of another size": (
        nbits(bias=np.ones(4, F)),
        r"its bias 'bias' has the shape \[4\], not \[3\]",
    ),
    "a table of 4 or of 8 columns": (
        table(np.zeros((3, 4), U8), np.ones((3, 1), F)),
        r"the shape \[3, 4\] and its scales 's' have \[3, 1\]: from these gtco cannot tell how",
    ),
    "scales that fit no table": (
        table(np.zeros((3, 16), U8), np.ones((3, 3), F)),
        r"\[3, 16\] and its scales 's' have \[3, 3\]: from these gtco cannot tell how",
    ),
    "blocks that do not divide": (
        linear("QuantizeLinear", X, np.ones((4, 4), F), np.zeros((4, 4), U8), block_size=4),
        r"its blocks of 4 do not divide its input \[4, 6\] along axis 1: the scale has the shape "
        r"\[4, 4\] and has to have \[4, 2\]",
    ),
    "blocks of another rank": (
        linear("DequantizeLinear", X.astype(I8), np.ones(2, F), np.zeros(2, I8), block_size=3),
        r"its blocks of 3 do not divide",
    ),
    "a negative block": (
        linear("DequantizeLinear", X.astype(I8), np.ones((4, 2), F), np.zeros((4, 2), I8),
               block_size=-3),
        r"blocks of 1 or more|negative",
    ),
    "scales for no axis": (
        linear("QuantizeLinear", X, np.ones(5, F), np.zeros(5, U8), axis=1),
        r"its scale has the shape \[5\]: give one scale, or the 6 of axis 1",
    ),
    "zero points for other channels": (
        linear("DequantizeLinear", X.astype(I8), np.ones(6, F), np.zeros(4, I8), axis=1),
        r"its scale has the shape \[6\] and its zero point \[4\]",
    ),
    "an axis too far": (
        linear("QuantizeLinear", X, np.ones(6, F), np.zeros(6, U8), axis=2),
        r"its axis 2 is none of the 2 of its input",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit(name: str) -> None:
    case, said = WRONG[name]
    found = refusal(case)
    assert re.search(said, found), found


def test_weights_of_run_time() -> None:
    case = nbits()
    case.inputs["b"] = case.constants.pop("b")
    assert "its input 'b' is known only at run time: make it a constant" in refusal(case)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
def test_floats_of_few_bits_are_refused_with_what_to_do(dtype: str) -> None:
    w = np.zeros((4, 6), dtype=getattr(ml_dtypes, dtype))
    node = helper.make_node("DequantizeLinear", ["w", "s"], ["f"], name="n")
    add = helper.make_node("Add", ["x", "f"], ["y"])
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (4, 6)) for name in "xy"]
    weights = [numpy_helper.from_array(w, "w"), numpy_helper.from_array(np.float32(1), "s")]
    graph = helper.make_graph([node, add], "g", given[:1], given[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])
    with pytest.raises(UnsupportedError, match=r"node 'n'.*type float[84].*model to int8 instead"):
        load_onnx(model)


def test_a_result_of_int4_is_refused() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]> g (float[3] x) => (int4[3] y)
        <float s = {0.5}> { y = QuantizeLinear <output_dtype = 22> (x, s) }"""
    with pytest.raises(UnsupportedError, match=r"output 'y' has elements of type int4.*cast it to"):
        load_onnx(onnx.parser.parse_model(text))


@pytest.mark.parametrize(
    "count", [25, pytest.param(1000, marks=pytest.mark.scheduled)], ids=["some", "many"]
)
@pytest.mark.parametrize("name", DRAWS)
def test_drawn_nodes_with_one_part_replaced(
    name: str, count: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """A tensor of another shape or type, an input left out, another attribute: the node is
    accepted, or refused in words that name it.
    """
    start, refused = fresh_seed(), 0
    for seed in range(start, start + count):
        d = Drawing(np.random.default_rng(seed))
        case = spoilt(d, DRAWS[name](d))
        try:
            lower(load_onnx(model_of([case]), simplify=False))
        except InternalError:
            raise
        except GtcoError as error:
            refused += 1
            said = str(error)
            assert not FOREIGN.search(said), f"{seed}: {said}"
            assert "node 'n" in said or "'out'" in said or "checker" in said, f"{seed}: {said}"
    assert refused > count / 5
    assert capfd.readouterr() == ("", "")


def spoilt(d: Drawing, case: Case) -> Case:
    names = [*case.inputs, *case.constants]
    part = d.pick([*names, "order", *case.attrs] if case.attrs else [*names, "order"])
    if part in names:
        kept = case.inputs if part in case.inputs else case.constants
        dtype = d.pick(["float32", "int8", "uint8", "int32", "int64", "bool", "float16"])
        shape = d.pick([(), (3,), (2, 3), (2, 3, 4), kept[part].shape])
        kept[part] = np.ones(shape, dtype)
    elif part == "order":
        order = list(case.order)
        order[int(d.rng.integers(len(order)))] = ""
        case.order = order if d.chance(0.5) else [name for name in order if name]
    else:
        case.attrs[part] = d.pick([-3, 0, 1, 7, 10**9, [1], [-1, 2, 5], 0.5, "nonsense"])
    return case

"""From a random number to a case of one operator; ``DRAWS`` has a function for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

import numpy as np

from tests.frontend.quantized.nodes import MICROSOFT, Case, Drawing

BYTES = ("uint8", "int8")


def _operands(d: Drawing, case: Case, k: int, n: int, signs: bool = True) -> None:
    """a [m, k] or a batch of such, and constant b [k, n] with one or n scales."""
    kind = d.pick(BYTES)
    weights = d.pick(BYTES) if signs or kind == "int8" else "int8"
    lead = d.pick([(), (), (d.size(3),), (2, d.size(3))])
    case.inputs["a"] = d.bytes(kind, *lead, d.size(), k)
    d.parameters(case, "a", kind)
    case.constants["b"] = d.bytes(weights, k, n)
    d.parameters(case, "b", weights, d.pick([0, n]))


def qlinear_matmul(d: Drawing) -> Case:
    case = Case("QLinearMatMul", "a as az b bs bz ys yz".split(), {}, {}, "uint8")
    k = d.size(70)
    _operands(d, case, k, d.size(20))
    case.result = str(case.inputs["a"].dtype)
    d.parameters(case, "y", case.result)
    case.constants["ys"] = _spread(d, case, "a", "b", k)
    if d.chance(0.2):  # two computed tensors, as in attention
        case.inputs["b"] = case.constants.pop("b")
        case.constants["bs"], case.constants["bz"] = d.scale(), d.bytes(case.inputs["b"].dtype.name)
        _same_signs(d, case)
    return case


def _same_signs(d: Drawing, case: Case) -> None:
    """Gives b a's type: ONNX Runtime has no other for computed tensors."""
    kind = case.inputs["a"].dtype.name
    case.inputs["b"] = d.bytes(kind, *case.inputs["b"].shape)
    case.constants["bz"] = d.bytes(kind)


def _spread(d: Drawing, case: Case, a: str, b: str, k: int) -> np.ndarray:
    """A scale with which the results take up much of the 8 bits, and often leave them."""
    scales = case.constants[f"{a}s"].max() * case.constants[f"{b}s"].max()
    size = scales * 80.0 * 80.0 * k**0.5 / d.pick([30.0, 60.0, 200.0])
    return np.asarray(size, np.float32)


def matmul_integer(d: Drawing) -> Case:
    case = Case("MatMulInteger", "a b az bz".split(), {}, {}, "int32")
    _operands(d, case, d.size(70), d.size(20))
    for name in ("as", "bs"):
        del case.constants[name]
    return case


def qlinear_conv(d: Drawing) -> Case:
    order = "x xs xz w ws wz ys yz".split() + (["bias"] if d.chance(0.7) else [])
    case = Case("QLinearConv", order, {}, {}, "uint8")
    depth, outputs = _convolution(d, case)
    weights = case.constants["w"].dtype.name
    d.parameters(case, "w", weights, d.pick([0, outputs]))
    if case.constants["ws"].size > 1:  # ONNX Runtime wants one value in all of them
        case.constants["wz"] = np.full(outputs, d.bytes(weights), weights)
    d.parameters(case, "x", case.inputs["x"].dtype.name)
    case.result = case.inputs["x"].dtype.name
    d.parameters(case, "y", case.result)
    case.constants["ys"] = _spread(d, case, "x", "w", depth)
    if "bias" in order:
        case.constants["bias"] = d.steps(outputs)
    if d.chance(0.2) and case.inputs["x"].ndim == 4:
        case.domain, case.attrs["channels_last"] = MICROSOFT, 1
        case.inputs["x"] = np.ascontiguousarray(np.moveaxis(case.inputs["x"], 1, -1))
    return case


def conv_integer(d: Drawing) -> Case:
    case = Case("ConvInteger", "x w xz wz".split(), {}, {}, "int32")
    _convolution(d, case)
    if d.chance(0.5):  # ONNX Runtime has kernels for uint8 alone
        case.inputs["x"] = d.bytes("uint8", *case.inputs["x"].shape)
    for name, tensor in (("xz", case.inputs["x"]), ("wz", case.constants["w"])):
        case.constants[name] = d.bytes(tensor.dtype.name)
    return case


def _convolution(d: Drawing, case: Case) -> tuple[int, int]:
    """x and constant w; the terms of a sum and the number of output channels."""
    kind, weights = d.pick(BYTES), d.pick(BYTES)
    space = d.pick([1, 2, 2, 2, 3]) if case.op == "QLinearConv" else d.pick([1, 2, 2])
    groups = d.pick([1, 1, 2, 3])
    inner, outputs = d.size(6), groups * d.size(6)
    kernel = [d.size(3) for _ in range(space)]
    sizes = [k * 2 + d.size(8) for k in kernel]
    case.inputs["x"] = d.bytes(kind, d.size(2), groups * inner, *sizes)
    case.constants["w"] = d.bytes(weights, outputs, inner, *kernel)
    case.attrs |= {"group": groups, "strides": [d.size(2) for _ in kernel]}
    if d.chance(0.3):
        case.attrs["auto_pad"] = d.pick(["SAME_UPPER", "SAME_LOWER", "VALID"])
    else:
        case.attrs["pads"] = [int(d.rng.integers(0, k)) for k in (*kernel, *kernel)]
        case.attrs["dilations"] = [d.size(2) for _ in kernel]
    return inner * prod(kernel), outputs


def qgemm(d: Drawing) -> Case:
    quantizes = d.chance(0.6)
    bias = "c" if d.chance(0.6) else ""
    order = ["a", "as", "az", "b", "bs", "bz", bias, *(["ys", "yz"] if quantizes else [])]
    case = Case("QGemm", order, {}, {}, "float32", MICROSOFT)
    m, k, n = d.size(), d.size(70), d.size(20)
    kind = "uint8" if d.chance(0.5) else "int8"
    weights = d.pick(BYTES) if kind == "uint8" else "int8"
    turns = [int(d.chance(0.5)) for _ in range(2)]
    case.attrs |= {"transA": turns[0], "transB": turns[1], "alpha": d.pick([1.0, 0.5])}
    case.inputs["a"] = d.bytes(kind, *((k, m) if turns[0] else (m, k)))
    case.constants["b"] = d.bytes(weights, *((n, k) if turns[1] else (k, n)))
    d.parameters(case, "a", kind)
    d.parameters(case, "b", weights, d.pick([0, n]))
    if bias:
        case.constants["c"] = d.steps(*d.pick([(n,), (1, n), (m, n)]))
    if quantizes:
        d.parameters(case, "y", kind)
        case.constants["ys"] = _spread(d, case, "a", "b", k)
        case.result = kind
    return case


def matmul_integer_to_float(d: Drawing) -> Case:
    order = ["a", "b", "as", "bs", "az", "bz", *(["bias"] if d.chance(0.5) else [])]
    case = Case("MatMulIntegerToFloat", order, {}, {}, "float32", MICROSOFT)
    n = d.size(20)
    _operands(d, case, d.size(70), n)
    if "bias" in order:
        case.constants["bias"] = d.floats(n)
    return case


def dynamic_quantize_matmul(d: Drawing) -> Case:
    order = ["a", "b", "bs", *d.pick([["bz"], ["bz", "bias"], ["", "bias"], []])]
    case = Case("DynamicQuantizeMatMul", order, {}, {}, "float32", MICROSOFT)
    n = d.size(20)
    _operands(d, case, d.size(70), n)
    case.inputs["a"] = d.floats(*case.inputs["a"].shape)
    if "bias" in order:
        case.constants["bias"] = d.floats(n)
    case.constants = {k: v for k, v in case.constants.items() if k in order}
    return case


def matmul_nbits(d: Drawing) -> Case:
    bits, block = d.pick([4, 4, 8, 2]), d.pick([16, 32, 64])
    blocks, n = d.size(4), d.size(20)
    k = blocks * block - (0 if d.chance(0.6) else int(d.rng.integers(1, block)))
    zeros, bias = d.pick(["", "z"]), d.chance(0.5)
    order = ["a", "b", "s", zeros, "", "bias"] if bias else ["a", "b", "s", zeros]
    case = Case("MatMulNBits", order, {"a": d.floats(2, d.size(), k)}, {}, "float32", MICROSOFT)
    case.attrs = {"K": k, "N": n, "bits": bits, "block_size": block, "accuracy_level": 1}
    case.constants["b"] = d.bytes("uint8", n, blocks, block * bits // 8)
    case.constants["s"] = d.scale(n, blocks)
    if d.chance(0.3):
        case.constants["s"].flat[0] = 0.0  # a block of zeros, as quantizers write it
    if zeros:
        case.constants["z"] = d.bytes("uint8", n, -(-blocks * bits // 8))
        if bits == 4 and d.chance(0.3):
            case.constants["z"] = d.rng.uniform(0, 15, (n, blocks)).astype(np.float32)
    if bias:
        case.constants["bias"] = d.floats(n)
    return case


def gather_block_quantized(d: Drawing) -> Case:
    bits, block = d.pick([4, 4, 8, 2]), d.pick([16, 32])
    rows, columns = d.size(), 8 // bits * (d.size(40) + block // 2)
    order = ["b", "ids", "s", *d.pick([["z"], []])]
    blocks = -(-columns // block)
    case = Case("GatherBlockQuantized", order, {}, {}, "float32", MICROSOFT)
    case.attrs = {"bits": bits, "block_size": block, "quantize_axis": d.pick([1, -1])}
    shape, zeros = (rows, columns), (rows, blocks)
    if bits == 4 and d.chance(0.5):
        kind = d.pick(["int4", "uint4"])
    else:
        kind, shape = "uint8", (rows, columns * bits // 8)
        zeros = (rows, -(-blocks * bits // 8))
    case.constants["b"] = d.bytes(kind, *shape)
    case.constants["s"] = d.scale(rows, blocks)
    if "z" in order:
        case.constants["z"] = d.bytes(kind, *zeros)
    case.inputs["ids"] = d.rng.integers(-rows, rows, (2, d.size())).astype(np.int64)
    return case


def qattention(d: Drawing) -> Case:
    """With masks of lengths or of flags, with a state or causal."""
    heads, size, batch, rows = d.size(3), d.size(8), d.size(3), d.size(9)
    width, k = heads * size, d.size(20)
    order = ["a", "b", "bias", "as", "bs", d.pick(["", "mask"]), "az", "bz"]
    case = Case("QAttention", order, {}, {}, "float32", MICROSOFT)
    case.attrs = {"num_heads": heads, "unidirectional": d.pick([0, 0, 1])}
    kind = d.pick(BYTES)
    weights = d.pick(BYTES)
    case.inputs["a"] = d.bytes(kind, batch, rows, k)
    case.constants["b"] = d.bytes(weights, k, 3 * width)
    d.parameters(case, "a", kind)
    d.parameters(case, "b", weights, d.pick([0, 3 * width]))
    for name in ("as", "az"):
        case.constants[name] = case.constants[name].reshape(())
    case.constants["bs"] = case.constants["bs"] / np.float32(40)
    case.constants["bias"] = d.floats(3 * width)
    if "mask" in order:
        lengths = d.rng.integers(1, rows + 1, batch)
        flags = np.arange(rows) < lengths[:, None]
        case.inputs["mask"] = (lengths if d.chance(0.5) else flags).astype(np.int32)
    return case


# element-wise operators and pooling ---------------------------------------------------------------
def _unary(d: Drawing, op: str, rank: int | None = None) -> Case:
    kind = d.pick(BYTES)
    case = Case(op, "x xs xz ys yz".split(), {}, {}, kind, MICROSOFT, steps=1, share=0.02)
    case.inputs["x"] = d.bytes(kind, *(d.size() for _ in range(rank or d.size(4))))
    d.parameters(case, "x", kind)
    d.parameters(case, "y", kind)
    for name in ("xs", "xz", "ys", "yz"):  # ONNX Runtime's kernels want scalars
        case.constants[name] = case.constants[name].reshape(())
    return case


def _binary(d: Drawing, op: str) -> Case:
    kind = d.pick(BYTES)
    case = Case(op, "x xs xz y ys yz zs zz".split(), {}, {}, kind, MICROSOFT, steps=1, share=0.02)
    shape = [d.size() for _ in range(d.size(4))]
    other = [n if d.chance(0.7) else 1 for n in shape][d.size(len(shape)) - 1 :]
    case.inputs["x"] = d.bytes(kind, *shape)
    (case.inputs if d.chance(0.5) else case.constants)["y"] = d.bytes(kind, *other)
    for name in "xyz":
        d.parameters(case, name, kind)
        for end in "sz":
            case.constants[name + end] = case.constants[name + end].reshape(())
    return case


def qlinear_add(d: Drawing) -> Case:
    return _binary(d, "QLinearAdd")


def qlinear_mul(d: Drawing) -> Case:
    return _binary(d, "QLinearMul")


def qlinear_sigmoid(d: Drawing) -> Case:
    case = _unary(d, "QLinearSigmoid")
    case.constants["ys"] = np.asarray(1 / d.pick([255, 256]), np.float32)
    return case


def qlinear_leaky_relu(d: Drawing) -> Case:
    case = _unary(d, "QLinearLeakyRelu")
    case.attrs["alpha"] = d.pick([0.01, 0.1, 0.5])
    return case


def qlinear_global_average_pool(d: Drawing) -> Case:
    case = _unary(d, "QLinearGlobalAveragePool", 4)
    case.attrs["channels_last"] = int(d.chance(0.5))
    return case


def qlinear_average_pool(d: Drawing) -> Case:
    case = _unary(d, "QLinearAveragePool", 4)
    last = int(d.chance(0.3))
    space = case.inputs["x"].shape[1:3] if last else case.inputs["x"].shape[2:]
    kernel = [d.size(min(n, 3)) for n in space]
    case.attrs |= {"kernel_shape": kernel, "channels_last": last}
    case.attrs |= {"strides": [d.size(2) for _ in kernel], "count_include_pad": int(d.chance(0.5))}
    case.attrs["pads"] = [int(d.rng.integers(0, k)) for k in (*kernel, *kernel)]
    case.attrs["ceil_mode"] = int(d.chance(0.5))
    return case


def qlinear_softmax(d: Drawing) -> Case:
    """With the scale that ONNX Runtime's quantizer gives probabilities, 1/256, for which its table
    of exponentials means the definition.
    """
    case = _unary(d, "QLinearSoftmax")
    rank = case.inputs["x"].ndim
    case.attrs |= {"axis": int(d.rng.integers(-rank, rank)), "opset": d.pick([11, 13])}
    case.constants["ys"] = np.asarray(1 / 256, np.float32)
    case.constants["yz"] = np.asarray(np.iinfo(case.result).min, case.result)
    return case


def qlinear_concat(d: Drawing) -> Case:
    kind = d.pick(BYTES)
    case = Case("QLinearConcat", [], {}, {}, kind, MICROSOFT)
    shape = [d.size() for _ in range(d.size(4))]
    axis = int(d.rng.integers(len(shape)))
    order = ["ys", "yz"]
    d.parameters(case, "y", kind)
    for place in range(d.size(3)):
        shape[axis] = d.size()
        case.inputs[f"x{place}"] = d.bytes(kind, *shape)
        d.parameters(case, f"x{place}", kind)
        same = d.chance(0.3)
        order += [f"x{place}", *(["ys", "yz"] if same else [f"x{place}s", f"x{place}z"])]
    case.order, case.attrs = order, {"axis": axis}
    for name, value in case.constants.items():
        case.constants[name] = value.reshape(())
    return case


def qlinear_where(d: Drawing) -> Case:
    case = _binary(d, "QLinearWhere")
    case.order = ["c", *case.order]
    case.inputs["c"] = d.rng.random(case.inputs["x"].shape) < 0.5
    return case


# quantizing and dequantizing ----------------------------------------------------------------------
def _shapes(d: Drawing, blocks: bool) -> tuple[list[int], list[int], dict[str, int]]:
    """The shape of a tensor, that of its scales, and the attributes."""
    shape = [d.size() for _ in range(d.size(4))]
    axis = int(d.rng.integers(-len(shape), len(shape)))
    if blocks:
        if len(shape) == 1:  # ONNX Runtime takes one scale of one axis for that of the tensor
            shape.insert(0, 2)
        block = d.size(min(4, shape[axis]))
        scales = list(shape)
        scales[axis] = -(-shape[axis] // block)
        return shape, scales, {"axis": axis, "block_size": block}
    one = d.chance(0.4)
    return shape, [] if one else [shape[axis]], {} if one else {"axis": axis}


def quantize_linear(d: Drawing) -> Case:
    kind = d.pick(["uint8", "int8", "uint16", "int16"])
    own = d.chance(0.3)
    shape, scales, attrs = _shapes(d, not own and d.chance(0.4))
    zero = d.chance(0.8)
    case = Case("QuantizeLinear", ["x", "s", *(["z"] if zero else [])], {}, {}, kind)
    case.attrs, case.domain = dict(attrs), MICROSOFT if own else ""
    case.inputs["x"] = d.floats(*shape)
    case.constants["s"] = d.scale(*scales)
    if zero:
        case.constants["z"] = d.bytes(kind, *scales)
    elif own:
        case.result = "uint8"
    else:
        case.attrs["output_dtype"] = {"uint8": 2, "int8": 3, "uint16": 4, "int16": 5}[kind]
    if not own and d.chance(0.3):
        case.opset = 23
        case.attrs["precision"] = 1
    return case


def dequantize_linear(d: Drawing) -> Case:
    kind = d.pick(["uint8", "int8", "uint16", "int16", "int32"])
    own = d.chance(0.3)
    shape, scales, attrs = _shapes(d, not own and d.chance(0.4))
    zero = kind != "int32" and d.chance(0.8)
    case = Case("DequantizeLinear", ["x", "s", *(["z"] if zero else [])], {}, {}, "float32")
    case.attrs, case.domain = dict(attrs), MICROSOFT if own else ""
    half = not own and d.chance(0.2)
    whole = kind == "int32" and half  # all of int32 would be infinite in float16
    case.inputs["x"] = d.steps(*shape) if whole else d.bytes(kind, *shape)
    case.constants["s"] = d.scale(*scales).astype(np.float16 if half else np.float32)
    case.result = "float16" if half else "float32"
    if zero:
        case.constants["z"] = d.bytes(kind, *scales)
    return case


DRAWS: Mapping[str, Callable[[Drawing], Case]] = {
    function.__name__: function
    for function in (
        qlinear_matmul, matmul_integer, qlinear_conv, conv_integer, qgemm, matmul_integer_to_float,
        dynamic_quantize_matmul, matmul_nbits, gather_block_quantized, qattention, qlinear_add,
        qlinear_mul, qlinear_sigmoid, qlinear_leaky_relu, qlinear_global_average_pool,
        qlinear_average_pool, qlinear_softmax, qlinear_concat, qlinear_where, quantize_linear,
        dequantize_linear,
    )
}  # fmt: skip

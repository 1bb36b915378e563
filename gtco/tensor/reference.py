"""The numpy meaning of every canonical operator: for constant folding, and as the reference of all
numerical tests.

Float arithmetic runs in the dtype of the given arrays, so float64 arrays give the higher-precision
result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from gtco.tensor.elementwise import ELEMENTWISE_OPERATORS
from gtco.tensor.reference_spatial import (
    avg_pool2d,
    conv2d,
    conv_transpose2d,
    grid_sample,
    max_pool2d,
    resize2d,
)
from gtco.tensor.special_functions import of_dtype
from gtco.tensor.stage import Operator

Array = np.ndarray


def evaluate(operator: Operator, *arrays: Array, dtype: str | None = None) -> Array:
    """The operator's output, with exactly the shape and dtype of ``operator.type``.

    If the type says float32 and the inputs are float64, the result stays float64 (a ``cast``
    rounds, unless ``dtype`` names the dtype that stands for every float but bfloat16). Contractions
    of bfloat16 operands, and of float16 ones that give float32, are computed in float64. Raises
    ``KeyError`` for a kind without a meaning here.
    """
    attrs = dict(operator.attrs)
    wanted, shape = _out_dtype(operator, arrays, dtype), _shape(operator)
    if 0 in shape:  # nothing is computed, so no meaning needs to handle it
        return np.zeros(shape, wanted)
    with np.errstate(all="ignore"):
        if operator.kind in ELEMENTWISE_OPERATORS:
            result = ELEMENTWISE_OPERATORS[operator.kind].meaning(operator, *arrays)
        else:
            result = _OTHER[operator.kind](operator, attrs, arrays)
    result = np.asarray(result)
    assert result.shape == shape, (
        f"{operator.kind} {operator.name or operator.output}: {result.shape}, declared {shape}"
    )
    return result.astype(wanted, copy=False)


def _out_dtype(operator: Operator, arrays: Sequence[Array], dtype: str | None) -> np.dtype:
    declared = np.dtype(operator.type.dtype)
    if declared.kind != "f":
        return declared
    if dtype is not None:
        return np.dtype(dtype)
    if operator.kind != "cast" and any(a.dtype == np.float64 for a in arrays):
        return np.dtype(np.float64)
    return declared


def softmax(x: Array, axis: int) -> Array:
    """softmax, shifted by the maximum, so that large scores do not overflow."""
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def _log_softmax(x: Array, axis: int) -> Array:
    shifted = x - x.max(axis=axis, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=axis, keepdims=True))


def cumsum(x: Array, axis: int, exclusive: bool = False, reverse: bool = False) -> Array:
    """The sum of the elements up to each one along an axis, in the dtype of ``x``."""
    x = np.flip(x, axis) if reverse else x
    sums = np.cumsum(x, axis, dtype=x.dtype)
    if exclusive:
        first = np.zeros_like(np.take(sums, [0], axis))
        sums = np.concatenate([first, np.delete(sums, -1, axis)], axis)
    return np.flip(sums, axis) if reverse else sums


# (operator, attributes, arrays) -> array


def _shape(operator: Operator) -> tuple[int, ...]:
    return tuple(int(d) for d in operator.type.shape)


def _slice(operator: Operator, attrs: dict[str, Any], arrays: Sequence[Array]) -> Array:
    index = []
    for begin, stride, count in zip(
        attrs["begin"], attrs["strides"], _shape(operator), strict=True
    ):
        end: int | None = begin + stride * count
        index.append(
            slice(begin, end if stride > 0 or (end is not None and end >= 0) else None, stride)
        )
    return arrays[0][tuple(index)]


def _reduce(
    function: Callable[..., Array],
) -> Callable[[Operator, dict[str, Any], Sequence[Array]], Array]:
    def apply(operator: Operator, attrs: dict[str, Any], arrays: Sequence[Array]) -> Array:
        return function(arrays[0], axis=tuple(attrs["axes"]), keepdims=bool(attrs["keepdims"]))

    return apply


def _extreme(
    function: Callable[..., Array], largest: bool
) -> Callable[[Operator, dict[str, Any], Sequence[Array]], Array]:
    """A maximum or minimum. Of no elements it is the least, or the largest, number of the dtype
    (ONNX, ReduceMax-20).
    """

    def apply(operator: Operator, attrs: dict[str, Any], arrays: Sequence[Array]) -> Array:
        (x,) = arrays
        if x.size:
            return _reduce(function)(operator, attrs, arrays)
        sign = -np.inf if largest else np.inf
        if x.dtype.kind in "iu":
            sign = np.iinfo(x.dtype).min if largest else np.iinfo(x.dtype).max
        return np.full(_shape(operator), sign if x.dtype != np.bool_ else not largest, x.dtype)

    return apply


def _layer_norm(operator: Operator, attrs: dict[str, Any], arrays: Sequence[Array]) -> Array:
    x, gamma, beta = arrays
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred * centred).mean(axis=-1, keepdims=True)
    return centred / np.sqrt(variance + of_dtype(x, attrs["epsilon"])) * gamma + beta


def _group_norm(operator: Operator, attrs: dict[str, Any], arrays: Sequence[Array]) -> Array:
    x, gamma, beta = arrays
    last = np.moveaxis(x, attrs["axis"], -1)
    batch, channels = last.shape[0], last.shape[-1]
    grouped = last.reshape(batch, -1, attrs["groups"], channels // attrs["groups"])
    centred = grouped - grouped.mean(axis=(1, 3), keepdims=True)
    variance = (centred * centred).mean(axis=(1, 3), keepdims=True)
    normal = (centred / np.sqrt(variance + of_dtype(x, attrs["epsilon"]))).reshape(last.shape)
    return np.moveaxis(normal * gamma + beta, -1, attrs["axis"])


def _moments(operator: Operator, attrs: dict[str, Any], arrays: Sequence[Array]) -> Array:
    mean = arrays[0].mean(axis=-2, keepdims=True)
    return np.concatenate([mean, ((arrays[0] - mean) ** 2).mean(axis=-2, keepdims=True)], axis=-2)


def _merged_moments(operator: Operator, attrs: dict[str, Any], arrays: Sequence[Array]) -> Array:
    (x,) = arrays
    batch, parts, _, channels = x.shape
    size = channels // attrs["groups"]
    grouped = x.reshape(batch, parts, 2, attrs["groups"], size)
    mean = grouped[:, :, 0].mean(axis=(1, 3))
    spread = (grouped[:, :, 0] - mean[:, None, :, None]) ** 2
    variance = (grouped[:, :, 1] + spread).mean(axis=(1, 3))
    scale = 1 / np.sqrt(variance + of_dtype(x, attrs["epsilon"]))
    return np.repeat(np.stack([mean, scale], axis=1), size, axis=2)


def _rms_norm(operator: Operator, attrs: dict[str, Any], arrays: Sequence[Array]) -> Array:
    x, gamma = arrays
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + of_dtype(x, attrs["epsilon"])) * gamma


def _attention(operator: Operator, attrs: dict[str, Any], arrays: Sequence[Array]) -> Array:
    """Attention. If q, k and v are narrower than the output, the softmax's numerators are rounded
    to their dtype for the product with v; their sum is not.
    """
    narrow = arrays[2].dtype
    half = narrow == ml_dtypes.bfloat16 or _summed_wide(operator, arrays[2])
    arrays = _wide(operator, arrays)
    q, k, v = arrays[:3]
    scores = np.matmul(q, np.swapaxes(k, -1, -2)) * of_dtype(q, attrs["scale"])
    if len(arrays) == 4:
        hidden = arrays[3] <= of_dtype(arrays[3], attrs.get("hidden", np.nan))
        scores = np.where(hidden, arrays[3], scores + arrays[3])
    e = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-np.inf))
    numerators = e.astype(narrow).astype(e.dtype) if half else e
    weights = numerators / e.sum(axis=-1, keepdims=True)
    if attrs.get("guarded"):
        weights = np.where(np.isnan(weights), of_dtype(weights, 0), weights)
    return np.matmul(weights, v)


def _wide(operator: Operator, arrays: Sequence[Array]) -> list[Array]:
    """Operands of a contraction in the dtype of its computation: float64 for bfloat16 ones, for
    float16 ones whose products are summed in float32, and for uint8 and int8 ones, whose products
    are summed in int32. float64 holds such integer sums exactly.
    """
    wide = (ml_dtypes.bfloat16, ml_dtypes.int4)  # numpy multiplies neither
    return [
        a.astype(np.float64) if a.dtype in wide or _summed_wide(operator, a) else a for a in arrays
    ]


def _summed_wide(operator: Operator, array: Array) -> bool:
    sums = "float32" if array.dtype == np.float16 else "int32"
    return array.dtype in (np.float16, np.int8, np.uint8) and operator.type.dtype == sums


def _product(
    function: Callable[..., Array],
) -> Callable[[Operator, dict[str, Any], Sequence[Array]], Array]:
    def apply(operator: Operator, attrs: dict[str, Any], arrays: Sequence[Array]) -> Array:
        result = function(*_wide(operator, arrays), **attrs)
        # Sums that int32 does not hold wrap around.
        return result.astype(np.int64) if operator.type.dtype == "int32" else result

    return apply


def _matmul(operator: Operator, attrs: dict[str, Any], arrays: Sequence[Array]) -> Array:
    if len(arrays) == 2:  # 'exact' says how the operands may be computed, not the result
        return _product(np.matmul)(operator, {}, arrays)
    a, steps, *of_blocks = arrays
    scales, *zeros = (
        np.repeat(x.astype(a.dtype), attrs["block"], axis=0)[: len(steps)] for x in of_blocks
    )
    whole = steps.astype(a.dtype)
    return np.matmul(a, (whole - zeros[0] if zeros else whole) * scales)


def _conv2d(operator: Operator, attrs: dict[str, Any], arrays: Sequence[Array]) -> Array:
    if len(arrays) == 2:
        return _product(conv2d)(operator, attrs, arrays)
    x, steps, *of_channels = arrays
    scales, *zeros = (a.astype(x.dtype)[:, None, None, None] for a in of_channels)
    whole = steps.astype(x.dtype)
    return conv2d(x, (whole - zeros[0] if zeros else whole) * scales, **attrs)


def _pad(operator: Operator, attrs: dict[str, Any], arrays: Sequence[Array]) -> Array:
    return np.pad(
        arrays[0],
        list(zip(attrs["before"], attrs["after"], strict=True)),
        constant_values=attrs["value"],
    )


def _relax(operator: Operator, attrs: dict[str, Any], arrays: Sequence[Array]) -> Array:
    """A ``relax`` operator, built with TVM's own LLVM target in this process: slow and correct."""
    import tvm

    machine, dtypes = _machine(attrs["module"])
    given = [
        tvm.runtime.tensor(np.array(a, dtype, order="C"))
        for a, dtype in zip(arrays, dtypes, strict=True)
    ]
    result = machine["main"](*given)
    return (result if attrs["result"] < 0 else result[attrs["result"]]).numpy()


@functools.lru_cache(maxsize=32)
def _machine(text: str) -> tuple[Any, tuple[str, ...]]:
    """The machine that runs a ``relax`` module, and the types of its parameters. The layers of a
    model are alike: their constants are different values through the same module.
    """
    import tvm
    from tvm import relax

    module = tvm.ir.load_json(text)
    parameters = next(f for v, f in module.functions_items() if v.name_hint == "main").params
    executable = relax.build(module, target="llvm")
    return relax.VirtualMachine(executable, tvm.cpu()), tuple(str(p.ty.dtype) for p in parameters)


def _scatter(op: Operator, a: dict[str, Any], x: Sequence[Array]) -> Array:
    data, index, updates = x
    rows = data.reshape(a["rows"], -1).copy()
    places, values = index.reshape(-1), updates.reshape(index.size, -1)
    inside = (places >= 0) & (places < len(rows))
    combine = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}
    for row, value in zip(places[inside], values[inside], strict=True):
        known = a["reduction"] != "update"
        rows[row] = combine[a["reduction"]](rows[row], value) if known else value
    return rows.reshape(data.shape)


def _topk(op: Operator, a: dict[str, Any], x: Sequence[Array]) -> Array:
    _, ranks = np.unique(x[0], return_inverse=True)  # NaN is the largest; 0 and -0 are equal
    ranks = ranks.reshape(x[0].shape)
    order = np.argsort(-ranks if a["largest"] else ranks, axis=-1, kind="stable")
    return order[..., : a["k"]]


_OTHER: dict[str, Callable[[Operator, dict[str, Any], Sequence[Array]], Array]] = {
    "identity": lambda op, a, x: x[0],
    "matmul": _matmul,
    "reshape": lambda op, a, x: x[0].reshape(_shape(op)),
    "permute": lambda op, a, x: x[0].transpose(a["axes"]),
    "slice": _slice,
    "concat": lambda op, a, x: np.concatenate(x, axis=a["axis"]),
    "broadcast": lambda op, a, x: np.broadcast_to(x[0], _shape(op)),
    "pad": _pad,
    "roll": lambda op, a, x: np.roll(x[0], a["shifts"], tuple(range(x[0].ndim))),
    "gather": lambda op, a, x: np.take(x[0], x[1], axis=a["axis"]),
    "scatter": _scatter,
    "topk": _topk,
    "sum": _reduce(np.sum),
    "mean": _reduce(np.mean),
    "max": _extreme(np.max, True),
    "min": _extreme(np.min, False),
    "prod": _reduce(np.prod),
    "argmax": lambda op, a, x: np.argmax(x[0], axis=a["axis"], keepdims=a["keepdims"]),
    "argmin": lambda op, a, x: np.argmin(x[0], axis=a["axis"], keepdims=a["keepdims"]),
    "softmax": lambda op, a, x: softmax(x[0], a["axis"]),
    "log_softmax": lambda op, a, x: _log_softmax(x[0], a["axis"]),
    "cumsum": lambda op, a, x: cumsum(x[0], **a),
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "moments": _moments,
    "merged_moments": _merged_moments,
    "attention": _attention,
    "conv2d": _conv2d,
    "conv_transpose2d": _product(conv_transpose2d),
    "max_pool2d": lambda op, a, x: max_pool2d(x[0], _shape(op), **a),
    "avg_pool2d": lambda op, a, x: avg_pool2d(x[0], _shape(op), **a),
    "resize2d": lambda op, a, x: resize2d(x[0], _shape(op), **a),
    "grid_sample": lambda op, a, x: grid_sample(x[0], x[1], **a),
    "relax": _relax,
}

"""Canonical operators as Relax programs, from which :mod:`gtco.tensor.relax.bridge` makes
kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, prod
from typing import Any

import tvm
from tvm import relax, te, tirx
from tvm.relax import op as R

from gtco.tensor.operators import CONTRACTIONS
from gtco.tensor.relax.apart import scatter_rows
from gtco.tensor.relax.calls import BridgeError
from gtco.tensor.stage import Operator, Stage, TensorType

# Kinds whose spelling has the output's shape, and whose call stores each element once. They need
# no reshape, which would be a second call: only a single call is spread over threads. A reduction
# accumulates in what it writes. Its reshape stays, so that no compiler reads the output early.
ONE_CALL = ("scatter", "topk", "cumsum")


def module_of(stage: Stage, apart: bool = False) -> Any:
    """The stage's one operator as a Relax module whose ``main`` takes the stage's inputs in the
    operator's order. With ``apart``, threads compute it, of which each takes one independent
    iteration.

    Raises :class:`BridgeError` for a kind that has no Relax spelling here.
    """
    op = stage.output
    if op.kind == "relax":
        return tvm.ir.load_json(op["module"])
    spell = (SPELLINGS | SPELLINGS_APART if apart else SPELLINGS).get(op.kind)
    if spell is None:
        raise BridgeError(f"operator '{op.kind}' has no Relax spelling")
    builder = relax.BlockBuilder()
    types = [stage.types[name] for name in op.inputs]
    parameters = [
        relax.Var(f"p{i}", relax.TensorType(t.shape, t.dtype)) for i, t in enumerate(types)
    ]
    with builder.function("main", parameters):
        with builder.dataflow():
            given, types = _widened(builder, op, parameters, types)
            made = spell(builder, op, given, types)
            if op.kind not in ONE_CALL:
                made = builder.emit(R.reshape(made, op.type.shape))
            if str(made.ty.dtype) != op.type.dtype:
                made = builder.emit(R.astype(made, op.type.dtype))
            result = builder.emit_output(made)
        builder.emit_func_output(result)
    return builder.get()


def _widened(
    b: Any, op: Operator, x: Sequence[Any], types: Sequence[TensorType]
) -> tuple[Sequence[Any], list[TensorType]]:
    """Operands of a contraction in the dtype of its output."""
    if op.kind not in CONTRACTIONS:
        return x, list(types)
    dtype = op.type.dtype
    given = [
        v if t.dtype == dtype else b.emit(R.astype(v, dtype)) for v, t in zip(x, types, strict=True)
    ]
    return given, [TensorType(t.shape, dtype) for t in types]


Spelling = Callable[[Any, Operator, Sequence[Any], Sequence[TensorType]], Any]


def _reduce(function: Callable[..., Any], wide: bool = False) -> Spelling:
    def spell(b: Any, op: Operator, x: Sequence[Any], types: Sequence[TensorType]) -> Any:
        value = x[0]
        narrow = types[0].dtype in ("bool", "float16", "bfloat16")
        if (wide and types[0].dtype != op.type.dtype) or narrow:
            value = b.emit(
                R.astype(
                    value,
                    "float32"
                    if types[0].dtype.endswith("float16")
                    else op.type.dtype
                    if op.type.dtype != "bool"
                    else "int32",
                )
            )
        return b.emit(function(value, axis=list(op["axes"]), keepdims=bool(op["keepdims"])))

    return spell


def _place(function: Callable[..., Any]) -> Spelling:
    """The place of an extreme. TVM's begins at -1 and at the least value of the type, which stay
    where no element is larger.
    """

    def spell(b: Any, op: Operator, x: Sequence[Any], types: Sequence[TensorType]) -> Any:
        narrow = types[0].dtype in ("bool", "float16", "bfloat16")
        value = b.emit(R.astype(x[0], "float32")) if narrow else x[0]
        place = b.emit(function(value, axis=op["axis"], keepdims=bool(op["keepdims"])))
        return b.emit(R.maximum(place, relax.const(0, "int64")))

    return spell


def _extreme(largest: bool) -> Spelling:
    """A maximum or minimum that is NaN if any element is; Relax's own drops NaN."""

    def spell(b: Any, op: Operator, x: Sequence[Any], types: Sequence[TensorType]) -> Any:
        dtype = types[0].dtype
        if not dtype.startswith("float"):
            return _reduce(R.max if largest else R.min)(b, op, x, types)

        def combine(a: Any, v: Any) -> Any:
            return tirx.Select(tirx.Or(a > v if largest else a < v, tirx.isnan(a)), a, v)

        reduced = tuple(op["axes"])
        if not reduced:
            return x[0]
        reducer = te.comm_reducer(combine, lambda t: tirx.const(-inf if largest else inf, t))
        kept = [i for i in range(len(types[0].shape)) if i not in reduced]

        def extreme(t: Any) -> Any:
            axes = [te.reduce_axis((0, t.shape[a])) for a in reduced]

            def element(*index: Any) -> Any:
                where = dict(zip(kept, index, strict=True)) | dict(zip(reduced, axes, strict=True))
                return reducer(t(*(where[i] for i in range(len(where)))), axis=axes)

            return te.compute([t.shape[i] for i in kept], element, name="extreme")

        return b.emit_te(extreme, x[0])

    return spell


def _softmax(function: Callable[..., Any]) -> Spelling:
    return lambda b, op, x, types: b.emit(function(x[0], axis=op["axis"]))


def _cumsum(b: Any, op: Operator, x: Sequence[Any], types: Sequence[TensorType]) -> Any:
    axis, turned = op["axis"], bool(op["reverse"])
    given = b.emit(R.flip(x[0], axis)) if turned else x[0]
    sums = b.emit(R.cumsum(given, axis, exclusive=bool(op["exclusive"])))
    return b.emit(R.flip(sums, axis)) if turned else sums


def _layer_norm(b: Any, op: Operator, x: Sequence[Any], types: Sequence[TensorType]) -> Any:
    """A layer_norm in two passes, which subtracts the mean before squaring. Relax's own takes
    E[x^2] - E[x]^2, which cancels.
    """
    mean = b.emit(R.mean(x[0], axis=[-1], keepdims=True))
    centred = b.emit(R.subtract(x[0], mean))
    variance = b.emit(R.mean(b.emit(R.multiply(centred, centred)), axis=[-1], keepdims=True))
    return _scaled(b, op, centred, variance, x[1:])


def _rms_norm(b: Any, op: Operator, x: Sequence[Any], types: Sequence[TensorType]) -> Any:
    square = b.emit(R.mean(b.emit(R.multiply(x[0], x[0])), axis=[-1], keepdims=True))
    return _scaled(b, op, x[0], square, x[1:])


def _scaled(b: Any, op: Operator, x: Any, variance: Any, weights: Sequence[Any]) -> Any:
    dtype = op.type.dtype
    deviation = b.emit(R.sqrt(b.emit(R.add(variance, relax.const(op["epsilon"], dtype)))))
    value = b.emit(R.multiply(b.emit(R.divide(x, deviation)), weights[0]))
    return b.emit(R.add(value, weights[1])) if len(weights) > 1 else value


def _centred(b: Any, x: Any, axes: list[int]) -> tuple[Any, Any, Any]:
    """Mean, deviations from it, and their mean square over ``axes``, which stay with extent 1."""
    mean = b.emit(R.mean(x, axis=axes, keepdims=True))
    centred = b.emit(R.subtract(x, mean))
    square = b.emit(R.multiply(centred, centred))
    return mean, centred, b.emit(R.mean(square, axis=axes, keepdims=True))


def _group_norm(b: Any, op: Operator, x: Sequence[Any], types: Sequence[TensorType]) -> Any:
    shape, axis = [int(d) for d in types[0].shape], op["axis"]
    order = [a for a in range(len(shape)) if a != axis] + [axis]
    last = [shape[a] for a in order]
    grouped = [shape[0], prod(last[1:-1]), op["groups"], last[-1] // op["groups"]]
    value = b.emit(R.reshape(b.emit(R.permute_dims(x[0], order)), grouped))
    _, centred, variance = _centred(b, value, [1, 3])
    deviation = b.emit(R.sqrt(b.emit(R.add(variance, relax.const(op["epsilon"], op.type.dtype)))))
    value = b.emit(R.reshape(b.emit(R.divide(centred, deviation)), last))
    value = b.emit(R.add(b.emit(R.multiply(value, x[1])), x[2]))
    return b.emit(R.permute_dims(value, [order.index(a) for a in range(len(shape))]))


def _moments(b: Any, op: Operator, x: Sequence[Any], types: Sequence[TensorType]) -> Any:
    axis = len(types[0].shape) - 2
    mean, _, variance = _centred(b, x[0], [axis])
    return b.emit(R.concat([mean, variance], axis=axis))


def _merged_moments(b: Any, op: Operator, x: Sequence[Any], types: Sequence[TensorType]) -> Any:
    batch, parts, _, channels = (int(d) for d in types[0].shape)
    grouped = [batch, parts, op["groups"], channels // op["groups"]]
    means, inside = (
        b.emit(R.reshape(b.emit(R.strided_slice(x[0], [2], [k], [k + 1])), grouped))
        for k in range(2)
    )
    mean, _, between = _centred(b, means, [1, 3])
    variance = b.emit(R.add(b.emit(R.mean(inside, axis=[1, 3], keepdims=True)), between))
    deviation = b.emit(R.sqrt(b.emit(R.add(variance, relax.const(op["epsilon"], op.type.dtype)))))
    scale = b.emit(R.divide(relax.const(1.0, op.type.dtype), deviation))
    wide = [batch, 1, grouped[2], grouped[3]]
    both = [
        b.emit(R.reshape(b.emit(R.broadcast_to(v, wide)), [batch, 1, channels]))
        for v in (mean, scale)
    ]
    return b.emit(R.concat(both, axis=1))


def _matmul(b: Any, op: Operator, x: Sequence[Any], types: Sequence[TensorType]) -> Any:
    return b.emit(R.matmul(x[0], x[1]))


def _conv2d(b: Any, op: Operator, x: Sequence[Any], types: Sequence[TensorType]) -> Any:
    return b.emit(
        R.nn.conv2d(
            x[0],
            x[1],
            strides=list(op["strides"]),
            padding=list(op["padding"]),
            dilation=list(op["dilation"]),
            groups=op["groups"],
            data_layout=op["layout"],
            kernel_layout="OIHW",
        )
    )


def _conv_transpose2d(b: Any, op: Operator, x: Sequence[Any], types: Sequence[TensorType]) -> Any:
    """The whole product, then the part that ``output_padding`` adds and the part that ``padding``
    cuts off. TVM allows at most a stride of the one and a kernel of the other, and has kernels only
    for NCHW.
    """
    last = op["layout"] == "NHWC"
    data = b.emit(R.permute_dims(x[0], [0, 3, 1, 2])) if last else x[0]
    whole = b.emit(
        R.nn.conv2d_transpose(
            data,
            x[1],
            strides=list(op["strides"]),
            groups=op["groups"],
            data_layout="NCHW",
            kernel_layout="IOHW",
        )
    )
    below, right = op["output_padding"]
    if below or right:
        whole = b.emit(R.nn.pad(whole, [0, 0, 0, 0, 0, below, 0, right]))
    top, left = op["padding"][:2]
    height, width = (int(d) for d in (op.type.shape[1:3] if last else op.type.shape[2:]))
    y = b.emit(R.strided_slice(whole, [2, 3], [top, left], [top + height, left + width]))
    return b.emit(R.permute_dims(y, [0, 2, 3, 1])) if last else y


def _attention(b: Any, op: Operator, x: Sequence[Any], types: Sequence[TensorType]) -> Any:
    rank = len(types[1].shape)
    keys = b.emit(R.permute_dims(x[1], [*range(rank - 2), rank - 1, rank - 2]))
    scores = b.emit(R.matmul(x[0], keys))
    scores = b.emit(R.multiply(scores, relax.const(op["scale"], op.type.dtype)))
    if len(x) == 4:
        summed = b.emit(R.add(scores, x[3]))
        if op.get("hidden") is not None:
            low = relax.const(op["hidden"], op.type.dtype)
            summed = b.emit(R.where(b.emit(R.less_equal(x[3], low)), x[3], summed))
        scores = summed
    weights = b.emit(R.nn.softmax(scores, axis=-1))
    if op.get("guarded"):
        zero = relax.const(0, op.type.dtype)
        weights = b.emit(R.where(b.emit(R.isnan(weights)), zero, weights))
    return b.emit(R.matmul(weights, x[2]))


def _scatter(b: Any, op: Operator, x: Sequence[Any], types: Sequence[TensorType]) -> Any:
    count = types[1].size
    rows = (op["rows"], op.type.size // op["rows"])
    data = b.emit(R.reshape(x[0], rows))
    index = b.emit(R.astype(b.emit(R.reshape(x[1], (count, 1))), "int64"))
    updates = b.emit(R.reshape(x[2], (count, rows[1])))
    # An index outside the tensor names a row behind it, which nobody reads.
    low, high = (relax.const(n, "int64") for n in (0, rows[0]))
    outside = b.emit(R.logical_or(b.emit(R.less(index, low)), b.emit(R.greater(index, high))))
    index = b.emit(R.where(outside, high, index))
    behind = b.emit(R.zeros((1, rows[1]), op.type.dtype))
    data = b.emit(R.concat([data, behind], axis=0))
    made = b.emit(R.scatter_nd(data, index, updates, op["reduction"]))
    made = b.emit(R.strided_slice(made, [0], [0], [rows[0]]))
    return b.emit(R.reshape(made, op.type.shape))


def _scatter_apart(b: Any, op: Operator, x: Sequence[Any], types: Sequence[TensorType]) -> Any:
    return b.emit_te(scatter_rows, *x, op["rows"], op["reduction"], op.get("along"))


def _topk(b: Any, op: Operator, x: Sequence[Any], types: Sequence[TensorType]) -> Any:
    return b.emit(
        R.topk(x[0], op["k"], -1, ret_type="indices", largest=bool(op["largest"]), dtype="int64")
    )


SPELLINGS: dict[str, Spelling] = {
    "sum": _reduce(R.sum, wide=True),
    "mean": _reduce(R.mean, wide=True),
    "prod": _reduce(R.prod, wide=True),
    "max": _extreme(True),
    "min": _extreme(False),
    "argmax": _place(R.argmax),
    "argmin": _place(R.argmin),
    "softmax": _softmax(R.nn.softmax),
    "log_softmax": _softmax(R.nn.log_softmax),
    "cumsum": _cumsum,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "moments": _moments,
    "merged_moments": _merged_moments,
    "matmul": _matmul,
    "conv2d": _conv2d,
    "conv_transpose2d": _conv_transpose2d,
    "attention": _attention,
    "scatter": _scatter,
    "topk": _topk,
}

# spellings for threads, each of which takes one independent iteration
SPELLINGS_APART: dict[str, Spelling] = {"scatter": _scatter_apart}

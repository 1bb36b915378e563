"""Rules for each Relax operator: element-wise, data movement, reductions and products.

A rule takes the lowering and the call. It gives the value, or None if this use of the operator has
no canonical form (the call then becomes a ``relax`` operator). Slices, borders and repetitions are
in ``movement.py``; image operators, normalisations and attention in ``layers.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import numpy
from tvm import relax

from gtco.graph.lower.context import Lowering, NoRule, Rule, integer, integers
from gtco.graph.lower.context import result_type as _type
from gtco.graph.lower.einsum import einsum
from gtco.graph.lower.indexing import INDEXING_RULES, signed
from gtco.graph.lower.layers import LAYER_RULES
from gtco.graph.lower.movement import MOVEMENT_RULES
from gtco.graph.lower.quantization import QUANTIZATION_RULES
from gtco.tensor.elementwise import ELEMENTWISE_OPERATORS
from gtco.tensor.stage import TensorType

__all__ = ["RULES", "Lowering", "NoRule", "Rule"]


def _plain(kind: str) -> Rule:
    def rule(lowering: Lowering, call: relax.Call) -> str:
        inputs = tuple(_tensor(lowering, argument, _type(call).dtype) for argument in call.args)
        return lowering.emit(kind, inputs, _type(call))

    return rule


def _tensor(lowering: Lowering, argument: Any, dtype: str) -> str:
    """A tensor argument. A bare number becomes a scalar constant."""
    value = lowering.value(argument)
    return value if isinstance(value, str) else lowering.constant(value, dtype)


def _clip(lowering: Lowering, call: relax.Call) -> str:
    """Known bounds are attributes; other bounds clip by maximum and minimum."""
    x, dtype = lowering.value(call.args[0]), _type(call).dtype
    bounds = [lowering.value(argument) for argument in call.args[1:3]]
    known = [lowering.array(bound) if isinstance(bound, str) else bound for bound in bounds]
    if all(bound is not None for bound in known):
        low, high = (float(numpy.asarray(bound).reshape(())) for bound in known)
        return lowering.emit("clip", (x,), _type(call), min=low, max=high)
    for kind, bound in zip(("maximum", "minimum"), bounds, strict=True):
        x = lowering.emit(
            kind, (x, bound if isinstance(bound, str) else lowering.constant(bound, dtype))
        )
    return str(x)


def _square(lowering: Lowering, call: relax.Call) -> str:
    x = lowering.value(call.args[0])
    return lowering.emit("multiply", (x, x), _type(call))


def _is_finite(lowering: Lowering, call: relax.Call) -> Any:
    x = lowering.value(call.args[0])
    dtype = lowering.type(x).dtype
    if dtype not in ("float32", "float64"):
        return None
    infinity = lowering.constant(numpy.inf, dtype)
    return lowering.emit("less", (lowering.emit("abs", (x,)), infinity))


def _softplus(lowering: Lowering, call: relax.Call) -> Any:
    if call.attrs.beta != 1.0:
        return None
    return lowering.emit("softplus", (lowering.value(call.args[0]),), _type(call))


def _leaky_relu(lowering: Lowering, call: relax.Call) -> str:
    return lowering.emit(
        "leaky_relu", (lowering.value(call.args[0]),), _type(call), alpha=float(call.attrs.alpha)
    )


# -- products --------------------------------------------------------------------------------------


def _matmul(lowering: Lowering, call: relax.Call) -> str:
    a, b = lowering.value(call.args[0]), lowering.value(call.args[1])
    shape_a, shape_b = lowering.type(a).shape, lowering.type(b).shape
    if len(shape_a) == 1:
        a = lowering.reshape(a, (1, *shape_a))
    if len(shape_b) == 1:
        b = lowering.reshape(b, (*shape_b, 1))
    return lowering.reshape(lowering.emit("matmul", (a, b)), _type(call).shape)


# -- data movement ---------------------------------------------------------------------------------


def _reshape(lowering: Lowering, call: relax.Call) -> str:
    return lowering.reshape(lowering.value(call.args[0]), _type(call).shape)


def _permute(lowering: Lowering, call: relax.Call) -> str:
    x = lowering.value(call.args[0])
    rank = len(lowering.type(x).shape)
    axes = (
        range(rank - 1, -1, -1)
        if call.attrs.axes is None
        else [a % rank for a in integers(call.attrs.axes)]
    )
    return lowering.permute(x, tuple(axes))


def _broadcast(lowering: Lowering, call: relax.Call) -> str:
    return lowering.emit("broadcast", (lowering.value(call.args[0]),), _type(call))


def _concat(lowering: Lowering, call: relax.Call) -> str:
    tensors = lowering.value(call.args[0])
    axis = 0 if call.attrs.axis is None else integer(call.attrs.axis)
    return lowering.concat(tensors, axis % len(_type(call).shape))


def _stack(lowering: Lowering, call: relax.Call) -> str:
    shape = _type(call).shape
    axis = (0 if call.attrs.axis is None else integer(call.attrs.axis)) % len(shape)
    one = (*shape[:axis], 1, *shape[axis + 1 :])
    return lowering.concat([lowering.reshape(t, one) for t in lowering.value(call.args[0])], axis)


def _gather(lowering: Lowering, call: relax.Call) -> str:
    x = lowering.value(call.args[0])
    axis = call.attrs.axis
    if axis is None:
        x, axis = lowering.reshape(x, (prod(map(int, lowering.type(x).shape)),)), 0
    indices = _tensor(lowering, call.args[1], "int64")
    axis = integer(axis) % len(lowering.type(x).shape)
    shape, known = lowering.type(x).shape, lowering.array(signed(lowering, indices))
    if known is not None and known.size == shape[axis]:
        # All elements in their order, as torch's exporter writes as_strided. The proof that samples
        # are apart (graph/samples.py) reads the graph as it is here.
        if numpy.array_equal(known.reshape(-1), numpy.arange(known.size)):
            return lowering.reshape(x, (*shape[:axis], *known.shape, *shape[axis + 1 :]))
    return lowering.emit("gather", (x, indices), axis=axis)


def _index_tensor(lowering: Lowering, call: relax.Call) -> Any:
    indices = lowering.value(call.args[1])
    if len(indices) != 1 or lowering.type(indices[0]).dtype == "bool":
        return None
    return lowering.emit("gather", (lowering.value(call.args[0]), indices[0]), axis=0)


# -- constants -------------------------------------------------------------------------------------


def _full(lowering: Lowering, call: relax.Call) -> Any:
    value = lowering.array(_tensor(lowering, call.args[1], _type(call).dtype))
    if value is None:
        scalar = lowering.value(call.args[1])
        return lowering.emit("broadcast", (scalar,), _type(call))
    return _filled(lowering, call, value.reshape(()))


def _filled(lowering: Lowering, call: relax.Call, value: Any) -> str:
    made = _type(call)
    # A view of one element: a constant of any size costs nothing.
    return lowering.graph.add_constant(
        numpy.broadcast_to(numpy.asarray(value, made.dtype), tuple(map(int, made.shape)))
    )


def _arange(lowering: Lowering, call: relax.Call) -> Any:
    start, stop, step = (lowering.value(argument) for argument in call.args[:3])
    if any(isinstance(v, str) for v in (start, stop, step)):
        return None
    return lowering.constant(numpy.arange(start, stop, step), _type(call).dtype)


def _eye(lowering: Lowering, call: relax.Call) -> str:
    rows, columns, k = (int(lowering.value(argument)) for argument in call.args[:3])
    return lowering.constant(numpy.eye(rows, columns, k), _type(call).dtype)


def _triangle(function: Callable[..., numpy.ndarray], kept: str) -> Rule:
    """An element's place says if it is kept: its column is compared with its row plus k."""

    def rule(lowering: Lowering, call: relax.Call) -> Any:
        x, k = lowering.value(call.args[0]), lowering.value(call.args[1])
        if isinstance(k, str):
            return None
        value, type = lowering.array(x), lowering.type(x)
        if value is not None:
            return lowering.graph.add_constant(function(value, int(k)))
        rows, columns = map(int, type.shape[-2:])
        first = min(max(int(k), -rows), columns)  # a k beyond the matrix keeps all or nothing
        row = lowering.constant(numpy.arange(first, first + rows)[:, None], "int64")
        column = lowering.constant(numpy.arange(columns), "int64")
        return lowering.emit(
            "where", (lowering.emit(kept, (column, row)), x, lowering.constant(0, type.dtype)), type
        )

    return rule


def _shape_of(lowering: Lowering, call: relax.Call) -> tuple[int, ...]:
    return tuple(int(d) for d in lowering.type(lowering.value(call.args[0])).shape)


def _shape_to_tensor(lowering: Lowering, call: relax.Call) -> str:
    return lowering.constant(lowering.value(call.args[0]), "int64")


def _tensor_to_shape(lowering: Lowering, call: relax.Call) -> tuple[int, ...]:
    value = lowering.array(lowering.value(call.args[0]))
    if value is None:
        raise NoRule("a shape that depends on data")
    return tuple(int(d) for d in value)


def _size(lowering: Lowering, call: relax.Call) -> str:
    return lowering.constant(lowering.type(lowering.value(call.args[0])).size, "int64")


# -- reductions ------------------------------------------------------------------------------------


def _axes(lowering: Lowering, call: relax.Call, x: str) -> tuple[int, ...]:
    rank = len(lowering.type(x).shape)
    axes = range(rank) if call.attrs.axis is None else [a % rank for a in integers(call.attrs.axis)]
    return tuple(sorted(axes))


def _reduction(kind: str) -> Rule:
    def rule(lowering: Lowering, call: relax.Call) -> str:
        x = lowering.value(call.args[0])
        axes = _axes(lowering, call, x)
        if not axes:
            return str(x)
        return lowering.emit(kind, (x,), _type(call), axes=axes, keepdims=bool(call.attrs.keepdims))

    return rule


def _mean(lowering: Lowering, call: relax.Call) -> str:
    """Of integers it is their sum in 64 bits, divided towards zero."""
    x, result = lowering.value(call.args[0]), _type(call)
    axes = _axes(lowering, call, x)
    if "int" not in result.dtype or not axes:
        return _reduction("mean")(lowering, call)
    count = prod(lowering.type(x).shape[axis] for axis in axes)
    source, wide = lowering.type(x), replace(result, dtype="int64")
    if source.dtype != wide.dtype:
        x = lowering.emit("cast", (x,), replace(source, dtype=wide.dtype))
    total = lowering.emit("sum", (x,), wide, axes=axes, keepdims=bool(call.attrs.keepdims))
    quotient = lowering.emit("divide", (total, lowering.constant(count, wide.dtype)), wide)
    same = result.dtype == wide.dtype
    return quotient if same else lowering.emit("cast", (quotient,), result)


def _place(kind: str) -> Rule:
    """The rule of argmax and argmin. Over all elements, the tensor is taken as one row."""

    def rule(lowering: Lowering, call: relax.Call) -> str:
        x, result = lowering.value(call.args[0]), _type(call)
        shape, axis = lowering.type(x).shape, call.attrs.axis
        if axis is not None:
            kept = {"axis": integer(axis) % len(shape), "keepdims": bool(call.attrs.keepdims)}
            return lowering.emit(kind, (x,), result, **kept)
        row = lowering.reshape(x, (prod(int(d) for d in shape),))
        return lowering.reshape(lowering.emit(kind, (row,), axis=0, keepdims=False), result.shape)

    return rule


def _variance(lowering: Lowering, call: relax.Call) -> str:
    x = lowering.value(call.args[0])
    axes = _axes(lowering, call, x)
    centred = lowering.emit("subtract", (x, lowering.emit("mean", (x,), axes=axes, keepdims=True)))
    square = lowering.emit("multiply", (centred, centred))
    return lowering.emit(
        "mean", (square,), _type(call), axes=axes, keepdims=bool(call.attrs.keepdims)
    )


def _std(lowering: Lowering, call: relax.Call) -> str:
    return lowering.emit("sqrt", (_variance(lowering, call),))


def _softmax(kind: str) -> Rule:
    def rule(lowering: Lowering, call: relax.Call) -> str:
        return lowering.emit(
            kind,
            (lowering.value(call.args[0]),),
            axis=integer(call.attrs.axis) % len(_type(call).shape),
        )

    return rule


def _cumsum(lowering: Lowering, call: relax.Call) -> str:
    """A sum of what comes before, in the result's dtype. Without an axis, the tensor is one row."""
    x, made, axis = lowering.value(call.args[0]), _type(call), call.attrs.axis
    known = lowering.type(x)
    if known.dtype != made.dtype:
        x = lowering.emit("cast", (x,), TensorType(known.shape, made.dtype))
    if axis is None:
        x, axis = lowering.reshape(x, made.shape), 0
    along, exclusive = integer(axis) % max(len(made.shape), 1), bool(call.attrs.exclusive)
    return lowering.emit("cumsum", (x,), axis=along, exclusive=exclusive, reverse=False)


RULES: dict[str, Rule] = {
    **{row.relax: _plain(row.name) for row in ELEMENTWISE_OPERATORS.values() if row.relax},
    "clip": _clip,
    "square": _square,
    "isfinite": _is_finite,
    "nn.softplus": _softplus,
    "nn.leakyrelu": _leaky_relu,
    "matmul": _matmul,
    "einsum": einsum,
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "flatten": _reshape,
    "nn.batch_flatten": _reshape,
    "permute_dims": _permute,
    "broadcast_to": _broadcast,
    "concat": _concat,
    "stack": _stack,
    "take": _gather,
    "index_tensor": _index_tensor,
    "full": _full,
    "full_like": _full,
    "zeros": lambda lowering, call: _filled(lowering, call, 0),
    "ones": lambda lowering, call: _filled(lowering, call, 1),
    "zeros_like": lambda lowering, call: _filled(lowering, call, 0),
    "ones_like": lambda lowering, call: _filled(lowering, call, 1),
    "arange": _arange,
    "eye": _eye,
    "tril": _triangle(numpy.tril, "less_equal"),
    "triu": _triangle(numpy.triu, "greater_equal"),
    "shape_of": _shape_of,
    "shape_to_tensor": _shape_to_tensor,
    "tensor_to_shape": _tensor_to_shape,
    "size": _size,
    "sum": _reduction("sum"),
    "mean": _mean,
    "max": _reduction("max"),
    "min": _reduction("min"),
    "prod": _reduction("prod"),
    "argmax": _place("argmax"),
    "argmin": _place("argmin"),
    "variance": _variance,
    "std": _std,
    "cumsum": _cumsum,
    "nn.softmax": _softmax("softmax"),
    "nn.log_softmax": _softmax("log_softmax"),
    **MOVEMENT_RULES,
    **QUANTIZATION_RULES,
    **INDEXING_RULES,
    **LAYER_RULES,
}

"""Element-wise operators in forms that TVM's importer lacks or gets wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy
from tvm import relax

from gtco.frontend.operators.arguments import (
    Attributes,
    Override,
    Refused,
    constant_of,
    outputs_of,
    padded,
    shape_of,
)


def dropout(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """The input itself, as at inference, and a mask that keeps everything. Before opset 10 the mask
    is of the input's type.
    """
    if len(inputs) > 2 and inputs[2] is not None:
        training = constant_of(inputs[2])
        ratio = constant_of(inputs[1]) if inputs[1] is not None else numpy.asarray(0.5)
        if training is None or (bool(training) and (ratio is None or float(ratio) != 0.0)):
            raise Refused(
                "training_mode is set: export the model after model.eval(); "
                "torch.nn.functional.dropout wants training=self.training for that"
            )
    if outputs_of(attrs) == 1:
        return inputs[0]
    kind = "bool" if attrs["tvm_custom"]["opset"] >= 10 else inputs[0].ty.dtype
    return relax.Tuple([inputs[0], builder.emit(relax.op.ones(shape_of(inputs[0]), kind))])


def is_inf(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    negative, positive = attrs.get("detect_negative", 1), attrs.get("detect_positive", 1)
    if negative and positive:
        return None
    if not negative and not positive:
        return builder.emit(relax.op.zeros(shape_of(inputs[0]), "bool"))
    infinity = relax.const(numpy.inf if positive else -numpy.inf, inputs[0].ty.dtype)
    return builder.emit(relax.op.equal(inputs[0], infinity))


def celu(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """alpha * (exp(x / alpha) - 1) below 0, as Elu is written. (ONNX's definition turns a scalar
    into a vector, and loses the digits of an x near 0.)
    """
    x = inputs[0]
    alpha, zero, one = (
        relax.const(value, str(x.ty.dtype)) for value in (attrs.get("alpha", 1.0), 0.0, 1.0)
    )
    scaled = builder.emit(relax.op.divide(x, alpha))
    rest = relax.op.subtract(one, relax.op.exp(scaled))
    grown = relax.op.subtract(relax.op.nn.relu(scaled), relax.op.nn.relu(rest))
    return relax.op.where(relax.op.greater(x, zero), x, relax.op.multiply(alpha, grown))


def elu(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """alpha * (exp(x) - 1) below 0, in the type of x; TVM writes float32."""
    return _elu(builder, inputs[0], attrs.get("alpha", 1.0), 1.0)


def selu(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """gamma times Elu, in the type of x."""
    alpha, gamma = attrs.get("alpha", 1.6732632423543772), attrs.get("gamma", 1.0507009873554805)
    return _elu(builder, inputs[0], alpha, gamma)


def _elu(builder: Any, x: Any, alpha: float, gamma: float) -> Any:
    below, one, scale = (relax.const(v, str(x.ty.dtype)) for v in (-alpha, 1.0, gamma))
    rest = relax.op.subtract(one, relax.op.exp(x))
    grown = relax.op.multiply(below, relax.op.nn.relu(builder.emit(rest)))
    whole = builder.emit(relax.op.add(builder.emit(grown), relax.op.nn.relu(x)))
    return whole if gamma == 1.0 else relax.op.multiply(scale, whole)


def clip(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """Clip as an operator. TVM's importer writes loops, which only the fallback can compile.
    A bound that is left out or NaN has no effect.
    """
    x, low, high = padded(inputs, 3)
    if low is None and high is None:
        low, high = (attrs.get(name) for name in ("min", "max"))
    for bound, choose in ((low, relax.op.maximum), (high, relax.op.minimum)):
        known = constant_of(bound) if isinstance(bound, relax.Expr) else bound
        if bound is None or (known is not None and numpy.isnan(known).all()):
            continue
        if known is not None:
            bound = relax.const(numpy.asarray(known).reshape(()), x.ty.dtype)
        elif "float" in str(x.ty.dtype):
            anything = relax.const(
                -numpy.inf if choose is relax.op.maximum else numpy.inf, x.ty.dtype
            )
            bound = relax.op.where(relax.op.isnan(bound), anything, bound)
        x = builder.emit(choose(x, bound))
    return x


def power(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """Pow with base and exponent of different types; the result has the base's type."""
    base, exponent = inputs
    if not isinstance(base.ty, relax.TensorType) or base.ty.dtype == exponent.ty.dtype:
        return None
    floats = [str(t.ty.dtype) for t in inputs if "float" in str(t.ty.dtype)]
    wide = floats[0] if floats else str(base.ty.dtype)
    a, b = (
        t if str(t.ty.dtype) == wide else builder.emit(relax.op.astype(t, wide)) for t in inputs
    )
    result = builder.emit(relax.op.power(a, b))
    return (
        result
        if wide == str(base.ty.dtype)
        else builder.emit(relax.op.astype(result, base.ty.dtype))
    )


def thresholded_relu(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """ThresholdedRelu. TVM multiplies by 0 and 1, which makes a NaN of an infinity."""
    x, dtype = inputs[0], str(inputs[0].ty.dtype)
    above = relax.op.greater(x, relax.const(attrs.get("alpha", 1.0), dtype))
    return relax.op.where(builder.emit(above), x, relax.const(0.0, dtype))


def prelu(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """PRelu, element-wise also if the slope varies along one axis. Later passes cannot look into
    TVM's operator for that, and only the fallback compiled it.
    """
    x, slope = inputs
    if len(shape_of(slope)) > len(shape_of(x)):
        return None  # no valid PRelu; TVM's importer reports it
    below = builder.emit(relax.op.less(x, relax.const(0, x.ty.dtype.dtype)))
    return relax.op.where(below, builder.emit(relax.op.multiply(x, slope)), x)


def combined(op: Callable[[Any, Any], Any], mean: bool = False) -> Override:
    """Max, Min, Mean or Sum of several tensors, two at a time. TVM stacks them and reduces the
    stack, and broadcasts to the larger size, also where that is 1 and the other is 0.
    """

    def translation(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
        shapes = [shape_of(x) for x in inputs if x.ty.shape is not None]
        if len(shapes) < len(inputs):
            return None
        if not all(map(all, shapes)):
            return relax.op.zeros(numpy.broadcast_shapes(*map(tuple, shapes)), inputs[0].ty.dtype)
        found = reduce(lambda a, b: builder.emit(op(a, b)), inputs)
        return relax.op.divide(found, relax.const(len(inputs), found.ty.dtype)) if mean else found

    return translation

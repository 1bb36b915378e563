"""Normalizations. ONNX's LayerNormalization and ONNX Runtime's SkipLayerNormalization have all of
their outputs, and any scale and bias that broadcast::

    y = (x - mean) * inverse * scale + bias    mean, 1 / deviation: over the axes from ``axis`` on
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
from tvm import relax

from gtco.frontend.operators.arguments import Attributes

_SKIP_EPSILON = 1e-12


def layer_normalization(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """(y, mean, inverse deviation); the last two only if the node returns them."""
    x, scale, bias = (*inputs, None)[:3]
    axis, epsilon = attrs.get("axis", -1), attrs.get("epsilon", 1e-5)
    return _normalized(builder, x, scale, bias, axis, epsilon, attrs["tvm_custom"]["num_outputs"])


def skip_layer_normalization(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """The layer norm of s = x + skip + bias over the last axis, its mean, its inverse deviation,
    and s; each only if the node returns it.
    """
    x, skip, scale, beta, bias = (*inputs, None, None)[:5]
    outputs = attrs["tvm_custom"]["num_outputs"]
    total = builder.emit(relax.op.add(x, skip))
    if bias is not None:
        total = builder.emit(relax.op.add(total, bias))
    epsilon = attrs.get("epsilon", _SKIP_EPSILON)
    made = _normalized(builder, total, scale, beta, -1, epsilon, min(outputs, 3))
    return relax.Tuple([*made.fields, total]) if outputs > 3 else made


def _normalized(
    builder: Any, x: Any, scale: Any, bias: Any, axis: int, epsilon: float, outputs: int
) -> Any:
    """The first ``outputs`` results; a tuple if there is more than one."""
    shape = [int(dim) for dim in x.ty.shape]
    dtype = str(x.ty.dtype)
    first = axis % len(shape)
    axes, inner = list(range(first, len(shape))), shape[first:]
    plain = [_plain(builder, tensor, inner) for tensor in (scale, bias)]
    ones, zeros = (relax.const(value(inner), dtype) for value in (numpy.ones, numpy.zeros))
    fits = plain[0] is not None and (bias is None or plain[1] is not None)
    gamma = plain[0] if fits else ones
    beta = plain[1] if fits and bias is not None else zeros
    y = builder.emit(relax.op.nn.layer_norm(x, gamma, beta, axes, epsilon))
    if not fits:
        y = builder.emit(relax.op.multiply(y, scale))
        if bias is not None:
            y = builder.emit(relax.op.add(y, bias))
    results = [y]
    if outputs > 1:
        results.append(builder.emit(relax.op.mean(x, axes, True)))
    if outputs > 2:
        variance = builder.emit(relax.op.variance(x, axes, True))
        total = builder.emit(relax.op.add(variance, relax.const(epsilon, dtype)))
        results.append(builder.emit(relax.op.rsqrt(total)))
    return relax.Tuple(results) if outputs > 1 else y


def _plain(builder: Any, tensor: Any, inner: Sequence[int]) -> Any:
    """The tensor in the shape of the normalized axes, if only leading ones differ; None if it
    broadcasts otherwise.
    """
    if tensor is None:
        return None
    shape = [int(dim) for dim in tensor.ty.shape]
    lead = len(shape) - len(inner)
    if lead < 0 or any(size != 1 for size in shape[:lead]) or shape[lead:] != list(inner):
        return None
    return builder.emit(relax.op.reshape(tensor, inner)) if lead else tensor


def batch_normalization(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """BatchNormalization in training mode too: the share of the new statistics is 1 - momentum, and
    TVM takes momentum.
    """
    if not attrs.get("training_mode", 0) or any(x.ty.dtype != "float32" for x in inputs):
        return None
    made = relax.op.nn.batch_norm(
        *inputs,
        axis=1,
        epsilon=attrs.get("epsilon", 1e-5),
        momentum=1 - attrs.get("momentum", 0.9),
        training=True,
    )
    return relax.Tuple([relax.TupleGetItem(made, n) for n in range(3)])


def local_response_normalization(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """LRN: x / (bias + alpha * mean of the squares of ``size`` neighbouring channels) ** beta. Of
    an even number one more lies behind; TVM takes one more on either side, and float32 alone.
    """
    shape, size = [int(d) for d in inputs[0].ty.shape], int(attrs["size"])
    before = (size - 1) // 2
    x = _widened(builder, inputs[0])
    squares = relax.op.reshape(builder.emit(relax.op.multiply(x, x)), [shape[0], 1, shape[1], -1])
    means = relax.op.nn.avg_pool2d(
        builder.emit(squares),
        pool_size=(size, 1),
        padding=(before, 0, size - 1 - before, 0),
        count_include_pad=True,
    )
    alpha, bias, beta = (
        relax.const(attrs.get(name, default), str(x.ty.dtype))
        for name, default in (("alpha", 1e-4), ("bias", 1.0), ("beta", 0.75))
    )
    means = builder.emit(relax.op.reshape(builder.emit(means), shape))
    whole = builder.emit(relax.op.add(builder.emit(relax.op.multiply(means, alpha)), bias))
    y = builder.emit(relax.op.divide(x, builder.emit(relax.op.power(whole, beta))))
    return relax.op.astype(y, str(inputs[0].ty.dtype))


def _widened(builder: Any, x: Any) -> Any:
    """The tensor in float32, if its type is narrower: squares and sums overflow in float16."""
    if str(x.ty.dtype) not in ("float16", "bfloat16"):
        return x
    return builder.emit(relax.op.astype(x, "float32"))


def lp_normalization(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """Vectors along ``axis`` divided by their norm, the sum of magnitudes for p = 1 and the root of
    the sum of squares for p = 2. A vector of zeros stays one, as in ONNX Runtime.
    """
    x, p = inputs[0], int(attrs.get("p", 2))
    dtype = str(x.ty.dtype)
    powers = relax.op.abs(x) if p == 1 else relax.op.multiply(x, x)
    norm = builder.emit(
        relax.op.sum(builder.emit(powers), [int(attrs.get("axis", -1))], keepdims=True)
    )
    norm = norm if p == 1 else builder.emit(relax.op.sqrt(norm))
    none = builder.emit(relax.op.equal(norm, relax.const(0, dtype)))
    norm = builder.emit(relax.op.where(none, relax.const(1, dtype), norm))
    return relax.op.divide(x, norm)


def mean_variance_normalization(builder: Any, inputs: Sequence[Any], attrs: Attributes) -> Any:
    """(x - mean) / (deviation + 1e-9) over ``axes``. TVM has no epsilon, and takes the difference
    of two squares, of which nothing is left where the mean is large.
    """
    x, axes = inputs[0], [int(axis) for axis in attrs.get("axes", (0, 2, 3))]
    mean = builder.emit(relax.op.mean(x, axes, keepdims=True))
    centred = builder.emit(relax.op.subtract(x, mean))
    squares = builder.emit(relax.op.multiply(centred, centred))
    deviation = relax.op.sqrt(builder.emit(relax.op.mean(squares, axes, keepdims=True)))
    least = relax.const(1e-9, str(x.ty.dtype))
    return relax.op.divide(centred, builder.emit(relax.op.add(builder.emit(deviation), least)))

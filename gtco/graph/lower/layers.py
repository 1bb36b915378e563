"""Rules for each Relax layer: pooling, resizing, normalisation, attention."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy
from tvm import relax

from gtco.graph.lower.context import Lowering, NoRule, Rule, integer, integers
from gtco.graph.lower.context import result_type as _type
from gtco.graph.lower.convolution import CONVOLUTION_RULES
from gtco.tensor.stage import TensorType

# -- pooling, resizing -----------------------------------------------------------------------------


def _windows(kind: str, a: Any, lead: tuple[int, ...] = ()) -> dict[str, Any] | None:
    """The attributes of a pooling without padding and layout. ``lead`` gives values for axes that
    Relax's operator lacks. None for a mean over dilated windows.
    """
    attrs: dict[str, Any] = {
        "kernel": (*lead, *integers(a.pool_size)),
        "strides": (*lead, *integers(a.strides)),
    }
    if kind == "max_pool2d":
        return attrs | {"dilation": (*lead, *integers(a.dilation))}
    if any(d != 1 for d in integers(a.dilation)):
        return None
    return attrs | {"count_include_pad": bool(a.count_include_pad)}


def _pool(kind: str) -> Rule:
    def rule(lowering: Lowering, call: relax.Call) -> Any:
        a = call.attrs
        if a.layout not in ("NCHW", "NHWC") or a.out_layout not in ("", a.layout):
            return None
        attrs = _windows(kind, a)
        if attrs is None:
            return None
        attrs |= {"padding": integers(a.padding), "layout": str(a.layout)}
        return lowering.emit(kind, (lowering.value(call.args[0]),), _type(call), **attrs)

    return rule


def _pool1d(kind: str) -> Rule:
    """Pooling of one axis as two-dimensional pooling of images with one row."""

    def rule(lowering: Lowering, call: relax.Call) -> Any:
        a = call.attrs
        if a.layout != "NCW" or a.out_layout not in ("", "NCW"):
            return None
        attrs = _windows(kind, a, (1,))
        if attrs is None:
            return None
        left, right = integers(a.padding)
        attrs |= {"padding": (0, left, 0, right), "layout": "NCHW"}
        made, x = _type(call), lowering.value(call.args[0])
        n, c, w = lowering.type(x).shape
        x = lowering.reshape(x, (n, c, 1, w))
        flat = TensorType((*made.shape[:2], 1, made.shape[2]), made.dtype)
        return lowering.reshape(lowering.emit(kind, (x,), flat, **attrs), made.shape)

    return rule


def _pool3d(kind: str) -> Rule:
    """Pooling of three axes: of the images, and then along the depth. A mean is one of means, since
    a window at a border has as many elements as the product of those along each axis.

    ::

        before: y = avg_pool3d(x)                                      # x [n, c, d, h, w]
        after:  y = avg_pool2d(avg_pool2d(x[n, c * d, h, w]) as [n, c, d, h' * w'])
    """

    def rule(lowering: Lowering, call: relax.Call) -> Any:
        a = call.attrs
        if a.layout != "NCDHW" or a.out_layout not in ("", "NCDHW"):
            return None
        attrs = _windows(kind, a)
        if attrs is None:
            return None
        pads, made, x = integers(a.padding), _type(call), lowering.value(call.args[0])
        n, c, d, h, w = (int(size) for size in lowering.type(x).shape)
        depth, *image = (int(size) for size in made.shape[2:])
        tuples = [name for name in attrs if name != "count_include_pad"]
        of_images = attrs | {name: attrs[name][1:] for name in tuples}
        of_depth = attrs | {name: (attrs[name][0], 1) for name in tuples}
        y = lowering.emit(
            kind,
            (lowering.reshape(x, (n, c * d, h, w)),),
            TensorType((n, c * d, *image), made.dtype),
            padding=(*pads[1:3], *pads[4:]),
            layout="NCHW",
            **of_images,
        )
        y = lowering.emit(
            kind,
            (lowering.reshape(y, (n, c, d, image[0] * image[1])),),
            TensorType((n, c, depth, image[0] * image[1]), made.dtype),
            padding=(pads[0], 0, pads[3], 0),
            layout="NCHW",
            **of_depth,
        )
        return lowering.reshape(y, made.shape)

    return rule


def _adaptive_avg_pool2d(lowering: Lowering, call: relax.Call) -> Any:
    a = call.attrs
    x = lowering.value(call.args[0])
    made = _type(call)
    axes = (2, 3) if a.layout == "NCHW" else (1, 2)
    if any(made.shape[axis] != 1 for axis in axes):
        return None
    return lowering.emit("mean", (x,), axes=axes, keepdims=True)


_METHODS = {
    "nearest_neighbor": "nearest",
    "nearest": "nearest",
    "linear": "linear",
    "cubic": "cubic",
}
_COORDINATES = ("half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel")


def _resize2d(lowering: Lowering, call: relax.Call) -> Any:
    a = call.attrs
    coordinates = str(a.coordinate_transformation_mode)
    if (
        coordinates not in _COORDINATES
        or a.layout not in ("NCHW", "NHWC")
        or a.method not in _METHODS
    ):
        return None
    if a.method == "cubic" and integer(a.cubic_exclude):
        return None
    rounding = str(a.rounding_method) or ("round" if coordinates == "half_pixel" else "floor")
    return lowering.emit(
        "resize2d",
        (lowering.value(call.args[0]),),
        _type(call),
        method=_METHODS[a.method],
        coordinates=coordinates,
        rounding="round_prefer_floor" if rounding == "round" else rounding,
        cubic_alpha=float(a.cubic_alpha),
        layout=str(a.layout),
    )


def _grid_sample(lowering: Lowering, call: relax.Call) -> Any:
    """Relax has the points' coordinates in axis 1; ONNX and the canonical operator have them in the
    last.
    """
    a = call.attrs
    methods = {"nearest": "nearest", "bilinear": "linear"}
    if a.layout != "NCHW" or a.method not in methods:
        return None
    x, grid = (lowering.value(argument) for argument in call.args)
    known = lowering.type(x), lowering.type(grid)
    if known[0].dtype != known[1].dtype:  # positions are computed in the image's dtype
        grid = lowering.emit("cast", (grid,), TensorType(known[1].shape, known[0].dtype))
    return lowering.emit(
        "grid_sample",
        (x, lowering.permute(grid, (0, 2, 3, 1))),
        method=methods[a.method],
        padding=str(a.padding_mode),
        align_corners=bool(a.align_corners),
        layout="NCHW",
    )


def _pixel_shuffle(lowering: Lowering, call: relax.Call) -> str:
    x = lowering.value(call.args[0])
    r = integer(call.attrs.upscale_factor)
    *lead, c, h, w = (int(d) for d in lowering.type(x).shape)
    rank = len(lead)
    x = lowering.reshape(x, (*lead, c // (r * r), r, r, h, w))
    x = lowering.permute(x, (*range(rank + 1), rank + 3, rank + 1, rank + 4, rank + 2))
    return lowering.reshape(x, (*lead, c // (r * r), h * r, w * r))


# -- normalisation ---------------------------------------------------------------------------------


def normalize(
    lowering: Lowering, x: str, gamma: str | None, beta: str | None, epsilon: float, axes: int = 1
) -> str:
    """layer_norm over the last ``axes`` axes. gamma and beta (flattened) default to
    ones and zeros.
    """
    known = lowering.type(x)
    size = prod(int(d) for d in known.shape[len(known.shape) - axes :])
    g = (
        lowering.constant(numpy.ones(size), known.dtype)
        if gamma is None
        else lowering.reshape(gamma, (size,))
    )
    b = (
        lowering.constant(numpy.zeros(size), known.dtype)
        if beta is None
        else lowering.reshape(beta, (size,))
    )
    flat = lowering.reshape(x, (*known.shape[: len(known.shape) - axes], size))
    return lowering.reshape(
        lowering.emit("layer_norm", (flat, g, b), epsilon=float(epsilon)), known.shape
    )


def _trailing(lowering: Lowering, x: str, axes: Any) -> int:
    """The number of axes if ``axes`` are the last ones; else 0."""
    rank = len(lowering.type(x).shape)
    positive = sorted(a % rank for a in integers(axes))
    return len(positive) if positive == list(range(rank - len(positive), rank)) else 0


def _layer_norm(lowering: Lowering, call: relax.Call) -> Any:
    x, gamma, beta = (lowering.value(argument) for argument in call.args)
    axes = _trailing(lowering, x, call.attrs.axes)
    if not axes:
        return None
    return normalize(
        lowering,
        x,
        gamma if call.attrs.scale else None,
        beta if call.attrs.center else None,
        call.attrs.epsilon,
        axes,
    )


def _rms_norm(lowering: Lowering, call: relax.Call) -> Any:
    x, gamma = (lowering.value(argument) for argument in call.args[:2])
    known = lowering.type(x)
    axes = _trailing(lowering, x, call.attrs.axes)
    normalized = known.shape[len(known.shape) - axes :]
    if not axes or lowering.type(gamma).shape != normalized:
        return None
    size = prod(int(d) for d in normalized)
    flat = lowering.reshape(x, (*known.shape[: len(known.shape) - axes], size))
    weight = lowering.reshape(gamma, (size,))
    y = lowering.emit("rms_norm", (flat, weight), epsilon=float(call.attrs.epsilon))
    return lowering.reshape(y, known.shape)


def _per_channel(lowering: Lowering, vector: str, rank: int, axis: int) -> str:
    size = lowering.type(vector).size
    return lowering.reshape(vector, tuple(size if i == axis else 1 for i in range(rank)))


def _group_norm(lowering: Lowering, call: relax.Call) -> Any:
    """Groups of channels are normalised together. For InstanceNorm every channel is a group."""
    a = call.attrs
    x, gamma, beta = (lowering.value(argument) for argument in call.args)
    known = lowering.type(x)
    rank = len(known.shape)
    axis = integer(a.channel_axis) % rank
    if axis != 1 or sorted(i % rank for i in integers(a.axes)) != list(range(2, rank)):
        return None
    channels = int(known.shape[1])
    return lowering.emit(
        "group_norm",
        (
            x,
            gamma if a.scale else lowering.constant(numpy.ones(channels), known.dtype),
            beta if a.center else lowering.constant(numpy.zeros(channels), known.dtype),
        ),
        groups=integer(a.num_groups) if hasattr(a, "num_groups") else channels,
        epsilon=float(a.epsilon),
        axis=axis,
    )


def _batch_norm(lowering: Lowering, call: relax.Call) -> tuple[str, str, str]:
    """With the running statistics: x * s + (beta - mean * s), s = gamma / sqrt(var + epsilon),
    where s and the shift fold to constants.
    """
    a = call.attrs
    x, gamma, beta, mean, variance = (lowering.value(argument) for argument in call.args)
    if a.training:
        return _standardized(lowering, call)
    known = lowering.type(x)
    rank = len(known.shape)
    axis = integer(a.axis) % rank
    epsilon = lowering.constant(a.epsilon, lowering.type(variance).dtype)
    scale = lowering.emit("rsqrt", (lowering.emit("add", (variance, epsilon)),))
    if a.scale:
        scale = lowering.emit("multiply", (scale, gamma))
    shift = lowering.emit("negative", (lowering.emit("multiply", (mean, scale)),))
    if a.center:
        shift = lowering.emit("add", (beta, shift))
    y = lowering.emit("multiply", (x, _per_channel(lowering, scale, rank, axis)))
    return lowering.emit("add", (y, _per_channel(lowering, shift, rank, axis))), mean, variance


def _standardized(lowering: Lowering, call: relax.Call) -> tuple[str, str, str]:
    """With the statistics of the normalised tensor itself, as TorchScript writes the standardizing
    of weights (BiT); then all of it folds to constants. It is refused for a tensor that depends on
    an input: such a model was exported in training mode.
    """
    a = call.attrs
    x, gamma, beta, *running = (lowering.value(argument) for argument in call.args)
    if lowering.computed(x):
        raise NoRule("batch_norm in training mode (export the model after model.eval())")
    known = lowering.type(x)
    rank = len(known.shape)
    axis = integer(a.axis) % rank
    axes = tuple(n for n in range(rank) if n != axis)
    mean = lowering.emit("mean", (x,), axes=axes, keepdims=True)
    centred = lowering.emit("subtract", (x, mean))
    square = lowering.emit("multiply", (centred, centred))
    variance = lowering.emit("mean", (square,), axes=axes, keepdims=True)
    epsilon = lowering.constant(a.epsilon, known.dtype)
    scale = lowering.emit("rsqrt", (lowering.emit("add", (variance, epsilon)),))
    y = lowering.emit("multiply", (centred, scale))
    if a.scale:
        y = lowering.emit("multiply", (y, _per_channel(lowering, gamma, rank, axis)))
    if a.center:
        y = lowering.emit("add", (y, _per_channel(lowering, beta, rank, axis)))

    def moved(old: str, new: str) -> str:
        share = float(a.momentum)
        kept = lowering.emit("multiply", (old, lowering.constant(1 - share, known.dtype)))
        now = lowering.reshape(new, lowering.type(old).shape)
        added = lowering.emit("multiply", (now, lowering.constant(share, known.dtype)))
        return lowering.emit("add", (kept, added))

    return y, moved(running[0], mean), moved(running[1], variance)


def _dropout(lowering: Lowering, call: relax.Call) -> tuple[str, str]:
    """Dropout does nothing at inference."""
    x = lowering.value(call.args[0])
    return x, x


# -- attention -------------------------------------------------------------------------------------


def _attention(lowering: Lowering, call: relax.Call) -> Any:
    """Relax has [batch, sequence, heads, depth]; the canonical operator has [batch, heads,
    sequence, depth].
    """
    a = call.attrs
    if a.window_size is not None:
        return None
    q, k, v = (
        lowering.permute(lowering.value(argument), (0, 2, 1, 3)) for argument in call.args[:3]
    )
    rows, columns = int(lowering.type(q).shape[2]), int(lowering.type(k).shape[2])
    scale = (
        float(a.scale.value if hasattr(a.scale, "value") else a.scale)
        if a.scale is not None
        else (int(lowering.type(q).shape[3]) ** -0.5)
    )
    bias = lowering.value(call.args[3]) if len(call.args) > 3 else None
    if a.causal_mask is not None:
        dtype = lowering.type(q).dtype
        offset = 0 if str(a.causal_mask) == "TopLeft" else columns - rows
        allowed = numpy.tri(rows, columns, offset, dtype=bool)
        mask = lowering.constant(numpy.where(allowed, 0.0, -numpy.inf), dtype)
        bias = mask if bias is None else lowering.emit("add", (bias, mask))
    inputs = (q, k, v) if bias is None else (q, k, v, bias)
    return lowering.permute(lowering.emit("attention", inputs, scale=scale), (0, 2, 1, 3))


LAYER_RULES: dict[str, Rule] = {
    **CONVOLUTION_RULES,
    "nn.max_pool1d": _pool1d("max_pool2d"),
    "nn.avg_pool1d": _pool1d("avg_pool2d"),
    "nn.max_pool3d": _pool3d("max_pool2d"),
    "nn.avg_pool3d": _pool3d("avg_pool2d"),
    "nn.max_pool2d": _pool("max_pool2d"),
    "nn.avg_pool2d": _pool("avg_pool2d"),
    "nn.adaptive_avg_pool2d": _adaptive_avg_pool2d,
    "image.resize2d": _resize2d,
    "image.grid_sample": _grid_sample,
    "nn.pixel_shuffle": _pixel_shuffle,
    "nn.layer_norm": _layer_norm,
    "nn.rms_norm": _rms_norm,
    "nn.group_norm": _group_norm,
    "nn.instance_norm": _group_norm,
    "nn.batch_norm": _batch_norm,
    "nn.dropout": _dropout,
    "nn.attention": _attention,
    "nn.attention_bias": _attention,
}

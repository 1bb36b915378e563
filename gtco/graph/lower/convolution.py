"""Rules for Relax's convolutions of any number of axes: they become conv2d and conv_transpose2d."""

from __future__ import annotations

from typing import Any

from tvm import relax

from gtco.graph.lower.context import Lowering, Rule, integer, integers, result_type
from gtco.tensor.stage import TensorType


def _conv2d(lowering: Lowering, call: relax.Call) -> Any:
    a = call.attrs
    if (
        a.data_layout not in ("NCHW", "NHWC")
        or a.out_layout not in ("", a.data_layout)
        or len(a.kernel_layout) != 4
    ):
        return None
    x, weight = lowering.value(call.args[0]), lowering.value(call.args[1])
    weight = lowering.permute(
        weight, tuple(str(a.kernel_layout).index(letter) for letter in "OIHW")
    )
    return lowering.emit(
        "conv2d",
        (x, weight),
        strides=integers(a.strides),
        padding=integers(a.padding),
        dilation=integers(a.dilation),
        groups=integer(a.groups),
        layout=str(a.data_layout),
    )


def _conv1d(lowering: Lowering, call: relax.Call) -> Any:
    """A convolution of one axis becomes one of two axes with a height of 1."""
    a = call.attrs
    if a.data_layout != "NCW" or a.kernel_layout != "OIW" or a.out_layout not in ("", "NCW"):
        return None
    x, weight = _with_height(lowering, call)
    left, right = integers(a.padding)
    y = lowering.emit(
        "conv2d",
        (x, weight),
        strides=(1, *integers(a.strides)),
        padding=(0, left, 0, right),
        dilation=(1, *integers(a.dilation)),
        groups=integer(a.groups),
        layout="NCHW",
    )
    return lowering.reshape(y, result_type(call).shape)


def _with_height(lowering: Lowering, call: relax.Call) -> tuple[str, str]:
    """Data [n, c, w] and weight [o, i, k], both with a height of 1."""
    made = []
    for argument in call.args[:2]:
        name = lowering.value(argument)
        first, second, length = lowering.type(name).shape
        made.append(lowering.reshape(name, (first, second, 1, length)))
    return made[0], made[1]


def _conv3d(lowering: Lowering, call: relax.Call) -> Any:
    """A sum of convolutions of two axes, one for each of the filter's planes.

    ::

        before: y = conv3d(x, w)                     # w [o, i, kd, kh, kw]
        after:  y = sum over t of conv2d(x[planes d * stride + t * dilation as images], w[:, :, t])
    """
    a = call.attrs
    if a.data_layout != "NCDHW" or a.kernel_layout != "OIDHW":
        return None
    if a.out_layout not in ("", "NCDHW"):
        return None
    x, weight = lowering.value(call.args[0]), lowering.value(call.args[1])
    made = result_type(call)
    (step, *strides), (spread, *dilation) = integers(a.strides), integers(a.dilation)
    front, top, left, back, bottom, right = integers(a.padding)
    if front or back:
        before, after = (0, 0, front, 0, 0), (0, 0, back, 0, 0)
        x = lowering.emit("pad", (x,), before=before, after=after, value=0.0)
    n, c, _, h, w = (int(d) for d in lowering.type(x).shape)
    o, i, planes, kh, kw = (int(d) for d in lowering.type(weight).shape)
    depth = int(made.shape[2])
    total: str | None = None
    for t in range(planes):
        images = lowering.emit(
            "slice",
            (x,),
            TensorType((n, c, depth, h, w), made.dtype),
            begin=(0, 0, t * spread, 0, 0),
            strides=(1, 1, step, 1, 1),
        )
        images = lowering.reshape(lowering.permute(images, (0, 2, 1, 3, 4)), (n * depth, c, h, w))
        plane = lowering.emit(
            "slice",
            (weight,),
            TensorType((o, i, 1, kh, kw), made.dtype),
            begin=(0, 0, t, 0, 0),
            strides=(1,) * 5,
        )
        y = lowering.emit(
            "conv2d",
            (images, lowering.reshape(plane, (o, i, kh, kw))),
            strides=tuple(strides),
            padding=(top, left, bottom, right),
            dilation=tuple(dilation),
            groups=integer(a.groups),
            layout="NCHW",
        )
        total = y if total is None else lowering.emit("add", (total, y))
    assert total is not None
    split = lowering.reshape(total, (n, depth, o, *made.shape[3:]))
    return lowering.permute(split, (0, 2, 1, 3, 4))


def _conv_transpose2d(lowering: Lowering, call: relax.Call) -> Any:
    a = call.attrs
    if a.data_layout != "NCHW" or a.kernel_layout != "IOHW" or a.out_layout not in ("", "NCHW"):
        return None
    x, weight = lowering.value(call.args[0]), lowering.value(call.args[1])
    return _transposed(
        lowering,
        x,
        weight,
        result_type(call),
        strides=integers(a.strides),
        padding=integers(a.padding),
        dilation=integers(a.dilation),
        output_padding=integers(a.output_padding),
        groups=integer(a.groups),
    )


def _conv_transpose1d(lowering: Lowering, call: relax.Call) -> Any:
    a = call.attrs
    if a.data_layout != "NCW" or a.kernel_layout != "IOW" or a.out_layout not in ("", "NCW"):
        return None
    x, weight = _with_height(lowering, call)
    made = result_type(call)
    n, c, width = made.shape
    left, right = integers(a.padding)
    y = _transposed(
        lowering,
        x,
        weight,
        TensorType((n, c, 1, width), made.dtype),
        strides=(1, *integers(a.strides)),
        padding=(0, left, 0, right),
        dilation=(1, *integers(a.dilation)),
        output_padding=(0, *integers(a.output_padding)),
        groups=integer(a.groups),
    )
    return lowering.reshape(y, made.shape)


def _transposed(
    lowering: Lowering,
    x: str,
    weight: str,
    made: TensorType,
    *,
    strides: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    output_padding: tuple[int, ...],
    groups: int,
) -> str:
    """conv_transpose2d. The kernel computes all rows of a stride alike, so its output has whole
    strides and is cut to the wanted size.
    """
    missing = [-int(size) % s for size, s in zip(made.shape[2:], strides, strict=True)]
    if made.dtype != "float32" or lowering.array(weight) is None:
        missing = [0, 0]  # the fallback computes these; it allows less output_padding
    for axis, spread in zip((2, 3), dilation, strict=True):
        weight = _dilated(lowering, weight, axis, spread)
    y = lowering.emit(
        "conv_transpose2d",
        (x, weight),
        strides=strides,
        padding=padding,
        output_padding=tuple(p + m for p, m in zip(output_padding, missing, strict=True)),
        groups=groups,
        layout="NCHW",
    )
    if not any(missing):
        return y
    return lowering.emit("slice", (y,), made, begin=(0,) * 4, strides=(1,) * 4)


def _dilated(lowering: Lowering, weight: str, axis: int, spread: int) -> str:
    """The weight with ``spread - 1`` zeros between neighbours along an axis."""
    shape = [int(d) for d in lowering.type(weight).shape]
    if spread == 1 or shape[axis] == 1:
        return weight
    split = (*shape[: axis + 1], 1, *shape[axis + 1 :])
    after = tuple(spread - 1 if i == axis + 1 else 0 for i in range(5))
    apart = lowering.emit(
        "pad", (lowering.reshape(weight, split),), before=(0,) * 5, after=after, value=0.0
    )
    wide = lowering.reshape(apart, (*shape[:axis], shape[axis] * spread, *shape[axis + 1 :]))
    count = (shape[axis] - 1) * spread + 1
    kept = TensorType((*shape[:axis], count, *shape[axis + 1 :]), lowering.type(weight).dtype)
    return lowering.emit("slice", (wide,), kept, begin=(0,) * 4, strides=(1,) * 4)


CONVOLUTION_RULES: dict[str, Rule] = {
    "nn.conv1d": _conv1d,
    "nn.conv2d": _conv2d,
    "nn.conv3d": _conv3d,
    "nn.conv1d_transpose": _conv_transpose1d,
    "nn.conv2d_transpose": _conv_transpose2d,
}

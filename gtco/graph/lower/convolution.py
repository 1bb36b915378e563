"""Rules for Relax's convolutions of any number of axes: they become conv2d and conv_transpose2d."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    """A convolution of two axes, if the filter has an extent of 1 along the third, or if its planes
    along the depth do not overlap; otherwise a sum of such convolutions.

    ::

        before: y = conv3d(x, w)                     # w [o, i, kd, kh, kw]
        after:  y = conv2d(x[n, c, d, h * w], w)     # kh = kw = 1; d and h likewise
        after:  y = conv2d(x[n * w, c, d, h], w)     # kw = 1; d and h likewise
        after:  y = conv2d(x[n * d, c * kd, h, w], w)           # a stride of kd, one group
        after:  y = sum over t of conv2d(x[planes d * stride + t * dilation as images], w[:, :, t])
    """
    a = call.attrs
    if a.data_layout != "NCDHW" or a.kernel_layout != "OIDHW":
        return None
    if a.out_layout not in ("", "NCDHW"):
        return None
    x, weight = lowering.value(call.args[0]), lowering.value(call.args[1])
    made = result_type(call)
    pads = integers(a.padding)
    axes = tuple(zip(integers(a.strides), pads[:3], pads[3:], integers(a.dilation), strict=True))
    volume = _Volume(lowering, x, weight, made, integer(a.groups), axes)
    # Along these the filter mixes nothing, so they may be images of a batch.
    apart = [axis for axis in range(3) if int(lowering.type(weight).shape[2 + axis]) == 1]
    if len(apart) > 1 and 1 in apart:
        return volume.joined(1 if 2 in apart else 0)
    if apart:
        return volume.as_images(apart[0])
    return volume.by_planes()


@dataclass(frozen=True)
class _Volume:
    """A 3-D convolution of ``x`` [n, c, d, h, w] by ``weight`` [o, i, kd, kh, kw].

    ``axes``: stride, padding in front and behind, and dilation along d, h and w.
    """

    lowering: Lowering
    x: str
    weight: str
    made: TensorType
    groups: int
    axes: tuple[tuple[int, int, int, int], ...]

    def joined(self, first: int) -> str:
        """Axes ``first`` and ``first + 1``, along which the filter has an extent of 1, as one."""
        x = self._strided(self._strided(self.x, first), first + 1)
        kept = 2 if first == 0 else 0
        shapes = [self.lowering.type(t).shape for t in (x, self.weight)]
        data, weight = (
            self.lowering.reshape(t, _joint(shape, 2 + first))
            for t, shape in zip((x, self.weight), shapes, strict=True)
        )
        one = (1, 0, 0, 1)
        axes = (one, self.axes[kept]) if first == 0 else (self.axes[kept], one)
        return self.lowering.reshape(self._flat(data, weight, axes), self.made.shape)

    def as_images(self, apart: int) -> str:
        """The images along axis ``apart``, where the filter has an extent of 1, as a batch."""
        x = self._strided(self.x, apart)
        others = [axis for axis in range(3) if axis != apart]
        n, c, *sizes = self.lowering.type(x).shape
        images = self.lowering.permute(x, (0, 2 + apart, 1, *(2 + axis for axis in others)))
        images = self.lowering.reshape(
            images, (int(n) * int(sizes[apart]), c, *(sizes[axis] for axis in others))
        )
        o, i, *extents = self.lowering.type(self.weight).shape
        weight = self.lowering.reshape(self.weight, (o, i, *(extents[axis] for axis in others)))
        y = self._flat(images, weight, tuple(self.axes[axis] for axis in others))
        split = self.lowering.reshape(y, (n, sizes[apart], *self.lowering.type(y).shape[1:]))
        places = {apart: 1, others[0]: 3, others[1]: 4}
        return self.lowering.permute(split, (0, 2, *(places[axis] for axis in range(3))))

    def by_planes(self) -> str:
        """Planes of the filter as channels if no two of them read the same plane of ``x``;
        otherwise a convolution for each.
        """
        low = self.lowering
        (step, front, back, spread), *rest = self.axes
        x = self._padded(self.x, 0) if front or back else self.x
        n, c, _, h, w = (int(d) for d in low.type(x).shape)
        o, i, planes, kh, kw = (int(d) for d in low.type(self.weight).shape)
        depth = int(self.made.shape[2])
        if step == planes and spread == 1 and self.groups == 1:
            x = _cut(low, x, (n, c, depth * planes, h, w), (0,) * 5, (1,) * 5)
            x = low.reshape(x, (n, c, depth, planes, h, w))
            x = low.reshape(low.permute(x, (0, 2, 1, 3, 4, 5)), (n * depth, c * planes, h, w))
            total = self._flat(x, low.reshape(self.weight, (o, i * planes, kh, kw)), rest)
        else:
            total = ""
            for t in range(planes):
                places = (0, 0, t * spread, 0, 0)
                images = _cut(low, x, (n, c, depth, h, w), places, (1, 1, step, 1, 1))
                images = low.permute(images, (0, 2, 1, 3, 4))
                plane = _cut(low, self.weight, (o, i, 1, kh, kw), (0, 0, t, 0, 0), (1,) * 5)
                y = self._flat(
                    low.reshape(images, (n * depth, c, h, w)),
                    low.reshape(plane, (o, i, kh, kw)),
                    rest,
                )
                total = low.emit("add", (total, y)) if total else y
        split = low.reshape(total, (n, depth, o, *self.made.shape[3:]))
        return low.permute(split, (0, 2, 1, 3, 4))

    def _flat(self, x: str, weight: str, axes: Sequence[tuple[int, int, int, int]]) -> str:
        (rows, top, bottom, down), (columns, left, right, across) = axes
        return self.lowering.emit(
            "conv2d",
            (x, weight),
            strides=(rows, columns),
            padding=(top, left, bottom, right),
            dilation=(down, across),
            groups=self.groups,
            layout="NCHW",
        )

    def _strided(self, x: str, axis: int) -> str:
        """What a filter of extent 1 reads along an axis."""
        step, front, back, _ = self.axes[axis]
        if front or back:
            x = self._padded(x, axis)
        shape = list(self.lowering.type(x).shape)
        shape[2 + axis] = self.made.shape[2 + axis]
        steps = tuple(step if place == 2 + axis else 1 for place in range(5))
        return _cut(self.lowering, x, tuple(shape), (0,) * 5, steps)

    def _padded(self, x: str, axis: int) -> str:
        before, after = [0] * 5, [0] * 5
        _, before[2 + axis], after[2 + axis], _ = self.axes[axis]
        return self.lowering.emit("pad", (x,), before=tuple(before), after=tuple(after), value=0.0)


def _cut(
    lowering: Lowering,
    x: str,
    shape: tuple[Any, ...],
    begin: tuple[int, ...],
    strides: tuple[int, ...],
) -> str:
    """The part of this shape; ``x`` itself if that is all of it."""
    known = lowering.type(x)
    if known.shape == shape:
        return x
    made = TensorType(shape, known.dtype)
    return lowering.emit("slice", (x,), made, begin=begin, strides=strides)


def _joint(shape: tuple[Any, ...], axis: int) -> tuple[Any, ...]:
    """The shape with ``axis`` and the next one as one."""
    return (*shape[:axis], int(shape[axis]) * int(shape[axis + 1]), *shape[axis + 2 :])


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


def _conv_transpose3d(lowering: Lowering, call: relax.Call) -> Any:
    """Transposed convolutions of two axes, one for all planes of the filter or one for each.

    ::

        before: y = conv3d_transpose(x, w)           # w [i, o, kd, kh, kw], a stride s along d
        after:  y = conv2d_transpose(x[n * d, c, h, w], w[i, kd * o, kh, kw])     # s = kd
        after:  y[q * s + r] = sum over t of conv2d_transpose(x[planes q - t // s], w[:, :, t])
                with the planes t of the filter that have t % s = r
    """
    a = call.attrs
    if a.data_layout != "NCDHW" or a.kernel_layout != "IODHW" or a.out_layout not in ("", "NCDHW"):
        return None
    x, weight = lowering.value(call.args[0]), lowering.value(call.args[1])
    pads, dilation = integers(a.padding), integers(a.dilation)
    step, extent = integers(a.strides)[0], int(lowering.type(weight).shape[2])
    places = [t * dilation[0] for t in range(extent)]
    if len({place % step for place in places}) < step:
        return None  # some planes of the output would be read by no plane of the filter
    made = result_type(call)
    o, depth = int(made.shape[1]), int(made.shape[2])
    n, c, planes, h, w = (int(d) for d in lowering.type(x).shape)
    i, per_group, _, *window = (int(d) for d in lowering.type(weight).shape)

    def flat(x: str, weight: str) -> str:
        """Images [m, c, h, w] by [i, k, kh, kw]."""
        images, filters = int(lowering.type(x).shape[0]), int(lowering.type(weight).shape[1])
        return _transposed(
            lowering,
            x,
            weight,
            TensorType((images, filters * integer(a.groups), *made.shape[3:]), made.dtype),
            strides=integers(a.strides)[1:],
            padding=(*pads[1:3], *pads[4:]),
            dilation=dilation[1:],
            output_padding=integers(a.output_padding)[1:],
            groups=integer(a.groups),
        )

    def cut(x: str, shape: tuple[int, ...], begin: tuple[int, ...]) -> str:
        return _cut(lowering, x, shape, begin, (1,) * 5)

    data = lowering.permute(x, (0, 2, 1, 3, 4))  # [n, planes, c, h, w]
    alone = step == extent and dilation[0] == 1 and pads[0] + depth <= planes * step
    if alone and integer(a.groups) == 1:
        filters = lowering.permute(weight, (0, 2, 1, 3, 4))
        filters = lowering.reshape(filters, (i, extent * per_group, *window))
        y = flat(lowering.reshape(data, (n * planes, c, h, w)), filters)
        count = planes
    else:
        count = -(-(pads[0] + depth) // step)  # planes of the output, by steps
        phases = []
        for phase in range(step):
            total = ""
            for t in [t for t in range(extent) if places[t] % step == phase]:
                shift = places[t] // step
                behind = max(count - planes - shift, 0)
                moved = data
                if shift or behind:
                    before, after = (0, shift, 0, 0, 0), (0, behind, 0, 0, 0)
                    moved = lowering.emit("pad", (data,), before=before, after=after, value=0.0)
                moved = cut(moved, (n, count, c, h, w), (0,) * 5)
                plane = cut(weight, (i, per_group, 1, *window), (0, 0, t, 0, 0))
                y = flat(
                    lowering.reshape(moved, (n * count, c, h, w)),
                    lowering.reshape(plane, (i, per_group, *window)),
                )
                total = lowering.emit("add", (total, y)) if total else y
            phases.append(lowering.reshape(total, (n, count, 1, o, *made.shape[3:])))
        y = lowering.concat(phases, 2) if step > 1 else phases[0]
    y = lowering.reshape(y, (n, count * step, o, *made.shape[3:]))
    y = cut(y, (n, depth, o, *(int(d) for d in made.shape[3:])), (0, pads[0], 0, 0, 0))
    return lowering.permute(y, (0, 2, 1, 3, 4))


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
    if made.dtype != "float32" or lowering.computed(weight):
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
    "nn.conv3d_transpose": _conv_transpose3d,
}

"""Contractions: matmul, convolution and transposed convolution seen as C[b, m, n] += A[b, m, k] *
B[b, k, n].

The view gives the tensor element of each of A, B and C as index expressions. A sketch over it
serves dense layers, batched products and convolutions (implicit GEMM) alike. A group of a
convolution is a batch, and so is a phase of a transposed one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, prod

from gtco.tensor.analysis.images import nhwc, place
from gtco.tensor.analysis.indices import broadcast_index, floordiv, floormod, reshape_index
from gtco.tensor.analysis.loop_nest import loop_nest
from gtco.tensor.analysis.mapping import widest
from gtco.tensor.analysis.scope import Expr
from gtco.tensor.packing import Packing
from gtco.tensor.stage import Operator, Stage

CONTRACTIONS = ("matmul", "conv2d", "conv_transpose2d")


@dataclass(frozen=True)
class Contraction:
    """Extents and operator; A and B are the tensors ``op.inputs[0]`` and ``op.inputs[1]``.
    ``gathered``: no neighbours of A along k lie side by side in memory.
    """

    op: Operator
    batch: int
    m: int
    n: int
    k: int
    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]
    gathered: bool = False

    @cached_property
    def out_shape(self) -> tuple[int, ...]:
        return tuple(int(d) for d in self.op.type.shape)

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.n * self.k

    def c_index(self, b: Expr, m: Expr, n: Expr) -> list[Expr]:
        raise AssertionError

    def a_index(self, b: Expr, m: Expr, k: Expr) -> list[Expr]:
        raise AssertionError

    def b_index(self, b: Expr, k: Expr, n: Expr) -> list[Expr]:
        raise AssertionError

    def packing(self, nr: int, step: int = 1, whole: int = 1, pairs: bool = False) -> Packing:
        """Constant B in panels of ``nr`` columns, with ``step`` neighbours of k side by side and
        zeros at the ends: [batches, ceil(n / nr), ceil(k / step), nr, step]. The last axis exists
        only if it is not 1. Panels end at a multiple of ``whole`` steps of k too. With ``pairs``,
        two of 4 bits lie in a byte.
        """
        panels, depth = ceil(self.n / nr), ceil(ceil(self.k / whole) * whole / step)
        pad = (0, depth * step - self.k, panels * nr - self.n)
        shape = (self.batch, self.k, self.n)
        laid = (
            Packing(shape, (0, 1, 2), pad, (self.batch, depth, panels, nr), (0, 2, 1, 3))
            if step == 1
            else Packing(
                shape,
                (0, 1, 2),
                pad,
                (self.batch, depth, step, panels, nr),
                (0, 3, 1, 4, 2),
                pairs=pairs,
            )
        )
        matrix = self.matrix_packing()
        return replace(matrix, then=laid) if matrix else laid

    def matrix_packing(self) -> Packing | None:
        """Constant B as [batches, k, n]; None if it has this layout already."""
        return None

    def row_packing(self) -> Packing:
        """Constant B as rows: [batches, n, k]."""
        raise AssertionError

    def packed_batch(self, b: Expr) -> Expr:
        """The batch of the packed B that a batch reads."""
        return b


@dataclass(frozen=True)
class MatmulView(Contraction):
    """numpy.matmul. The leading axes of the output along which B is the same (of size 1 or absent)
    are folded into m, before the rows; the others are batches.
    """

    @property
    def leading(self) -> tuple[int, ...]:
        """The leading axes of B, as many as the output has."""
        rank = len(self.out_shape) - len(self.b_shape)
        return (1,) * rank + self.b_shape[:-2]

    @property
    def folded(self) -> bool:
        """True if there is one B for all of A."""
        return prod(self.leading) == 1

    def position(self, b: Expr, m: Expr) -> list[Expr]:
        """The output's index, without its column."""
        rows = tuple(
            d for d, own in zip(self.out_shape[:-2], self.leading, strict=True) if own == 1
        )
        batches = tuple(own for own in self.leading if own != 1)
        row = iter(reshape_index([m], [self.m], (*rows, self.out_shape[-2])))
        batch = iter(reshape_index([b], [self.batch], batches))
        return [*(next(row) if own == 1 else next(batch) for own in self.leading), next(row)]

    def c_index(self, b: Expr, m: Expr, n: Expr) -> list[Expr]:
        return [*self.position(b, m), n]

    def a_index(self, b: Expr, m: Expr, k: Expr) -> list[Expr]:
        *lead, row = self.position(b, m)
        return [*broadcast_index(lead, self.a_shape[:-2]), row, k]

    def b_index(self, b: Expr, k: Expr, n: Expr) -> list[Expr]:
        return [*reshape_index([b], [self.batch], self.b_shape[:-2]), k, n]

    def row_packing(self) -> Packing:
        shape = (self.batch, self.k, self.n)
        return Packing(shape, (0, 2, 1), (0,) * 3, (self.batch, self.n, self.k), (0, 1, 2))


@dataclass(frozen=True)
class ConvView(Contraction):
    """Implicit GEMM: b = group, m = (image, row, column) of the output, n = output channel of the
    group, k = (kh, kw, c) or (c, kh, kw) with c = input channel of the group.

    The order of k follows the input's memory, so that packing reads runs of neighbours.
    """

    channels_first: bool = False  # k = (c, kh, kw)

    @property
    def groups(self) -> int:
        return int(self.op["groups"])

    @property
    def kernel(self) -> tuple[int, int]:
        """Taps along height and width."""
        return self.b_shape[2], self.b_shape[3]

    @property
    def channels(self) -> int:
        """Input channels of a group."""
        return self.k // prod(self.kernel)

    @property
    def run(self) -> int:
        """Neighbours of k that lie side by side in memory."""
        if self.gathered:
            return 1
        return self.kernel[1] if self.channels_first else self.channels

    @property
    def image(self) -> tuple[int, int]:
        """Input height and width."""
        return nhwc(self.a_shape, self.op["layout"])[1:3]

    @cached_property
    def result(self) -> tuple[int, int, int]:
        """Images, output height and width."""
        return nhwc(self.out_shape, self.op["layout"])[:3]

    @property
    def padded(self) -> bool:
        """True if a tap may lie outside the image."""
        return any(self.op["padding"])

    def group(self, b: Expr) -> Expr:
        return b

    def pixel(self, m: Expr) -> list[Expr]:
        """(image, output row, output column) of m."""
        return reshape_index([m], [self.m], self.result)

    def source(self, b: Expr, pixel: Sequence[Expr], kh: Expr, kw: Expr) -> tuple[Expr, Expr]:
        """The input's row and column, which lie outside the image under padding."""
        (sh, sw), (top, left, _, _), (dh, dw) = (
            self.op["strides"],
            self.op["padding"],
            self.op["dilation"],
        )
        return pixel[1] * sh + kh * dh - top, pixel[2] * sw + kw * dw - left

    def place(self, image: Expr, row: Expr, column: Expr, c: Expr) -> list[Expr]:
        """The index in the layout's own order."""
        return place(self.op["layout"], image, row, column, c)

    def x_index(self, b: Expr, image: Expr, row: Expr, column: Expr, c: Expr) -> list[Expr]:
        """The index of the input's channel ``c`` of the batch's group."""
        return self.place(image, row, column, self.group(b) * self.channels + c)

    def taps(self, k: Expr) -> tuple[Expr, Expr, Expr]:
        """(kh, kw, c) of k."""
        kh, kw = self.kernel
        if self.channels_first:
            c, i, j = reshape_index([k], [self.k], (self.channels, kh, kw))
        else:
            i, j, c = reshape_index([k], [self.k], (kh, kw, self.channels))
        return i, j, c

    def c_index(self, b: Expr, m: Expr, n: Expr) -> list[Expr]:
        image, row, column = self.pixel(m)
        return self.place(image, row, column, self.group(b) * self.n + n)

    def a_index(self, b: Expr, m: Expr, k: Expr) -> list[Expr]:
        """The index of an element of A; it is valid only without padding."""
        i, j, c = self.taps(k)
        pixel = self.pixel(m)
        return self.x_index(b, pixel[0], *self.source(b, pixel, i, j), c)

    def b_index(self, b: Expr, k: Expr, n: Expr) -> list[Expr]:
        i, j, c = self.taps(k)
        return [self.group(b) * self.n + n, c, i, j]

    def matrix_packing(self) -> Packing | None:
        shape = (self.groups, self.n, *self.b_shape[1:])
        axes = (0, 2, 3, 4, 1) if self.channels_first else (0, 3, 4, 2, 1)
        moved = tuple(shape[a] for a in axes)
        return Packing(shape, axes, (0,) * 5, moved, (0, 1, 2, 3, 4))

    def row_packing(self) -> Packing:
        shape = (self.groups, self.n, *self.b_shape[1:])
        axes = (0, 1, 2, 3, 4) if self.channels_first else (0, 1, 3, 4, 2)
        moved = tuple(shape[a] for a in axes)
        return Packing(shape, axes, (0,) * 5, moved, (0, 1, 2, 3, 4))


@dataclass(frozen=True)
class TransposedView(ConvView):
    """A transposed convolution as one convolution of stride 1 for each phase, without inserted
    zeros.

    ::

        y[s * q + f] = sum over t, c of  x[q + (f + p) // s - t, c] * w[c, s * t + (f + p) % s]

    along each axis, with s the stride, p the padding and f the phase (a row's place among s
    neighbours). b = (group, phase of rows, phase of columns), m = (image, q of rows, q of columns),
    k = (t of rows, t of columns, c). If a phase has fewer taps than others, zeros are packed.
    """

    @property
    def strides(self) -> tuple[int, int]:
        sh, sw = self.op["strides"]
        return sh, sw

    @property
    def kernel(self) -> tuple[int, int]:
        sh, sw = self.strides
        return ceil(self.b_shape[2] / sh), ceil(self.b_shape[3] / sw)

    @property
    def result(self) -> tuple[int, int, int]:
        images, h, w = super().result
        return images, h // self.strides[0], w // self.strides[1]

    @property
    def padded(self) -> bool:
        for size, count, taps, stride, p in zip(
            self.image, self.result[1:], self.kernel, self.strides, self.op["padding"], strict=False
        ):
            if p // stride - (taps - 1) < 0 or count - 1 + (stride - 1 + p) // stride >= size:
                return True
        return False

    def phases(self, b: Expr) -> list[Expr]:
        """(group, phase of rows, phase of columns) of a batch."""
        return reshape_index([b], [self.batch], (self.groups, *self.strides))

    def group(self, b: Expr) -> Expr:
        return self.phases(b)[0]

    def source(self, b: Expr, pixel: Sequence[Expr], kh: Expr, kw: Expr) -> tuple[Expr, Expr]:
        (sh, sw), (top, left, _, _) = self.strides, self.op["padding"]
        _, fh, fw = self.phases(b)
        return (
            pixel[1] + floordiv(fh + top, sh) - kh,
            pixel[2] + floordiv(fw + left, sw) - kw,
        )

    def c_index(self, b: Expr, m: Expr, n: Expr) -> list[Expr]:
        image, row, column = self.pixel(m)
        group, fh, fw = self.phases(b)
        sh, sw = self.strides
        return self.place(image, row * sh + fh, column * sw + fw, group * self.n + n)

    def b_index(self, b: Expr, k: Expr, n: Expr) -> list[Expr]:
        raise AssertionError("a transposed convolution's weights are constants")

    def packed_batch(self, b: Expr) -> Expr:
        (sh, sw), (top, left, _, _) = self.strides, self.op["padding"]
        group, fh, fw = self.phases(b)
        return (group * sh + floormod(fh + top, sh)) * sw + floormod(fw + left, sw)

    def matrix_packing(self) -> Packing | None:
        (th, tw), (sh, sw), (kh, kw) = self.kernel, self.strides, self.b_shape[2:]
        return Packing(
            (self.groups, self.channels, self.n, kh, kw),
            (0, 3, 4, 1, 2),
            (0, th * sh - kh, tw * sw - kw, 0, 0),
            (self.groups, th, sh, tw, sw, self.channels, self.n),
            (0, 2, 4, 1, 3, 5, 6),
        )

    def row_packing(self) -> Packing:
        (th, tw), (sh, sw), (kh, kw) = self.kernel, self.strides, self.b_shape[2:]
        return Packing(
            (self.groups, self.channels, self.n, kh, kw),
            (0, 2, 3, 4, 1),
            (0, 0, th * sh - kh, tw * sw - kw, 0),
            (self.groups, self.n, th, sh, tw, sw, self.channels),
            (0, 3, 5, 1, 2, 4, 6),
        )


def contraction(stage: Stage, op: Operator) -> Contraction | None:
    """The view of one of ``CONTRACTIONS``, or None. There is none for a depthwise convolution
    (which contracts no channels), for a transposed one whose output is not a whole number of
    strides, for symbolic shapes, and if there is nothing to multiply.
    """
    shapes = [stage.types[x].shape for x in op.inputs[:2]]
    if any(isinstance(d, str) for shape in (*shapes, op.type.shape) for d in shape):
        return None
    a, b = (tuple(int(d) for d in shape) for shape in shapes)
    out = tuple(int(d) for d in op.type.shape)
    if 0 in (*a, *b, *out):
        return None
    if op.kind == "matmul" and min(len(a), len(b)) < 2:
        return None
    if op.kind == "conv2d" and int(op["groups"]) > 1 and b[1] == b[0] // int(op["groups"]) == 1:
        return None
    if op.kind == "conv_transpose2d":
        space = nhwc(out, op["layout"])[1:3]
        if any(size % stride for size, stride in zip(space, op["strides"], strict=True)):
            return None
    nest = loop_nest(op, a, b)
    # an axis that only B has is a batch too: panels of B are packed one batch at a time
    mapping = widest(nest, frozenset(x for x in nest.loops if x.startswith("batch of B")))
    assert mapping is not None, f"no mapping of {nest}"
    batch = nest.extent(x for x in nest.loops if x not in mapping.mapped)
    m, n, k = (nest.extent(group) for group in (mapping.m, mapping.n, mapping.k))
    return VIEWS[op.kind](op, batch, m, n, k, a, b)


VIEWS: Mapping[str, type[Contraction]] = {
    "matmul": MatmulView,
    "conv2d": ConvView,
    "conv_transpose2d": TransposedView,
}

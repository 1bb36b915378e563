"""Contractions: matmul and conv2d seen as C[b, m, n] += A[b, m, k] * B[b, k, n].

The view says which tensor element each of A, B and C is, as index expressions; a sketch over it
serves dense layers, batched products and convolutions (implicit GEMM) alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tvm import tirx

from gtco.tensor.emit import Expr
from gtco.tensor.expression import broadcast_index, reshape_index
from gtco.tensor.space import Packing
from gtco.tensor.stage import Operator, Stage


@dataclass(frozen=True)
class Contraction:
    """Extents and operator; A and B are the tensors ``op.inputs[0]`` and ``op.inputs[1]``."""

    op: Operator
    batch: int
    m: int
    n: int
    k: int
    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]

    @property
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

    def packing(self, nr: int) -> Packing:
        """Constant B in panels: [ceil(n / nr), k, nr], zero-padded."""
        raise AssertionError


@dataclass(frozen=True)
class MatmulView(Contraction):
    """numpy.matmul; where B has no batch axes of its own, A's are folded into m."""

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return self.out_shape[:-2]

    @property
    def folded(self) -> bool:
        return prod(self.b_shape[:-2]) == 1

    def c_index(self, b: Expr, m: Expr, n: Expr) -> list[Expr]:
        if self.folded:
            return [*reshape_index([m], [self.m], self.out_shape[:-1]), n]
        return [*reshape_index([b], [self.batch], self.batch_shape), m, n]

    def a_index(self, b: Expr, m: Expr, k: Expr) -> list[Expr]:
        if self.folded:
            return [*reshape_index([m], [self.m], self.a_shape[:-1]), k]
        return [
            *broadcast_index(reshape_index([b], [self.batch], self.batch_shape), self.a_shape[:-2]),
            m,
            k,
        ]

    def b_index(self, b: Expr, k: Expr, n: Expr) -> list[Expr]:
        if self.folded:
            return [0] * (len(self.b_shape) - 2) + [k, n]
        return [
            *broadcast_index(reshape_index([b], [self.batch], self.batch_shape), self.b_shape[:-2]),
            k,
            n,
        ]

    def packing(self, nr: int) -> Packing:
        panels = -(-self.n // nr)
        return Packing(
            (self.k, self.n), (0, 1), (0, panels * nr - self.n), (self.k, panels, nr), (1, 0, 2)
        )


@dataclass(frozen=True)
class ConvView(Contraction):
    """Implicit GEMM: m = (image, row, column) of the output, n = output channel, k = (kh, kw, c),
    or (c, kh, kw).

    The order of k follows the input's memory, so that packing reads runs of neighbours.
    """

    channels_first: bool = False  # k = (c, kh, kw)

    @property
    def kernel(self) -> tuple[int, int]:
        return self.b_shape[2], self.b_shape[3]

    @property
    def nhwc(self) -> bool:
        return self.op["layout"] == "NHWC"

    @property
    def channels(self) -> int:
        return self.b_shape[1]

    @property
    def image(self) -> tuple[int, int]:
        """Input height and width."""
        return (
            (self.a_shape[1], self.a_shape[2]) if self.nhwc else (self.a_shape[2], self.a_shape[3])
        )

    @property
    def result(self) -> tuple[int, int, int]:
        """Images, output height and width."""
        s = self.out_shape
        return (s[0], s[1], s[2]) if self.nhwc else (s[0], s[2], s[3])

    @property
    def padded(self) -> bool:
        return any(self.op["padding"])

    def pixel(self, m: Expr) -> list[Expr]:
        """(image, output row, output column) of m."""
        return reshape_index([m], [self.m], self.result)

    def source(self, pixel: Sequence[Expr], kh: Expr, kw: Expr) -> tuple[Expr, Expr]:
        """The input's row and column, which lie outside the image under padding."""
        (sh, sw), (top, left, _, _), (dh, dw) = (
            self.op["strides"],
            self.op["padding"],
            self.op["dilation"],
        )
        return pixel[1] * sh + kh * dh - top, pixel[2] * sw + kw * dw - left

    def x_index(self, image: Expr, row: Expr, column: Expr, c: Expr) -> list[Expr]:
        return [image, row, column, c] if self.nhwc else [image, c, row, column]

    def c_index(self, b: Expr, m: Expr, n: Expr) -> list[Expr]:
        image, row, column = self.pixel(m)
        return self.x_index(image, row, column, n)

    def a_index(self, b: Expr, m: Expr, k: Expr) -> list[Expr]:
        """Meaningful without padding."""
        kh, kw = self.kernel
        if self.channels_first:
            c, i, j = reshape_index([k], [self.k], (self.channels, kh, kw))
        else:
            i, j, c = reshape_index([k], [self.k], (kh, kw, self.channels))
        pixel = self.pixel(m)
        return self.x_index(pixel[0], *self.source(pixel, i, j), c)

    def packing(self, nr: int) -> Packing:
        panels = -(-self.n // nr)
        axes = (1, 2, 3, 0) if self.channels_first else (2, 3, 1, 0)
        shape = self.b_shape
        moved = tuple(shape[a] for a in axes[:3])
        return Packing(
            shape, axes, (0, 0, 0, panels * nr - self.n), (*moved, panels, nr), (3, 0, 1, 2, 4)
        )


def contraction(stage: Stage, op: Operator, channels_first: bool = False) -> Contraction | None:
    """The view of a matmul, or of an ungrouped conv2d; None for other operators and for symbolic
    shapes.
    """
    shapes = [stage.types[x].shape for x in op.inputs[:2]]
    if any(isinstance(d, str) for shape in (*shapes, op.type.shape) for d in shape):
        return None
    a, b = (tuple(int(d) for d in shape) for shape in shapes)
    out = tuple(int(d) for d in op.type.shape)
    if op.kind == "matmul":
        if len(a) < 2 or len(b) < 2:
            return None
        folded = prod(b[:-2]) == 1
        if folded and prod(out[:-2]) != prod(a[:-2]):
            return None
        m = prod(out[:-1]) if folded else out[-2]
        return MatmulView(op, 1 if folded else prod(out[:-2]), m, out[-1], a[-1], a, b)
    if op.kind == "conv2d" and op["groups"] == 1:
        m = prod(out) // b[0]
        return ConvView(op, 1, m, b[0], b[1] * b[2] * b[3], a, b, channels_first)
    return None


def linear_rows(em_index: Expr, m: Expr, k: Expr) -> tuple[Expr, int] | None:
    """(offset, row stride) where ``em_index == offset + m * stride + k``, else None."""
    from tvm.sym import detect_linear_equation

    parts = detect_linear_equation(em_index, [m, k])
    if (
        len(parts) != 3
        or not all(isinstance(p, tirx.IntImm) for p in parts[:2])
        or int(parts[1].value) != 1
    ):
        return None
    return parts[2], int(parts[0].value)

"""Emits a row of the intrinsic table: a micro-kernel as TIR, with its accumulators in registers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from gtco.tensor.emit.emitter import Array, Emitter, Expr
from gtco.tensor.emit.vector_math import from_bits
from gtco.tensor.intrinsics.table import MicroKernel

# TVM's LLVM code generator takes no bfloat16 vectors, so pairs are passed as int32. Groups of four
# bytes are too, because those of A are broadcast as one number.
DOT, DOT_BYTES = "gtco_dpbf16ps", "gtco_dpbusd"


def _dot_bytes(lanes: int) -> str:
    """The function of VPDPBUSD for vectors of so many int32. LLVM gives a 256-bit one the encoding
    that the target has.
    """
    words, quads, bits = f"<{lanes} x i32>", f"<{4 * lanes} x i8>", 32 * lanes
    return f"""\
declare {words} @llvm.x86.avx512.vpdpbusd.{bits}({words}, {quads}, {quads})
define internal {words} @{DOT_BYTES}({words} %c, {words} %a, {words} %b) alwaysinline {{
  %x = bitcast {words} %a to {quads}
  %y = bitcast {words} %b to {quads}
  %sum = call {words} @llvm.x86.avx512.vpdpbusd.{bits}({words} %c, {quads} %x, {quads} %y)
  ret {words} %sum
}}
"""


SOURCES = {
    "vnni": _dot_bytes(16),
    "vnni256": _dot_bytes(8),
    "bf16": f"""\
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)
define internal <16 x float> @{DOT}(<16 x float> %c, <16 x i32> %a, <16 x i32> %b) alwaysinline {{
  %x = bitcast <16 x i32> %a to <32 x bfloat>
  %y = bitcast <16 x i32> %b to <32 x bfloat>
  %sum = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float> %c, <32 x bfloat> %x,
                                                            <32 x bfloat> %y)
  ret <16 x float> %sum
}}
""",
}


@dataclass(frozen=True)
class Operand:
    """The place of an operand of a row: a flat buffer, the place of its first element, and strides,
    all in elements of the buffer.

    Element k of row i of A lies at ``offset + i * stride + along(k)``; ``along`` is k itself if it
    is not given (a convolution's window is several runs). B of iteration n lies at ``offset + n *
    stride``, with its vectors ``vector`` apart, or side by side. Neighbours of k that are read as
    one lie in a buffer of their elements, or (only pairs of B) in one of int32.
    """

    buffer: Any
    offset: Expr
    stride: Expr
    along: Callable[[Expr], Expr] = lambda k: k
    vector: Expr | None = None

    @staticmethod
    def of(array: Array, index: Sequence[Expr], vector: Expr | None = None) -> Operand:
        """The operand that begins at ``index`` of an array, and strides over its second axis from
        the end.
        """
        return Operand(array.buffer, array.flat(index), array.shape[-1], vector=vector)


def fma_tile(
    em: Emitter,
    tile: MicroKernel,
    depth: Expr,
    a: Operand,
    b: Operand,
    store: Callable[[int, int, Expr], None],
    *,
    load: Callable[[int, int], Expr] | None = None,
    first: Expr = True,
    step: Callable[[Expr], None] = lambda k: None,
    passes: int = 1,
    runs: Expr = 1,
    block: int | None = None,
) -> None:
    """C[rows, columns] = A[rows, depth] x B[depth, columns], plus C itself if ``load`` is given.

    - ``a``, ``b``: the operands, in the row's layouts;
    - ``store(i, j, vector)``, ``load(i, j)``: write and read C by vectors;
    - ``first``: with ``load``, C starts from zero if it holds;
    - ``step(k)``: emits the further work of an iteration, such as a prefetch;
    - ``passes``: runs over k more than once, for measurements only;
    - ``runs``: k is that many loops of ``depth`` steps, one after the other. ``along`` and ``step``
      may divide their arguments by ``depth``;
    - ``block``: so many iterations are a loop inside of another. LLVM's register allocator takes a
      deeper loop for more used; it would put the sums of a shallower one into memory, to keep the
      constants of another loop in registers.
    """
    lanes, width = tile.lanes, tile.kind.step
    acc = em.registers(tile.rows * tile.columns, tile.kind.accumulator)
    zero = tirx.const(0, tile.kind.accumulator)
    cells = [
        (i, j * lanes, (i * tile.vectors + j) * lanes)
        for i in range(tile.rows)
        for j in range(tile.vectors)
    ]

    def clear() -> None:
        for _, _, at in cells:
            em.store_vector(acc, [at], em.splat(zero))

    def resume() -> None:
        assert load is not None
        for i, j, at in cells:
            em.store_vector(acc, [at], load(i, j))

    if load is None:
        clear()
    else:
        em.branch(first, clear, resume)
    steps = em.index((depth + (width - 1)) // width)
    with (
        _helpers(tile),
        em.loop(passes, "part"),
        em.loop(runs, "run") as run,
        _iterations(em, steps, block) as position,
    ):
        k = em.index(run * depth + position * width)
        step(k)
        _STEPS[tile.kind.name](_Step(em, tile, acc, a, b, k, em.index(run * steps + position)))
    for i, j, at in cells:
        store(i, j, em.load_vector(acc, [at]))


@contextmanager
def _iterations(em: Emitter, steps: Expr, block: int | None) -> Iterator[Expr]:
    """A loop over ``steps``, or two: of blocks, and of the ``block`` steps in each."""
    if block is None or (isinstance(steps, int) and steps <= block):
        with em.loop(steps, "k") as k:
            yield k
        return
    with em.loop(em.index((steps + (block - 1)) // block), "block") as which:
        inside = em.let_index(tirx.min(block, steps - which * block), "steps")
        with em.loop(inside, "k") as k:
            yield em.index(which * block + k)


@contextmanager
def _helpers(tile: MicroKernel) -> Iterator[None]:
    """The LLVM functions that the row's kind calls."""
    source = SOURCES.get(tile.kind.name)
    if source is None:
        yield
        return
    with T.attr(tirx.const(0, "int32"), "pragma_import_llvm", source):
        yield


@dataclass(frozen=True)
class _Step:
    """One iteration: sums += A[:, k:k + step] x B[k:k + step, :]; ``number`` counts iterations."""

    em: Emitter
    tile: MicroKernel
    acc: Array
    a: Operand
    b: Operand
    k: Expr
    number: Expr

    def element(self, i: int, k: Expr) -> Expr:
        """An element of A."""
        return self.a.buffer[self.place(i, k)]

    def word(self, i: int) -> Expr:
        """The neighbours of A from element k on that the row reads as one, as an int32."""
        many = self.tile.kind.a.step
        return tirx.reinterpret("int32", self.a.buffer[tirx.Ramp(self.place(i, self.k), 1, many)])

    def place(self, i: int, k: Expr) -> Expr:
        return self.em.index(self.a.offset + i * self.a.stride + self.a.along(k))

    def vector(self, j: int, width: int = 1) -> Expr:
        """Vector j of this step of B, in its layout, with ``width`` elements of the buffer a
        lane.
        """
        lanes = width * self.tile.lanes
        apart = lanes if self.b.vector is None else self.b.vector
        at = self.b.offset + self.number * self.b.stride + j * apart
        return self.b.buffer[self.em.ramp(at, lanes)]

    def words(self, j: int) -> Expr:
        """Vector j of this step of B, with the neighbours of k that are read as one as an int32."""
        if str(self.b.buffer.dtype) == "int32":
            return self.vector(j)
        many = self.tile.kind.b.step
        return tirx.reinterpret(f"int32x{self.tile.lanes}", self.vector(j, many))

    def accumulate(
        self,
        vectors: Sequence[Expr],
        element: Callable[[int], Expr],
        fused: Callable[[Expr, Expr, Expr], Expr],
    ) -> None:
        """``fused(sum, a, b)`` for every sum, ``element(i)`` broadcast."""
        em, tile = self.em, self.tile
        for i in range(tile.rows):
            value = em.let(em.splat(element(i)), "a")
            for j in range(tile.vectors):
                at = (i * tile.vectors + j) * tile.lanes
                total = fused(em.load_vector(self.acc, [at]), value, vectors[j])
                em.store_vector(self.acc, [at], total)


def _product(total: Expr, a: Expr, b: Expr) -> Expr:
    return total + a * b


def _fma(s: _Step) -> None:
    vectors = [s.em.let(s.vector(j), "b") for j in range(s.tile.vectors)]
    s.accumulate(vectors, lambda i: s.element(i, s.k), _product)


def _dot(function: str) -> Callable[[_Step], None]:
    """A step of rows whose instruction adds the products of all neighbours of a lane."""

    def step(s: _Step) -> None:
        vectors = [s.em.let(s.words(j), "b") for j in range(s.tile.vectors)]
        dtype = f"{s.tile.kind.accumulator}x{s.tile.lanes}"
        s.accumulate(
            vectors, s.word, lambda total, a, b: tirx.call_pure_extern(dtype, function, total, a, b)
        )

    return step


def _widened(s: _Step) -> None:
    """Multiplies pairs of bfloat16 in float32. The lower half of a pair is its first element:
    shifted up it is a float32. The pair without its lower half is the second.
    """
    em, lanes = s.em, s.tile.lanes
    pairs = [em.let(s.words(j), "pairs") for j in range(s.tile.vectors)]
    sixteen, upper = em.splat(tirx.const(16, "int32")), em.splat(tirx.const(-65536, "int32"))
    assert lanes == em.lanes
    halves = (
        lambda x: tirx.shift_left(x, sixteen),
        lambda x: tirx.bitwise_and(x, upper),
    )
    for half, part in enumerate(halves):
        vectors = [em.let(from_bits(part(x)), "b") for x in pairs]
        s.accumulate(vectors, lambda i, half=half: s.element(i, em.index(s.k + half)), _product)  # type: ignore[misc]


def _half(s: _Step) -> None:
    wide = f"float32x{s.tile.lanes}"
    vectors = [s.em.let(tirx.Cast(wide, s.vector(j)), "b") for j in range(s.tile.vectors)]
    s.accumulate(vectors, lambda i: s.element(i, s.k), _product)


_STEPS: dict[str, Callable[[_Step], None]] = {
    "fma": _fma,
    "bf16": _dot(DOT),
    "widened": _widened,
    "half": _half,
    "vnni": _dot(DOT_BYTES),
    "vnni256": _dot(DOT_BYTES),
}

"""Emits a row of the intrinsic table: a micro-kernel as TIR, with its accumulators in registers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from tvm import tirx

from gtco.tensor.emit.emitter import Array, Emitter, Expr, lanes_of
from gtco.tensor.emit.llvm_source import source
from gtco.tensor.emit.vector_math import from_bits
from gtco.tensor.intrinsics.instructions import BFDOT, BFMMLA, DOT, DOT_BYTES, SDOT, SMMLA, SOURCES
from gtco.tensor.intrinsics.table import MicroKernel


@dataclass(frozen=True)
class Operand:
    """The place of an operand of a row: a flat buffer, the place of its first element, and strides,
    all in elements of the buffer.

    Element k of row i of A lies at ``offset + i * stride + along(k)``; ``along`` is k itself if it
    is not given (a convolution's window is several runs). ``dense``: within a run, neighbours of k
    are neighbours in the buffer. ``apart``: k is several runs (of :func:`fma_tile`) that lie so
    far apart, and ``along`` counts within each. B of iteration n lies at ``offset + n *
    stride``, with its vectors ``vector`` apart, or side by side. Neighbours of k that are read as
    one lie in a buffer of their elements, or (only pairs of B) in one of int32.
    """

    buffer: Any
    offset: Expr
    stride: Expr
    along: Callable[[Expr], Expr] = lambda k: k
    vector: Expr | None = None
    dense: bool = True
    apart: Expr | None = None

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
    rolled: bool = False,
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
      constants of another loop in registers;
    - ``rolled``: LLVM makes no copies of an iteration. Two iterations of a large tile whose
      ``depth`` is not known have some sums in memory.
    """
    width = tile.kind.step
    acc = em.registers(tile.covered(tile.rows) * tile.columns, tile.kind.accumulator)
    sums = _Blocks(em, tile, acc) if tile.kind.height > 1 else _Rows(em, tile, acc)
    if load is None:
        sums.clear()
    else:
        em.branch(first, sums.clear, lambda: sums.resume(load))
    together = tile.lanes if tile.by_element and a.dense else 1
    emit = _STEPS[tile.kind.name]
    with _helpers(tile), em.loop(passes, "part"), em.loop(runs, "run") as run:
        steps = em.index((depth + (width - 1)) // width)

        def iteration(position: Expr) -> _Step:
            k = em.index(run * depth + position * width)
            step(k)
            number = em.index(run * steps + position)
            if a.apart is None:
                return _Step(em, tile, acc, a, b, k, number)
            of_run = replace(a, offset=a.offset + run * a.apart)
            return _Step(em, tile, acc, of_run, b, em.index(position * width), number)

        if together == 1:
            with _iterations(em, steps, block, rolled) as position:
                emit(iteration(position))
        else:
            whole = em.index(steps // together * together)
            if not _none(whole):
                with _iterations(em, em.index(steps // together), block, rolled) as position:
                    first_of = em.index(position * together)
                    _by_element([iteration(em.index(first_of + n)) for n in range(together)])
            if not _none(rest := em.index(steps - whole)):
                with em.loop(rest, "rest") as position:
                    emit(iteration(em.index(whole + position)))
    sums.finish(store)


def _none(count: Expr) -> bool:
    """True if a number of iterations is known to be 0."""
    return isinstance(count, int) and count == 0


@dataclass(frozen=True)
class _Rows:
    """Sums in registers: a vector of neighbouring columns of a row in each."""

    em: Emitter
    tile: MicroKernel
    acc: Array

    def cells(self) -> Iterator[tuple[int, int, int]]:
        """Row, first column and place of each vector."""
        lanes, vectors = self.tile.lanes, self.tile.vectors
        for i in range(self.tile.rows):
            for j in range(vectors):
                yield i, j * lanes, (i * vectors + j) * lanes

    def clear(self) -> None:
        zero = self.em.splat(tirx.const(0, self.tile.kind.accumulator))
        for _, _, at in self.cells():
            self.em.store_vector(self.acc, [at], zero)

    def resume(self, load: Callable[[int, int], Expr]) -> None:
        for i, j, at in self.cells():
            self.em.store_vector(self.acc, [at], load(i, j))

    def finish(self, store: Callable[[int, int, Expr], None]) -> None:
        for i, j, at in self.cells():
            store(i, j, self.em.load_vector(self.acc, [at]))


@dataclass(frozen=True)
class _Blocks:
    """Sums in registers: a block of two rows and two columns in each. If the number of rows is odd,
    the last blocks have a row more, which is not stored.
    """

    em: Emitter
    tile: MicroKernel
    acc: Array

    def pairs(self) -> Iterator[tuple[int, int, int]]:
        """The first row and column of two blocks side by side, and their place."""
        tile = self.tile
        for i in range(0, tile.rows, 2):
            for j in range(tile.vectors):
                yield i, j * tile.lanes, (i // 2 * tile.vectors + j) * 2 * tile.lanes

    def clear(self) -> None:
        zero, lanes = self.em.splat(tirx.const(0, self.tile.kind.accumulator)), self.tile.lanes
        for _, _, at in self.pairs():
            for place in (at, at + lanes):
                self.em.store_vector(self.acc, [place], zero)

    def resume(self, load: Callable[[int, int], Expr]) -> None:
        for i, j, at in self.pairs():
            upper = self.em.let(load(i, j), "c")
            lower = self.em.let(load(i + 1, j), "c") if i + 1 < self.tile.rows else upper
            self._put(at, upper, lower)

    def finish(self, store: Callable[[int, int, Expr], None]) -> None:
        for i, j, at in self.pairs():
            left = self.em.let(self.em.load_vector(self.acc, [at]), "c")
            right = self.em.let(self.em.load_vector(self.acc, [at + self.tile.lanes]), "c")
            for row, turned in zip(range(i, self.tile.rows), _turned(left, right), strict=False):
                store(row, j, turned)

    def _put(self, at: int, upper: Expr, lower: Expr) -> None:
        for n, block in enumerate(_turned(upper, lower)):
            self.em.store_vector(self.acc, [at + n * self.tile.lanes], block)


def _turned(first: Expr, second: Expr) -> tuple[Expr, Expr]:
    """Two rows of four columns -> two blocks of 2x2 side by side, and back."""
    return tirx.Shuffle([first, second], [0, 1, 4, 5]), tirx.Shuffle([first, second], [2, 3, 6, 7])


@contextmanager
def _iterations(em: Emitter, steps: Expr, block: int | None, rolled: bool) -> Iterator[Expr]:
    """A loop over ``steps``, or two: of blocks, and of the ``block`` steps in each."""
    if block is None or (isinstance(steps, int) and steps <= block):
        with em.loop(steps, "k", rolled=rolled) as k:
            yield k
        return
    with em.loop(em.index((steps + (block - 1)) // block), "block") as which:
        inside = em.let_index(tirx.min(block, steps - which * block), "steps")
        with em.loop(inside, "k", rolled=rolled) as k:
            yield em.index(which * block + k)


def _helpers(tile: MicroKernel) -> AbstractContextManager[None]:
    """The LLVM functions that the row's kind calls."""
    text = SOURCES.get(tile.kind.name)
    return nullcontext() if text is None else source(text)


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
        layout = self.tile.kind.b
        many = layout.places(layout.step)
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
            value = element(i)
            value = em.let(value if lanes_of(value) > 1 else em.splat(value), "a")
            for j in range(tile.vectors):
                at = (i * tile.vectors + j) * tile.lanes
                total = fused(em.load_vector(self.acc, [at]), value, vectors[j])
                em.store_vector(self.acc, [at], total)


    def vectors(self) -> list[Expr]:
        """This step of B."""
        return [self.em.let(self.vector(j), "b") for j in range(self.tile.vectors)]


def _product(total: Expr, a: Expr, b: Expr) -> Expr:
    return total + a * b


def _fma(s: _Step) -> None:
    s.accumulate(s.vectors(), lambda i: s.element(i, s.k), _product)


def _by_element(steps: Sequence[_Step]) -> None:
    """As many steps as a vector has lanes, whose elements of a row of A are one vector."""
    s = steps[0]
    rows = [
        s.em.let(s.a.buffer[s.em.ramp(s.place(i, s.k), s.tile.lanes)], "a")
        for i in range(s.tile.rows)
    ]
    for lane, one in enumerate(steps):
        one.accumulate(
            one.vectors(),
            lambda i, lane=lane: tirx.Shuffle([rows[i]], [lane] * s.tile.lanes),  # type: ignore[misc]
            _product,
        )


def _matrix(function: str) -> Callable[[_Step], None]:
    """A step of rows whose instruction multiplies two rows by two columns."""

    def half(s: _Step, at: Expr, count: int) -> Expr:
        """8 bytes of a row of A, as two int32."""
        return tirx.reinterpret("int32x2", s.a.buffer[s.em.ramp(at, count)])

    def step(s: _Step) -> None:
        em, tile, many = s.em, s.tile, s.tile.kind.b.step
        lanes = tile.lanes
        apart = many * lanes if s.b.vector is None else s.b.vector
        base = s.b.offset + s.number * s.b.stride
        columns = [
            em.let(
                tirx.reinterpret(
                    f"int32x{lanes}",
                    s.b.buffer[em.ramp(base + j * apart + n * 2 * many, 2 * many)],
                ),
                "b",
            )
            for j in range(tile.vectors)
            for n in range(2)
        ]
        dtype = f"{tile.kind.accumulator}x{lanes}"
        for i in range(0, tile.rows, 2):
            places = [s.place(min(row, tile.rows - 1), s.k) for row in (i, i + 1)]
            halves = [half(s, at, many) for at in places]
            rows = em.let(tirx.Shuffle(halves, list(range(lanes))), "a")
            for n, column in enumerate(columns):
                at = (i // 2 * len(columns) + n) * lanes
                total = em.load_vector(s.acc, [at])
                total = tirx.call_pure_extern(dtype, function, total, rows, column)
                em.store_vector(s.acc, [at], total)

    return step


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


def nibbles(em: Emitter, words: Expr) -> Iterator[Expr]:
    """The eight int4 in each int32 of a vector, as eight vectors of float32, from the lowest bits
    on. A shift to the left, and one back that copies the sign.
    """
    lanes = lanes_of(words)
    for n in range(8):
        raised = tirx.shift_left(words, em.splat(tirx.const(28 - 4 * n, "int32"), lanes))
        steps = tirx.shift_right(raised, em.splat(tirx.const(28, "int32"), lanes))
        yield tirx.Cast(f"float32x{lanes}", steps)


def _nibble(s: _Step) -> None:
    words = [s.em.let(s.words(j), "words") for j in range(s.tile.vectors)]
    for n, parts in enumerate(zip(*(nibbles(s.em, x) for x in words), strict=True)):
        vectors = [s.em.let(x, "b") for x in parts]
        s.accumulate(vectors, lambda i, n=n: s.element(i, s.em.index(s.k + n)), _product)  # type: ignore[misc]


def _half(s: _Step) -> None:
    wide = f"float32x{s.tile.lanes}"
    vectors = [s.em.let(tirx.Cast(wide, s.vector(j)), "b") for j in range(s.tile.vectors)]
    s.accumulate(vectors, lambda i: s.element(i, s.k), _product)


_STEPS: dict[str, Callable[[_Step], None]] = {
    "fma": _fma,
    "bf16": _dot(DOT),
    "widened": _widened,
    "bfdot": _dot(BFDOT),
    "bfmmla": _matrix(BFMMLA),
    "sdot": _dot(SDOT),
    "smmla": _matrix(SMMLA),
    "half": _half,
    "fcvtl": _half,
    "byte": _half,
    "nibble": _nibble,
    "vnni": _dot(DOT_BYTES),
    "vnni256": _dot(DOT_BYTES),
}

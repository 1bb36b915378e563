"""The register level of GPUs as data: one row for each instruction that multiplies or moves
matrices.

A row has a compute abstraction, ``dst[m, n] = sum over k of src1[m, k] * src2[k, n]`` with its
extents and formats (GTCO, eq. 5). It also has a memory abstraction (eq. 6-8): for each operand the
places of its elements in a thread's registers, and the instructions that load and store it.
Fragment layouts are data too: (lane, element) -> (row, column), as sums over the digits of the lane
and of the element.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod

import numpy as np

from gtco.machine.gpu import GpuTarget

Coordinates = tuple[int, int, int]  # (row, column, which of the instruction's matrices)


@dataclass(frozen=True)
class Digit:
    """One digit of a number, the fastest first. It counts to ``extent``, and each step advances by
    so many rows, columns and matrices.
    """

    extent: int
    row: int = 0
    column: int = 0
    matrix: int = 0


@dataclass(frozen=True)
class Fragment:
    """The element of a matrix that each lane holds as its i-th: the sum of the advances of the
    digits of the lane's number and of i. ``lanes`` counts the threads that hold the matrix
    together.
    """

    lane: tuple[Digit, ...]
    element: tuple[Digit, ...]

    @property
    def lanes(self) -> int:
        return prod(d.extent for d in self.lane)

    @property
    def elements(self) -> int:
        """The number of elements of one lane."""
        return prod(d.extent for d in self.element)

    def place(self, lane: int, element: int) -> Coordinates:
        """(row, column, matrix) of a lane's element."""
        found = [0, 0, 0]
        for number, digits in ((lane, self.lane), (element, self.element)):
            for digit in digits:
                number, step = divmod(number, digit.extent)
                for axis, stride in enumerate((digit.row, digit.column, digit.matrix)):
                    found[axis] += step * stride
        return found[0], found[1], found[2]

    @cached_property
    def places(self) -> Mapping[tuple[int, int], Coordinates]:
        """The place of every (lane, element)."""
        every = product(range(self.lanes), range(self.elements))
        return {(lane, i): self.place(lane, i) for lane, i in every}

    @property
    def transposed(self) -> Fragment:
        """The fragment of the matrix with its rows and columns exchanged."""

        def turned(digits: tuple[Digit, ...]) -> tuple[Digit, ...]:
            return tuple(replace(d, row=d.column, column=d.row) for d in digits)

        return Fragment(turned(self.lane), turned(self.element))

    def deal(self, matrices: np.ndarray) -> np.ndarray:
        """[lane, element] of ``matrices`` [matrix, row, column]."""
        dealt = np.empty((self.lanes, self.elements), matrices.dtype)
        for (lane, i), (row, column, matrix) in self.places.items():
            dealt[lane, i] = matrices[matrix, row, column]
        return dealt

    def collect(self, dealt: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """The matrices of :meth:`deal`, of ``shape``; elements that no lane holds stay NaN."""
        matrices = np.full(shape, np.nan, dealt.dtype)
        for (lane, i), (row, column, matrix) in self.places.items():
            matrices[matrix, row, column] = dealt[lane, i]
        return matrices


@dataclass(frozen=True)
class FragmentOperand:
    """One operand's memory abstraction.

    - ``formats``: the dtypes of its elements;
    - ``fragment``: the places of its elements in registers; None if the compiler hides them (WMMA),
      or if the operand stays in shared memory (wgmma's B);
    - ``load``, ``store``: the instructions that bring it to the registers and back.
    """

    formats: tuple[str, ...]
    fragment: Fragment | None
    load: str
    store: str = ""


@dataclass(frozen=True)
class TensorCoreRow:
    """An instruction that multiplies ``batch`` matrices at once, each m x k by k x n. GPUs have it
    from generation ``since`` to the one before ``until``.
    """

    name: str
    extents: tuple[int, int, int]  # m, n, k
    a: FragmentOperand
    b: FragmentOperand
    c: FragmentOperand
    since: int
    until: int = 1000
    batch: int = 1
    unit: str = "mma"

    @property
    def flops(self) -> int:
        return 2 * self.batch * prod(self.extents)

    def admitted(self, target: GpuTarget, operand: str) -> bool:
        """True if the target has this instruction, on every architecture with an image, for
        operands of this dtype.
        """
        begun = oldest(target) >= self.since
        return begun and newest(target) < self.until and operand in self.a.formats

    def rate(self, operand: str) -> str:
        """The unit of ``GpuTarget.rates`` that runs it."""
        return self.unit if self.unit == "fma" else f"{self.unit}:{operand}"

    def multiply(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        """The meaning of the row: C + A B for [matrix, row, column] each, with one loop a
        dimension, as in eq. 5.
        """
        m, n, k = self.extents
        result = c.astype(np.float64)
        for g, i, j, x in product(range(self.batch), range(m), range(n), range(k)):
            result[g, i, j] += float(a[g, i, x]) * float(b[g, x, j])
        return result

    def run(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        """The same on registers [lane, element]: the lanes' C after the instruction. If the row
        hides an operand's layout, that operand is [matrix, row, column] here too.
        """
        m, n, k = self.extents
        parts = ((self.a, a, (m, k)), (self.b, b, (k, n)), (self.c, c, (m, n)))
        made = self.multiply(
            *(
                operand.fragment.collect(given, (self.batch, *shape)) if operand.fragment else given
                for operand, given, shape in parts
            )
        )
        return self.c.fragment.deal(made) if self.c.fragment else made


# ---- fragments: t = lane % 4, g = lane / 4 in the PTX manual's words

_PAIR = Digit(2, column=1)
_ROWS_OF_PAIRS = (Digit(4, column=2), Digit(8, row=1))
# mma.m16n8: C and D, four float32: rows g and g + 8, columns 2t and its neighbour
SUMS_16X8 = Fragment(_ROWS_OF_PAIRS, (_PAIR, Digit(2, row=8)))
A_16X8 = SUMS_16X8  # A with k = 8: two registers of two
A_16X16 = Fragment(_ROWS_OF_PAIRS, (_PAIR, Digit(2, row=8), Digit(2, column=8)))
B_8X8 = Fragment(_ROWS_OF_PAIRS, (_PAIR,)).transposed
B_16X8 = Fragment(_ROWS_OF_PAIRS, (_PAIR, Digit(2, column=8))).transposed
# mma.m8n8k4: four matrices at once, each of the lanes 4q..4q+3 and 16 more
_QUADS = (Digit(4, matrix=1), Digit(2, row=4))
A_8X4 = Fragment((Digit(4, row=1), *_QUADS), (Digit(4, column=1),))  # .row
B_4X8 = A_8X4.transposed  # .col
SUMS_8X8 = Fragment(
    (Digit(2, row=1), Digit(2, column=2), *_QUADS),
    (Digit(2, column=1), Digit(2, row=2), Digit(2, column=4)),
)
# wgmma.m64nNk16: four warps, each with 16 rows as mma.m16n8k16 has them
_WARPS = Digit(4, row=16)
A_64X16 = Fragment((*_ROWS_OF_PAIRS, _WARPS), A_16X16.element)


def sums_64(n: int) -> Fragment:
    """wgmma's C and D of ``n`` columns."""
    return Fragment((*_ROWS_OF_PAIRS, _WARPS), (*SUMS_16X8.element, Digit(n // 8, column=8)))


# ---- rows that multiply

HALF, NARROW = ("float16",), ("float16", "bfloat16")
ANY = ("float32", *NARROW)


def _mma(name: str, formats: tuple[str, ...], since: int, *fragments: Fragment) -> TensorCoreRow:
    a, b, c = fragments
    m, n, k = (int(part) for part in name.replace("n", "m").replace("k", "m").split("m")[1:])
    return TensorCoreRow(
        f"mma.{name}",
        (m, n, k),
        FragmentOperand(formats, a, f"ldmatrix.x{a.elements // 2}"),
        FragmentOperand(formats, b, f"ldmatrix.x{b.elements // 2}"),
        FragmentOperand(("float32",), c, "", "st.shared"),
        since,
    )


def _wmma(m: int, n: int, k: int) -> TensorCoreRow:
    """A row of WMMA, which hides its fragments: only wmma.load, wmma.mma and wmma.store know
    them.
    """
    return TensorCoreRow(
        f"wmma.m{m}n{n}k{k}",
        (m, n, k),
        FragmentOperand(HALF, None, "wmma.load.a"),
        FragmentOperand(HALF, None, "wmma.load.b"),
        FragmentOperand(("float32",), None, "wmma.load.c", "wmma.store.d"),
        75,
    )


def _wgmma(n: int) -> TensorCoreRow:
    """A row of Hopper: a warp group multiplies, B always out of shared memory and A optionally."""
    return TensorCoreRow(
        f"wgmma.m64n{n}k16",
        (64, n, 16),
        FragmentOperand(NARROW, A_64X16, "descriptor"),
        FragmentOperand(NARROW, None, "descriptor"),
        FragmentOperand(("float32",), sums_64(n), "", "st.shared"),
        90,
        91,
        unit="wgmma",
    )


_QUAD_PAIRS = TensorCoreRow(
    "mma.m8n8k4",
    (8, 8, 4),
    FragmentOperand(HALF, A_8X4, "ld.shared"),
    FragmentOperand(HALF, B_4X8, "ld.shared"),
    FragmentOperand(("float32",), SUMS_8X8, "", "st.shared"),
    70,
    80,  # later generations run it without their Tensor Cores
    batch=4,
)
# CUDA cores: one multiply-add for each of 32 lanes, 4 rows by 8 columns
_LANES = Fragment((Digit(8, column=1), Digit(4, row=1)), (Digit(1),))
_FMA = TensorCoreRow(
    "fma",
    (4, 8, 1),
    FragmentOperand(ANY, Fragment((Digit(8), Digit(4, row=1)), (Digit(1),)), "ld.shared"),
    FragmentOperand(ANY, Fragment((Digit(8, column=1), Digit(4)), (Digit(1),)), "ld.shared"),
    FragmentOperand(("float32",), _LANES, "", "st.shared"),
    75,
    unit="fma",
)

WGMMA_COLUMNS = tuple(range(8, 257, 8))
ROWS: Mapping[str, TensorCoreRow] = {
    row.name: row
    for row in (
        _mma("m16n8k16", NARROW, 80, A_16X16, B_16X8, SUMS_16X8),
        _mma("m16n8k8", HALF, 75, A_16X8, B_8X8, SUMS_16X8),
        _QUAD_PAIRS,
        _wmma(16, 16, 16),
        _wmma(8, 32, 16),
        _wmma(32, 8, 16),
        *(_wgmma(n) for n in WGMMA_COLUMNS),
        _FMA,
    )
}
# The rows that device/gtco/mma.cuh emits, the best first. m16n8k16 takes half the instructions of
# m16n8k8 for the same products, and WMMA is the same instructions behind hidden layouts.
EMITTED = ("mma.m16n8k16", "mma.m16n8k8", "fma")
# The rows of device/gtco/wgmma.cuh, whose tile is a warp group's: it chooses among their columns.
EMITTED_COLUMNS = (32, 64, 96, 128, 192, 256)


# ---- rows that move


@dataclass(frozen=True)
class Move:
    """An instruction that moves elements one level down: ``shared.Src[j] = global.Src[i]`` (eq. 6)
    or ``reg.Src[k] = shared.Src[j]`` (eq. 7).

    - ``nbytes``: bytes of one lane;
    - ``fragment``: for an 8x8 matrix of 16-bit elements, the elements that each lane gets.
    """

    name: str
    source: str
    target: str
    nbytes: int
    since: int
    fragment: Fragment | None = None


_MATRIX = Fragment(_ROWS_OF_PAIRS, (_PAIR,))
MOVES: Mapping[str, Move] = {
    move.name: move
    for move in (
        *(Move(f"cp.async.{n}", "global", "shared", n, 80) for n in (4, 8, 16)),
        *(Move(f"ld.global.{n}", "global", "register", n, 75) for n in (4, 8, 16)),
        *(Move(f"ldmatrix.x{n}", "shared", "register", 4 * n, 75, _MATRIX) for n in (1, 2, 4)),
        *(
            Move(f"ldmatrix.x{n}.trans", "shared", "register", 4 * n, 75, _MATRIX.transposed)
            for n in (1, 2, 4)
        ),
    )
}


def generation(arch: str) -> int:
    return int(arch.removeprefix("sm_").rstrip("a"))


def oldest(target: GpuTarget) -> int:
    """The generation of the oldest architecture for which an image is made: 80 for sm_80."""
    return min(map(generation, (target.arch, *target.images)))


def newest(target: GpuTarget) -> int:
    return max(map(generation, (target.arch, *target.images)))


def rows(target: GpuTarget, operand: str) -> Iterator[TensorCoreRow]:
    """The rows that multiply operands of this dtype on the target, also those that no kernel
    uses.
    """
    return (row for row in ROWS.values() if row.admitted(target, operand))


def emitted_rows(target: GpuTarget, operand: str) -> tuple[TensorCoreRow, ...]:
    """The rows that kernels use, the fastest first: one of Tensor Cores if they know the format,
    and CUDA cores.
    """
    found = [ROWS[name] for name in EMITTED if ROWS[name].admitted(target, operand)]
    cores = [row for row in found if row.unit == "mma" and target.rate(row.rate(operand))]
    return (*cores[:1], ROWS["fma"])


def group_rows(target: GpuTarget, operand: str) -> tuple[TensorCoreRow, ...]:
    """The emitted rows of warp groups, for operands that lie in shared memory along k."""
    found = (ROWS[f"wgmma.m64n{n}k16"] for n in EMITTED_COLUMNS)
    return tuple(row for row in found if row.admitted(target, operand))

"""The register level as data: micro-kernels, one row each.

A row has a compute abstraction (the loop extents that it covers, and the operand that each loop
indexes) and a memory abstraction (the formats of its operands, their layout in memory, the values
it holds in registers), after GTCO Section V. :func:`micro_kernels` lists the rows that a target
admits by its instruction sets and its register file (FILTERBYISA of Helix, Alg. 2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from gtco.machine.isa import NEON_LANES
from gtco.machine.target import Target
from gtco.tensor.stage import INT4, ITEM_BYTES, Stage, item_bytes

WIDTHS = (1, 2, 3, 4, 6)  # vectors of columns
TALLEST = 14  # rows: more gain nothing, because B is loaded once a step for all of them
# The operand of the rows that multiply float32 by int8 weights. "int8" is that of two integers.
WEIGHTS = "int8 weights"


@dataclass(frozen=True)
class Layout:
    """The layout in which a row reads an operand: elements of ``dtype``, with ``step`` neighbours
    of k side by side.

    A is [row][k]; a step is read as one and broadcast to all lanes. B is [k / step][column][step];
    a step of several columns is read as one vector. Both end at a multiple of the row's step, with
    zeros.
    """

    dtype: str = "float32"
    step: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of an element that has whole ones."""
        return ITEM_BYTES[self.dtype]

    @property
    def item(self) -> float:
        """Bytes of an element."""
        return item_bytes(self.dtype)

    def places(self, count: int) -> int:
        """The elements of a kernel's buffer that hold ``count`` of the operand: bytes for int4."""
        return count // 2 if self.dtype == INT4 else count


# int4 weights in memory: eight neighbours of k are an int32, the first in its lowest bits.
NIBBLES = Layout(INT4, 8)

@dataclass(frozen=True)
class Kind:
    """The properties that the rows around one instruction share.

    - ``operand``: the dtype of B in the graph, and of A too, except for a float32 A beside float16
      or int4 weights, and on x86-64 a uint8 A beside int8 weights; ``WEIGHTS`` for a float32 A
      beside int8 weights;
    - ``a``, ``b``: the layouts in which the row reads them;
    - ``step``: the steps of k of an iteration;
    - ``products``: the multiply-adds of one lane of one instruction (of one of its rows);
    - ``height``: the rows of C that an instruction multiplies at once; it takes as long for fewer;
    - ``in_tiles``: True if a tile unit multiplies, not the vector registers;
    - ``latency``: in cycles;
    - ``spare``: the registers beside sums and a step of B;
    - ``converts``: the vector instructions that convert a vector of B before it is multiplied, for
      each step of k;
    - ``features``, ``lanes``: the instruction sets and vector widths that a target must have;
    - ``accumulator``: the dtype of the sums.
    """

    name: str
    operand: str
    a: Layout
    b: Layout
    step: int = 1
    products: int = 1
    height: int = 1
    latency: int = 4
    spare: int = 1
    converts: int = 0
    features: tuple[str, ...] = ()
    lanes: tuple[int, ...] = (8, 16)
    accumulator: str = "float32"
    in_tiles: bool = False

    @property
    def word(self) -> int:
        """The bytes of a step of B that lie side by side and are read as one, for one column."""
        return int(self.b.step * self.b.item)

    def admitted(self, target: Target) -> bool:
        return target.lanes in self.lanes and set(self.features) <= set(target.features)


# Of two kinds for one format, the better comes first.
KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        # float32 throughout: the plain FMA
        Kind("fma", "float32", Layout(), Layout(), lanes=(NEON_LANES, 8, 16)),
        # TDPBF16PS: a tile of 16 rows adds the products of 16 pairs; TDPBUSD: exactly, those of 16
        # times four uint8 of A and int8 of B
        *(
            Kind(
                name,
                b.dtype,
                a,
                b,
                step=16 * b.step,
                products=16 * b.step,
                height=16,
                in_tiles=True,
                latency=52,
                spare=0,
                features=("amx-tile", feature),
                lanes=(16,),
                accumulator=sums,
            )
            for name, a, b, feature, sums in (
                ("tiles", Layout("bfloat16", 2), Layout("bfloat16", 2), "amx-bf16", "float32"),
                ("tiles8", Layout("uint8", 4), Layout("int8", 4), "amx-int8", "int32"),
            )
        ),
        # VDPBF16PS: each lane adds the products of a pair
        Kind(
            "bf16",
            "bfloat16",
            Layout("bfloat16", 2),
            Layout("bfloat16", 2),
            step=2,
            products=2,
            latency=6,
            features=("avx512bf16",),
            lanes=(16,),
        ),
        # BFMMLA: adds the products of two rows and two columns, four steps of k at once
        Kind(
            "bfmmla",
            "bfloat16",
            Layout("bfloat16", 4),
            Layout("bfloat16", 4),
            step=4,
            products=4,
            height=2,
            latency=5,
            features=("bf16",),
            lanes=(NEON_LANES,),
        ),
        # BFDOT: as VDPBF16PS
        Kind(
            "bfdot",
            "bfloat16",
            Layout("bfloat16", 2),
            Layout("bfloat16", 2),
            step=2,
            products=2,
            latency=4,
            features=("bf16",),
            lanes=(NEON_LANES,),
        ),
        # bfloat16 in memory: a shift and a mask split a pair of B into two float32, and A is
        # widened while it is packed; the plain FMA multiplies
        Kind(
            "widened",
            "bfloat16",
            Layout("float32"),
            Layout("bfloat16", 2),
            step=2,
            spare=2,
            converts=1,
            lanes=(NEON_LANES, 8, 16),
        ),
        # float16 in memory: VCVTPH2PS widens a vector of B while it is loaded, or FCVTL, which
        # every AArch64 CPU has
        *(
            Kind(
                name,
                "float16",
                Layout("float32"),
                Layout("float16"),
                converts=2,
                features=features,
                lanes=lanes,
            )
            for name, features, lanes in (
                ("half", ("f16c",), (8, 16)),
                ("fcvtl", (), (NEON_LANES,)),
            )
        ),
        # int8 weights in memory: VPMOVSXBD and VCVTDQ2PS widen a vector of B while it is loaded, or
        # the like of AArch64
        Kind(
            "byte",
            WEIGHTS,
            Layout("float32"),
            Layout("int8"),
            converts=2,
            lanes=(NEON_LANES, 8, 16),
        ),
        # int4 weights in memory: two shifts and VCVTDQ2PS widen each eighth of a vector of int32
        Kind(
            "nibble",
            INT4,
            Layout("float32"),
            NIBBLES,
            step=8,
            spare=2,
            converts=3,
            lanes=(NEON_LANES, 8, 16),
        ),
        # VPDPBUSD: each lane adds the products of four uint8 of A and four int8 of B, exactly, in
        # vectors of 512 bits and of 256
        *(
            Kind(
                name,
                "int8",
                Layout("uint8", 4),
                Layout("int8", 4),
                step=4,
                products=4,
                latency=5,
                features=(feature,),
                lanes=(lanes,),
                accumulator="int32",
            )
            for name, feature, lanes in (("vnni", "avx512vnni", 16), ("vnni256", "avxvnni", 8))
        ),
        # SMMLA: adds the products of two rows and two columns, eight steps of k at once
        Kind(
            "smmla",
            "int8",
            Layout("int8", 8),
            Layout("int8", 8),
            step=8,
            products=8,
            height=2,
            latency=3,
            features=("i8mm",),
            lanes=(NEON_LANES,),
            accumulator="int32",
        ),
        # SDOT: each lane adds the products of four int8 of A and of B
        Kind(
            "sdot",
            "int8",
            Layout("int8", 4),
            Layout("int8", 4),
            step=4,
            products=4,
            latency=3,
            features=("dotprod",),
            lanes=(NEON_LANES,),
            accumulator="int32",
        ),
    )
}


@dataclass(frozen=True)
class MicroKernel:
    """C[rows, vectors*lanes] += A[rows, k] x B[k, vectors*lanes], C in registers, A broadcast, B
    loaded by vectors.

    Compute abstraction: i indexes (C, A), j indexes (C, B), k is reduced and indexes (A, B). Memory
    abstraction: rows*vectors accumulators, ``vectors`` registers of B, the kind's own beside them.
    In the tile unit a register holds 16 rows, of which ``rows`` may leave the last ones out.
    """

    rows: int
    vectors: int
    lanes: int
    kind: Kind = KINDS["fma"]

    @property
    def name(self) -> str:
        """The name in a config. A float32 row is named by its size alone."""
        size = f"{self.rows}x{self.vectors}"
        return size if self.kind.name == "fma" else f"{self.kind.name}:{size}"

    @property
    def kernel(self) -> str:
        """The row of the level-0 table that gives its speed."""
        return self.kernel_of(self.rows)

    def kernel_of(self, rows: int) -> str:
        """The :attr:`kernel` with so many rows."""
        return f"{self.kind.name}:{self.covered(rows)}x{self.vectors}"

    def covered(self, rows: int) -> int:
        """The rows for which instructions are executed to multiply ``rows``."""
        return ceil(rows / self.kind.height) * self.kind.height

    @property
    def columns(self) -> int:
        return self.vectors * self.lanes

    @property
    def extents(self) -> tuple[int, int, int]:
        """The extents of the loops m, n and k in one iteration."""
        return self.rows, self.columns, self.kind.step

    @property
    def registers(self) -> int:
        """The vector registers or tiles that it takes."""
        if self.kind.in_tiles:
            blocks = self.covered(self.rows) // self.kind.height
            return blocks * self.vectors + blocks + self.vectors
        return self.covered(self.rows) * self.vectors + self.beside

    @property
    def beside(self) -> int:
        """The vector registers that it holds beside its sums: those of a step of B, and of A or of
        constants. A row of 2x2 blocks holds two columns of B or two rows of A in a register.
        """
        if self.kind.height > 1:
            return 2 * self.vectors + ceil(self.rows / self.kind.height)
        return self.vectors + (self.rows if self.by_element else self.kind.spare)

    @property
    def by_element(self) -> bool:
        """True if the instruction multiplies by an element of a vector, as NEON's FMLA does. So
        several steps of k of each row of A are one register.
        """
        return self.lanes == NEON_LANES and self.kind.name == "fma"

    @property
    def loads(self) -> float:
        """The loads of an iteration: of A, which are broadcast or lie in a vector, and of B."""
        a = self.kind.step / self.kind.a.step * self.rows
        if self.by_element:
            a /= self.lanes
        return a + self.vectors * max(1, self.kind.word // 4)

    @staticmethod
    @lru_cache(maxsize=1024)
    def parse(name: str, lanes: int) -> MicroKernel:
        """The row of a :attr:`name` or a :attr:`kernel`."""
        kind, _, size = name.rpartition(":")
        rows, vectors = size.split("x")
        return MicroKernel(int(rows), int(vectors), lanes, KINDS[kind or "fma"])

    def work(self, rows: float, depth: float) -> float:
        """Vector operations, as the level-0 table counts them, for ``rows`` rows by ``depth`` steps
        of k. For rows of several at once, ``rows`` are those that instructions cover.
        """
        return rows * self.vectors * self.steps(depth) / self.kind.products

    def steps(self, depth: float) -> float:
        """The steps of k for which a tile unit multiplies; for vectors, ``depth`` itself."""
        return ceil(depth / self.kind.step) * self.kind.step if self.kind.in_tiles else depth


def operand_of(a: str, b: str) -> str:
    """The :attr:`Kind.operand` of the rows that multiply A of dtype ``a`` by B of dtype ``b``: that
    of A, but int8 for all integers of 8 bits.
    """
    return "int8" if {a, b} <= {"int8", "uint8"} else a


def multiplied(stage: Stage) -> str | None:
    """The :attr:`Kind.operand` of the rows that multiply in the stage; None if it has no
    products.
    """
    products = [op for op in stage.operators if op.kind in ("matmul", "conv2d", "attention")]
    if not products:
        return None
    return operand_of(*(stage.types[x].dtype for x in products[0].inputs[:2]))


def kinds(target: Target, operand: str) -> tuple[Kind, ...]:
    """The kinds of rows that multiply operands of this dtype on the target, the better first."""
    return tuple(k for k in KINDS.values() if k.operand == operand and k.admitted(target))


@lru_cache(maxsize=256)
def micro_kernels(target: Target, operand: str = "float32") -> tuple[MicroKernel, ...]:
    """Rows for operands of this dtype that fit the registers, widest rows first for each number of
    vectors.
    """
    return tuple(
        MicroKernel(rows, vectors, target.lanes, kind)
        for kind in kinds(target, operand)
        for vectors in WIDTHS
        for rows in _heights(target, kind, vectors)
    )


def packable(rows: Sequence[MicroKernel]) -> tuple[MicroKernel, ...]:
    """Those of the rows whose B can be packed while a model runs: steps of k that are read as one
    are at most an int32.
    """
    return tuple(tile for tile in rows if tile.kind.word <= 4)


def _heights(target: Target, kind: Kind, vectors: int) -> Sequence[int]:
    """The numbers of rows of a kind's micro-kernels with so many vectors, most first."""
    if kind.in_tiles:
        return (2 * kind.height, kind.height) if vectors <= 2 else ()
    fitting = (
        rows
        for rows in range(TALLEST, 0, -1)
        if MicroKernel(rows, vectors, target.lanes, kind).registers <= target.registers
    )
    most = next(fitting, 0)
    return range(most - most % kind.height, 0, -kind.height)


def timed_micro_kernels(target: Target) -> tuple[MicroKernel, ...]:
    """The rows that are timed to measure a machine: all, but of those for bytes in registers only
    the tallest for each number of vectors, and none of those for int8 and int4 weights. The rates
    of the others follow from those of rows that execute as many instructions and loads
    (:func:`gtco.search.calibration.measure.derived`).
    """
    rows = in_registers(micro_kernels(target, "int8"))
    weights = (*micro_kernels(target, WEIGHTS), *micro_kernels(target, INT4))
    derived = {*rows, *weights} - set(tallest(rows).values())
    return tuple(tile for tile in every_micro_kernel(target) if tile not in derived)


def in_registers(rows: Sequence[MicroKernel]) -> tuple[MicroKernel, ...]:
    """Those of the rows that vector registers multiply."""
    return tuple(tile for tile in rows if not tile.kind.in_tiles)


def tallest(rows: Sequence[MicroKernel]) -> dict[int, MicroKernel]:
    """The first, which is the tallest, of the rows with each number of vectors."""
    found: dict[int, MicroKernel] = {}
    for tile in rows:
        found.setdefault(tile.vectors, tile)
    return found


def every_micro_kernel(target: Target) -> tuple[MicroKernel, ...]:
    """The target's rows for operands of all dtypes."""
    operands = dict.fromkeys(kind.operand for kind in KINDS.values())
    return tuple(tile for operand in operands for tile in micro_kernels(target, operand))

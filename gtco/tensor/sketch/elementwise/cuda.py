"""Sketch rule for stages of element-wise and data-movement operators alone on a GPU, structure SS.

::

    for row, group of N neighbours in it:                 # a thread each
      x0 = read_group<N>(in0 + ...)                        # 16 bytes at a time if possible
      for v in range(N): y[v] = expression(x0[v], in1[...])
      write_group(out + ..., y)

A row is the trailing axes of the output that every load runs evenly through, or else the last axis.
If an input runs along another axis than the output, a block turns it in a tile of shared memory
(:mod:`gtco.tensor.sketch.elementwise.cuda_turning`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, gcd, prod
from typing import Any

from tvm import tirx
from tvm.sym import detect_linear_equation
from tvm.tirx.script.builder import ir as T

from gtco.machine.gpu import GpuTarget
from gtco.tensor import cost
from gtco.tensor.analysis.axes import longest_row, output_shape
from gtco.tensor.analysis.chains import is_static, readable
from gtco.tensor.analysis.indices import split_flat
from gtco.tensor.cuda.arguments import arguments
from gtco.tensor.cuda.lambdas import Body, traced
from gtco.tensor.cuda.loops import by_element
from gtco.tensor.cuda.program import CudaProgram, Launch
from gtco.tensor.cuda.source import source
from gtco.tensor.cuda.spelling import CTYPES, OR, PRODUCT, SUM, indented
from gtco.tensor.emit.emitter import Expr, storage
from gtco.tensor.emit.reader import Reader
from gtco.tensor.sketch.elementwise.cuda_accesses import Moved, moved
from gtco.tensor.sketch.elementwise.cuda_turning import Turning, turning
from gtco.tensor.sketch.shared.cuda_streaming import taken
from gtco.tensor.space import Config, Decision, Option, Rejection
from gtco.tensor.stage import ITEM_BYTES, Stage

NEIGHBOURS = (8, 4, 2)
THREADS = (128, 256, 512)
CHUNK = 16  # bytes of one access
LANES = 16  # operations are counted for so many lanes at once; each lane counts as one
JOINED = 4  # registers of each further part of a concatenation; a thread chooses between the parts


def match(stage: Stage, target: GpuTarget) -> CudaElementwise | None:
    """The stage, if all its operators are readable and its shapes are known; else None."""
    if not is_static(stage) or not all(readable(op) for op in stage.operators):
        return None
    if stage.output.type.size == 0:
        return None
    return CudaElementwise(stage, target)


@dataclass(frozen=True)
class RowAxes:
    """The output as rows: the ``outer`` axes count them, and one has the ``inner`` axes. ``even``
    is true if every load is contiguous or constant along a row.
    """

    outer: tuple[int, ...]
    inner: tuple[int, ...]
    even: bool

    @property
    def count(self) -> int:
        return prod(self.outer)

    @property
    def length(self) -> int:
        return prod(self.inner)

    def index(self, row: Expr, position: Expr) -> list[Expr]:
        return [*split_flat(row, self.outer), *split_flat(position, self.inner)]


@dataclass(frozen=True)
class CudaElementwise:
    """Element-wise and injective operators on a GPU; see the module's text for the loops."""

    stage: Stage
    target: GpuTarget

    name = "elementwise"
    structure = "SS"

    # the space ------------------------------------------------------------------------------------
    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        if self.turning is not None and "tile" not in chosen:
            return Decision("tile", "block", (*self.turning.sides, 0))  # 0: none
        if chosen.get("tile", 0):
            return None
        if "neighbours" not in chosen:
            return Decision("neighbours", "grain", (*self.neighbours, 1))
        if "threads" not in chosen:
            return Decision("threads", "block", THREADS)
        return None

    @cached_property
    def turning(self) -> Turning | None:
        return turning(self.stage, self.target)

    @cached_property
    def rows(self) -> RowAxes:
        shape = output_shape(self.stage)
        cut = longest_row(self.stage)
        at = max(len(shape) - 1, 0) if cut is None else cut
        return RowAxes(shape[:at], shape[at:], cut is not None)

    @cached_property
    def neighbours(self) -> tuple[int, ...]:
        """The numbers of neighbours, beyond one, that a thread may take: those that make some
        access wider.
        """
        widest = max(ITEM_BYTES[t.dtype] for t in self.stage.types.values())
        return tuple(
            n
            for n in NEIGHBOURS
            if n <= self.rows.length and n * widest <= 2 * CHUNK and self._offers(n)
        )

    def _offers(self, neighbours: int) -> bool:
        """True if some access of a thread is wider, and no other one is scattered over the warp."""
        groups = Groups(self, neighbours)
        return groups.align > 1 and (groups.few_alone or self.moved(neighbours).in_order)

    def workload(self, config: Config) -> Launch:
        stage, output = self.stage, self.stage.output
        read = float(stage.input_bytes)
        work = cost.vectors(stage, stage.operators, LANES).total * output.type.size
        flops = float(sum(op.type.size for op in stage.operators))
        if config["tile"] if self.turning is not None else 0:
            assert self.turning is not None
            return self.turning.launch(config["tile"], read, work, flops)
        n, threads = config["neighbours"], config["threads"]
        found = self.moved(n)
        joined = sum(len(op.inputs) - 1 for op in stage.operators if op.kind == "concat")
        return Launch(
            blocks=ceil(self.groups(n) / threads),
            threads=threads,
            shared=0,
            registers=taken(32 + 8 * n + JOINED * joined, threads, self.target),
            unit="fma",
            work=0.0,
            vector=work,
            read=read,
            written=float(output.type.nbytes),
            traffic=found.bytes,
            flops=flops,
            lines=found.lines,
            asked=n * (read + output.type.nbytes) / output.type.size,
        )

    def moved(self, neighbours: int) -> Moved:
        if neighbours not in self._moved:
            size = self.rows.count, self.rows.length
            self._moved[neighbours] = moved(
                self.stage, size, lambda row, j: self.rows.index(row, j)[: self.rank], neighbours
            )
        return self._moved[neighbours]

    @cached_property
    def _moved(self) -> dict[int, Moved]:
        return {}

    @property
    def rank(self) -> int:
        return len(self.stage.output.type.shape)

    def groups(self, neighbours: int) -> int:
        return self.rows.count * ceil(self.rows.length / neighbours)

    # the program ----------------------------------------------------------------------------------
    def build(self, config: Config, symbol: str) -> CudaProgram | Rejection:
        if self.turning is not None and config["tile"]:
            return self.turning.program(config["tile"], symbol)
        n, threads = config["neighbours"], config["threads"]
        groups = Groups(self, n)
        text = source(
            symbol,
            self.stage,
            ["elementwise.cuh"],
            [groups.text(threads)],
            "",
            threads,
            f"{n} neighbours a thread" if n > 1 else "an element a thread",
        )
        blocks = ceil(self.groups(n) / threads)
        each = f"{n} neighbours by each" if n > 1 else "an element by each"
        said = by_element(self.stage, blocks, threads, each)
        return CudaProgram(text, (blocks, 1, 1), threads, lines=said)


@dataclass(frozen=True)
class Wide:
    """Neighbours of ``tensor`` from ``flat`` on, which one access loads as ``name``, if
    ``condition`` holds.
    """

    name: str
    tensor: str
    flat: Expr
    align: int
    buffer: Any
    condition: Expr = True


@dataclass
class NeighboursReader(Reader):
    """Reads element ``v`` of the thread's ``n`` neighbours. Neighbours that lie side by side are
    loaded ahead of the loop over them, as ``wide``.
    """

    n: int = 1
    v: Expr = 0
    first: Expr = 0  # the position in the row of the thread's first element
    at: Any = None  # one variable along an even row: a sum is not always recognised as even
    rest: int = 0  # how many positions beyond the row the last group has
    fixed: tuple[Any, ...] = ()  # the variables whose values are known ahead of the loop
    wide: list[Wide] = field(default_factory=list)
    conditions: tuple[Expr, ...] = ()
    single: int = 0  # loads of one element, which differ from neighbour to neighbour

    def load(self, tensor: str, index: Sequence[Expr]) -> Expr:
        em, array = self.emitter, self.inputs[tensor]
        flat = em.index(array.flat(index))
        if self.n == 1:
            return array.buffer[flat]
        self.single += 1  # until the load is found to be wide, or the same for all
        along = self.v if self.at is None else self.at
        parts: Any = (0, flat) if isinstance(flat, int) else detect_linear_equation(flat, [along])
        if len(parts) != 2:
            return array.buffer[flat]
        step, origin = int(parts[0]), em.index(parts[1])
        if self.at is not None:
            origin = em.index(origin + self.first * step)
        if step == 1 and (found := self._loaded(tensor, origin)) is not None:
            self.single -= 1
            return found.buffer[self.v]
        self.single -= step == 0
        return array.buffer[em.index(origin + self.v * step)]

    def _loaded(self, tensor: str, origin: Expr) -> Wide | None:
        """The neighbours from ``origin`` on, if one access may load them."""
        em, size = self.emitter, self.stage.types[tensor].size
        align = alignment(em, origin, self.n)
        condition: Expr = True
        if self.conditions:
            condition = em.analyzer.simplify(tirx.all(*self.conditions))
        for known in self.wide:
            same = known.tensor == tensor and em.known(tirx.EQ(known.flat, origin)) is True
            if same and str(known.condition) == str(condition):
                return known
        free = [v for x in (origin, condition) for v in _variables(x)]
        if align < 2 or not all(any(v.same_as(f) for f in self.fixed) for v in free):
            return None
        if not self.conditions:  # a conditional element must not be read outside the tensor
            last = origin + (self.n - 1 - self.rest)
            if em.known(origin >= 0) is not True or em.known(last < size) is not True:
                return None
        name, dtype = f"x{len(self.wide)}", self.stage.types[tensor].dtype
        buffer = tirx.decl_buffer((self.n,), storage(dtype), name=name)
        self.wide.append(Wide(name, tensor, origin, align, buffer, condition))
        return self.wide[-1]

    def guarded(self, condition: Expr, tensor: str, index: Sequence[Expr]) -> Expr:
        if condition is True:
            return self.value(tensor, index)
        before = self.conditions
        self.conditions = (*before, condition)
        value = self.value(tensor, index)
        self.conditions = before
        return value


class Groups:
    """Prints the stage with ``n`` neighbours a thread."""

    def __init__(self, sketch: CudaElementwise, n: int) -> None:
        self.sketch, self.stage, self.n = sketch, sketch.stage, n
        self.rows = sketch.rows
        self.per_row = ceil(self.rows.length / n)
        self.rest = self.per_row * n - self.rows.length
        self.wide: list[Wide] = []
        self.align = 1  # alignment of the output
        self.printer, self.body = traced(
            arguments(self.stage),
            (("row", self.rows.count), ("group", self.per_row), ("v", n)),
            self._emit,
        )

    @property
    def few_alone(self) -> bool:
        """True if most loads take several elements, and few take one of each group."""
        return self.single <= len(self.wide)

    def _emit(self, b: Body) -> None:
        em, output = b.em, self.stage.output
        row, group, v = b.index
        first = em.index(group * self.n)
        fixed = tuple(x for x in (row, group) if isinstance(x, tirx.Var))
        reader = NeighboursReader(
            self.stage, em, b.inputs, n=self.n, v=v, first=first, rest=self.rest, fixed=fixed
        )
        position = first + v
        if self.rows.even and self.n > 1:
            position = reader.at = tirx.Var("at", "int32")
            em.bind(reader.at, self.rows.length)
        index = self.rows.index(row, position)[: self.sketch.rank]
        value = reader.value(output.output, index)
        at = em.index(row * self.rows.length + first)
        self.at, self.first, self.wide = at, first, reader.wide
        self.single = reader.single
        self.align = alignment(em, at, self.n)
        self.result = tirx.decl_buffer((self.n,), storage(output.type.dtype), name="y")
        if self.align > 1:
            T.buffer_store(self.result, value, [v])
        else:
            T.buffer_store(b.output.buffer, value, [em.index(at + v)])

    def text(self, threads: int) -> str:
        printer, dtype, n = self.printer, self.stage.output.type.dtype, self.n
        for buffer, name, kind in (
            *((w.buffer, w.name, self.stage.types[w.tensor].dtype) for w in self.wide),
            (self.result, "y", dtype),
        ):
            printer.names[buffer] = name
            printer.bfloat16 |= {buffer} if kind == "bfloat16" else set()
        args, first = arguments(self.stage), printer.expression(self.first)
        left = f"{self.rows.length} - {printer.expression(self.first, PRODUCT)}"
        left = left if self.rest else ""
        lines = self._position(threads)
        for w in self.wide:
            count = left
            if w.condition is not True:
                count = f"{printer.expression(w.condition, OR)} ? {left or n} : 0"
            place = f"{args.pointer(w.tensor)} + {printer.expression(w.flat, SUM)}"
            given = f"{place}, {count}" if count else place
            lines.append(f"const auto {w.name} = gtco::read_group<{n}, {w.align}>({given});")
        if self.align > 1:
            lines.append(f"gtco::Group<{CTYPES[dtype]}, {n}> y;")
        inside = printer.lines(self.body)
        if n > 1:
            bound = f"v < {n} && {first} + v < {self.rows.length}" if self.rest else f"v < {n}"
            inside = [f"for (int v = 0; {bound}; ++v) {{", *indented(inside), "}"]
            inside = ["#pragma unroll", *inside]
        lines += inside
        if self.align > 1:
            place = f"out + {printer.expression(self.at, SUM)}"
            given = ", ".join([place, "y", *([left] if left else [])])
            lines.append(f"gtco::write_group<{self.align}>({given});")
        return "\n".join(lines)

    def _position(self, threads: int) -> list[str]:
        """The statements that find the row and the group of a thread."""
        count, per_row = self.rows.count, self.per_row
        both = count > 1 and per_row > 1
        name = "thread" if both else "row" if count > 1 else "group"
        lines = [f"const int {name} = block * {threads} + threadIdx.x;"]
        if count * per_row % threads:
            lines.append(f"if ({name} >= {count * per_row}) return;")
        if both:
            lines.append(f"const int row = thread / {per_row}, group = thread % {per_row};")
        return lines


def alignment(em: Any, position: Expr, most: int) -> int:
    """The largest power of two, ``most`` at most, that always divides a position."""
    if isinstance(position, int):
        step = position
    else:
        found = em.analyzer.modular_set(position)
        step = gcd(int(found.coeff), int(found.base))
    return gcd(most, step) if step else most


def _variables(x: Expr) -> list[Any]:
    return [] if isinstance(x, int | bool) else list(tirx.analysis.undefined_vars(x, []))

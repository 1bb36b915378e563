"""Sketch rule of last resort on a GPU: any single operator. It is slow, and builds every operator
that the CPU's rule builds.

Element-wise and data-movement operators, pooling, resizing and sampling have a thread for each
element of the output, and use the same readers as on a CPU. All other kinds go through
:mod:`gtco.tensor.relax.bridge`, whose loops are printed. If the outer loops are independent, each
of their iterations has a thread; else one thread does everything. Temporary tensors are in global
memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from math import ceil
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from gtco.machine.gpu import GpuTarget
from gtco.tensor.analysis.chains import is_static, readable
from gtco.tensor.analysis.indices import split_flat
from gtco.tensor.cuda.arguments import arguments
from gtco.tensor.cuda.lambdas import Body, printed
from gtco.tensor.cuda.loops import by_element
from gtco.tensor.cuda.printer import Printer
from gtco.tensor.cuda.program import CudaProgram, Launch
from gtco.tensor.cuda.source import source
from gtco.tensor.cuda.spelling import PrintError
from gtco.tensor.emit.lines import program_lines
from gtco.tensor.emit.reader import Reader
from gtco.tensor.relax.bridge import lower_module
from gtco.tensor.relax.calls import BridgeError
from gtco.tensor.relax.spellings import module_of
from gtco.tensor.sketch.fallback.cpu import IMAGE, SLOWNESS, of_nothing, operations
from gtco.tensor.space import Config, Decision, Option, Rejection
from gtco.tensor.stage import INT4, Stage

THREADS = 128
EACH = 8  # instructions of a loop's iteration
AT_ONCE = 4  # iterations whose loads overlap
ALONE = ("relax", "scatter", "topk", "cumsum")  # kinds that no other sketch for GPUs computes
MOST_SCRATCH = 1 << 28  # bytes that a kernel may keep in global memory


def iterations(statement: Any) -> int:
    """The iterations of all loops of known extents together. A statement, and a loop of unknown
    extent, counts once.
    """
    if isinstance(statement, tirx.SeqStmt):
        return sum(iterations(s) for s in statement.seq)
    if isinstance(statement, tirx.For):
        extent = statement.extent
        return (int(extent) if isinstance(extent, tirx.IntImm) else 1) * iterations(statement.body)
    if isinstance(statement, tirx.IfThenElse):
        return iterations(statement.then_case)
    return 1


def match(stage: Stage, target: GpuTarget) -> CudaFallback | None:
    """The stage if it is a single operator of known shapes, else None."""
    if len(stage.operators) != 1 or not is_static(stage):
        return None
    if any(i.type.dtype == INT4 for i in stage.inputs):
        return None  # CUDA has no type of two weights in a byte, and models for GPUs have none
    return CudaFallback(stage, target)


@dataclass(frozen=True)
class CudaFallback:
    """One operator."""

    stage: Stage
    target: GpuTarget

    name = "fallback"
    structure = "scalar"

    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        return None

    @property
    def by_elements(self) -> bool:
        """True if each element is computed directly from the inputs, without temporary tensors."""
        op = self.stage.output
        nothing = op.type.size == 0 or of_nothing(self.stage) is not None
        return readable(op) or op.kind in IMAGE or nothing

    @property
    def tasks(self) -> int:
        """The number of threads that have work."""
        return self._counts[0]

    @cached_property
    def _counts(self) -> tuple[int, int]:
        """The number of threads, and of iterations of each one's loops, as far as they are known.

        An operator that only this sketch computes is lowered to count them. For all others one
        thread is assumed: lowering every operator only to price it takes longer than all other
        sketches together.
        """
        op = self.stage.output
        if self.by_elements:
            return max(1, op.type.size), 1
        if op.kind not in ALONE and op.type.dtype.startswith(("float", "bfloat")):
            return 1, 1
        try:
            function, _, tasks = self._lower("priced")
            return tasks, iterations(function.body)
        except Exception:  # it will not build either, and the build says why
            return 1, 1

    def workload(self, config: Config) -> Launch:
        flops, (tasks, turns) = operations(self.stage), self._counts
        read = float(self.stage.input_bytes)
        written = float(self.stage.output.type.nbytes)
        return Launch(
            blocks=ceil(tasks / THREADS),
            threads=THREADS if tasks > 1 or self.by_elements else 1,
            shared=0,
            registers=64,
            unit="fma",
            work=0.0,
            vector=max(flops, float(EACH * tasks * turns)),
            read=read,
            written=written,
            traffic=SLOWNESS * (read + written),
            flops=flops,
            overlapped=False,
            steps=1 if self.by_elements else max(1, int(flops / tasks), turns // AT_ONCE),
        )

    def build(self, config: Config, symbol: str) -> CudaProgram | Rejection:
        op = self.stage.output
        try:
            return self._elements(symbol) if self.by_elements else self._lowered(symbol)
        except (BridgeError, PrintError) as error:
            return Rejection("no program", f"{op.get('op', op.kind)}: {error}")

    def _elements(self, symbol: str) -> CudaProgram:
        """``out[i] = value(i)``, with a thread for each i."""
        stage, output = self.stage, self.stage.output
        size, constant = output.type.size, of_nothing(stage)

        def body(b: Body) -> None:
            index = split_flat(b.index[0], output.type.sizes)
            if constant is not None:
                value = tirx.const(constant, output.type.dtype)
            elif output.kind in IMAGE:
                reader = Reader(stage, b.em, b.inputs)
                sources = [partial(reader.value, x) for x in output.inputs]
                types = [stage.types[x] for x in output.inputs]
                value = IMAGE[output.kind](b.em, output, sources, types, index)
            else:
                value = Reader(stage, b.em, b.inputs).value(output.output, index)
            T.buffer_store(b.output.buffer, value, [b.index[0]])

        lines: list[str] = []
        if size:
            lines.append(f"const int i = block * {THREADS} + threadIdx.x;")
            if size % THREADS:
                lines.append(f"if (i >= {size}) return;")
            lines += printed(arguments(stage), (("i", size),), body)
        text = source(symbol, stage, [], lines, "", THREADS, "a thread an element")
        blocks = max(1, ceil(size / THREADS))
        said = by_element(stage, blocks, THREADS, "an element by each")
        return CudaProgram(text, (blocks, 1, 1), THREADS, lines=said)

    def _lower(self, symbol: str) -> tuple[Any, int, int]:
        """TVM's function, its bytes of scratch, and its number of independent iterations."""
        stage, op = self.stage, self.stage.output
        types = {i.name: i.type for i in stage.inputs}
        names = list(types)
        return lower_module(
            module_of(stage, apart=True),
            symbol,
            list(types.values()),
            [names.index(x) for x in op.inputs],
            op.type,
            op.get("result", -1),
            apart=True,
        )

    def _lowered(self, symbol: str) -> CudaProgram | Rejection:
        """The printed function that TVM makes from the operator."""
        stage = self.stage
        function, scratch, tasks = self._lower(symbol)
        if scratch > MOST_SCRATCH:
            return Rejection("too large", f"{scratch} bytes beside its tensors")
        *pointers, workspace, begin, end = function.params
        printer = Printer()
        for p in (*pointers, begin, end):
            printer.name(p, str(p.name))
        printer.names[workspace] = "((unsigned char*)scratch)" if scratch else "nullptr"
        threads = THREADS if tasks > 1 else 1
        place = f"int64_t(block) * {THREADS} + threadIdx.x" if tasks > 1 else "0"
        lines = [f"const int64_t begin = {place}, end = begin + 1;"]
        if tasks % threads:
            lines.append(f"if (begin >= {tasks}) return;")
        lines += printer.lines(function.body)
        about = f"{tasks} independent iterations" if tasks > 1 else "one thread"
        text = source(symbol, stage, [], lines, "", threads, about, shares=scratch > 0)
        counters = int(scratch > 0)  # they come with scratch, which is the handle's own
        grid = (ceil(tasks / threads), 1, 1)
        said = program_lines(function, tasks)
        return CudaProgram(text, grid, threads, scratch=scratch, counters=counters, lines=said)

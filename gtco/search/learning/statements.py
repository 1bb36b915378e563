"""What a program does, statement by statement: the innermost statements of a TIR function that are
not loops (S(P) of GTCO's equation 4), each with the loops around it, how often it runs, what it
computes and which memory it touches.

Nothing is lowered or run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any, Literal

from tvm import tirx
from tvm.target.codegen import llvm_get_intrinsic_name

from gtco.search.learning.indices import CONDITIONS, Affine, Indices, is_integer
from gtco.tensor.emit.arithmetic import LIBM
from gtco.tensor.emit.emitter import ROLLED, lanes_of, operands
from gtco.tensor.intrinsics.tiles import HEIGHT, LINE, MULTIPLY, PREFIX
from gtco.tensor.space import Program
from gtco.tensor.stage import ITEM_BYTES, Stage

# Who a buffer is: an input that a run brings, one that is packed into the library, the result, a
# thread's scratch, or a small array that LLVM keeps in registers or on the stack.
Place = Literal["input", "weight", "output", "scratch", "local"]
PLACES: tuple[Place, ...] = ("input", "weight", "output", "scratch", "local")
# Kinds of operations, in vector instructions: ``address`` are the scalar integers inside indices.
KINDS = (
    *("fma", "add", "multiply", "divide", "compare", "convert", "bits", "shuffle", "library"),
    *("integer", "address", "prefetch"),
)
BESIDE = ("integer", "address", "prefetch")  # what is not computing on the stage's values
_BITS = (
    *(tirx.BitwiseAnd, tirx.BitwiseOr, tirx.BitwiseXor, tirx.BitwiseNot),
    *(tirx.LShift, tirx.RShift),
)
_KIND = {
    **dict.fromkeys((*CONDITIONS, tirx.Max, tirx.Min, tirx.Select), "compare"),
    **dict.fromkeys(_BITS, "bits"),
    **dict.fromkeys((tirx.Add, tirx.Sub), "add"),
    **dict.fromkeys((tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod), "divide"),
    tirx.Mul: "multiply",
    tirx.Cast: "convert",
    tirx.Shuffle: "shuffle",
}
_CALLS = {
    "tirx.sqrt": "divide",
    "tirx.reinterpret": "",
    "tirx.address_of": "",
    "tirx.vectorlow": "shuffle",
    "tirx.vectorhigh": "shuffle",
    "prim.if_then_else": "compare",
}


@dataclass(frozen=True)
class Loop:
    """A loop that is not the loop of a vector: its number, its average number of iterations, and
    its kind.
    """

    number: int
    extent: float
    kind: Literal["task", "serial", "unrolled"]


@dataclass(frozen=True)
class Access:
    """One load or store.

    - ``item``: bytes of an element; ``lanes``: elements at once; ``lane``: elements from one lane
      to the next;
    - ``base``: the position at the middle of all loops; ``steps``: how many elements each loop
      moves it;
    - ``size``: elements of the whole buffer.
    """

    place: Place
    buffer: int
    item: int
    lanes: int
    lane: float
    base: float
    steps: Mapping[int, float]
    write: bool
    size: float


@dataclass(frozen=True)
class Statement:
    """An innermost statement, the loops around it from outside in, how often it runs in all tasks,
    its operations by kind (vector instructions), the elements that its floating-point operations
    compute, its accesses.
    """

    loops: tuple[Loop, ...]
    runs: float
    operations: Mapping[str, float]
    elements: float
    accesses: tuple[Access, ...]


def statements(program: Program, stage: Stage, vector_bytes: int) -> list[Statement]:
    """The innermost statements of a program of ``stage``; a vector has ``vector_bytes``."""
    reading = _Reading(program, stage, vector_bytes)
    reading.statement(program.function.body, 1.0)
    return reading.found


class _Reading:
    def __init__(self, program: Program, stage: Stage, vector_bytes: int) -> None:
        self.vector_bytes = vector_bytes
        self.found: list[Statement] = []
        self.loops: list[Loop] = []
        self.vector: tuple[int, int] = (0, 1)  # the vector loop around: its number and lanes
        *inputs, output, scratch, begin, end = program.function.params
        self.indices = Indices(lambda load: self.access(load.source, load.indices, False))
        self.indices.values |= {hash(begin): Affine(), hash(end): Affine(program.tasks)}
        self.end = hash(end)  # the end of the tasks
        self.places: dict[int, Place] = {hash(output): "output", hash(scratch): "scratch"}
        for parameter, given in zip(inputs, stage.inputs, strict=True):
            self.places[hash(parameter)] = "weight" if given.constant else "input"
        self.buffers: dict[int, tuple[int, list[float], float]] = {}  # item, strides, size
        self._begin()

    def _begin(self) -> None:
        self.operations: dict[str, float] = {}
        self.elements = 0.0
        self.accesses: list[Access] = []

    # statements -----------------------------------------------------------------------------------
    def statement(self, node: Any, runs: float) -> None:
        match node:
            case tirx.SeqStmt():
                for part in node.seq:
                    self.statement(part, runs)
            case tirx.For():
                self.loop(node, runs)
            case tirx.IfThenElse():
                share = self.indices.share(node.condition)
                self.compute(node.condition)
                self.end_of_statement(runs)
                self.statement(node.then_case, runs * share)
                if node.else_case is not None:
                    self.statement(node.else_case, runs * (1 - share))
            case tirx.BufferStore():
                self.compute(node.value)
                self.access(node.buffer, node.indices, True)
                self.end_of_statement(runs)
            case tirx.Bind():
                self.bind(node.var, node.value)
                self.end_of_statement(runs)
            case tirx.Evaluate():
                self.compute(node.value)
                self.end_of_statement(runs)
            case tirx.DeclBuffer():
                self.declare(node.buffer, self.place(node.data))
            case tirx.AllocBuffer():
                self.declare(node.buffer, "local")
            case tirx.AttrStmt() | tirx.While():
                self.statement(node.body, runs)

    def end_of_statement(self, runs: float) -> None:
        if self.operations or self.accesses:
            self.found.append(
                Statement(
                    tuple(self.loops),
                    runs,
                    self.operations,
                    self.elements,
                    tuple(self.accesses),
                )
            )
            self._begin()

    def loop(self, node: Any, runs: float) -> None:
        self.indices.asked.clear()
        low = self.indices.affine(node.min)
        extent = max(self.indices.affine(node.extent).value, 0.0)
        tasks = self.end in self.indices.asked
        number = self.indices.enter(node.loop_var, low, extent)
        if node.kind == tirx.ForKind.VECTORIZED:
            before, self.vector = self.vector, (number, max(int(extent), 1))
            self.statement(node.body, runs)
            self.vector = before
            return
        unrolled = node.kind == tirx.ForKind.UNROLLED
        kind: Literal["task", "serial", "unrolled"] = "unrolled" if unrolled else "serial"
        self.loops.append(Loop(number, extent, "task" if tasks else kind))
        self.statement(node.body, runs * extent)
        self.loops.pop()

    def bind(self, variable: Any, value: Any) -> None:
        if is_integer(variable) and lanes_of(variable) == 1:
            self.indices.values[hash(variable)] = self.indices.affine(value)
            self.add("address", 1)
        else:
            self.compute(value)

    def declare(self, buffer: Any, place: Place) -> None:
        shape = [_number(d) for d in buffer.shape]
        strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
        item = ITEM_BYTES.get(str(buffer.dtype), 4)
        self.places[hash(buffer)] = place
        self.buffers[hash(buffer)] = (item, strides, prod(shape))

    def place(self, data: Any) -> Place:
        """The memory that a pointer points into. A pointer that is computed in another way points
        into scratch.
        """
        left = [data]
        while left:
            node = left.pop()
            if hash(node) in self.places:
                return self.places[hash(node)]
            if isinstance(node, tirx.Var):
                continue
            left += [x for x in operands(node) if not isinstance(x, int | float)]
            if hasattr(node, "source"):
                left.append(node.source)
        return "scratch"

    # values ---------------------------------------------------------------------------------------
    def compute(self, root: Any) -> None:
        """Counts the operations of the value."""
        left = [root]
        while left:
            node = left.pop()
            kind = type(node)
            if kind in (tirx.Var, tirx.IntImm, tirx.FloatImm):
                continue
            if hasattr(node, "source"):
                self.access(node.source, node.indices, False)
                continue
            if kind is tirx.Broadcast:
                left.append(node.value)
                continue
            if kind is tirx.Ramp:
                left.append(node.base)
                continue
            parts = list(operands(node))
            name = _KIND.get(kind)
            if name is None:
                name, parts = self.call(node, parts)
            elif name == "add" and not is_integer(node):
                product = next((x for x in parts if isinstance(x, tirx.Mul)), None)
                if product is not None:  # one instruction
                    name = "fma"
                    parts = [x for x in parts if x is not product] + [product.a, product.b]
            left += parts
            if name:
                self.count(name, node)

    def add(self, name: str, instructions: float) -> None:
        self.operations[name] = self.operations.get(name, 0.0) + instructions

    def count(self, name: str, node: Any) -> None:
        item = ITEM_BYTES.get(str(node.ty).partition("x")[0], 4)
        lanes = lanes_of(node) * self.vector[1]
        if is_integer(node) and lanes == 1 and name not in BESIDE:
            name = "integer"
        self.add(name, ceil(lanes * item / self.vector_bytes))
        if name not in BESIDE and not is_integer(node):
            self.elements += lanes * (2 if name == "fma" else 1)

    def call(self, node: Any, parts: list[Any]) -> tuple[str, list[Any]]:
        """The kind of the called function, and its arguments that are values."""
        name = getattr(getattr(node, "op", None), "name", "")
        if name in _CALLS:
            return _CALLS[name], parts
        if name in ("tirx.call_llvm_intrin", "tirx.call_llvm_pure_intrin"):
            called = llvm_get_intrinsic_name(int(parts[0])).removeprefix("llvm.")
            if called == "prefetch":  # asks for a line; nothing is read
                return "prefetch", []
            if called in LIBM:
                return "library", parts[1:]
            return "shuffle" if "perm" in called else "convert", parts[1:]
        if name == "tirx.call_extern" and parts[0].value.startswith(PREFIX):
            self.tile(parts[0].value.removeprefix(PREFIX).partition("_")[0], parts[1:])
            return "", []
        if name == "tirx.call_extern" and parts[0].value == ROLLED:
            return "", []
        if name == "tirx.call_pure_extern":
            return "library" if parts[0].value in LIBM else "fma", parts[1:]
        return "convert" if name else "", parts

    def tile(self, what: str, parts: list[Any]) -> None:
        """An instruction of the tile unit: the work of a vector instruction for each row of a full
        tile, or the load or store of its lines, which lie ``parts[1]`` bytes apart.
        """
        if what in MULTIPLY.values():
            self.add("fma", HEIGHT)
            pairs = 2 if what == MULTIPLY["bfloat16"] else 4  # steps of k in a word
            self.elements += 2 * HEIGHT * LINE / 4 * pairs * LINE / 4
        if what not in ("load", "store"):
            return
        (first,) = parts[0].args
        self.access(first.source, first.indices, what == "store")
        place = self.accesses.pop()
        apart = self.indices.affine(parts[1]).value / place.item
        self.accesses += [
            replace(place, lanes=LINE // place.item, lane=1.0, base=place.base + row * apart)
            for row in range(HEIGHT)
        ]

    # memory ---------------------------------------------------------------------------------------
    def access(self, buffer: Any, indices: Sequence[Any], write: bool) -> None:
        where = Affine()
        lanes, lane = 1, 0.0
        which = hash(buffer)
        if which not in self.buffers:
            self.declare(buffer, "local")
        item, strides, size = self.buffers[which]
        for index, stride in zip(indices, strides, strict=True):
            if isinstance(index, tirx.Ramp):
                lanes, lane = int(index.lanes), self.indices.affine(index.stride).value
                index = index.base
            where = where.plus(self.indices.affine(index).times(stride))
            if not isinstance(index, tirx.Var | tirx.IntImm | int):
                self.add("address", 1)
        vector, width = self.vector
        if width > 1 and where.steps.get(vector):
            lanes, lane = lanes * width, where.steps[vector]
        self.accesses.append(
            Access(
                self.places[which],
                which,
                item,
                lanes,
                lane,
                where.value,
                {n: step for n, step in where.steps.items() if step and n != vector},
                write,
                size,
            )
        )


def _number(size: Any) -> float:
    return float(int(size)) if isinstance(size, int | tirx.IntImm) else 1.0

"""A thin layer over TVM's TIR builder, with which every sketch writes its loops.

Kernels have the ABI of ``gtco.runtime``: ``void symbol(buffers..., workspace, begin, end)`` over a
range of tasks. They are built without TVM's packed convention, so an object file holds plain C
functions and needs no TVM at run time. Index expressions are simplified here, where the loops'
ranges are known. TVM's own simplifier would inline every ``let``, and expressions would grow
exponentially.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as T

from gtco.tensor.analysis.indices import flatten
from gtco.tensor.analysis.scope import Expr, Index, Scope
from gtco.tensor.stage import ITEM_BYTES, TensorType

# TVM keeps a range's extent in 32 bits. A larger one wraps, and conditions are decided wrongly.
INDEX_LIMIT = 2**31
# TVM's passes and its LLVM code generator replace a bound variable by its value, and the variables
# in that value by theirs: a chain of n values, each used twice, has 2^n nodes. A value read from
# memory is not replaced, so a value of more nodes than this goes through an array, which LLVM
# removes.
MOST_NODES = 2000
ROLLED = "gtco_rolled"  # a function that marks a loop (gtco/codegen/rolled.py)
CALLED = "gtco.called"  # a kernel's attribute: the names of :attr:`Emitter.called`


def lanes_of(x: Expr) -> int:
    """Lanes of an expression's type: 1 for a scalar, also in a vectorized loop."""
    _, _, lanes = str(x.ty).partition("x")
    return int(lanes) if lanes else 1


def operands(x: Expr) -> Sequence[Expr]:
    """The values from which a value is computed; none for a value read from memory."""
    kind: Any = type(x)
    names = _operand_names(kind)
    if isinstance(names, str):
        return getattr(x, names)
    return [getattr(x, name) for name in names]


@cache  # a check of a class of TVM takes longer than what is done with the operands
def _operand_names(kind: Any) -> str | tuple[str, ...]:
    """The fields of an expression of this class that are its operands; or the field that has all of
    them.
    """
    if issubclass(kind, tvm.ir.Call):
        return "args"
    if issubclass(kind, tirx.Shuffle):
        return "vectors"
    if issubclass(kind, tirx.Select):
        return ("condition", "true_value", "false_value")
    if issubclass(kind, tirx.Cast | tirx.Broadcast):
        return ("value",)
    if issubclass(kind, tirx.Not):
        return ("a",)
    return ("a", "b") if hasattr(kind, "b") else ()


def positive_divisors(x: Expr) -> Expr:
    """``x // -c`` becomes ``-x // c``, and ``x % -c`` becomes ``-(-x % c)``, in all of ``x``."""
    kind: Any = type(x)
    names = _operand_names(kind)
    if kind is tirx.Cast:
        return tirx.Cast(x.ty.dtype, positive_divisors(x.value))
    if isinstance(names, str) or len(names) < 2:
        return x
    before = [getattr(x, name) for name in names]
    after = [positive_divisors(part) for part in before]
    if kind in (tirx.FloorDiv, tirx.FloorMod):
        a, b = after
        if isinstance(b, tirx.IntImm) and b.value < 0:
            zero, divisor = tirx.const(0, str(x.ty)), tirx.const(-b.value, str(x.ty))
            if kind is tirx.FloorDiv:
                return tirx.floordiv(zero - a, divisor)
            return zero - tirx.floormod(zero - a, divisor)
    same = all(old.same_as(new) for old, new in zip(before, after, strict=True))
    return x if same else kind(*after)


def _chooses(x: Expr) -> bool:
    """True if a choice is part of the value, without looking into bound variables."""
    return type(x) is tirx.Select or any(map(_chooses, operands(x)))


@dataclass
class Array:
    """A row-major view of memory: flat TIR buffer, shape, and an offset in elements."""

    buffer: Any
    shape: tuple[int, ...]
    dtype: str
    offset: Expr = 0

    def flat(self, index: Index) -> Expr:
        return flatten(index, self.shape) + self.offset

    def part(self, i: Expr, em: Emitter | None = None, name: str = "part") -> Array:
        """The subarray at position ``i`` of the first axis; ``em`` binds its begin."""
        at = self.flat([i, *(0 for _ in self.shape[1:])])
        return Array(self.buffer, self.shape[1:], self.dtype, em.let_index(at, name) if em else at)


@dataclass
class Emitter(Scope):
    """State of one kernel under construction."""

    lanes: int
    _varying: set[Any] = field(default_factory=set)  # variables that depend on the lane
    _lane: tuple[Expr, int] = (0, 1)  # lane and number of lanes of the vector loop around
    # Nodes of the bound variables, written out
    _nodes: dict[Any, int] = field(default_factory=dict)
    # functions that the kernel calls, and that the code generator defines for the target
    called: set[str] = field(default_factory=set)

    # the external function that rounds float32 to a bfloat16's bits, if the machine has one
    bfloat16_rounding = ""

    # loops ----------------------------------------------------------------------------------------
    @contextmanager
    def loop(
        self,
        extent: Expr,
        name: str = "i",
        kind: Callable[..., Any] = T.serial,
        rolled: bool = False,
    ) -> Iterator[Expr]:
        """``for name in range(extent)``; a loop of one iteration disappears.

        LLVM makes several copies of the body in a loop, or only copies and no loop, except if it is
        ``rolled``: where the body is so long that nothing is gained. The variable of a rolled loop
        indexes no registers.
        """
        if isinstance(extent, int) and extent == 1:
            yield 0
            return
        with kind(self.number(0), self.number(extent)) as var:
            IRBuilder.name(name, var)
            if isinstance(extent, int):
                self.bind(var, extent)
            if rolled:
                self.called.add(ROLLED)
                T.evaluate(tirx.call_extern("int32", ROLLED))
            yield var

    @contextmanager
    def vector(self, lanes: int, name: str = "v") -> Iterator[Expr]:
        """A loop whose iterations become the lanes of vector instructions. Any number of lanes is
        legal.
        """
        with self.loop(lanes, name, T.vectorized) as lane:
            before = self._varying, self._lane
            if isinstance(lane, tirx.Var):
                self._varying, self._lane = {*self._varying, lane}, (lane, lanes)
            yield lane
            self._varying, self._lane = before

    def varies(self, value: Expr) -> bool:
        """True if the value depends on the lane of the vector loop around it."""
        if isinstance(value, int | float | bool) or not self._varying:
            return False
        return not self._varying.isdisjoint(tirx.analysis.undefined_vars(value, []))

    @contextmanager
    def range(self, begin: Expr, end: Expr, name: str = "i") -> Iterator[Expr]:
        with T.serial(self.number(begin), self.number(end)) as var:
            IRBuilder.name(name, var)
            yield var

    @contextmanager
    def when(self, condition: Expr) -> Iterator[None]:
        """``if condition:``, decided at build time if possible."""
        known = self.known(condition)
        if known is True:
            yield
            return
        with T.If(condition), T.Then():
            yield

    def branch(
        self, condition: Expr, then: Callable[[], None], otherwise: Callable[[], None]
    ) -> None:
        known = self.known(condition)
        if known is not None:
            (then if known else otherwise)()
            return
        with T.If(condition):
            with T.Then():
                then()
            with T.Else():
                otherwise()

    # values ---------------------------------------------------------------------------------------
    def let(self, value: Expr, name: str = "x") -> Expr:
        """Binds a value, so that it is evaluated once and used many times."""
        if isinstance(value, int | float) or isinstance(
            value, tirx.Var | tirx.IntImm | tirx.FloatImm
        ):
            return value
        nodes = self._count(value)
        if nodes > MOST_NODES and not str(value.ty).startswith("bool"):
            value, nodes = self.reread(value), 1
        return self._bound(value, name, nodes)

    def reread(self, value: Expr) -> Expr:
        """Stores the value, and gives it as it is read again."""
        if str(value.ty).startswith("bool"):
            number, zero = self._as_number(value)
            return tirx.NE(self.reread(number), zero)
        dtype, lanes = str(value.ty).partition("x")[0], lanes_of(value)
        place, size = self._lane if self.varies(value) else (0, 1)
        if lanes > 1:  # explicit vectors
            place, size = tirx.Ramp(0, 1, lanes), lanes
        array = self.registers(size, dtype)
        T.buffer_store(array.buffer, value, [place])
        return array.buffer[place]

    def _count(self, value: Expr) -> int:
        """Nodes of the expression tree, with bound variables written out. A value read from memory
        is one.
        """
        if type(value) is tirx.Var:
            return self._nodes.get(value, 1)
        return 1 + sum(map(self._count, operands(value)))

    def _bound(self, value: Expr, name: str, nodes: int) -> Expr:
        """The value bound to a variable. ``nodes``: its :meth:`_count`."""
        if str(value.ty).startswith("bool"):  # TVM cannot bind vectors of bools
            number, zero = self._as_number(value)
            return tirx.NE(self._bound(number, name, nodes + 2), zero)
        var = T.Bind(self._unread(value))
        IRBuilder.name(name, var)
        self._nodes[var] = nodes
        if self.varies(value):
            self._varying.add(var)
        return var

    @staticmethod
    def _as_number(value: Expr) -> tuple[Expr, Expr]:
        """A bool as 1 or 0, and the 0 that it is compared with to be a bool again."""
        lanes = lanes_of(value)
        one, zero = (
            tirx.Broadcast(c, lanes) if lanes > 1 else c
            for c in (tirx.const(1, "int8"), tirx.const(0, "int8"))
        )
        return tirx.Select(value, one, zero), zero

    def _unread(self, value: Expr) -> Expr:
        """``value``; if it is a float that contains a choice, behind two reinterpretations.

        TVM's passes compute the interval of every bound value. For a product with a choice between
        floats they then make an integer constant of a float's type, which is an error. They do not
        look into a reinterpretation, and LLVM removes both.
        """
        dtype, lanes = str(value.ty).partition("x")[0], lanes_of(value)
        if not dtype.startswith("float") or not _chooses(value):
            return value
        integer, vector = dtype.replace("float", "uint"), f"x{lanes}" if lanes > 1 else ""
        return tirx.reinterpret(dtype + vector, tirx.reinterpret(integer + vector, value))

    def index(self, value: Expr) -> Expr:
        """The integer expression in its simplest form that divides by positive numbers alone.

        The simplifier makes ``i % -2 * -1`` of ``-i % 2``. TVM's ``LowerIntrin`` binds a variable
        inside of such a remainder, and its LLVM code generator refuses that binding where it visits
        the expression once a lane.
        """
        return positive_divisors(super().index(value))

    def let_index(self, value: Expr, name: str = "n") -> Expr:
        """Like :meth:`let` for an integer, and keeps the known range."""
        value = self.index(value)
        if isinstance(value, int) or isinstance(value, tirx.Var):
            return value
        bound = self.analyzer.const_int_bound(value)
        var = self._bound(value, name, self._count(value))
        extent = bound.max_value + 1 - bound.min_value
        limit = INDEX_LIMIT**2 if self.wide else INDEX_LIMIT
        if bound.min_value > -limit and extent < limit:
            self.bind(var, extent, bound.min_value)
        return var

    def load(self, array: Array, index: Index) -> Expr:
        value = array.buffer[self.index(array.flat(index))]
        return value

    def store(self, array: Array, index: Index, value: Expr) -> None:
        T.buffer_store(array.buffer, value, [self.index(array.flat(index))])

    # whole vectors --------------------------------------------------------------------------------
    def ramp(self, position: Expr, lanes: int | None = None) -> Expr:
        """The indices of ``lanes`` neighbours; for one lane, the position itself."""
        first, lanes = self.index(position), lanes or self.lanes
        return tirx.Ramp(first, 1, lanes) if lanes > 1 else first

    def load_vector(self, array: Array, index: Index, lanes: int | None = None) -> Expr:
        """``lanes`` neighbours starting at ``index`` (contiguous along the last axis)."""
        return array.buffer[self.ramp(array.flat(index), lanes)]

    def store_vector(
        self, array: Array, index: Index, value: Expr, lanes: int | None = None
    ) -> None:
        T.buffer_store(array.buffer, value, [self.ramp(array.flat(index), lanes)])

    def splat(self, value: Expr, lanes: int | None = None) -> Expr:
        """``value`` in every lane. With one lane it is unchanged, because TVM has no vectors of
        one.
        """
        value = tirx.const(value, "float32") if isinstance(value, int | float) else value
        lanes = lanes or self.lanes
        return value if lanes == 1 else tirx.Broadcast(value, lanes)

    def reduce_vector(
        self, vector: Expr, combine: Callable[[Expr, Expr], Expr], left: int = 1
    ) -> Expr:
        """Folds a vector's lanes by halving, down to a scalar or a vector of ``left`` lanes."""
        width = self.lanes
        while width > max(left, 2):
            width //= 2
            dtype = f"float32x{width}"
            low, high = (
                tirx.vectorlow(dtype, vector),
                tirx.call_intrin(dtype, "tirx.vectorhigh", vector),
            )
            vector = self.let(combine(low, high))
        if left > 1:
            return vector
        return self.let(combine(tirx.Shuffle([vector], [0]), tirx.Shuffle([vector], [1])))

    def prefetch(self, array: Array, position: Expr) -> None:
        """Prefetches the cache line at a flat position into L2. Outside the array it does
        nothing.
        """
        self.prefetch_value(array.buffer[self.index(position)])

    def prefetch_value(self, load: Expr, level: int = 2, write: bool = False) -> None:
        """Like :meth:`prefetch`, for the line that ``load`` would read, into L1 or L2. With
        ``write`` the line is going to be written.
        """
        where, kind = tirx.address_of(load), int(write)
        T.evaluate(tirx.call_llvm_intrin("void", "llvm.prefetch", where, kind, 4 - level, 1))

    # memory ---------------------------------------------------------------------------------------
    def registers(self, size: int, dtype: str = "float32") -> Array:
        """A small private array. With constant indices LLVM keeps it in registers, else on the
        stack.
        """
        buffer = T.alloc_buffer((size,), storage(dtype), scope="local")
        return Array(buffer, (size,), dtype)


@dataclass(frozen=True)
class KernelArguments:
    """A kernel's parameters as arrays: inputs by name, the output, private scratch and the task
    range.
    """

    inputs: dict[str, Array]
    output: Array
    workspace: Array
    begin: Expr
    end: Expr

    def scratch_buffer(self, dtype: str) -> Any:
        """The thread's workspace as a flat buffer of another dtype."""
        if dtype == self.workspace.dtype:
            return self.workspace.buffer
        size = self.workspace.shape[0] * ITEM_BYTES["float32"] // ITEM_BYTES[dtype]
        return T.decl_buffer((size,), storage(dtype), data=self.workspace.buffer.data)


def kernel(
    symbol: str,
    inputs: dict[str, TensorType],
    output: TensorType,
    workspace: int,
    lanes: int,
    body: Callable[[Emitter, KernelArguments], None],
    wide: bool = False,
) -> Any:
    """The TIR function ``symbol(inputs..., output, workspace, begin, end)``, whose body ``body``
    emits.

    ``workspace`` is in bytes. ``inputs`` gives the types that the kernel sees, packed constants in
    their packed shape. ``wide`` is true if indices are int64.
    """
    with IRBuilder() as builder:
        with T.prim_func(s_tir=False):
            T.func_name(symbol)
            pointers = {
                name: T.arg(f"in{i}", T.handle(storage(t.dtype)))
                for i, (name, t) in enumerate(inputs.items())
            }
            out = T.arg("out", T.handle(storage(output.dtype)))
            scratch = T.arg("workspace", T.handle("float32"))
            begin, end = T.arg("begin", T.int64()), T.arg("end", T.int64())
            T.func_attr({"tirx.noalias": True, "global_symbol": symbol})
            emitter = Emitter(lanes, wide=wide)
            arrays = {name: view(pointers[name], t, name) for name, t in inputs.items()}
            work = TensorType((max(workspace // 4, 1),))
            # TVM must know that no task is negative. Else, before it divides, it adds a number that
            # makes the least int32 positive, and multiplies it beyond int32 when it simplifies.
            dtype = emitter.index_dtype
            first, last = (x if wide else tirx.Cast(dtype, x) for x in (begin, end))
            first = tirx.Max(first, tirx.IntImm(dtype, 0))
            body(
                emitter,
                KernelArguments(
                    arrays,
                    view(out, output, "out"),
                    view(scratch, work, "workspace"),
                    first,
                    last,
                ),
            )
    function = builder.get()
    return function.with_attr(CALLED, sorted(emitter.called)) if emitter.called else function


def storage(dtype: str) -> str:
    """The TIR dtype in which elements lie in memory. A bfloat16 is its bits, because LLVM's code
    generator does not take TVM's vectors of bfloat16 (``gtco.tensor.emit.bfloat16``).
    """
    return "uint16" if dtype == "bfloat16" else dtype


def view(pointer: Any, type_: TensorType, name: str) -> Array:
    """A kernel's pointer as an array."""
    shape = tuple(int(d) for d in type_.shape)
    buffer = T.decl_buffer((max(prod(shape), 1),), storage(type_.dtype), data=pointer)
    IRBuilder.name(name, buffer)
    return Array(buffer, shape, type_.dtype)

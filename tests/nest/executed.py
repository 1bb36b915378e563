"""Emitted loops, executed in Python: what they load, store and multiply, and what they compute.

TVM prints a kernel as Python source in which ``T`` names its constructs. Here ``T`` is a module of
small functions on numpy arrays that count, and the source is executed as it is.
"""

from __future__ import annotations

import ast
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from gtco.tensor.space import Program


@dataclass
class Counts:
    """Elements by buffer. ``products`` are those of vectors by an element that was loaded for all
    lanes, one a lane: micro-kernels multiply so, and nothing else does. ``different`` are loads
    without those of an element that was loaded for the same register tile; ``touched`` are the
    elements that are loaded at all.
    """

    loads: Counter[str] = field(default_factory=Counter)
    stores: Counter[str] = field(default_factory=Counter)
    different: Counter[str] = field(default_factory=Counter)
    touched: dict[str, set[int]] = field(default_factory=dict)
    products: int = 0
    _of_tile: dict[str, set[int]] = field(default_factory=dict)

    def load(self, name: str, where: np.ndarray) -> None:
        self.loads[name] += where.size
        here, places = self._of_tile.setdefault(name, set()), set(map(int, where))
        self.different[name] += len(places - here)
        here |= places
        self.touched.setdefault(name, set()).update(places)

    def next_tile(self) -> None:
        """The following loads are for another register tile."""
        self._of_tile.clear()


@dataclass(frozen=True)
class Region:
    """The elements [begin, end) of a buffer, counted under a name of their own."""

    name: str
    begin: int
    end: int


@dataclass
class Value:
    """One or more lanes of a buffer's dtype; ``everywhere`` if one that was loaded is in all."""

    lanes: np.ndarray
    counts: Counts
    everywhere: bool = False

    __array_ufunc__ = None  # numpy's scalars leave operations with a value to it

    def __add__(self, other: Any) -> Value:
        return Value(self.lanes + _lanes(other), self.counts)

    def __sub__(self, other: Any) -> Value:
        return Value(self.lanes - _lanes(other), self.counts)

    def __mul__(self, other: Any) -> Value:
        if isinstance(other, Value) and (self.everywhere or other.everywhere):
            self.counts.products += max(self.lanes.size, other.lanes.size)
        return Value(self.lanes * _lanes(other), self.counts)

    def __lshift__(self, other: Any) -> Value:
        return Value(self.lanes << _lanes(other), self.counts)

    def __rtruediv__(self, other: Any) -> Value:
        return Value(_lanes(other) / self.lanes, self.counts)

    __radd__, __rmul__ = __add__, __mul__


class Buffer:
    """A flat buffer that counts what is read and written, under the region's name if it has any."""

    def __init__(
        self, name: str, data: np.ndarray, counts: Counts, regions: Sequence[Region] = ()
    ) -> None:
        self.name, self.data, self.counts, self.regions = name, data, counts, regions

    def _part(self, index: Any) -> tuple[np.ndarray, str]:
        if isinstance(index, slice):
            where: Any = np.arange(index.start, index.stop)
        else:
            where = np.atleast_1d(index)
        assert where.min() >= 0 and where.max() < self.data.size, (
            f"{self.name}[{where}] is outside of its {self.data.size} elements"
        )
        if not self.regions:
            return where, self.name
        held = [r for r in self.regions if r.begin <= where.min() and where.max() < r.end]
        assert len(held) == 1, f"{self.name}[{where}] lies in no piece"
        return where, held[0].name

    def __getitem__(self, index: Any) -> Value:
        where, name = self._part(index)
        self.counts.load(name, where)
        return Value(self.data[where], self.counts)

    def __setitem__(self, index: Any, value: Any) -> None:
        where, name = self._part(index)
        self.counts.stores[name] += where.size
        self.data[where] = _lanes(value)


def _lanes(value: Any) -> Any:
    return value.lanes if isinstance(value, Value) else value


def execute(
    program: Program,
    arrays: Sequence[np.ndarray],
    output: np.ndarray,
    pieces: Sequence[Region],
    begin: int,
    end: int,
) -> Counts:
    """Executes the tasks [begin, end) on flat float32 arrays, in the order of the kernel's
    arguments. ``output`` is written. The pieces are those of the scratch.
    """
    counts = Counts()
    scratch = np.full(max((p.end for p in pieces), default=0), np.nan, np.float32)
    buffers = [Buffer(f"input {i}", a, counts) for i, a in enumerate(arrays)]
    buffers += [Buffer("output", output, counts), Buffer("scratch", scratch, counts, pieces)]
    source = ast.parse(program.function.script())
    (kernel,) = (s for s in source.body if isinstance(s, ast.FunctionDef))
    for argument in kernel.args.args:
        argument.annotation = None
    module = ast.fix_missing_locations(ast.Module([_Unread().visit(kernel)], []))
    scope: dict[str, Any] = {"T": _constructs(counts)}
    exec(compile(module, kernel.name, "exec"), scope)
    scope[kernel.name](*buffers, begin, end)
    return counts


class _Unread(ast.NodeTransformer):
    """An address is not a load, and a prefetch may lie behind the buffer: it is not evaluated."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        if isinstance(node.func, ast.Attribute) and node.func.attr == "address_of":
            node.args = []
        return self.generic_visit(node)  # type: ignore[return-value]


def _constructs(counts: Counts) -> SimpleNamespace:
    """What the printed source calls as ``T``."""

    def registers(shape: Sequence[int], *rest: Any) -> Buffer:
        counts.next_tile()
        return Buffer("registers", np.full(shape, np.nan, np.float32), counts)

    def of(lanes: np.ndarray) -> Value:
        return Value(lanes, counts)

    def either(choose: Callable[..., Any]) -> Callable[[Any, Any], Any]:
        """The maximum or minimum, of numbers or lane by lane."""
        return lambda a, b: (
            of(choose(_lanes(a), _lanes(b)))
            if isinstance(a, Value) or isinstance(b, Value)
            else int(choose(a, b))
        )

    def pure(dtype: str, name: str, *arguments: Any) -> Value:
        """AVX-512's x - floor(x), which is 0 of infinities, and x times 2 to the floor(y)."""
        x, y = (_lanes(a) for a in arguments[:2])
        if name == "llvm.x86.avx512.mask.reduce.ps.512":
            assert y == 9, "it rounds down"
            finite = np.where(np.isinf(x), np.float32(0), x)
            return of(finite - np.floor(finite))
        assert name == "llvm.x86.avx512.mask.scalef.ps.512", name
        return of(x * np.exp2(np.floor(y)))

    return SimpleNamespace(
        prim_func=lambda function: function,
        func_attr=lambda attrs: None,
        decl_buffer=lambda shape, *rest, data, **more: data,
        alloc_local=registers,
        vectorized=range,
        unroll=range,
        grid=lambda *extents: itertools.product(*map(range, extents)),
        min=either(np.minimum),
        max=either(np.maximum),
        Cast=lambda dtype, value: value,
        Select=lambda condition, yes, no: yes if condition else no,
        Ramp=lambda base, stride, lanes: base + stride * np.arange(lanes),
        Broadcast=lambda value, lanes: Value(
            np.repeat(_lanes(value), lanes), counts, isinstance(value, Value)
        ),
        Shuffle=lambda parts, lanes: of(np.concatenate([p.lanes for p in parts])[lanes]),
        vectorlow=lambda dtype, value: of(value.lanes[: value.lanes.size // 2]),
        vectorhigh=lambda dtype, value: of(value.lanes[value.lanes.size // 2 :]),
        reinterpret=lambda dtype, value: of(value.lanes.view(dtype.partition("x")[0])),
        call_llvm_pure_intrin=pure,
        float32=np.float32,
        uint32=np.uint32,
        int16=np.int16,
        bool=bool,
        address_of=lambda: None,
        call_llvm_intrin=lambda *arguments: None,
        call_extern=lambda *arguments: None,
    )

"""Makes a fused stage one schedulable TIR function, for TVM's MetaSchedule to tune.

Every operator becomes a ``te.compute`` by its definition, like TVM's own operators, and all
rewriting is left to MetaSchedule's rules. Exponentials and similar functions stay calls during the
search, and become gtco's polynomials when a program is built (:func:`vectorizable`). TVM's own
functions call libm for each lane, and that difference would say nothing about schedules. Constant
weights of products are marked, so that MetaSchedule may choose their layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import tvm
import tvm_ffi
from tvm import te, tirx

from gtco.support.errors import UnsupportedError
from gtco.tensor.analysis.chains import readable
from gtco.tensor.analysis.indices import broadcast_index
from gtco.tensor.emit import vector_math
from gtco.tensor.emit.emitter import Emitter, Expr
from gtco.tensor.emit.reader import Reader
from gtco.tensor.stage import Operator, Stage

LAYOUT_FREE = "layout_free_buffers"  # TVM's attribute: parameters whose layout is its to choose


FUNCTIONS: dict[str, Callable[[Emitter, Expr], Expr]] = {
    "exp": vector_math.exp,
    "erf": vector_math.erf,
    "tanh": vector_math.tanh,
    "sigmoid": vector_math.sigmoid,
    "silu": vector_math.silu,
    "gelu": vector_math.gelu,
    "gelu_tanh": vector_math.gelu_tanh,
    "exp_nonpositive": vector_math.exp_nonpositive,
}


class _Written(Emitter):
    """An emitter that makes only expressions and repeats a value instead of binding it. TVM's
    search knows no bindings within an expression, and LLVM computes a repeated value once.
    """

    def let(self, value: Expr, name: str = "x") -> Expr:
        return value

    def let_index(self, value: Expr, name: str = "n") -> Expr:
        return self.index(value)


@dataclass
class _Binding(_Written):
    """An emitter of one expression with its bindings around it. In a repeated expression TVM
    replaces (x + c) - c, by which an exponential rounds, by x.
    """

    bindings: list[tuple[Any, Expr]] = field(default_factory=list)

    def let(self, value: Expr, name: str = "x") -> Expr:
        var = tirx.Var(name, str(value.ty))
        self.bindings.append((var, value))
        return var

    def closed(self, value: Expr) -> Expr:
        for var, bound in reversed(self.bindings):
            value = tirx.Let(var, bound, value)
        return value


def _call(name: str, x: Expr) -> Expr:
    return tirx.call_pure_extern("float32", name, x)


def vectorizable(function: Any, lanes: int) -> Any:
    """The function with its calls of ``FUNCTIONS`` as arithmetic."""

    def written(call: Any) -> Any:
        if getattr(call.op, "name", "") != "tirx.call_pure_extern":
            return call
        if call.args[0].value not in FUNCTIONS:
            return call
        em = _Binding(lanes)
        return em.closed(FUNCTIONS[call.args[0].value](em, call.args[1]))

    return function.with_body(tvm_ffi.structural_map(function.body, (tvm.ir.Call, written)))


class _CallingReader(Reader):
    """A reader that keeps functions as calls."""

    def value(self, tensor: str, index: Sequence[Expr]) -> Expr:
        op = self.stage.producers.get(tensor)
        if tensor in self.known or op is None or op.kind not in FUNCTIONS:
            return super().value(tensor, index)
        return _call(op.kind, self.value(op.inputs[0], index))


class _Program:
    """The tensors of a stage. Movement and element-wise operators are read through: a chain of them
    becomes one tensor only if a product or a reduction reads it, or if it is the stage's output.
    """

    def __init__(self, stage: Stage, lanes: int) -> None:
        self.stage, self.lanes = stage, lanes
        self.tensors = {
            i.name: te.placeholder(i.type.sizes, i.type.dtype, name=f"p{n}")
            for n, i in enumerate(stage.inputs)
        }

    def add(self, op: Operator) -> None:
        floats = (op.type, *(self.stage.types[x] for x in op.inputs))
        if any(t.dtype != "float32" for t in floats):
            raise UnsupportedError(f"{op.kind} of {', '.join(t.dtype for t in floats)} for TVM")
        if readable(op):
            return
        if op.kind not in _KINDS:
            raise UnsupportedError(f"{op.kind} is not written for TVM")
        made = _KINDS[op.kind](self, op, *(self.tensor(x) for x in op.inputs))
        self.tensors[op.output] = made

    def tensor(self, name: str) -> Any:
        """A tensor of the stage. If it was only read through so far, it is made now."""
        if name not in self.tensors:
            known = {x: _reading(tensor) for x, tensor in self.tensors.items()}

            def element(em: Emitter, index: Sequence[Expr]) -> Expr:
                return _CallingReader(self.stage, em, {}, known).value(name, index)

            self.tensors[name] = self.each(self.stage.types[name].sizes, element)
        return self.tensors[name]

    def each(
        self, shape: Sequence[int], element: Callable[[Emitter, Sequence[Expr]], Expr]
    ) -> Any:
        """A tensor defined by its elements."""

        def compute(*index: Any) -> Expr:
            em = _Written(self.lanes)
            for var, extent in zip(index, shape, strict=True):
                em.bind(var, extent)
            return element(em, index)

        return te.compute(tuple(shape), compute)

    def matmul(self, op: Operator, a: Any, b: Any) -> Any:
        return _product(a, b, op.type.sizes)

    def conv2d(self, op: Operator, x: Any, weight: Any) -> Any:
        top, left, bottom, right = op["padding"]
        (down, across), (dy, dx) = op["strides"], op["dilation"]
        last = op["layout"] == "NHWC"
        h, w = (1, 2) if last else (2, 3)
        sizes = [int(d) for d in x.shape]
        outputs, inputs, kh, kw = (int(d) for d in weight.shape)
        if any(op["padding"]):
            padded = list(sizes)
            padded[h] += top + bottom
            padded[w] += left + right

            def pad(*index: Any) -> Expr:
                inner = list(index)
                inner[h], inner[w] = index[h] - top, index[w] - left
                inside = tirx.all(
                    inner[h] >= 0, inner[h] < sizes[h], inner[w] >= 0, inner[w] < sizes[w]
                )
                return tirx.if_then_else(inside, x(*inner), tirx.const(0, "float32"))

            source = te.compute(tuple(padded), pad, name="padded")
        else:
            source = x
        ci, ky, kx = (te.reduce_axis((0, n)) for n in (inputs, kh, kw))
        of_group = outputs // op["groups"]

        def element(*index: Any) -> Expr:
            n, c, y, z = (index[0], index[3], index[1], index[2]) if last else index
            channel = ci if op["groups"] == 1 else tirx.floordiv(c, of_group) * inputs + ci
            row, column = y * down + ky * dy, z * across + kx * dx
            where = (n, row, column, channel) if last else (n, channel, row, column)
            return te.sum(source(*where) * weight(c, ci, ky, kx), axis=[ci, ky, kx])

        return te.compute(op.type.sizes, element, name="conv2d")

    def softmax(self, op: Operator, x: Any) -> Any:
        return self.softmax_over(x, op["axis"], op.type.sizes)

    def softmax_over(self, x: Any, axis: int, shape: tuple[int, ...]) -> Any:
        kept = [*shape[:axis], 1, *shape[axis + 1 :]]

        def along(index: Sequence[Any], k: Any) -> list[Any]:
            return [*index[:axis], k, *index[axis + 1 :]]

        k, j = (te.reduce_axis((0, shape[axis])) for _ in range(2))
        top = te.compute(tuple(kept), lambda *i: te.max(x(*along(i, k)), axis=k), name="top")
        weights = te.compute(
            shape, lambda *i: _call("exp_nonpositive", x(*i) - top(*along(i, 0))), name="weights"
        )
        total = te.compute(tuple(kept), lambda *i: te.sum(weights(*along(i, j)), axis=j))
        return te.compute(shape, lambda *i: weights(*i) / total(*along(i, 0)), name="softmax")

    def layer_norm(self, op: Operator, x: Any, gamma: Any, beta: Any) -> Any:
        """Two passes: mean, then the mean squared deviation from it."""
        shape, n = op.type.sizes, op.type.sizes[-1]
        k, j = (te.reduce_axis((0, n)) for _ in range(2))
        total = te.compute(shape[:-1], lambda *i: te.sum(x(*i, k), axis=k), name="total")

        def apart(*index: Any) -> Expr:
            return x(*index) - total(*index[:-1]) * tirx.const(1 / n, "float32")

        squares = te.compute(
            shape[:-1], lambda *i: te.sum(apart(*i, j) * apart(*i, j), axis=j), name="squares"
        )

        def element(*index: Any) -> Expr:
            variance = squares(*index[:-1]) * tirx.const(1 / n, "float32")
            scale = 1 / tirx.sqrt(variance + tirx.const(op["epsilon"], "float32"))
            return apart(*index) * scale * gamma(index[-1]) + beta(index[-1])

        return te.compute(shape, element, name="layer_norm")

    def attention(self, op: Operator, q: Any, k: Any, v: Any, *bias: Any) -> Any:
        if op.get("hidden") is not None or op.get("guarded"):
            raise UnsupportedError("attention with a mask that hides is not written for TVM")
        rows, keys = int(q.shape[-2]), int(k.shape[-2])
        batch = op.type.sizes[:-2]
        shape = (*batch, rows, keys)
        products = _product(q, k, shape, transposed=True)

        def score(*index: Any) -> Expr:
            value = products(*index) * tirx.const(op["scale"], "float32")
            for x in bias:
                value = value + x(*broadcast_index(index, [int(d) for d in x.shape]))
            return value

        scores = te.compute(shape, score, name="scores")
        weights = self.softmax_over(scores, len(shape) - 1, shape)
        return _product(weights, v, op.type.sizes)

    def sum(self, op: Operator, x: Any) -> Any:
        axes, shape = op["axes"], [int(d) for d in x.shape]
        factor = 1.0 if op.kind == "sum" else 1 / prod(shape[a] for a in axes)
        reduced = {a: te.reduce_axis((0, shape[a])) for a in axes}

        def element(*index: Any) -> Expr:
            left = list(index)
            where = []
            for a in range(len(shape)):
                kept = left.pop(0) if a not in reduced or op["keepdims"] else None
                where.append(reduced.get(a, kept))
            return te.sum(x(*where), axis=list(reduced.values()))

        total = te.compute(op.type.sizes, element, name="total")
        if op.kind == "sum":
            return total
        return te.compute(op.type.sizes, lambda *i: total(*i) * tirx.const(factor, "float32"))


_KINDS: dict[str, Callable[..., Any]] = {
    "matmul": _Program.matmul,
    "conv2d": _Program.conv2d,
    "softmax": _Program.softmax,
    "layer_norm": _Program.layer_norm,
    "attention": _Program.attention,
    "sum": _Program.sum,
    "mean": _Program.sum,
}


def program(stage: Stage, lanes: int) -> Any:
    """The stage as a TIR function of its inputs, in order, and its output. ``lanes``: float32
    values in the target's vector. Raises :class:`UnsupportedError` for an operator that is not
    written here.
    """
    made = _Program(stage, lanes)
    for op in stage.operators:
        made.add(op)
    parameters = [*(made.tensors[i.name] for i in stage.inputs), made.tensor(stage.output.output)]
    function = te.create_prim_func(parameters)
    # what several operators read, or in parts, TVM lays out wrongly
    products = [op for op in stage.operators if op.kind in ("matmul", "conv2d")]
    free = [
        n
        for n, i in enumerate(stage.inputs)
        if i.constant
        and [op.inputs[1] for op in products].count(i.name) == 1
        and len(stage.consumers(i.name)) == 1
    ]
    return function.with_attr(LAYOUT_FREE, free) if free else function


def _reading(tensor: Any) -> Callable[[Sequence[Expr]], Expr]:
    return lambda index: tensor(*index)


def _product(a: Any, b: Any, shape: Sequence[int], transposed: bool = False) -> Any:
    """numpy.matmul; ``transposed``: with b's last two axes exchanged."""
    k = te.reduce_axis((0, int(a.shape[-1])), name="k")

    def element(*index: Any) -> Expr:
        *batch, i, j = index
        left, right = (
            broadcast_index(batch, [int(d) for d in x.shape[:-2]]) if len(x.shape) > 2 else []
            for x in (a, b)
        )
        last = (j, k) if transposed else (k, j)
        return te.sum(a(*left, i, k) * b(*right, *last), axis=k)

    return te.compute(tuple(shape), element, name="matmul")


"""A stage's element-wise and data-movement operators as expressions.

A reader goes backward: it gives the value of a tensor at an index, through any chain of
element-wise and injective operators down to the stage's inputs (a prologue). It also goes forward,
through an :class:`~gtco.tensor.analysis.chains.Epilogue`: from an element that an anchor (a matmul,
a reduction) has just computed to the element of the stage's output that it decides (a fused
epilogue, transposed stores included).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from gtco.tensor.analysis.chains import Epilogue, shape_of
from gtco.tensor.analysis.indices import broadcast_index
from gtco.tensor.analysis.movement import BIJECTIVE, CHOOSING, MOVEMENT, source_index
from gtco.tensor.emit import lookup, scalar
from gtco.tensor.emit.bfloat16 import literal
from gtco.tensor.emit.choices import stored
from gtco.tensor.emit.emitter import Array, Emitter, Expr
from gtco.tensor.operators import ELEMENTWISE, pattern
from gtco.tensor.stage import Operator, Stage


@dataclass
class Reader:
    """Values of a stage's tensors at an index. ``known`` overrides tensors whose values the kernel
    has itself.
    """

    stage: Stage
    emitter: Emitter
    inputs: Mapping[str, Array]
    known: dict[str, Callable[[Sequence[Expr]], Expr]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._stored = stored(self.stage)
        self._rounded = scalar.rounded(self.stage)
        self._tables = {
            op.output: self._table(op) for op in self.stage.operators if op.kind == "byte_function"
        }

    def _table(self, op: Operator) -> Array:
        """The values of a function of a byte, which this emits."""
        em, dtypes = self.emitter, [self.stage.types[x].dtype for x in op.inputs]
        table = em.registers(lookup.BYTES, op.type.dtype)
        with em.loop(lookup.BYTES // em.lanes, "block") as block, em.vector(em.lanes) as lane:
            place = block * em.lanes + lane
            given = [self.value(x, [0] * len(self.shape(x))) for x in op.inputs[1:]]
            byte = lookup.byte_of(place, dtypes[0])
            value = scalar.apply(em, op, [byte, *given], ["float32", *dtypes[1:]])
            em.store(table, [place], value)
        return table

    def value(self, tensor: str, index: Sequence[Expr]) -> Expr:
        """``tensor[index]`` as an expression. Large intermediate values are bound once."""
        index = [self.emitter.index(i) for i in index]
        if tensor in self.known:
            return self.known[tensor](index)
        op = self.stage.producers.get(tensor)
        if op is None:
            return self.load(tensor, index)
        if pattern(op.kind) == ELEMENTWISE:
            args = [self.value(x, broadcast_index(index, self.shape(x))) for x in op.inputs]
            return self.applied(op, args)
        return self.moved(op, index)

    def applied(self, op: Operator, args: Sequence[Expr]) -> Expr:
        """The value of an element-wise operator for these values of its inputs."""
        dtypes = [self.stage.types[x].dtype for x in op.inputs]
        if op.output in self._tables:
            return lookup.looked_up(self.emitter, self._tables[op.output], args[0], dtypes[0])
        value = scalar.apply(self.emitter, op, args, dtypes, op.output in self._rounded)
        return self.emitter.reread(value) if op.output in self._stored else value

    def shape(self, tensor: str) -> tuple[int, ...]:
        return shape_of(self.stage, tensor)

    def load(self, tensor: str, index: Sequence[Expr]) -> Expr:
        return self.emitter.load(self.inputs[tensor], index)

    def moved(self, op: Operator, index: list[Expr]) -> Expr:
        source = op.inputs[0]
        shape = self.shape(source)
        match op.kind:
            case "concat":
                return self.concatenated(op, index)
            case "pad":
                return self.padded(op, index, shape)
            case "gather":
                return self.gathered(op, index, shape)
        return self.value(source, source_index(op, index, shape))

    def concatenated(self, op: Operator, index: list[Expr]) -> Expr:
        axis = op["axis"]
        offsets = [0]
        for x in op.inputs:
            offsets.append(offsets[-1] + self.shape(x)[axis])
        result: Expr = None
        for x, start, stop in reversed(list(zip(op.inputs, offsets, offsets[1:], strict=False))):
            if (
                self.emitter.known(index[axis] < start) is True
                or self.emitter.known(index[axis] >= stop) is True
            ):
                continue
            inside = (
                self.emitter.known(index[axis] >= start) is True
                and self.emitter.known(index[axis] < stop) is True
            )
            choose, bound = self.conditional(op.inputs, index[axis])
            here = index[axis] - start if inside else bound(index[axis] - start, stop - start)
            where = True if inside else tirx.all(index[axis] >= start, index[axis] < stop)
            part = self.guarded(where, x, [*index[:axis], here, *index[axis + 1 :]])
            result = part if result is None else choose(index[axis] < stop, part, result)
        # No part is left where the index lies outside of all of them: in a branch for the border of
        # a window, of which it is known that it never runs. It still needs an expression.
        return literal(0, op.type.dtype) if result is None else result

    def padded(self, op: Operator, index: list[Expr], shape: tuple[int, ...]) -> Expr:
        inner = [i - b for i, b in zip(index, op["before"], strict=True)]
        checked = [
            i for i, b, a in zip(inner, op["before"], op["after"], strict=True) if b > 0 or a > 0
        ]
        choose, bound = self.conditional(op.inputs[:1], *checked)
        inside: Expr = True
        for k, (b, a, n) in enumerate(zip(op["before"], op["after"], shape, strict=True)):
            i = inner[k]
            for condition in ([i >= 0] if b else []) + ([i < n] if a else []):
                known = self.emitter.known(condition)
                if known is False:
                    return literal(op["value"], op.type.dtype)
                if known is None:
                    inside = condition if inside is True else tirx.all(inside, condition)
                    inner[k] = bound(i, n)
        value = self.guarded(inside, op.inputs[0], inner)
        return (
            value
            if inside is True
            else choose(inside, value, literal(op["value"], op.type.dtype))
        )

    def guarded(self, condition: Expr, tensor: str, index: Sequence[Expr]) -> Expr:
        """``tensor[index]``, which is used only if the condition holds."""
        return self.value(tensor, index)

    def conditional(
        self, tensors: Sequence[str], *where: Expr
    ) -> tuple[Callable[[Expr, Expr, Expr], Expr], Callable[[Expr, int], Expr]]:
        """The function that chooses between values of ``tensors`` (or a constant), and the function
        that bounds an index that may lie outside of them. A choice evaluates both its sides if
        either is arithmetic, so all tensors of a chain of choices are given at once.

        Movement alone is one expression, which ``if_then_else`` guards. Arithmetic binds values
        before the choice, so it is evaluated in either case, at an index that is clamped into the
        tensor. Movement is evaluated in either case too if the positions ``where`` that decide vary
        from lane to lane: TVM makes scalar code of such a guard, statement by statement, and a
        value bound before the statement would be that of its last lane alone.
        """
        varies = any(self.emitter.varies(i) for i in where)
        if not varies and all(t not in self.known and self._moves_only(t) for t in tensors):
            return T.if_then_else, lambda i, n: i
        return tirx.Select, lambda i, n: tirx.max(tirx.min(i, n - 1), 0)

    def _moves_only(self, tensor: str) -> bool:
        op = self.stage.producers.get(tensor)
        return op is None or (
            op.kind in MOVEMENT and op.kind != "gather" and all(map(self._moves_only, op.inputs))
        )

    def gathered(self, op: Operator, index: list[Expr], shape: tuple[int, ...]) -> Expr:
        axis, rank = op["axis"], len(self.shape(op.inputs[1]))
        where = self.row(op, index)
        return self.value(op.inputs[0], [*index[:axis], where, *index[axis + rank :]])

    def row(self, op: Operator, index: Sequence[Expr]) -> Expr:
        """:meth:`place` as a variable with its range."""
        return self.inside(self.place(op, index), op)

    def place(self, op: Operator, index: Sequence[Expr]) -> Expr:
        """The place along its axis that a gather reads for the element at ``index``.

        A negative index counts from the end. It is a shift and a mask, not a choice: of seven
        choices side by side, LLVM makes vector code with a mask that it does not compute. An index
        of the user may lie outside; it reads the first or the last place.
        """
        em, axis = self.emitter, op["axis"]
        rank, size = len(self.shape(op.inputs[1])), max(self.shape(op.inputs[0])[axis], 1)
        where = self.value(op.inputs[1], list(index[axis : axis + rank]))
        where = em.let(tirx.Cast(em.index_dtype, where), "row")
        sign = tirx.shift_right(where, 63 if em.index_dtype == "int64" else 31)
        counted = where + tirx.bitwise_and(sign, em.number(size))
        return tirx.max(tirx.min(counted, size - 1), 0)

    def inside(self, place: Expr, op: Operator) -> Expr:
        """A place along the axis of a gather as a variable with its range."""
        where = self.emitter.let(place, "row")
        self.emitter.bind(where, max(self.shape(op.inputs[0])[op["axis"]], 1))
        return where

    def through(
        self, tail: Epilogue, index: Sequence[Expr], value: Expr
    ) -> tuple[Expr, list[Expr]]:
        """The output's element and its index, for the anchor's ``value`` at ``index``."""
        em = self.emitter
        where = tail.positions([em.index(i) for i in index])
        values = {tail.anchor: value}
        for op in tail.operators:
            if op.kind in BIJECTIVE:
                values[op.output] = values[op.inputs[0]]
                continue
            args = [
                values[x]
                if x in values
                else self.value(x, broadcast_index(where[op.output], self.shape(x)))
                for x in op.inputs
            ]
            values[op.output] = em.let(self.applied(op, args))
        output = self.stage.output.output
        return values[output], where[output]

    def finish(self, tail: Epilogue, index: Sequence[Expr], value: Expr, output: Array) -> None:
        """Stores the result of the epilogue for the anchor's ``value`` at ``index`` in its
        place.
        """
        result, where = self.through(tail, index, value)
        self.emitter.store(output, where, result)

    def prefetch(self, tail: Epilogue, index: Sequence[Expr], output: Array) -> None:
        """Prefetches the lines that :meth:`finish` will use at ``index``: the output's, and those
        of inputs that have an element for each of the output's, such as a residual.
        """
        em = self.emitter
        where = tail.positions([em.index(i) for i in index])
        for op in tail.operators:
            for x in dict.fromkeys(x for x in op.inputs if x in self.inputs):
                if self.shape(x) == self.shape(op.output):
                    em.prefetch(self.inputs[x], self.inputs[x].flat(where[op.output]))
        at = em.index(output.flat(where[self.stage.output.output]))
        em.prefetch_value(output.buffer[at], write=True)

    def prefetch_value(self, tensor: str, index: Sequence[Expr]) -> None:
        """Prefetches the lines of the stage's inputs that :meth:`value` would read at ``index``,
        as far as the index alone decides where: not what a concat, pad or gather chooses. Outside
        the tensor it does nothing.
        """
        index = [self.emitter.index(i) for i in index]
        op = self.stage.producers.get(tensor)
        if op is None:
            self.emitter.prefetch(self.inputs[tensor], self.inputs[tensor].flat(index))
        elif pattern(op.kind) == ELEMENTWISE:
            for x in dict.fromkeys(op.inputs):
                if self.shape(x) == self.shape(op.output):
                    self.prefetch_value(x, index)
        elif op.kind in MOVEMENT - CHOOSING:
            source = op.inputs[0]
            self.prefetch_value(source, source_index(op, index, self.shape(source)))

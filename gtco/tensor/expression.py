"""A stage's element-wise and data-movement operators as index expressions.

:class:`Reader` goes backward: the value of a tensor at an index, through any chain of element-wise
and injective operators down to the stage's inputs (a prologue). :class:`Epilogue` goes forward:
from an element that an anchor (a matmul, a reduction) has just computed to the element of the
stage's output that it decides (a fused epilogue, transposed stores included).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from gtco.tensor import scalar
from gtco.tensor.bfloat16 import literal
from gtco.tensor.emit import Array, Emitter, Expr
from gtco.tensor.operators import ELEMENTWISE, pattern
from gtco.tensor.stage import Operator, Stage

BIJECTIVE = frozenset({"reshape", "permute", "roll", "identity"})
READABLE = BIJECTIVE | {"slice", "broadcast", "concat", "pad", "gather"}


def readable(op: Operator) -> bool:
    """Can :class:`Reader` evaluate through this operator?"""
    return op.kind in READABLE or pattern(op.kind) == ELEMENTWISE


def reshape_index(index: Sequence[Expr], old: Sequence[int], new: Sequence[int]) -> list[Expr]:
    """The index into shape ``new`` of the element at ``index`` of shape ``old``: both row-major, of
    one size.

    Dimensions are regrouped where prefix products agree, so that [197, 768] -> [197, 12, 64]
    divides 768 alone.
    """
    result: list[Expr] = []
    i = j = 0
    while i < len(old) or j < len(new):
        i0, j0 = i, j
        a = b = 1
        if i < len(old):
            a, i = old[i], i + 1
        if j < len(new):
            b, j = new[j], j + 1
        while a != b:
            if (a < b and i < len(old)) or j >= len(new):
                a, i = a * old[i], i + 1
            else:
                b, j = b * new[j], j + 1
        flat: Expr = 0
        for extent, position in zip(old[i0:i], index[i0:i], strict=True):
            flat = flat * extent + position
        group = list(new[j0:j])
        parts: list[Expr] = []
        for k in range(len(group) - 1, -1, -1):
            if group[k] == 1:
                parts.append(0)
            elif all(extent == 1 for extent in group[:k]):
                parts.append(flat)
            else:
                parts.append(_mod(flat, group[k]))
                flat = _div(flat, group[k])
        result += parts[::-1]
    return result


def _div(a: Expr, b: int) -> Expr:
    return a // b if isinstance(a, int) else tirx.floordiv(a, b)


def _mod(a: Expr, b: int) -> Expr:
    return a % b if isinstance(a, int) else tirx.floormod(a, b)


def broadcast_index(index: Sequence[Expr], shape: Sequence[int]) -> list[Expr]:
    """The index into an operand of ``shape`` that numpy's broadcasting reads for ``index`` of the
    result.
    """
    trailing = list(index)[len(index) - len(shape) :]
    return [0 if extent == 1 else i for extent, i in zip(shape, trailing, strict=True)]


@dataclass
class Reader:
    """Values of a stage's tensors at an index; ``known`` overrides tensors that the kernel holds
    itself.
    """

    stage: Stage
    emitter: Emitter
    inputs: Mapping[str, Array]
    known: dict[str, Callable[[Sequence[Expr]], Expr]] = field(default_factory=dict)

    def value(self, tensor: str, index: Sequence[Expr]) -> Expr:
        """``tensor[index]`` as an expression; large intermediate values are bound once."""
        index = [self.emitter.index(i) for i in index]
        if tensor in self.known:
            return self.known[tensor](index)
        op = self.stage.producers.get(tensor)
        if op is None:
            return self.load(tensor, index)
        if pattern(op.kind) == ELEMENTWISE:
            args = [self.value(x, broadcast_index(index, self.shape(x))) for x in op.inputs]
            return scalar.apply(
                self.emitter, op, args, [self.stage.types[x].dtype for x in op.inputs]
            )
        return self.moved(op, index)

    def shape(self, tensor: str) -> tuple[int, ...]:
        return tuple(int(d) for d in self.stage.types[tensor].shape)

    def load(self, tensor: str, index: Sequence[Expr]) -> Expr:
        return self.emitter.load(self.inputs[tensor], index)

    def moved(self, op: Operator, index: list[Expr]) -> Expr:
        source = op.inputs[0]
        shape = self.shape(source)
        match op.kind:
            case "identity":
                return self.value(source, index)
            case "reshape":
                return self.value(source, reshape_index(index, self.shape(op.output), shape))
            case "permute":
                inverse = sorted(range(len(shape)), key=op["axes"].__getitem__)
                return self.value(source, [index[i] for i in inverse])
            case "slice":
                return self.value(
                    source,
                    [b + i * s for b, i, s in zip(op["begin"], index, op["strides"], strict=True)],
                )
            case "broadcast":
                return self.value(source, broadcast_index(index, shape))
            case "roll":
                return self.value(
                    source,
                    [
                        _mod(i + (n - s) % n, n) if s % n else i
                        for i, s, n in zip(index, op["shifts"], shape, strict=True)
                    ],
                )
            case "concat":
                return self.concatenated(op, index)
            case "pad":
                return self.padded(op, index, shape)
            case "gather":
                return self.gathered(op, index, shape)
        raise AssertionError(f"no index map for {op.kind}")

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
            part = self.value(x, [*index[:axis], here, *index[axis + 1 :]])
            result = part if result is None else choose(index[axis] < stop, part, result)
        return result

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
        value = self.value(op.inputs[0], inner)
        return (
            value
            if inside is True
            else choose(inside, value, literal(op["value"], op.type.dtype))
        )

    def conditional(
        self, tensors: Sequence[str], *where: Expr
    ) -> tuple[Callable[[Expr, Expr, Expr], Expr], Callable[[Expr, int], Expr]]:
        """How to choose between values of ``tensors`` (or a constant), and how to bound an index
        that may lie outside of them. A choice evaluates both its sides where either is arithmetic,
        so all tensors of a chain of choices are asked at once.

        Movement alone is one expression, which ``if_then_else`` guards. Arithmetic binds values
        ahead of the choice: it is evaluated either way, at an index that is clamped into the
        tensor. So is movement where ``where``, the positions that decide, differ from lane to lane:
        TVM makes scalar code of such a guard, statement by statement, and a value bound before the
        statement would be its last lane's alone.
        """
        varies = any(self.emitter.varies(i) for i in where)
        if not varies and all(t not in self.known and self._moves_only(t) for t in tensors):
            return T.if_then_else, lambda i, n: i
        return tirx.Select, lambda i, n: tirx.max(tirx.min(i, n - 1), 0)

    def _moves_only(self, tensor: str) -> bool:
        op = self.stage.producers.get(tensor)
        return op is None or (
            op.kind in READABLE and op.kind != "gather" and all(map(self._moves_only, op.inputs))
        )

    def gathered(self, op: Operator, index: list[Expr], shape: tuple[int, ...]) -> Expr:
        axis, rank = op["axis"], len(self.shape(op.inputs[1]))
        where = self.value(op.inputs[1], index[axis : axis + rank])
        where = self.emitter.let(tirx.Cast("int32", where), "row")
        where = self.emitter.let(tirx.Select(where < 0, where + shape[axis], where), "row")
        return self.value(op.inputs[0], [*index[:axis], where, *index[axis + rank :]])


def derived(stage: Stage, anchor: str) -> list[Operator]:
    """The operators that depend on ``anchor``, in order."""
    names = {anchor}
    found = []
    for op in stage.operators:
        if names.intersection(op.inputs):
            names.add(op.output)
            found.append(op)
    return found


@dataclass(frozen=True)
class Epilogue:
    """The operators behind an anchor, when each maps its elements one to one; :func:`epilogue`
    checks that.
    """

    stage: Stage
    anchor: str
    operators: tuple[Operator, ...]

    @property
    def depends(self) -> frozenset[str]:
        return frozenset({self.anchor, *(op.output for op in self.operators)})

    def forward(self, index: Sequence[Expr]) -> list[Expr]:
        """The output's index of the element that the anchor has at ``index``."""
        return self.positions(list(index))[self.stage.output.output]

    def positions(self, index: list[Expr]) -> dict[str, list[Expr]]:
        """Where each tensor of the epilogue has the element that the anchor has at ``index``."""
        where = {self.anchor: index}
        for op in self.operators:
            source = next(x for x in op.inputs if x in where)
            where[op.output] = _forward(op, where[source], self.stage)
        return where

    def value(self, reader: Reader, index: Sequence[Expr], value: Expr) -> tuple[Expr, list[Expr]]:
        """The output's element and its index, given the anchor's ``value`` at ``index``."""
        em = reader.emitter
        where = self.positions([em.index(i) for i in index])
        values = {self.anchor: value}
        for op in self.operators:
            if op.kind in BIJECTIVE:
                values[op.output] = values[op.inputs[0]]
                continue
            args = [
                values[x]
                if x in values
                else reader.value(x, broadcast_index(where[op.output], reader.shape(x)))
                for x in op.inputs
            ]
            values[op.output] = em.let(
                scalar.apply(em, op, args, [self.stage.types[x].dtype for x in op.inputs])
            )
        output = self.stage.output.output
        return values[output], where[output]


def _forward(op: Operator, index: list[Expr], stage: Stage) -> list[Expr]:
    shape = tuple(int(d) for d in stage.types[op.inputs[0]].shape)
    match op.kind:
        case "reshape":
            return reshape_index(index, shape, tuple(int(d) for d in op.type.shape))
        case "permute":
            return [index[a] for a in op["axes"]]
        case "roll":
            return [
                _mod(i + s % n, n) if s % n else i
                for i, s, n in zip(index, op["shifts"], shape, strict=True)
            ]
    return index


def epilogue(stage: Stage, anchor: str) -> Epilogue | None:
    """The epilogue behind ``anchor``, or None where some operator is no one-to-one map of its
    elements.

    Element-wise operators need all operands that depend on the anchor in the result's own shape and
    at the same position (``x * sigmoid(x)`` is fine, ``x + transpose(x)`` is not); other operands
    must be readable from the stage's inputs.
    """
    operators = derived(stage, anchor)
    space: dict[str, tuple[str, ...]] = {anchor: ()}  # the movement operators passed on the way
    for op in operators:
        dependent = [x for x in op.inputs if x in space]
        if op.kind in BIJECTIVE:
            space[op.output] = (*space[dependent[0]], op.output)
        elif pattern(op.kind) == ELEMENTWISE:
            if len({space[x] for x in dependent}) > 1:
                return None
            if any(stage.types[x].shape != op.type.shape for x in dependent):
                return None
            space[op.output] = space[dependent[0]]
        else:
            return None
    known = {anchor, *(op.output for op in (*operators, *ancestors(stage, anchor)))}
    if any(op.output not in known and not readable(op) for op in stage.operators):
        return None
    if stage.output.output not in space:
        return None
    return Epilogue(stage, anchor, tuple(operators))


def ancestors(stage: Stage, tensor: str) -> list[Operator]:
    """The operators that ``tensor`` depends on, its own producer included, in order."""
    names = {tensor}
    found = []
    for op in reversed(stage.operators):
        if op.output in names:
            names.update(op.inputs)
            found.append(op)
    return found[::-1]


def prologue_readable(
    stage: Stage, tensors: Sequence[str], known: frozenset[str] = frozenset()
) -> bool:
    """Are these tensors, and all they come from, readable from the stage's inputs?

    ``known`` are tensors whose values the kernel has itself.
    """
    todo = [t for t in tensors if t in stage.producers and t not in known]
    while todo:
        op = stage.producers[todo.pop()]
        if not readable(op):
            return False
        todo += [t for t in op.inputs if t in stage.producers and t not in known]
    return True

"""Chains of operators around an anchor (a matmul, a reduction): the operators that it is computed
from, and the epilogue that each of its elements goes through.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gtco.tensor.analysis.movement import BIJECTIVE, MOVEMENT, result_index
from gtco.tensor.analysis.scope import Expr
from gtco.tensor.operators import ELEMENTWISE, pattern
from gtco.tensor.stage import Operator, Stage, item_bytes


def shape_of(stage: Stage, tensor: str) -> tuple[int, ...]:
    return stage.types[tensor].sizes


def is_static(stage: Stage) -> bool:
    return all(t.static for t in stage.types.values())


def anchor(stage: Stage, *kinds: str) -> Operator | None:
    """The operator of these kinds, if the stage has exactly one; else None."""
    found = [op for op in stage.operators if op.kind in kinds]
    return found[0] if len(found) == 1 else None


def float32(stage: Stage, tensors: Iterable[str]) -> bool:
    return all(stage.types[t].dtype == "float32" for t in tensors)


def readable(op: Operator) -> bool:
    """True if one element of its output can be computed directly from elements of its inputs."""
    return op.kind in MOVEMENT or pattern(op.kind) == ELEMENTWISE


def prologue_readable(
    stage: Stage, tensors: Sequence[str], known: frozenset[str] = frozenset()
) -> bool:
    """True if these tensors, and all that they are computed from, are readable from the stage's
    inputs.

    The kernel itself has the values of the tensors in ``known``.
    """
    todo = [t for t in tensors if t in stage.producers and t not in known]
    while todo:
        op = stage.producers[todo.pop()]
        if not readable(op):
            return False
        todo += [t for t in op.inputs if t in stage.producers and t not in known]
    return True


def ancestors(stage: Stage, tensor: str) -> list[Operator]:
    """The operators that ``tensor`` depends on, its own producer included, in order."""
    names = {tensor}
    found = []
    for op in reversed(stage.operators):
        if op.output in names:
            names.update(op.inputs)
            found.append(op)
    return found[::-1]


def bytes_read(stage: Stage, tensor: str) -> float:
    """Bytes that the stage reads from memory for one element of ``tensor``. Only tensors that are
    as large count, so a bias does not.
    """
    types, producers = stage.types, stage.producers
    read = {x for op in ancestors(stage, tensor) for x in op.inputs if x not in producers}
    whole = [types[x] for x in read or {tensor} if types[x].size >= types[tensor].size]
    return float(sum(item_bytes(t.dtype) for t in whole))


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
    """The operators that follow an anchor, if each maps its elements one to one; :func:`epilogue`
    checks that.
    """

    stage: Stage
    anchor: str
    operators: tuple[Operator, ...]

    def forward(self, index: Sequence[Expr]) -> list[Expr]:
        """The output's index of the element that the anchor has at ``index``."""
        return self.positions(list(index))[self.stage.output.output]

    def positions(self, index: list[Expr]) -> dict[str, list[Expr]]:
        """For each tensor of the epilogue, the index of the element that the anchor has at
        ``index``.
        """
        where = {self.anchor: index}
        for op in self.operators:
            source = next(x for x in op.inputs if x in where)
            where[op.output] = result_index(op, where[source], shape_of(self.stage, source))
        return where


def epilogue(stage: Stage, anchor: str) -> Epilogue | None:
    """The epilogue of ``anchor``, or None if some operator is not a one-to-one map of its elements.

    In an element-wise operator, all operands that depend on the anchor must have the result's own
    shape and the same position (``x * sigmoid(x)`` is fine, ``x + transpose(x)`` is not). Other
    operands must be readable from the stage's inputs.
    """
    operators = derived(stage, anchor)
    space: dict[str, tuple[str, ...]] = {anchor: ()}  # the movement operators passed so far
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

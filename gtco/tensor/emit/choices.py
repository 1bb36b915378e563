"""Chains of choices, whose conditions follow from other choices.

TVM's ``LowerIntrin`` simplifies the condition of each choice, and there the choices inside, each of
which has its condition simplified anew. So the time grows by a large factor with each: two
remainders of remainders take a minute, as does ``torch.bucketize``, a binary search that
``torch.export`` writes out. It does not look into a value that is read from memory.
"""

from __future__ import annotations

from gtco.tensor.elementwise import ELEMENTWISE_OPERATORS
from gtco.tensor.stage import Operator, Stage

FEW = 3  # choices of a chain, which TVM simplifies in no time
APART = 2  # choices between two values that are stored, in longer chains
# Divisions of integers; choices look for zeros
_DIVISIONS = ("divide", "floor_divide", "floor_mod", "mod")


def stored(stage: Stage) -> frozenset[str]:
    """The tensors inside the stage whose values are read from memory where they are used; none
    in stages without long chains.
    """
    depth: dict[str, int] = {}
    found = set()
    for op in stage.operators:
        before = max((depth.get(x, 0) for x in op.inputs), default=0)
        depth[op.output] = before + _choices(op)
        if depth[op.output] // APART > before // APART:
            found.add(op.output)
    return frozenset(found) if max(depth.values()) > FEW else frozenset()


def _choices(op: Operator) -> int:
    if op.kind in _DIVISIONS and "int" in op.type.dtype:
        return 2
    row = ELEMENTWISE_OPERATORS.get(op.kind)
    return 1 if row is not None and (row.tests or row.conditions) else 0

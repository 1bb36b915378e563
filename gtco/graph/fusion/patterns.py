"""Which operators may share a stage: the five patterns of GTCO, Section III, as two small tables.

The pattern of an operator is in its row of ``gtco.tensor.operators``. A stage that the tables
forbid has cost +inf in Algorithm 1 (``pattern(v_i, v_j) = opaque``, line 36) and is never priced.
The cost function may still refuse a stage that they allow, because only it knows the sketches.

The paper marks softmax opaque and splits layer normalization into element-wise operators. Here both
are whole operators and reductions. This allows every fusion that the paper's labels allow, and also
softmax between two matrix products (Section IV-D) and layer normalization as a prologue.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from gtco.tensor.operators import (
    COMPLEX,
    ELEMENTWISE,
    INJECTIVE,
    OPAQUE,
    REDUCTION,
    is_anchor,
    pattern,
)
from gtco.tensor.stage import Operator

# (producer, consumer) pairs whose tensor may stay inside a stage.
_PAIRS: frozenset[tuple[str, str]] = frozenset(
    [(a, b) for a in (INJECTIVE, ELEMENTWISE) for b in (INJECTIVE, ELEMENTWISE, REDUCTION, COMPLEX)]
    + [(REDUCTION, b) for b in (INJECTIVE, ELEMENTWISE, COMPLEX)]  # epilogue; layer_norm prologue
    + [(COMPLEX, b) for b in (INJECTIVE, ELEMENTWISE, REDUCTION)]  # epilogue; softmax, layer_norm
    # COMPLEX -> COMPLEX and REDUCTION -> REDUCTION: no kernel keeps that tensor in registers.
)

# The anchors that a path inside a stage may meet, from the sink upwards: M matmul, C another
# complex operator, S softmax, R another reduction. Element-wise and injective operators have no
# letter; any number of them may be in between. O is an opaque operator, alone in its stage.
_PATHS: frozenset[str] = frozenset(
    ["", "O", "MSM"]
    + [below + anchor + above for anchor in "MC" for below in ("", *"SR") for above in ("", *"SR")]
    + list("SR")
)


def _letter(op: Operator) -> str:
    kind = pattern(op.kind)
    if kind == COMPLEX:
        return "M" if op.kind == "matmul" else "C"
    if kind == REDUCTION:
        return "S" if op.kind == "softmax" else "R"
    return "O" if kind == OPAQUE else ""


def fusable(producer: Operator, consumer: Operator) -> bool:
    """True if the tensor between these two operators may stay inside a stage."""
    return (pattern(producer.kind), pattern(consumer.kind)) in _PAIRS


def extend_path(path: str, op: Operator) -> str | None:
    """The path extended upwards by ``op``; None if no stage may hold the extended path.

    ``path`` names the anchors (complex operators, reductions) between the stage's sink and ``op``,
    those near the sink first; start with ``""``.
    """
    grown = path + _letter(op)
    return grown if grown in _PATHS else None


def stage_allowed(operators: Iterable[Operator]) -> bool:
    """True if these operators may be one stage. They are in topological order; the last is the
    sink, and all others are used only inside. This is the rule as a whole, by which tests hold the
    search. The search asks it piece by piece.

    Every edge must be in the pair table, every path in the path table, and the whole has one
    anchor: at most one complex operator (two as matmul -> softmax -> matmul) with at most one
    reduction before it and one after it; without a complex operator, at most one reduction. A stage
    stays allowed if an operator that reads no other operator of the stage is removed. So a search
    may grow stages upwards from the sink and stop at the first refusal.
    """
    ops = tuple(operators)
    paths = _paths(ops)
    return paths is not None and anchors_allowed([op for op in ops if is_anchor(op.kind)], paths)


def _paths(ops: tuple[Operator, ...]) -> dict[str, set[str]] | None:
    """The paths from the sink to each operator, itself included; None if an edge or a path is in no
    table.
    """
    makers = {op.output: op for op in ops}
    paths: dict[str, set[str]] = {op.output: set() for op in ops}
    paths[ops[-1].output].add(_letter(ops[-1]))
    for op in reversed(ops):
        for source in dict.fromkeys(op.inputs):
            maker = makers.get(source)
            if maker is None:
                continue
            if not fusable(maker, op):
                return None
            for path in paths[op.output]:
                grown = extend_path(path, maker)
                if grown is None:
                    return None
                paths[source].add(grown)
    return paths


def anchors_allowed(anchors: Sequence[Operator], paths: Mapping[str, Collection[str]]) -> bool:
    """True if these, in topological order, may be all the anchors of one stage.

    ``paths`` has the paths from the sink to each (``extend_path``).
    """
    complexes = [op for op in anchors if _letter(op) in ("M", "C")]
    reductions = [op for op in anchors if _letter(op) in ("S", "R")]
    if not complexes:
        return len(reductions) <= 1
    if len(complexes) == 2:  # the first product reaches the second only through the softmax
        return len(reductions) == 1 and paths[complexes[0].output] == {"MSM"}
    if len(complexes) > 2:
        return False
    # The path from the sink to a reduction before the complex operator passes that operator. The
    # path to the complex operator passes a reduction behind it.
    down = {path[:-1] for path in paths[complexes[0].output]}
    before = [op for op in reductions if any(p[:-1].endswith(("M", "C")) for p in paths[op.output])]
    behind = [op for op in reductions if op not in before]
    return len(before) <= 1 and len(behind) <= (1 if any(down) else 0)

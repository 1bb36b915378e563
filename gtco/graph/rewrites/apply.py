"""How rewrites walk a graph, and small helper functions that most of them use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import numpy

from gtco.graph.graph import Graph
from gtco.graph.infer import infer_type
from gtco.tensor.reference import evaluate
from gtco.tensor.stage import Dim, Operator, TensorType

Rule = Callable[[Graph, Operator], str | None]
# Movement of one tensor that gives each of its elements at most once.
MOVES = ("identity", "reshape", "permute", "slice")
COMPUTED = ("cast", "subtract", *MOVES)  # of constants, by :func:`constant_value`


def apply_rule(
    graph: Graph,
    kinds: Collection[str],
    rule: Rule,
    *,
    backwards: bool = False,
    onwards: bool = False,
) -> Graph:
    """A copy of ``graph`` in which ``rule`` was tried once on every operator of these kinds, in
    topological order; with ``onwards`` also on what a replacement is or directly reads, so that an
    operator moves as far as it can.

    The rule gives the tensor that replaces the operator's output, or None ("not mine"). It may add
    operators and constants, and does not change the operator itself. Operators without readers are
    dropped at once, so that ``only_user`` counts only live readers.

    A replacement of another type than the operator's is not taken: a constant of the pattern, such
    as an epsilon, may have broadcast its result, and rules do not look for that.
    """
    graph = graph.copy()
    order = list(graph.operators)
    pending = order if backwards else order[::-1]
    while pending:
        op = graph.operators.get(pending.pop())
        if (
            op is None
            or op.kind not in kinds
            or (op.kind == "identity" and op.output in graph.outputs)
        ):
            continue
        new = rule(graph, op)
        if new is None or new == op.output:
            continue
        if _has_type(graph, new, op.type):
            graph.replace_uses(op.output, new)
            graph.drop_dead(op.output)
            if onwards and (made := graph.producer(new)) is not None:
                pending += [new, *made.inputs]
        else:
            graph.drop_dead(new)
    return graph.prune()


def _has_type(graph: Graph, tensor: str, wanted: TensorType) -> bool:
    if graph.types[tensor] != wanted:
        return False
    op = graph.producer(tensor)
    if op is None:
        return True
    inputs = [graph.types[source] for source in op.inputs]
    return infer_type(op.kind, inputs, dict(op.attrs), op.type) == wanted


def scalar(graph: Graph, tensor: str) -> float | None:
    """The value of a constant whose elements are all the same; None for any other tensor."""
    value = graph.constants.get(tensor)
    if value is None or value.size == 0 or value.dtype.kind not in "fiu":
        return None
    first = value.flat[0]
    if value.size > 1 and any(value.strides) and not bool((value == first).all()):
        return None
    return float(first)


def constant_value(
    graph: Graph, tensor: str, kinds: Collection[str] = COMPUTED
) -> numpy.ndarray | None:
    """The value of a constant, also if operators of these kinds make it of constants."""
    if graph.is_constant(tensor):
        return graph.constants[tensor]
    op = graph.producer(tensor)
    if op is None or op.kind not in kinds:
        return None
    values = []
    for x in op.inputs:
        if (value := constant_value(graph, x, kinds)) is None:
            return None
        values.append(value)
    return evaluate(op, *values)


def made_by(graph: Graph, tensor: str, *kinds: str) -> Operator | None:
    """The operator that makes ``tensor``, if it is of one of these kinds; else None."""
    op = graph.producer(tensor)
    return op if op is not None and op.kind in kinds else None


def axis_vector(graph: Graph, tensor: str, axis: int, shape: Sequence[Dim]) -> numpy.ndarray | None:
    """The vector of a constant that, broadcast to ``shape``, varies only along one axis."""
    value = graph.constants.get(tensor)
    if value is None or value.dtype.kind != "f" or not isinstance(shape[axis], int):
        return None
    size = int(shape[axis])
    if value.size == 1:
        return numpy.broadcast_to(value.reshape(()), (size,))
    here = axis - len(shape) + value.ndim
    if here >= 0 and value.shape[here] == size == value.size:
        return value.reshape(size)
    return None


def moved(graph: Graph, tensor: str, moves: Iterable[Operator]) -> str:
    """The tensor after this movement, in its own dtype."""
    for op in moves:
        made = TensorType(op.type.shape, graph.types[tensor].dtype)
        tensor = graph.add(op.kind, (tensor,), made, name=op.name, **dict(op.attrs))
    return tensor


def with_constant(graph: Graph, op: Operator) -> tuple[str, str] | None:
    """(other operand, constant operand) of a commutative operator with exactly one constant
    operand."""
    first, second = op.inputs
    if graph.is_constant(second) and not graph.is_constant(first):
        return first, second
    if graph.is_constant(first) and not graph.is_constant(second):
        return second, first
    return None


def close(value: float | None, wanted: float, tolerance: float = 1e-4) -> bool:
    """True if both are equal up to the rounding of constants by exporters (some keep 4 digits)."""
    return value is not None and abs(value - wanted) <= tolerance * max(1e-6, abs(wanted))

"""Operators of constants become constants; equal small constants become one.

before: t = permute(W); y = matmul(x, t)        after: y = matmul(x, W'), W' a constant
"""

from __future__ import annotations

from functools import partial

import numpy

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import apply_rule
from gtco.tensor.elementwise import BROADCASTING
from gtco.tensor.operators import OPERATORS
from gtco.tensor.stage import Operator, TensorType

# A result may have so many more bytes than its inputs, or so many times as many: int8 weights
# become float32. Views have no such limit.
_GROWTH = 16 << 20
_WIDER = 4
_VIEWS = frozenset("identity reshape permute slice broadcast".split())
_INTERN_BYTES = 4096
_DIVISIONS = frozenset("divide floor_divide mod floor_mod".split())


def fold_constants(graph: Graph) -> Graph:
    """Computes every operator whose inputs are all constants, unless it is an output or its result
    is much larger.

    Floats follow IEEE 754, with infinities and NaN. A result without a value (an integer over 0) is
    left for the run time, where it may never be reached; so is a result that cannot be computed
    here.

    ``broadcast`` gives a view with stride 0, so a constant never grows in memory. If only an
    element-wise operator reads such a view, the narrow constant takes its place.
    """
    graph = apply_rule(graph, OPERATORS, partial(_fold, set()))
    graph = apply_rule(graph, BROADCASTING, _narrow)
    return _intern(graph)


def _fold(made: set[str], graph: Graph, op: Operator) -> str | None:
    """``made``: constants that were computed here. One that nothing else reads goes at once, so
    memory holds no weights twice.
    """
    if op.output in graph.outputs or not all(graph.is_constant(source) for source in op.inputs):
        return None
    given = sum(graph.constants.nbytes(source) for source in op.inputs)
    if op.kind not in _VIEWS and op.type.nbytes > max(given + _GROWTH, given * _WIDER):
        return None
    if op.kind in _DIVISIONS:
        divisor = graph.constants[op.inputs[1]]
        if divisor.dtype.kind in "iu" and not divisor.all():
            return None
    try:
        value = graph.constants.result(op)
    except Exception as error:
        # Integer arithmetic without a value (a negative power), or an operator that TVM cannot run.
        if op.kind == "relax" or isinstance(error, ArithmeticError | ValueError):
            return None
        raise
    found = graph.add_constant(value, op.output)
    for source in made.intersection(op.inputs):
        if graph.only_user(source) is not None:
            del graph.constants[source]
    made.add(found)
    return found


def _narrow(graph: Graph, op: Operator) -> str | None:
    """Axes along which a constant repeats one value become 1, if another operand gives
    the shape.
    """
    inputs = list(op.inputs)
    for index, source in enumerate(inputs):
        if not graph.is_constant(source) or graph.constants.is_later(source):
            continue  # a broadcast is never left for later
        value = graph.constants[source]
        if value.size <= 1 or 0 not in value.strides:
            continue
        narrow = value[tuple(slice(0, 1) if s == 0 else slice(None) for s in value.strides)]
        if narrow.shape == value.shape:
            continue
        others = [graph.types[t].shape for i, t in enumerate(inputs) if i != index]
        if numpy.broadcast_shapes(narrow.shape, *others) == op.type.shape:  # type: ignore[arg-type]
            inputs[index] = graph.add_constant(narrow, source)
    return (
        None
        if tuple(inputs) == op.inputs
        else graph.add(op.kind, inputs, op.type, name=op.name, **dict(op.attrs))
    )


def _intern(graph: Graph) -> Graph:
    graph = graph.copy()
    known: dict[tuple[TensorType, bytes], str] = {}
    for name in list(graph.constants):
        if graph.constants.nbytes(name) <= _INTERN_BYTES:
            key = graph.types[name], graph.constants[name].tobytes()
            graph.replace_uses(name, known.setdefault(key, name))
    return graph.prune()

"""A dequantization, operators of one argument and a quantization become one function of a byte.

before: q2 = quantize(gelu(dequantize(q, s, z)), h, l, z2)
after:  q2 = byte_function(q, s, z, h, l, z2), with functions (gelu)

before: q2 = quantize(permute(relu(dequantize(q, s, z))), h, l, z2)
after:  q2 = permute(byte_function(q, s, z, h, l, z2)), with functions (relu)

before: q2 = quantize(relu(dequantize(q, s, z))), of the same scale and zero point, which is 0
after:  q2 = q

Kernels look the function up in a table of its 256 values. This is for machines with an instruction
that looks up a vector of bytes; elsewhere arithmetic is faster. A function that changes no byte
goes everywhere.
"""

from __future__ import annotations

from functools import partial

import numpy

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import MOVES, apply_rule, moved, scalar
from gtco.machine.target import Machine, Target
from gtco.tensor.elementwise import ELEMENTWISE_OPERATORS, UNARY
from gtco.tensor.emit.lookup import FEATURE
from gtco.tensor.stage import Attrs, Operator, TensorType, make_attrs

LEAST = 4096  # elements: to make a table takes time too
_WITH_CONSTANT = ("add", "subtract", "multiply", "divide", "maximum", "minimum")
# An operator of one argument: its kind, its attributes and the constants beside the argument.
_Function = tuple[str, Attrs, tuple[float, ...]]


def byte_functions(graph: Graph, machine: Machine) -> Graph:
    """The graph with these functions, if the machine has the instruction."""
    tables = isinstance(machine, Target) and FEATURE in machine.features
    return apply_rule(graph, {"quantize"}, partial(_rule, tables))


def _rule(tables: bool, graph: Graph, op: Operator) -> str | None:
    functions: list[_Function] = []
    moves: list[Operator] = []
    between: list[Operator] = []
    found = graph.producer(op.inputs[0])
    while found is not None and found.kind != "dequantize":
        if found.kind in MOVES:
            moves.insert(0, found)
            source = found.inputs[0]
        elif (known := _function(graph, found)) is not None:
            source, function = known
            functions.insert(0, function)
        else:
            return None
        between.append(found)
        found = graph.producer(source)
    if found is None or found.type.dtype != "float32":
        return None
    steps = (*found.inputs[1:], *op.inputs[1:])
    if any(scalar(graph, x) is None for x in steps):
        return None
    q = found.inputs[0]
    attrs = make_attrs(functions=functions, min=op["min"], max=op["max"])
    kind = TensorType(graph.types[q].shape, op.type.dtype)
    made = Operator("byte_function", (q, *steps), "", kind, attrs, op.name)
    if not _changes(graph, made):
        return moved(graph, q, moves)
    if not tables or kind.size < LEAST:
        return None
    if any(graph.only_user(x.output) is None for x in between):  # they would be computed twice
        return None
    y = graph.add(made.kind, made.inputs, kind, name=op.name, **dict(attrs))
    return moved(graph, y, moves)


def _function(graph: Graph, op: Operator) -> tuple[str, _Function] | None:
    """The argument of an operator that is a function of it alone, and the function."""
    if op.type.dtype != "float32" or graph.types[op.inputs[0]] != op.type:
        return None
    if op.kind in UNARY:
        return op.inputs[0], (op.kind, op.attrs, ())
    if op.kind in _WITH_CONSTANT:
        value = scalar(graph, op.inputs[1])
        if value is not None:
            return op.inputs[0], (op.kind, op.attrs, (value,))
    return None


def _changes(graph: Graph, op: Operator) -> bool:
    """True if a function of a byte changes some byte."""
    dtype = graph.types[op.inputs[0]].dtype
    if dtype != op.type.dtype:
        return True
    every = numpy.arange(256).astype(numpy.uint8).view(dtype)
    steps = [numpy.float32(scalar(graph, x)) for x in op.inputs[1:]]
    meaning = ELEMENTWISE_OPERATORS[op.kind].meaning
    with numpy.errstate(all="ignore"):
        return not bool((meaning(op, every, *steps) == every).all())

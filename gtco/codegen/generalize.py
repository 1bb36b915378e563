"""One kernel for stages of many sizes: kernels that differ in numbers alone become one that reads
these numbers from an array.

Helix's kernels take their sizes as arguments. Here such kernels are found, and no sketch knows of
them. A kernel's TIR is walked as a tree, whose *outline* is the tree with its numbers left out.
Kernels with equal outlines compute the same with other extents, strides and offsets
(anti-unification of their trees). Where all of them have the same number it stays a constant.
Numbers that differ in the same way are one argument. A stage's arguments are an array of constants
beside its weights, so that a library's runtime knows nothing of them.

::

    for i in range(40): y[i * 320] = x[i * 96]        numbers (40, 320, 96)
    for i in range(10): y[i * 80] = x[i * 96]         numbers (10, 80, 96)

    n0, n1 = max(numbers[0], 1), max(numbers[1], 1)   arguments (40, 320) and (10, 80)
    for i in range(n0): y[i * n1] = x[i * 96]

Some numbers belong to the outline, so kernels that differ in them stay apart:

- what LLVM or the machine needs as a constant: lanes, immediates, the extents of vectors and of
  unrolled loops, the sizes of arrays;
- indices of arrays that are to lie in registers, with the extents of the loops that make them;
- divisors of vectors, since a machine has no division of integer vectors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import tvm
from tvm import tirx
from tvm_ffi.serialization import from_json_graph_str

from gtco.codegen.outline_walk import Walk
from gtco.codegen.outlines import Arguments, Outline


def outline(function: Any) -> Outline:
    """The outline of a kernel, a ``PrimFunc`` as a sketch makes it."""
    # the kernel's name is an attribute, and says nothing of what it computes
    nameless = function.without_attr("global_symbol")
    walk = Walk(json.loads(tvm.ir.save_json(nameless)))
    walk.function()
    digest = hashlib.sha256("\0".join(walk.tokens).encode()).hexdigest()
    return Outline(digest[:16], tuple(walk.numbers))


def generalized(function: Any, wanted: Arguments) -> Any:
    """``function`` with arguments for some of its numbers: it has one more buffer, the array of
    them, behind all others.

    It keeps the name and the attributes.
    """
    graph = json.loads(tvm.ir.save_json(function))
    walk = Walk(graph)
    names = {}
    for column in range(len(wanted.least)):
        names[column] = walk.variable(f"n{column}", "int32" if wanted.dtype == "int32" else "int64")
    walk.replaced = {place: names[column] for place, column in wanted.columns.items()}
    body = walk.function()
    root = graph["nodes"][graph["root_index"]]["data"]
    root["body"] = body
    # the variables are parameters until the body is here
    root["params"] = walk.add("ffi.Array", [*walk.children(root["params"]), *names.values()])
    # tvm.ir.load_json writes the text again, since an older TVM may have written it
    loaded = from_json_graph_str(json.dumps(graph))
    count = len(loaded.params) - len(names)
    every = [*loaded.params]
    params, made = every[:count], every[count:]
    return _with_array(function, params, made, loaded.body, wanted)


def _with_array(
    function: Any, params: list[Any], variables: Sequence[Any], body: Any, wanted: Arguments
) -> Any:
    pointer = tirx.Var("numbers", tvm.ir.PointerType(tvm.ir.PrimType(wanted.dtype), "global"))
    buffer = tirx.decl_buffer((max(len(variables), 1),), wanted.dtype, "numbers", data=pointer)
    first: list[Any] = [tirx.DeclBuffer(buffer, data=pointer)]
    for column, variable in enumerate(variables):
        value = buffer[column]
        if wanted.least[column] >= 0:
            # What TVM knows of signs keeps divisions and bounds of loops simple.
            value = tirx.Max(value, tirx.IntImm(wanted.dtype, wanted.least[column]))
        first.append(tirx.Bind(variable, value))
    # buffers, then the thread's scratch and the range of tasks
    params[-3:-3] = [pointer]
    return tirx.PrimFunc(params, tirx.SeqStmt([*first, body]), function.ret_type, function.attrs)

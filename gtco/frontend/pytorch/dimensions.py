"""The dynamic dimensions of a program, and their names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any


def dimensions_of_program(program: Any) -> dict[str, list[tuple[str, int]]]:
    """The inputs and axes of each dynamic dimension of an ExportedProgram, by the name that
    ``shapes`` has for it.
    """
    names = dimension_names(program)
    found: dict[str, list[tuple[str, int]]] = {}
    for tensor, axis, symbol, _ in _dynamic_axes(program):
        found.setdefault(names[symbol], []).append((tensor, axis))
    return found


def _dynamic_axes(program: Any) -> Iterator[tuple[str, int, str, Any]]:
    """The input, the axis, the symbol, and torch's node for it."""
    for node in program.graph.nodes:
        if node.op != "placeholder" or node.name not in program.graph_signature.user_inputs:
            continue
        for axis, size in enumerate(getattr(node.meta.get("val"), "shape", ())):
            symbol = getattr(getattr(size, "node", None), "expr", None)
            if symbol is not None and symbol.is_Symbol:
                yield node.name, axis, str(symbol), size.node


def dimension_names(program: Any) -> dict[str, str]:
    """The names for the symbols of the inputs' dynamic dimensions (``s77``): the user's own names
    (``Dim("batch")``), else the first input and axis (``x.0``). A saved program has lost the user's
    names.
    """
    found: dict[str, str] = {}
    for tensor, axis, symbol, node in _dynamic_axes(program):
        if symbol in found:
            continue
        sources = getattr(node.shape_env, "var_to_sources", {}).get(node.expr, ())
        given = getattr(node.shape_env, "source_name_to_debug_name", {})
        named = [given[source.name] for source in sources if source.name in given]
        free = named and named[0] not in found.values()
        found[symbol] = named[0] if free else f"{tensor}.{axis}"
    return found


def name_dimensions(graph: Any, names: Mapping[str, str]) -> None:
    """Puts these names for the symbols in the graph's tensors, also in expressions (``2*s77``)."""
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = re.sub(r"\w+", lambda m: names.get(m[0], m[0]), dim.dim_param)

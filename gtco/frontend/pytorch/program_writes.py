"""What an ExportedProgram writes to besides its outputs. A library computes outputs and keeps no
state, so it does none of this, and a note says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def notes_of_writes(program: Any) -> list[str]:
    """A note for each buffer, parameter and input that the program changes."""
    signature = program.graph_signature
    state = {**signature.inputs_to_buffers, **signature.inputs_to_parameters}
    after = {**signature.buffers_to_mutate, **getattr(signature, "parameters_to_mutate", {})}
    changed = list(after.values())
    inputs = list(signature.user_inputs_to_mutate.values())
    for node in program.graph.nodes:
        for written in _written(node):
            name = _root(written).name
            if name in state:
                changed.append(state[name])
            elif name in signature.user_inputs:
                inputs.append(name)
    return [
        f"the module changes its own tensor '{name}' when it runs; the library keeps no state, and "
        "each call starts with the value that the tensor had when the module was compiled"
        for name in dict.fromkeys(changed)
    ] + [
        f"the module changes its input '{name}' in place; the library leaves inputs as they are"
        for name in dict.fromkeys(inputs)
    ]


def _schema(node: Any) -> Any:
    return getattr(node.target, "_schema", None) if node.op == "call_function" else None


def arguments_of(
    schema: Any, args: Iterable[Any], kwargs: Mapping[str, Any]
) -> list[tuple[Any, Any]]:
    """The arguments of an operator's schema that are given, with their values."""
    by_name = {argument.name: argument for argument in schema.arguments}
    found = list(zip(schema.arguments, args, strict=False))
    return found + [(by_name[name], value) for name, value in kwargs.items()]


def written_of(arguments: Iterable[tuple[Any, Any]]) -> list[Any]:
    """The values that the operator writes to; those of a list one by one."""
    found: list[Any] = []
    for argument, value in arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += value if isinstance(value, list | tuple) else [value]
    return found


def _arguments(node: Any) -> list[tuple[Any, Any]]:
    return arguments_of(_schema(node), node.args, node.kwargs)


def _written(node: Any) -> list[Any]:
    """The nodes whose tensors the operator writes to."""
    if _schema(node) is None:
        return []
    return [value for value in written_of(_arguments(node)) if hasattr(value, "op")]


def _root(node: Any) -> Any:
    """The node whose memory this one's tensor is in, where operators give views."""
    while _schema(node) is not None and any(r.alias_info for r in _schema(node).returns):
        shared = [v for a, v in _arguments(node) if a.alias_info is not None and hasattr(v, "op")]
        if not shared:
            break
        node = shared[0]
    return node

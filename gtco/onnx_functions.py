"""Operators that ONNX defines by simpler ones, written out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
import onnx.defs
import onnx.helper
import onnx.inliner


def written_out(model: onnx.ModelProto, operators: Sequence[tuple[str, str]]) -> onnx.ModelProto:
    """The model with these operators, (domain, type), by their definitions. ``model`` itself is
    given the types of its initializers, which ONNX's inliner does not know otherwise, and the
    attributes that were left to their defaults, which it does not fill in. Raises what the inliner
    raises where a definition depends on more than is known.
    """
    opset = {_domain(entry.domain): entry.version for entry in model.opset_import}
    _set_defaults(model.graph, frozenset(operators), opset)
    for t in model.graph.initializer:
        model.graph.value_info.append(
            onnx.helper.make_tensor_value_info(t.name, t.data_type, t.dims)
        )
    return onnx.inliner.inline_selected_functions(
        model, list(operators), exclude=False, inline_schema_functions=True
    )


def _set_defaults(
    graph: onnx.GraphProto, operators: frozenset[tuple[str, str]], opset: Mapping[str, int]
) -> None:
    """Write out the attributes that nodes of these operators leave to their defaults."""
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                _set_defaults(inner, operators, opset)
        if (node.domain, node.op_type) not in operators:
            continue
        given = {attribute.name for attribute in node.attribute}
        schema = onnx.defs.get_schema(node.op_type, opset[_domain(node.domain)], "")
        for name, attribute in schema.attributes.items():
            if name not in given and attribute.default_value.name:
                node.attribute.append(attribute.default_value)


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name

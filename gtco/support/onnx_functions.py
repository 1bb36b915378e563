"""Writes out operators that ONNX or the model itself defines by simpler ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
import onnx.defs
import onnx.helper
import onnx.inliner
import onnx.shape_inference

from gtco.support.onnx_messages import nodes

# ONNX infers nothing behind these: they give the type and shape of what they normalize.
_UNINFERRED = ("GroupNormalization", "MeanVarianceNormalization")


def inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without local functions: each call becomes the nodes of its function. ``model`` is
    left as it is. External data stays where it is.
    """
    if not model.functions:
        return model
    if any(function.attribute_proto for function in model.functions):
        if any(map(_hands_on, model.functions)):
            for function in _callers_first(model):
                alone = onnx.inliner.inline_selected_functions
                model = alone(_with_defaults(model), [function], exclude=False)
        model = _with_defaults(model)
    return onnx.inliner.inline_local_functions(model)


def _hands_on(function: onnx.FunctionProto) -> bool:
    """True if nodes inside have attributes that are the function's own, without a default. Where a
    call leaves them out, such a node has none, and takes the default of its own function; this is
    known once the call is inlined.
    """
    optional = set(function.attribute)
    return any(a.ref_attr_name in optional for node in nodes(function) for a in node.attribute)


def _callers_first(model: onnx.ModelProto) -> list[tuple[str, str]]:
    """The functions, (domain, name), each before those that it calls. So a function's calls are all
    in the graph when it comes.
    """
    calls = {
        (f.domain, f.name): [(node.domain, node.op_type) for node in nodes(f)]
        for f in model.functions
    }
    seen, order = set(), []

    def visit(key: tuple[str, str]) -> None:
        if key in calls and key not in seen:
            seen.add(key)
            for inner in calls[key]:
                visit(inner)
            order.append(key)

    for key in calls:
        visit(key)
    return order[::-1]


def _with_defaults(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which calls have the attributes that they leave to the function's defaults: ONNX's
    inliner passes over these, and the nodes inside would take defaults of their own operators.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    defaults = {
        (_domain(f.domain), f.name, f.overload): list(f.attribute_proto) for f in copy.functions
    }
    for body in (copy.graph, *copy.functions):
        for node in nodes(body):
            given = {attribute.name for attribute in node.attribute}
            key = _domain(node.domain), node.op_type, node.overload
            node.attribute.extend(a for a in defaults.get(key, ()) if a.name not in given)
    return copy


def written_out(model: onnx.ModelProto, operators: Sequence[tuple[str, str]]) -> onnx.ModelProto:
    """The model with these operators, (domain, type), replaced by their definitions. ``model``
    itself is changed: the types of its initializers and of values for which ONNX infers none, and
    the attributes left to their defaults, are written into it, because ONNX's inliner does not know
    them otherwise. Raises what the inliner raises if a definition depends on more than is known.
    """
    opset = {_domain(entry.domain): entry.version for entry in model.opset_import}
    _set_defaults(model.graph, frozenset(operators), opset)
    for t in model.graph.initializer:
        model.graph.value_info.append(
            onnx.helper.make_tensor_value_info(t.name, t.data_type, t.dims)
        )
    _add_types(model)
    return onnx.inliner.inline_selected_functions(
        model, list(operators), exclude=False, inline_schema_functions=True
    )


def _add_types(model: onnx.ModelProto) -> None:
    """Adds types where ONNX would infer none; without them it would infer none for the later values
    either.
    """
    nodes = (n for n in model.graph.node if not _domain(n.domain) and n.op_type in _UNINFERRED)
    names = {node.output[0] for node in nodes}
    if not names:
        return
    alike = onnx.ModelProto()
    alike.CopyFrom(model)
    for node in alike.graph.node:
        if node.output[0] in names:
            node.CopyFrom(onnx.helper.make_node("Identity", node.input[:1], node.output))
    inferred = onnx.shape_inference.infer_shapes(alike).graph.value_info
    model.graph.value_info.extend(value for value in inferred if value.name in names)


def _set_defaults(
    graph: onnx.GraphProto, operators: frozenset[tuple[str, str]], opset: Mapping[str, int]
) -> None:
    """Writes out the attributes that nodes of these operators leave to their defaults."""
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

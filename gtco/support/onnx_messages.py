"""Walks over an ONNX message before anything else reads it. An unknown file may hold text that is
not UTF-8, sizes that are impossible, and tensors at any depth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from gtco.support.errors import ModelError

# Elements of one tensor: larger sizes are damaged, and products may overflow
MAX_ELEMENTS = 1 << 40


@cache
def _fields(kind: Descriptor) -> tuple[tuple[str, bool, bool], ...]:
    """For each field: its name, whether it is text (else a message), whether it is repeated."""
    return tuple(
        (field.name, field.type == FieldDescriptor.TYPE_STRING, is_repeated(field))
        for field in kind.fields
        if field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_MESSAGE)
    )


def is_repeated(field: Any) -> bool:
    """True if the field is repeated. Versions of protobuf spell this differently."""
    known = getattr(field, "is_repeated", None)
    return field.label == field.LABEL_REPEATED if known is None else bool(known)


def check_text(message: Any, where: str = "") -> None:
    """Raises ModelError if a name or another text is not UTF-8. Protobuf does not check this."""
    for name, is_text, repeated in _fields(message.DESCRIPTOR):
        place = f"{where}.{name}" if where else name
        try:
            value = getattr(message, name)
            parts = list(value) if repeated else [value]
        except UnicodeDecodeError:  # raised by one implementation of protobuf; another gives bytes
            parts = [b""]
        if is_text and not all(isinstance(part, str) for part in parts):
            raise ModelError(
                f"the model is damaged: its field '{place}' is not UTF-8 text. Export it again"
            )
        if not is_text and (repeated or message.HasField(name)):
            for number, part in enumerate(parts):
                check_text(part, f"{place}[{number}]" if repeated else place)


def is_utf8(path: str | Path) -> bool:
    """True if a path is UTF-8. A path on Linux may have any bytes; ONNX Runtime and OpenVINO take
    text.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:  # Python has the bytes as lone surrogates
        return False
    return True


def nodes(body: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.NodeProto]:
    """Every node, also those of nested graphs."""
    for node in body.node:
        yield node
        for attribute in node.attribute:
            for inner in subgraphs(attribute):
                yield from nodes(inner)


def subgraphs(attribute: onnx.AttributeProto) -> list[onnx.GraphProto]:
    return [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]


def read_inside(node: onnx.NodeProto) -> set[str]:
    """The tensors that the node's nested graphs read or give. Names are unique through all of a
    model's graphs, so a name that is made inside is none of an outer graph.
    """
    graphs = [graph for attribute in node.attribute for graph in subgraphs(attribute)]
    names = {value.name for graph in graphs for value in graph.output}
    for graph in graphs:
        for inner in graph.node:
            names |= {*inner.input} | read_inside(inner)
    return names


def inner_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Every tensor except the initializers of ``graph`` itself: those in attributes, in nested
    graphs, and sparse ones.
    """
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        for attribute in node.attribute:
            yield from attribute.tensors
            if attribute.HasField("t"):
                yield attribute.t
            for sparse in (
                *([attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []),
                *attribute.sparse_tensors,
            ):
                yield from (sparse.values, sparse.indices)
            for inner in subgraphs(attribute):
                yield from inner.initializer
                yield from inner_tensors(inner)


def check_sizes(tensor: onnx.TensorProto) -> None:
    """Raises ModelError for a negative size, or for so many elements that products of sizes
    overflow.
    """
    dims = list(tensor.dims)
    if any(size < 0 for size in dims) or math.prod(dims) > MAX_ELEMENTS:
        raise ModelError(
            f"tensor '{tensor.name or '(unnamed)'}' is damaged: it cannot have the shape {dims}: "
            "export the model again"
        )


def check_functions(model: onnx.ModelProto) -> None:
    """Raises ModelError if a local function calls itself, directly or not. ONNX forbids it, and
    writing out the calls would not end.
    """
    functions = {(f.domain, f.name, f.overload): f for f in model.functions}
    done: set[tuple[str, str, str]] = set()

    def visit(key: tuple[str, str, str], path: tuple[tuple[str, str, str], ...]) -> None:
        if key in path:
            raise ModelError(f"the model's function '{key[1]}' calls itself: export it again")
        if key in done or key not in functions:
            return
        for node in nodes(functions[key]):
            visit((node.domain, node.op_type, node.overload), (*path, key))
        done.add(key)

    for key in functions:
        visit(key, ())

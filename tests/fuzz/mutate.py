"""Mutations: of a model's bytes, operators, edges, attributes, sizes, values, types and names; of a
library's headers, notes, metadata and weights. Each is drawn only from the generator, so the same
seed and number give the same file again.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import onnx
from onnx import AttributeProto, TensorProto

OPERATORS = sorted({s.name for s in onnx.defs.get_all_schemas() if s.domain == ""})
INTEGERS = (
    0,
    1,
    2,
    3,
    5,
    -1,
    -2,
    7,
    255,
    65536,
    2**31 - 1,
    2**31,
    2**40,
    2**62,
    -(2**31),
    -(2**63),
)
FLOATS = (0.0, -1.0, 1e-30, 1e30, 3.4e38, float("nan"), float("inf"), float("-inf"))
NAMES = ("", "x", "y", "a b", "*/\\\n", "\0", "??/", "\u202e", "é", "n" * 300, "../../x", "%s%n")

Model = onnx.ModelProto
Draw = random.Random


def bytes_of(data: bytes, rng: Draw, count: int) -> bytes:
    """Changes bytes ``count`` times: flips a bit, or sets, removes, doubles or adds bytes."""
    changed = bytearray(data)
    for _ in range(count):
        if not changed:
            break
        at, size = rng.randrange(len(changed)), rng.choice((1, 1, 1, 2, 8, 40))
        kind = rng.randrange(6)
        if kind == 0:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            changed[at : at + size] = rng.randbytes(size)
        elif kind == 2:
            del changed[at : at + size]
        elif kind == 3:
            changed[at:at] = changed[at : at + size]
        elif kind == 4:
            changed[at : at + size] = bytes([rng.choice((0, 255, 127, 128))]) * size
        else:
            changed[at:at] = rng.randbytes(size)
    return bytes(changed)


def operator(model: Model, rng: Draw) -> None:
    rng.choice(model.graph.node).op_type = rng.choice((*OPERATORS, "Mystery", ""))


def domain(model: Model, rng: Draw) -> None:
    rng.choice(model.graph.node).domain = rng.choice(("com.microsoft", "ai.onnx.ml", "own"))


def edge(model: Model, rng: Draw) -> None:
    node, graph = rng.choice(model.graph.node), model.graph
    known = [n for other in graph.node for n in (*other.input, *other.output)]
    known += [value.name for value in (*graph.input, *graph.initializer)]
    kind = rng.randrange(5)
    if kind == 0 and node.input:
        node.input[rng.randrange(len(node.input))] = rng.choice((*known, "", "nowhere"))
    elif kind == 1 and node.input:
        del node.input[rng.randrange(len(node.input))]
    elif kind == 2:
        node.input.append(rng.choice((*known, "")))
    elif kind == 3 and node.output:
        node.output[0] = rng.choice(known)
    else:
        graph.output[0].name = rng.choice(known)


def node_order(model: Model, rng: Draw) -> None:
    nodes = list(model.graph.node)
    kind = rng.randrange(3)
    if kind == 0:
        nodes.remove(rng.choice(nodes))
    elif kind == 1:
        nodes.append(rng.choice(nodes))
    else:
        rng.shuffle(nodes)
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(kept)


def attribute(model: Model, rng: Draw) -> None:
    nodes = [node for node in model.graph.node if node.attribute]
    if not nodes:
        return
    node = rng.choice(nodes)
    chosen = rng.choice(node.attribute)
    kind = rng.randrange(6)
    if kind == 0:
        node.attribute.remove(chosen)
    elif kind == 1:
        chosen.name = rng.choice(("axis", "group", "perm", "auto_pad", "mode", "to", "unknown"))
    elif kind == 2:
        chosen.type = rng.choice(AttributeProto.AttributeType.values())
    elif chosen.ints:
        if rng.random() < 0.5:
            chosen.ints[rng.randrange(len(chosen.ints))] = rng.choice(INTEGERS)
        elif rng.random() < 0.5:
            chosen.ints.append(rng.choice(INTEGERS))
        else:
            del chosen.ints[rng.randrange(len(chosen.ints)) :]
    elif chosen.type == AttributeProto.FLOAT:
        chosen.f = rng.choice(FLOATS)
    elif chosen.type == AttributeProto.STRING:
        chosen.s = rng.choice((b"", b"\xff\xfe", b"cubic", b"bij,jk", b"...i->i", b"reflect"))
    else:
        chosen.i = rng.choice(INTEGERS)


def sizes(model: Model, rng: Draw) -> None:
    graph = model.graph
    chosen = rng.choice((*graph.input, *graph.output, *graph.initializer))
    if isinstance(chosen, TensorProto):
        if chosen.dims and rng.random() < 0.7:
            chosen.dims[rng.randrange(len(chosen.dims))] = rng.choice(INTEGERS)
        else:
            chosen.dims.append(rng.choice(INTEGERS))
        return
    dims = chosen.type.tensor_type.shape.dim
    kind = rng.randrange(4)
    if kind == 0 and dims:
        del dims[rng.randrange(len(dims))]
    elif kind == 1:
        dims.add().dim_value = rng.choice(INTEGERS)
    elif kind == 2 and dims:
        dims[rng.randrange(len(dims))].dim_param = rng.choice(NAMES)
    elif dims:
        dims[rng.randrange(len(dims))].dim_value = rng.choice(INTEGERS)


def value(model: Model, rng: Draw) -> None:
    if not model.graph.initializer:
        return
    tensor = rng.choice(model.graph.initializer)
    if tensor.data_type == TensorProto.INT64 and tensor.raw_data and rng.random() < 0.8:
        at = rng.randrange(len(tensor.raw_data) // 8 or 1) * 8
        data = bytearray(tensor.raw_data)
        data[at : at + 8] = (rng.choice(INTEGERS) % 2**64).to_bytes(8, "little")
        tensor.raw_data = bytes(data)
    else:
        tensor.raw_data = bytes_of(tensor.raw_data, rng, 3)


def dtype(model: Model, rng: Draw) -> None:
    kind = rng.choice((*TensorProto.DataType.values(), 99))
    if rng.random() < 0.5 and model.graph.initializer:
        rng.choice(model.graph.initializer).data_type = kind
    else:
        chosen = rng.choice((*model.graph.input, *model.graph.output))
        chosen.type.tensor_type.elem_type = kind


def name(model: Model, rng: Draw) -> None:
    """Renames one tensor everywhere."""
    graph, new = model.graph, rng.choice(NAMES)
    old = rng.choice([n for node in graph.node for n in (*node.input, *node.output) if n] or ["x"])
    for node in graph.node:
        for names in (node.input, node.output):
            for at, given in enumerate(names):
                names[at] = new if given == old else given
    for other in (*graph.input, *graph.output, *graph.initializer):
        other.name = new if other.name == old else other.name


def version(model: Model, rng: Draw) -> None:
    if rng.random() < 0.3:
        model.ir_version = rng.choice((1, 3, 2**31, 99, -1))
    else:
        model.opset_import[0].version = rng.choice((1, 6, 11, 13, 17, 22, 9999, 0, -1, 2**62))


def external(model: Model, rng: Draw) -> None:
    if not model.graph.initializer:
        return
    tensor = rng.choice(model.graph.initializer)
    tensor.data_location = TensorProto.EXTERNAL
    places = ("m.onnx", "/etc/passwd", "../m.onnx", "", "\0", "absent")
    tensor.external_data.add(key="location", value=rng.choice(places))
    for key in ("offset", "length"):
        if rng.random() < 0.5:
            tensor.external_data.add(key=key, value=str(rng.choice((*INTEGERS, "x", "", "1e3"))))


STRUCTURED: tuple[Callable[[Model, Draw], None], ...] = (
    *(operator, edge, attribute, sizes, value) * 2,
    *(domain, node_order, dtype, name, version, external),
)


def mutated_model(model: Model, rng: Draw) -> bytes:
    if rng.random() < 0.3:
        return bytes_of(model.SerializeToString(), rng, rng.choice((1, 1, 2, 5)))
    changed = Model()
    changed.CopyFrom(model)
    for _ in range(rng.choice((1, 1, 2, 3))):
        if changed.graph.node:
            rng.choice(STRUCTURED)(changed, rng)
    return changed.SerializeToString()


def mutated_library(data: bytes, rng: Draw) -> bytes:
    """Damages the headers (most often), notes and metadata, any place, or the length."""
    kind = rng.randrange(6)
    changed = bytearray(data)
    if kind == 0:
        return data[: rng.randrange(len(data))]
    if kind == 1:
        return data + rng.randbytes(rng.randrange(1, 5000))
    if kind == 2:
        return bytes_of(data, rng, 2)
    areas = [(0, 64), (64, 64 + 56 * 12)]
    for mark in (b"gtco\0\0\0\0", b'"operators"', b"GTCOWGT1", b".gtco_weights"):
        at = data.find(mark)
        if at >= 0:
            areas.append((max(0, at - 16), at + 120))
    start, end = rng.choice(areas)
    for _ in range(rng.choice((1, 1, 4))):
        at = rng.randrange(start, min(end, len(data)))
        if rng.random() < 0.5:
            changed[at] ^= 1 << rng.randrange(8)
        else:
            at -= at % 8
            changed[at : at + 8] = (rng.choice(INTEGERS) % 2**64).to_bytes(8, "little")
    return bytes(changed)

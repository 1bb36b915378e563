"""If, Loop and Scan written out. Their conditions and counts must follow from shapes and
constants.

An If becomes the branch that it takes. A Loop becomes one copy of its body for each run. The walk
evaluates the condition that each copy gives, so a loop may also end by its condition. A Scan
becomes one copy for each slice of its inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import onnx
from onnx import TensorProto, helper

from gtco.frontend.expansion.walk import Unsuitable, Walk

MAX_NODES = 20_000  # of a model with its loops written out; a compile takes minutes there


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def branch(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    """If: only the branch that it takes."""
    condition = walk.writer.values.get(node.input[0])
    if condition is None:
        raise Unsuitable(
            "its condition is known only when the model runs. gtco compiles models that always run "
            "the same operators: write both branches and choose by Where, or export the model with "
            "an example input that takes the branch you need"
        )
    graph = attributes(node)["then_branch" if condition.reshape(()) else "else_branch"]
    return _body(walk, graph, walk.inside(graph), [])


def loop(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    """Loop, a body [iteration, condition, carried...] -> [condition, carried..., scanned...]."""
    body: onnx.GraphProto = attributes(node)["body"]
    count, go = (node.input[i] if i < len(node.input) else "" for i in range(2))
    carried = list(node.input[2:])
    if count and count not in walk.writer.values:
        raise Unsuitable(
            "how often it runs is known only when the model runs. gtco writes loops out, so their "
            "count has to follow from shapes and constants: give every dimension a size, or make "
            "the count a constant"
        )
    trips = int(walk.writer.values[count].reshape(())) if count else None
    constants = walk.inside(body)
    scanned: list[list[str]] = []
    runs = 0
    while trips is None or runs < trips:
        if go and not _condition(walk, go):
            break
        number = walk.writer.integers(runs)
        given = go or walk.writer.constant(True, TensorProto.BOOL)
        results = _body(walk, body, constants, [number, given, *carried])
        go = results[0] if go else ""
        carried = results[1 : 1 + len(carried)]
        scanned.append(results[1 + len(carried) :])
        runs += 1
        _bound(walk, f"{trips} times" if trips is not None else "until its condition fails")
    outputs = len(body.output) - 1 - len(carried)
    return [*carried, *_stacked(walk, node, scanned, [0] * outputs)]


def scan(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    """Scan since opset 9, a body [carried..., slices...] -> [carried..., scanned...]."""
    writer, attrs = walk.writer, attributes(node)
    if writer.opset < 9:
        raise Unsuitable("Scan before opset 9 has a batch axis: export with opset 9 or newer")
    body: onnx.GraphProto = attrs["body"]
    count = int(attrs["num_scan_inputs"])
    carried, given = list(node.input[:-count]), list(node.input[-count:])
    outputs = len(body.output) - len(carried)
    backwards = attrs.get("scan_input_directions", [0] * count)
    axes = attrs.get("scan_input_axes", [0] * count)
    axes = [axis % len(writer.shape(x)) for axis, x in zip(axes, given, strict=True)]
    trips = writer.shape(given[0])[axes[0]]
    constants = walk.inside(body)
    scanned: list[list[str]] = []
    for run in range(trips):
        slices = [
            writer.add("Gather", x, writer.integers(trips - 1 - run if back else run), axis=axis)
            for x, axis, back in zip(given, axes, backwards, strict=True)
        ]
        results = _body(walk, body, constants, [*carried, *slices])
        carried = results[: len(carried)]
        scanned.append(results[len(carried) :])
        _bound(walk, f"{trips} times")
    order = attrs.get("scan_output_directions", [0] * outputs)
    for place, back in enumerate(order):
        if back:
            turned = [one[place] for one in reversed(scanned)]
            for one, name in zip(scanned, turned, strict=True):
                one[place] = name
    return [*carried, *_stacked(walk, node, scanned, attrs.get("scan_output_axes", [0] * outputs))]


def _body(
    walk: Walk, graph: onnx.GraphProto, constants: Mapping[str, str], arguments: Sequence[str]
) -> list[str]:
    """The graph's outputs, written out again with these inputs. ``constants`` are its initializers,
    by their names in the graph.
    """
    names = dict(constants)
    names.update({v.name: name for v, name in zip(graph.input, arguments, strict=True)})
    here = walk.node
    walk.all(graph.node, names, keep=False)
    walk.node = here
    return [names.get(value.name, value.name) for value in graph.output]


def _condition(walk: Walk, name: str) -> bool:
    value = walk.writer.values.get(name)
    if value is None:
        raise Unsuitable(
            "whether it runs once more is known only when the model runs, and gtco writes loops "
            "out: give the loop a constant count and no condition of its own"
        )
    return bool(numpy.asarray(value).reshape(()))


def _bound(walk: Walk, often: str) -> None:
    if len(walk.writer.nodes) > MAX_NODES:
        raise Unsuitable(
            f"it runs {often}, and gtco writes loops out: the model would have more than "
            f"{MAX_NODES} nodes. Make the loop shorter, or replace it by operators on whole tensors"
        )


def _stacked(
    walk: Walk, node: onnx.NodeProto, scanned: Sequence[Sequence[str]], axes: Sequence[int]
) -> list[str]:
    """The results of the runs, stacked along a new axis each."""
    writer = walk.writer
    wanted = node.output[len(node.output) - len(axes) :] if axes else []
    if not scanned and any(wanted):
        raise Unsuitable(
            f"it never runs, so its output '{wanted[0]}' has no elements, and gtco has no such "
            "tensors: remove the loop"
        )
    stacks = []
    for place, axis in enumerate(axes):
        if not scanned:
            stacks.append("")
            continue
        parts = [one[place] for one in scanned]
        shape = list(writer.shape(parts[0]))
        shape.insert(axis % (len(shape) + 1), 1)
        apart = [writer.reshape(part, shape) for part in parts]
        stacks.append(writer.add("Concat", *apart, axis=axis % len(shape)))
    return stacks

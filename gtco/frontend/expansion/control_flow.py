"""If, Loop and Scan written out. The conditions and counts of loops must follow from shapes and
constants.

An If becomes the branch that it takes. If values of inputs decide, both branches are computed, and
a Where chooses between their results:

    If(c) {then: a, else: b}  ->  Where(c, a, b)

This is right since no operator has an effect beside its results. If one branch breaks a rule of
ONNX at the sizes of the inputs, so that no run can take it, NaN stands for its results.

A Loop becomes one copy of its body for each run. The walk evaluates the condition that each copy
gives, so a loop may also end by its condition. A Scan becomes one copy for each slice of its
inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import onnx
from onnx import TensorProto, helper

from gtco.frontend.expansion.walk import Unsuitable, Walk
from gtco.frontend.node_check import DTYPES
from gtco.support.errors import ModelError

MAX_NODES = 20_000  # of a model with its loops written out; a compile takes minutes there

_BRANCHES = ("then_branch", "else_branch")


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def branch(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    """If: only the branch that it takes, or both where ``walk`` allows it."""
    condition = walk.writer.values.get(node.input[0])
    graphs = [attributes(node)[name] for name in _BRANCHES]
    if condition is not None:
        graph = graphs[0 if condition.reshape(()) else 1]
        return _body(walk, graph, walk.inside(graph), [])
    if walk.undecided is None:
        raise Unsuitable("its condition is known only when the model runs")
    if walk.writer.opset < 9:
        raise Unsuitable(
            "its condition is known only when the model runs, and Where, which would choose "
            "between the results of its branches, is in opset 9 and newer: export with one of them"
        )
    label = walk.node
    made = [_fitting(walk, graph) for graph in graphs]
    if isinstance(made[0], Exception) and isinstance(made[1], Exception):
        raise made[1]
    walk.node = label
    _bound(walk, "by a value of an input, so both of its branches are computed")
    choice = walk.writer.reshape(node.input[0], [])
    for place, one in enumerate(made):
        if isinstance(one, Exception):
            fits = made[1 - place]
            assert not isinstance(fits, Exception)
            made[place] = [_impossible(walk, name) for name in fits]
            walk.undecided.append(
                f"{label}: its {_BRANCHES[place]} does not fit the sizes of the inputs. A run "
                "whose condition takes it gives NaN"
            )
            break
    else:
        walk.undecided.append(
            f"{label}: both of its branches are computed, and a value of an input chooses between "
            "their results. If your runs take one of them alone, make the condition a constant"
        )
    then, other = made
    assert not isinstance(then, Exception) and not isinstance(other, Exception)
    return [_chosen(walk, choice, *pair) for pair in zip(then, other, strict=True)]


def _fitting(walk: Walk, graph: onnx.GraphProto) -> list[str] | Exception:
    """The graph's outputs, written out. If the sizes of its inputs break a rule of ONNX inside,
    nothing of it is written, and the error is the result. Raises :class:`Unsuitable` for what gtco
    lacks.
    """
    writer = walk.writer
    mark = writer.mark()
    try:
        names = _body(walk, graph, walk.inside(graph), [])
        writer.check_unknown(writer.since(mark))
        return names
    except Unsuitable as error:
        try:
            writer.check_unknown(writer.since(mark))
        except ModelError as wrong:
            writer.back_to(mark)
            return wrong
        raise error
    except Exception as error:  # of a rule that was given other ranks than ONNX allows
        writer.back_to(mark)
        return error


def _impossible(walk: Walk, name: str) -> str:
    """NaN in the shape of ``name``: the result of a branch that cannot run."""
    writer = walk.writer
    dtype, shape = writer.dtype(name), writer.shape(name)
    if DTYPES[dtype] not in ("float16", "bfloat16", "float32", "float64"):
        raise Unsuitable(
            "its condition is known only when the model runs, and one of its branches does not "
            f"fit the sizes of the inputs. It would have to give {DTYPES[dtype]}, which has no "
            "NaN: make the condition a constant"
        )
    nan = writer.constant(numpy.nan, dtype)
    return writer.add("Expand", nan, writer.integers(list(shape))) if shape else nan


def _chosen(walk: Walk, choice: str, then: str, other: str) -> str:
    writer = walk.writer
    kinds = [f"{DTYPES[writer.dtype(x)]}{list(writer.shape(x))}" for x in (then, other)]
    if kinds[0] != kinds[1]:
        raise Unsuitable(
            "its condition is known only when the model runs, and its branches give "
            f"{kinds[0]} and {kinds[1]}. gtco computes both branches and chooses, so their results "
            "need one type and shape: give the inputs sizes for which they have, or make the "
            "condition a constant"
        )
    return writer.add("Where", choice, then, other)


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
    last = node.output[len(node.output) - len(axes) :] if axes else []
    wanted = [name for name in last if name in walk.read]
    if not scanned and wanted:
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

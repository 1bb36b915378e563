"""Slices and concatenations: those that do nothing are removed, the others move to where they cost
least.

before: slice(permute(x)), slice(reshape(x))    after: permute(slice(x)), reshape(slice(x))
before: slice(slice(x))                         after: slice(x)
before: slice(concat(a, b)) inside b            after: slice(b)
before: concat(slice(x, :k), slice(x, k:))      after: x
before: reshape(concat(reshape(a), ...)), a     after: concat(a, ...) along the axis they make
        stack whose axis joins the next one
before: concat(reshape(a), ...), axes of size 1        after: reshape(concat(a, ...)) along axis 0
        are all that is new and all in front
"""

from __future__ import annotations

from math import prod

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import apply_rule, made_by
from gtco.tensor.analysis.indices import axis_groups
from gtco.tensor.stage import Operator, TensorType

_ROUNDS = 10


def simplify_slices(graph: Graph) -> Graph:
    """Runs the rules to a fixed point."""
    for _ in range(_ROUNDS):
        before = graph.operators
        graph = apply_rule(graph, {"slice"}, past_movement)
        graph = apply_rule(graph, {"concat"}, _concat)
        graph = apply_rule(graph, {"reshape"}, _joined_stack)
        graph = apply_rule(graph, {"concat"}, _stack_in_front)
        if graph.operators == before:
            break
    return graph


def _shape(graph: Graph, tensor: str) -> tuple[int, ...]:
    return tuple(int(d) for d in graph.types[tensor].shape)


def past_movement(graph: Graph, op: Operator) -> str | None:
    """What replaces a slice that cuts nothing, a slice, movement or one part of a concat."""
    source = op.inputs[0]
    if graph.types[source] == op.type and all(s == 1 for s in op["strides"]):
        return source
    inner = graph.producer(source)
    if inner is None or op.output in graph.outputs:
        return None
    if inner.kind == "slice":
        begin = [
            b0 + s0 * b
            for b0, s0, b in zip(inner["begin"], inner["strides"], op["begin"], strict=True)
        ]
        strides = [s0 * s for s0, s in zip(inner["strides"], op["strides"], strict=True)]
        return graph.add("slice", inner.inputs, op.type, name=op.name, begin=begin, strides=strides)
    if inner.kind == "permute":
        return _above_permute(graph, op, inner)
    if inner.kind == "reshape":
        return _above_reshape(graph, op, inner)
    return _inside_concat(graph, op, inner) if inner.kind == "concat" else None


def _above_permute(graph: Graph, op: Operator, permute: Operator) -> str:
    axes = permute["axes"]
    rank = len(axes)
    begin, strides, shape = [0] * rank, [1] * rank, [0] * rank
    for place, axis in enumerate(axes):
        begin[axis], strides[axis], shape[axis] = (
            op["begin"][place],
            op["strides"][place],
            int(op.type.shape[place]),
        )
    x = graph.add(
        "slice",
        permute.inputs,
        TensorType(tuple(shape), op.type.dtype),
        name=op.name,
        begin=begin,
        strides=strides,
    )
    return graph.add("permute", (x,), name=permute.name, axes=axes)


def _above_reshape(graph: Graph, op: Operator, reshape: Operator) -> str | None:
    """Moves a slice above a reshape that splits one axis into several. The slice may cut only the
    outermost of them that is longer than 1.
    """
    source, target = _shape(graph, reshape.inputs[0]), _shape(graph, reshape.output)
    if 0 in source:
        return None
    taken = _shape(graph, op.output)
    begin, strides, shape = [0] * len(source), [1] * len(source), list(source)
    for left, right in axis_groups(source, target):
        cut = [a for a in right if taken[a] != target[a] or op["strides"][a] != 1]
        if not cut:
            continue
        full = [a for a in left if source[a] != 1]
        inner = prod(target[a] for a in right if a > cut[0])
        if (
            len(cut) != 1
            or (op["strides"][cut[0]] != 1 and inner != 1)
            or len(full) != 1
            or any(target[a] != 1 for a in right if a < cut[0])
        ):
            return None
        begin[full[0]], shape[full[0]] = op["begin"][cut[0]] * inner, taken[cut[0]] * inner
        strides[full[0]] = op["strides"][cut[0]]
    x = graph.add(
        "slice",
        reshape.inputs,
        TensorType(tuple(shape), op.type.dtype),
        name=op.name,
        begin=begin,
        strides=strides,
    )
    return graph.add("reshape", (x,), op.type, name=reshape.name)


def _inside_concat(graph: Graph, op: Operator, concat: Operator) -> str | None:
    axis = concat["axis"]
    first, stride, count = op["begin"][axis], op["strides"][axis], int(op.type.shape[axis])
    last = first + stride * (count - 1)
    start = 0
    for part in concat.inputs:
        size = _shape(graph, part)[axis]
        if start <= min(first, last) and max(first, last) < start + size:
            begin = [b - start if i == axis else b for i, b in enumerate(op["begin"])]
            return graph.add(
                "slice", (part,), op.type, name=op.name, begin=begin, strides=op["strides"]
            )
        start += size
    return None


def _concat(graph: Graph, op: Operator) -> str | None:
    axis = op["axis"]
    parts = [t for t in op.inputs if _shape(graph, t)[axis] != 0] or [op.inputs[0]]
    if len(parts) == 1 and op.output not in graph.outputs:
        return parts[0]
    merged: list[str] = []
    for part in parts:
        joined = _joined(graph, merged[-1], part, axis) if merged else None
        if joined is None:
            merged.append(part)
        else:
            merged[-1] = joined
    if merged == list(op.inputs):
        return None
    return merged[0] if len(merged) == 1 else graph.add("concat", merged, name=op.name, axis=axis)


def _joined_stack(graph: Graph, op: Operator) -> str | None:
    """Tensors that are stacked along an axis which the reshape merges with the next axes are
    concatenated along these axes directly. The layout is then free to move a whole axis.
    """
    concat = made_by(graph, op.inputs[0], "concat")
    if concat is None or graph.only_user(concat.output) is None or op.output in graph.outputs:
        return None
    if not all(made_by(graph, part, "reshape") for part in concat.inputs):
        return None
    axis, source, target = concat["axis"], _shape(graph, concat.output), _shape(graph, op.output)
    if 0 in source:
        return None
    before = prod(source[:axis])
    starts = [a for a, n in enumerate(target) if n != 1 and prod(target[:a]) == before]
    ends = [e for e in range(axis + 2, len(source) + 1) if source[e - 1] != 1]
    ends = [e for e in ends if starts and prod(source[axis:e]) == target[starts[0]]]
    if not ends:
        return None
    joined, inner = starts[0], prod(source[axis + 1 : ends[0]])
    parts = []
    for part in concat.inputs:
        shape = list(target)
        shape[joined] = _shape(graph, part)[axis] * inner
        kind = TensorType(tuple(shape), op.type.dtype)
        parts.append(graph.add("reshape", (part,), kind, name=op.name))
    return graph.add("concat", parts, name=concat.name, axis=joined)


def _stack_in_front(graph: Graph, op: Operator) -> str | None:
    """Tensors that are stacked in front lie one after the other, so one reshape of them all makes
    the new axes. Of steps that are written out there are many, and each reshape less is one choice
    less for the fusion search.
    """
    if op.output in graph.outputs or prod(op.type.shape[: op["axis"]]) != 1:
        return None
    stacked: list[str] = []
    for part in op.inputs:
        reshape = made_by(graph, part, "reshape")
        if reshape is None:
            return None
        shape = _shape(graph, reshape.inputs[0])
        if not shape or _without_units(shape) != _without_units(_shape(graph, part)):
            return None
        stacked += reshape.inputs
    if len({_shape(graph, x)[1:] for x in stacked}) != 1:
        return None
    y = graph.add("concat", stacked, name=op.name, axis=0)
    return graph.add("reshape", (y,), op.type, name=op.name)


def _without_units(shape: tuple[int, ...]) -> list[int]:
    return [n for n in shape if n != 1]


def _joined(graph: Graph, first: str, second: str, axis: int) -> str | None:
    """The one slice that two neighbouring slices of a tensor form. The parts of a nested concat
    stay.
    """
    a, b = made_by(graph, first, "slice"), made_by(graph, second, "slice")
    if (
        a is None
        or b is None
        or a.inputs != b.inputs
        or a["strides"] != b["strides"]
        or a["strides"][axis] != 1
    ):
        return None
    size = _shape(graph, first)[axis]
    begin = tuple(x + size if i == axis else x for i, x in enumerate(a["begin"]))
    if begin != b["begin"]:
        return None
    shape = list(_shape(graph, first))
    if any(
        x != y
        for i, (x, y) in enumerate(zip(shape, _shape(graph, second), strict=True))
        if i != axis
    ):
        return None
    shape[axis] += _shape(graph, second)[axis]
    return graph.add(
        "slice",
        a.inputs,
        TensorType(tuple(shape), a.type.dtype),
        name=a.name,
        begin=a["begin"],
        strides=a["strides"],
    )

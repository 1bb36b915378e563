"""Normalisation that an exporter took apart becomes one operator again (Ba et al. 2016; Wu and He
2018).

before: d = x - mean(x); y = d / sqrt(mean(d * d) + eps) * gamma + beta
after:  y = layer_norm(x, gamma, beta)                     means over the last axis
        y = permute(layer_norm(permute(x), gamma, beta))   over one other axis (SAM's LayerNorm2d)
        y = group_norm(x, gamma, beta)                     over all axes from the first or second on

before: y = x / sqrt(mean(x * x) + eps) * gamma            the mean over the last axis
after:  y = rms_norm(x, gamma)

before: y = rms_norm(permute(x - mean(x)), gamma)          the mean over the axis that comes last
after:  y = layer_norm(permute(x), gamma, 0)               (an optimizer moved the permute)

before: y = reshape(layer_norm(reshape(x: [N, C, H, W], [N, G, -1]), 1, 0)) * gamma + beta
after:  y = group_norm(x, gamma, beta) {groups=G, axis=1}
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from gtco.graph.graph import Graph
from gtco.graph.permutes import invert
from gtco.graph.rewrites.apply import apply_rule, axis_vector, made_by, scalar, with_constant
from gtco.tensor.stage import Operator


def layer_norm(graph: Graph) -> Graph:
    """Finds first the core (gamma 1, beta 0), then the scale and the shift after it, then groups
    with their scale and shift.
    """
    graph = apply_rule(graph, {"divide", "multiply"}, _core)
    graph = apply_rule(graph, {"rms_norm"}, _centred)
    graph = apply_rule(graph, {"multiply"}, _scale)
    graph = apply_rule(graph, {"add"}, _shift)
    graph = apply_rule(graph, {"reshape"}, _grouped)
    graph = apply_rule(graph, {"multiply"}, _scale)
    return apply_rule(graph, {"add"}, _shift)


def _mean(graph: Graph, tensor: str) -> Operator | None:
    op = made_by(graph, tensor, "mean")
    return op if op is not None and op["keepdims"] else None


def _core(graph: Graph, op: Operator) -> str | None:
    candidates = (
        [(op.inputs[0], op.inputs[1], "sqrt")]
        if op.kind == "divide"
        else [(op.inputs[0], op.inputs[1], "rsqrt"), (op.inputs[1], op.inputs[0], "rsqrt")]
    )
    for centred, deviation, root_kind in candidates:
        root, centre = made_by(graph, deviation, root_kind), made_by(graph, centred, "subtract")
        total = made_by(graph, root.inputs[0], "add") if root is not None else None
        pair = with_constant(graph, total) if total is not None else None
        if pair is None:
            continue
        variance, epsilon = _mean(graph, pair[0]), scalar(graph, pair[1])
        square = made_by(graph, variance.inputs[0], "multiply") if variance is not None else None
        if square is None or square.inputs != (centred, centred) or epsilon is None:
            continue
        if graph.types[centred] != op.type:
            continue  # epsilon broadcasts the result
        assert variance is not None
        mean = _mean(graph, centre.inputs[1]) if centre is not None else None
        if centre is not None and mean is not None and mean.inputs[0] == centre.inputs[0]:
            if variance["axes"] == mean["axes"]:
                return _made(graph, op, centre.inputs[0], mean["axes"], epsilon)
            continue
        rank = len(op.type.shape)
        size = op.type.shape[-1] if rank else None
        if [a % rank for a in variance["axes"]] == [rank - 1] and isinstance(size, int):
            ones = graph.add_constant(numpy.ones(size, op.type.dtype), "gamma")
            return graph.add("rms_norm", (centred, ones), name=op.name, epsilon=epsilon)
    return None


def _centred(graph: Graph, op: Operator) -> str | None:
    """The norm of a tensor minus its mean is the layer norm of that tensor."""
    moved = made_by(graph, op.inputs[0], "permute")
    centre = made_by(graph, op.inputs[0] if moved is None else moved.inputs[0], "subtract")
    mean = _mean(graph, centre.inputs[1]) if centre is not None else None
    if centre is None or mean is None or mean.inputs[0] != centre.inputs[0]:
        return None
    rank = len(op.type.shape)
    order = moved["axes"] if moved is not None else tuple(range(rank))
    if [a % rank for a in mean["axes"]] != [order[-1]]:
        return None
    x = centre.inputs[0]
    if moved is not None:
        x = graph.add("permute", (x,), name=moved.name, axes=order)
    beta = _affine_of_one(graph, int(op.type.shape[-1]), op.type.dtype)[1]
    inputs = (x, op.inputs[1], beta)
    return graph.add("layer_norm", inputs, name=op.name, epsilon=op["epsilon"])


def _made(graph: Graph, op: Operator, x: str, axes: tuple[int, ...], epsilon: float) -> str | None:
    """The normalisation of ``x`` over ``axes`` with gamma 1 and beta 0."""
    shape, rank = op.type.shape, len(op.type.shape)
    axes = tuple(sorted(a % rank for a in axes))
    if len(axes) == 1:
        order = (*(a for a in range(rank) if a not in axes), *axes)
        last = x if axes[0] == rank - 1 else graph.add("permute", (x,), axes=order)
        made = graph.add(
            "layer_norm",
            (last, *_affine_of_one(graph, int(shape[axes[0]]), op.type.dtype)),
            name=op.name,
            epsilon=epsilon,
        )
        return made if last == x else graph.add("permute", (made,), axes=invert(order))
    if rank < 3 or axes not in (tuple(range(1, rank)), tuple(range(2, rank))):
        return None
    channels = shape[1]
    if not isinstance(channels, int):
        return None
    return graph.add(
        "group_norm",
        (x, *_affine_of_one(graph, channels, op.type.dtype)),
        name=op.name,
        groups=1 if axes[0] == 1 else channels,
        epsilon=epsilon,
        axis=1,
    )


def _affine_of_one(graph: Graph, size: int, dtype: str) -> tuple[str, str]:
    return (
        graph.add_constant(numpy.ones(size, dtype), "gamma"),
        graph.add_constant(numpy.zeros(size, dtype), "beta"),
    )


def _grouped(graph: Graph, op: Operator) -> str | None:
    """A norm of rows that are groups of channels laid flat: the reshapes around it are removed."""
    norm = made_by(graph, op.inputs[0], "layer_norm")
    flat = made_by(graph, norm.inputs[0], "reshape") if norm is not None else None
    if norm is None or flat is None or graph.only_user(norm.output) is None:
        return None
    x = flat.inputs[0]
    shape = op.type.shape
    if graph.types[x].shape != shape or not all(isinstance(d, int) for d in shape):
        return None
    gamma, beta = (scalar(graph, t) for t in norm.inputs[1:])
    if len(shape) < 3 or gamma is None or beta is None or op.type.size == 0:
        return None
    batch, channels = int(shape[0]), int(shape[1])
    rows = norm.type.size // int(norm.type.shape[-1])
    groups = rows // batch
    if rows % batch or not groups or channels % groups:
        return None
    if len(shape) == 3 and groups == channels:  # rows of the last axis already
        return None
    affine = [
        graph.add_constant(numpy.full(channels, value, op.type.dtype)) for value in (gamma, beta)
    ]
    return graph.add(
        "group_norm",
        (x, *affine),
        name=norm.name,
        groups=groups,
        epsilon=norm["epsilon"],
        axis=1,
    )


def _affine(
    graph: Graph, op: Operator
) -> tuple[Operator, tuple[int, ...] | None, numpy.ndarray] | None:
    """Three things: the normalisation under ``op`` that only it reads, the permutation between them
    if there is one, and the vector that ``op`` applies along the channels.
    """
    pair = with_constant(graph, op)
    if pair is None:
        return None
    below = made_by(graph, pair[0], "layer_norm", "rms_norm", "group_norm", "permute")
    if below is None or below.type != op.type or graph.only_user(below.output) is None:
        return None
    order: tuple[int, ...] | None = None
    axis = len(op.type.shape) - 1
    norm: Operator | None = below
    if below.kind == "permute":
        order = below["axes"]
        axis = order.index(axis)
        norm = made_by(graph, below.inputs[0], "layer_norm")
        if norm is None or graph.only_user(norm.output) is None:
            return None
    elif below.kind == "group_norm":
        axis = below["axis"]
    assert norm is not None
    vector = axis_vector(graph, pair[1], axis, op.type.shape)
    if vector is None or not all(graph.is_constant(t) for t in norm.inputs[1:]):
        return None
    return norm, order, vector


def _scale(graph: Graph, op: Operator) -> str | None:
    found = _affine(graph, op)
    if found is None:
        return None
    norm, order, vector = found
    affine = [graph.add_constant(graph.constants[t] * vector, t) for t in norm.inputs[1:]]
    return _again(graph, norm, affine, order)


def _shift(graph: Graph, op: Operator) -> str | None:
    found = _affine(graph, op)
    if found is None or found[0].kind == "rms_norm":
        return None
    norm, order, vector = found
    beta = graph.add_constant(graph.constants[norm.inputs[2]] + vector, norm.inputs[2])
    return _again(graph, norm, (norm.inputs[1], beta), order)


def _again(
    graph: Graph, norm: Operator, affine: Sequence[str], order: tuple[int, ...] | None
) -> str:
    """The same normalisation with other constants, permuted as before."""
    made = graph.add(norm.kind, (norm.inputs[0], *affine), name=norm.name, **dict(norm.attrs))
    return made if order is None else graph.add("permute", (made,), axes=order)

"""Batch normalisation after a convolution becomes part of its weights.

before: (conv2d(x, W) + b) * s + t, with b, s, t constants per output channel
after:  conv2d(x, W * s) + (b * s + t)

The same is done for a transposed convolution.
"""

from __future__ import annotations

import numpy

from gtco.graph.graph import Graph
from gtco.graph.rewrites.apply import apply_rule, made_by, with_constant
from gtco.tensor.stage import Operator

_KINDS = ("conv2d", "conv_transpose2d")


def conv_scale(graph: Graph) -> Graph:
    """Scales move inwards over shifts, then into the weights; shifts merge (``simplify_arithmetic``
    does the rest)."""
    graph = apply_rule(graph, {"multiply"}, _over_shift)
    return apply_rule(graph, {"multiply"}, _into_weights)


def _per_channel(graph: Graph, constant: str, conv: Operator) -> numpy.ndarray | None:
    """The constant as a vector over the convolution's output channels; None for integers, since
    their weights have no room for a factor.
    """
    if not conv.type.dtype.startswith("float"):
        return None
    value, axis = graph.constants[constant], 1 if conv["layout"] == "NCHW" else 3
    channels = int(conv.type.shape[axis])
    if value.size == 1:
        return numpy.broadcast_to(value.reshape(()), (channels,))
    place = axis - 4 + value.ndim
    if value.ndim > 4 or place < 0 or value.shape[place] != channels or value.size != channels:
        return None
    return value.reshape(channels)


def _over_shift(graph: Graph, op: Operator) -> str | None:
    outer = with_constant(graph, op)
    shift = made_by(graph, outer[0], "add") if outer is not None else None
    inner = with_constant(graph, shift) if shift is not None else None
    if outer is None or shift is None or inner is None or graph.only_user(shift.output) is None:
        return None
    conv = made_by(graph, inner[0], *_KINDS)
    if (
        conv is None
        or _per_channel(graph, outer[1], conv) is None
        or _per_channel(graph, inner[1], conv) is None
    ):
        return None
    scaled = graph.add("multiply", (conv.output, outer[1]), name=op.name)
    moved = graph.add_constant(graph.constants[inner[1]] * graph.constants[outer[1]], inner[1])
    return graph.add("add", (scaled, moved), name=shift.name)


def _into_weights(graph: Graph, op: Operator) -> str | None:
    pair = with_constant(graph, op)
    conv = made_by(graph, pair[0], *_KINDS) if pair is not None else None
    if (
        pair is None
        or conv is None
        or graph.only_user(conv.output) is None
        or not graph.is_constant(conv.inputs[1])
    ):
        return None
    scale = _per_channel(graph, pair[1], conv)
    if scale is None:
        return None
    # In double precision, so that folding costs one rounding.
    wide = scale.astype(numpy.float64)
    if conv.kind == "conv2d":  # [outputs, channels of a group, KH, KW]
        factor = wide[:, None, None, None]
    else:  # [channels, outputs of a group, KH, KW]
        groups, (channels, outputs) = int(conv["groups"]), graph.types[conv.inputs[1]].sizes[:2]
        factor = wide.reshape(groups, outputs).repeat(channels // groups, 0)[:, :, None, None]

    def scaled(weight: numpy.ndarray) -> numpy.ndarray:
        made: numpy.ndarray = (weight.astype(numpy.float64) * factor).astype(weight.dtype)
        return made

    folded = graph.constants.mapped(conv.inputs[1], scaled)
    return graph.add(
        conv.kind,
        (conv.inputs[0], graph.add_constant(folded, conv.inputs[1])),
        name=conv.name,
        **dict(conv.attrs),
    )

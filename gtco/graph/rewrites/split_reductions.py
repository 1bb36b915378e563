"""Cuts reductions with too few or too long rows for one task each into two steps, and writes
group_norm in operators that have kernels.

before: y = group_norm(x: [N, H, W, C], gamma, beta) {groups, axis=3}
after:  s = moments(reshape(x, [N, P, HW/P, C]))           [N, P, 2, C], one task a part and columns
        m, r = slices of merged_moments(s) {groups}        [N, 1, 1, C]: mean, 1/deviation
        y = (x - m) * r * gamma + beta                     element-wise, any number of tasks

before: y = permute(layer_norm(permute(x: [N, C, H, W])))  channels first
after:  the same of [N, C, HW], which one kernel reads along HW

before: y = layer_norm(x: [1, L], gamma, beta)          rows so few and long that cores idle
after:  the same as of a group_norm, parts of the row being columns of a matrix
before: y = softmax(x: [1, L])
after:  e = exp(x - max(x)); y = e * (1 / sum(e))        the reductions in two steps each

before: y = max(x: [1, L], axes=(1,))
after:  y = max(max(reshape(x, [1, P, L/P]), axes=(2,)), axes=(1,))

The moments of a part are taken about the part's own mean while it is in cache. Parts of one size
are merged exactly (Chan, Golub and LeVeque, 1983), so no result is the difference of two large
sums. This runs once, after the layout is settled.
"""

from __future__ import annotations

from math import isqrt, prod

import numpy

from gtco.graph.graph import Graph
from gtco.graph.permutes import invert
from gtco.graph.rewrites.apply import apply_rule, made_by
from gtco.graph.rewrites.name_outputs import name_outputs
from gtco.graph.rewrites.simplify_movement import simplify_movement
from gtco.tensor.stage import Operator, TensorType

PART = 16384  # about so many elements per task: they fit the cache nearest to the core
MOST_PARTS = 256  # parts that one task can still merge
FEW = 4  # rows per core: with fewer, long rows are split
REDUCTIONS = ("sum", "mean", "max", "min", "prod")


def split_reductions(graph: Graph, cores: int) -> Graph:
    """``graph`` with reductions cut for ``cores`` cores, and without group_norm."""
    graph = apply_rule(graph, {"permute"}, _channels_first)
    graph = apply_rule(graph, {"group_norm"}, lambda g, op: _group_norm(g, op, cores))
    graph = apply_rule(graph, {"layer_norm"}, lambda g, op: _layer_norm(g, op, cores))
    graph = apply_rule(graph, {"softmax"}, lambda g, op: _softmax(g, op, cores))
    graph = apply_rule(graph, set(REDUCTIONS), lambda g, op: _reduction(g, op, cores))
    return name_outputs(simplify_movement(graph))


def part_rows(rows: int, width: int) -> int:
    """The number of rows of ``width`` elements in a part: a divisor of ``rows`` that gives about
    ``PART`` elements, or all rows if there is no such divisor.
    """
    wanted = max(1, PART // width, -(-rows // MOST_PARTS))
    small = [d for d in range(1, isqrt(rows) + 1) if rows % d == 0]
    divisors = {*small, *(rows // d for d in small)}
    below = max(d for d in divisors if d <= wanted)
    if 4 * below >= wanted:
        return below
    return min(d for d in (*divisors, rows) if d >= min(wanted, rows))


# -- normalisation ---------------------------------------------------------------------------------


def _group_norm(graph: Graph, op: Operator, cores: int) -> str:
    """``op`` in operators that have kernels."""
    x, gamma, beta = op.inputs
    shape = tuple(int(d) for d in op.type.shape)
    axis, groups, rank = op["axis"], op["groups"], len(shape)
    if op.type.dtype == "float32" and op.type.size:
        if axis == rank - 1:
            return _channels_last(graph, op, shape, groups)
        if axis == 1 and shape[0] * groups < FEW * cores and op.type.size > 2 * PART:
            return _long_rows(graph, op, shape, groups)
    if axis != 1:
        order = (0, axis, *(a for a in range(1, rank) if a != axis))
        first = graph.add("permute", (x,), axes=order)
        attrs = dict(op.attrs) | {"axis": 1}
        made = graph.add("group_norm", (first, gamma, beta), name=op.name, **attrs)
        norm = graph.producer(made)
        assert norm is not None
        return graph.add("permute", (_group_norm(graph, norm, cores),), axes=invert(order))
    # channels first and enough rows: a row is a group laid flat
    size = op.type.size // max(shape[0] * groups, 1)
    flat = _reshape(graph, x, (shape[0], groups, size))
    wide = TensorType((size,), op.type.dtype)  # read from one element: rows are long
    one, zero = (
        graph.add("broadcast", (graph.add_constant(numpy.full(1, v, op.type.dtype)),), wide)
        for v in (1, 0)
    )
    y = graph.add("layer_norm", (flat, one, zero), name=op.name, epsilon=op["epsilon"])
    return _affine(graph, _reshape(graph, y, shape), gamma, beta, 1)


def _channels_last(graph: Graph, op: Operator, shape: tuple[int, ...], groups: int) -> str:
    batch, channels, rows = shape[0], shape[-1], prod(shape[1:-1])
    part = part_rows(rows, channels)
    flat = _reshape(graph, op.inputs[0], (batch, rows // part, part, channels))
    merged = _merged(graph, op, flat, groups)
    narrow = (batch, *(1 for _ in shape[1:-1]), channels)
    return _normalised(graph, op, op.inputs[0], merged, narrow, len(shape) - 1)


def _long_rows(graph: Graph, op: Operator, shape: tuple[int, ...], groups: int) -> str:
    """Channels first: each group is one long row."""
    one = _row_moments(graph, op, shape[0] * groups)
    inner = (shape[0], groups, shape[1] // groups, *shape[2:])
    narrow = (shape[0], groups, *(1 for _ in inner[2:]))
    centre, scale = _halves(graph, one, narrow)
    wide = _reshape(graph, op.inputs[0], inner)
    y = graph.add("multiply", (graph.add("subtract", (wide, centre)), scale), name=op.name)
    return _affine(graph, _reshape(graph, y, shape), op.inputs[1], op.inputs[2], 1)


def _row_moments(graph: Graph, op: Operator, rows: int) -> str:
    """Mean and 1/deviation, [rows, 2, 1], of the input of ``op``, laid flat in ``rows`` long rows.
    Each row is seen as a matrix whose columns all belong to it.
    """
    size = op.type.size // rows
    width = _divisor(size)
    part = part_rows(size // width, width)
    view = (rows, size // width // part, part, width)
    merged = _merged(graph, op, _reshape(graph, op.inputs[0], view), 1)
    return graph.add(
        "slice",
        (merged,),
        TensorType((rows, 2, 1), op.type.dtype),
        begin=(0, 0, 0),
        strides=(1, 1, 1),
    )


def _idle(op: Operator, cores: int) -> bool:
    """True if ``op`` has so few and so long rows along its last axis that, with one row per task,
    cores idle longer than it costs to share the rows out in further steps.
    """
    known = op.type
    if known.dtype != "float32" or not all(isinstance(d, int) for d in known.shape):
        return False
    length = int(known.shape[-1])
    if not known.size or part_rows(length, 1) == length:
        return False
    rows = known.size // length
    return (-(-rows // cores) - rows / cores) * length >= 4 * PART


def _layer_norm(graph: Graph, op: Operator, cores: int) -> str | None:
    """A layer norm of a few very long rows."""
    if not _idle(op, cores) or _divisor(int(op.type.shape[-1])) < 8:
        return None
    shape = tuple(int(d) for d in op.type.shape)
    one = _row_moments(graph, op, op.type.size // shape[-1])
    centre, scale = _halves(graph, one, (*shape[:-1], 1))
    y = graph.add("multiply", (graph.add("subtract", (op.inputs[0], centre)), scale), name=op.name)
    return _affine(graph, y, op.inputs[1], op.inputs[2], len(shape) - 1)


def _softmax(graph: Graph, op: Operator, cores: int) -> str | None:
    """A softmax of a few very long rows. :func:`_reduction` cuts its sums and extremes into two
    steps each.
    """
    (x,) = op.inputs
    last = len(op.type.shape) - 1
    if op["axis"] not in (last, -1) or not _idle(op, cores):
        return None
    top = graph.add("max", (x,), name=op.name, axes=(last,), keepdims=True)
    e = graph.add("exp", (graph.add("subtract", (x, top)),), name=op.name)
    total = graph.add("sum", (e,), name=op.name, axes=(last,), keepdims=True)
    one = graph.add_constant(numpy.ones((), numpy.float32))
    return graph.add("multiply", (e, graph.add("divide", (one, total))), name=op.name)


def _channels_first(graph: Graph, op: Operator) -> str | None:
    """Normalisation over an axis that is not the last in memory, if the permutations around it
    remain: the axes after that axis become one.
    """
    norm = made_by(graph, op.inputs[0], "layer_norm", "rms_norm")
    before = made_by(graph, norm.inputs[0], "permute") if norm is not None else None
    if norm is None or before is None or graph.only_user(norm.output) is None:
        return None
    order = before["axes"]
    rank, axis = len(order), order[-1]
    shape = tuple(int(d) for d in op.type.shape)
    if op["axes"] != invert(order) or op.type.dtype != "float32" or not op.type.size:
        return None
    if order != (*(a for a in range(rank) if a != axis), axis) or axis == rank - 1:
        return None
    lead, inner = prod(shape[:axis]), prod(shape[axis + 1 :])
    if inner < 8 or rank == 3:
        return None
    flat = _reshape(graph, before.inputs[0], (lead, shape[axis], inner))
    rows = graph.add("permute", (flat,), axes=(0, 2, 1))
    done = graph.add(norm.kind, (rows, *norm.inputs[1:]), name=norm.name, **dict(norm.attrs))
    return _reshape(graph, graph.add("permute", (done,), axes=(0, 2, 1)), shape)


def _merged(graph: Graph, op: Operator, parts: str, groups: int) -> str:
    return graph.add(
        "merged_moments",
        (graph.add("moments", (parts,), name=op.name),),
        name=op.name,
        groups=groups,
        epsilon=op["epsilon"],
    )


def _normalised(
    graph: Graph, op: Operator, x: str, merged: str, narrow: tuple[int, ...], axis: int
) -> str:
    centre, scale = _halves(graph, merged, narrow)
    y = graph.add("multiply", (graph.add("subtract", (x, centre)), scale), name=op.name)
    return _affine(graph, y, op.inputs[1], op.inputs[2], axis)


def _halves(graph: Graph, merged: str, shape: tuple[int, ...]) -> tuple[str, str]:
    """Mean and 1/deviation in ``shape``."""
    batch, _, channels = (int(d) for d in graph.types[merged].shape)
    half = TensorType((batch, 1, channels), graph.types[merged].dtype)
    return tuple(  # type: ignore[return-value]
        _reshape(
            graph,
            graph.add("slice", (merged,), half, begin=(0, k, 0), strides=(1, 1, 1)),
            shape,
        )
        for k in range(2)
    )


def _affine(graph: Graph, y: str, gamma: str, beta: str, axis: int) -> str:
    """Scale and shift along ``axis``, without those that change nothing."""
    shape = tuple(d if a == axis else 1 for a, d in enumerate(int(d) for d in graph.types[y].shape))
    for kind, vector, neutral in (("multiply", gamma, 1.0), ("add", beta, 0.0)):
        value = graph.constants.get(vector)
        if value is not None and bool((value == neutral).all()):
            continue
        wide = (
            graph.add_constant(value.reshape(shape), vector)
            if value is not None
            else _reshape(graph, vector, shape)
        )
        y = graph.add(kind, (y, wide))
    return y


def _reshape(graph: Graph, x: str, shape: tuple[int, ...]) -> str:
    known = graph.types[x]
    return x if known.shape == shape else graph.add("reshape", (x,), TensorType(shape, known.dtype))


def _divisor(size: int) -> int:
    """The number of columns of a matrix view of a flat row: whole vectors if possible."""
    best = 1
    for width in range(1, min(size, 256) + 1):
        if size % width == 0 and (width % 16 == 0 or best % 16):
            best = width
    return best


# -- plain reductions ------------------------------------------------------------------------------


def _reduction(graph: Graph, op: Operator, cores: int) -> str | None:
    """A reduction to few elements, in two steps."""
    (x,) = op.inputs
    known = graph.types[x]
    if known.dtype != "float32" or not all(isinstance(d, int) for d in known.shape):
        return None
    shape = tuple(int(d) for d in known.shape)
    axes = tuple(a for a in op["axes"] if shape[a] > 1)
    if not axes or known.size <= 4 * PART:
        return None
    if axes != tuple(range(axes[0], axes[-1] + 1)):
        return None
    lead, length, width = (
        prod(shape[: axes[0]]), prod(shape[axes[0] : axes[-1] + 1]), prod(shape[axes[-1] + 1 :]),
    )  # fmt: skip
    tasks = lead * -(-width // 64)
    if tasks >= FEW * cores:
        return None
    part = part_rows(length, width)
    if part == length:
        return None
    parts = _reshape(graph, x, (lead, length // part, part, width))
    first = graph.add(op.kind, (parts,), name=op.name, axes=(2,), keepdims=False)
    second = graph.add(op.kind, (first,), name=op.name, axes=(1,), keepdims=False)
    return _reshape(graph, second, tuple(int(d) for d in op.type.shape))

"""The places of a contraction's operands and result in memory."""

from __future__ import annotations

import itertools
from dataclasses import replace

from tvm import tirx
from tvm.sym import detect_linear_equation

from gtco.tensor.analysis.chains import Epilogue, ancestors, shape_of
from gtco.tensor.analysis.contraction import Contraction, ConvView, TransposedView
from gtco.tensor.analysis.indices import flatten
from gtco.tensor.analysis.probe import Probe
from gtco.tensor.analysis.scope import Expr, Scope
from gtco.tensor.stage import Stage


def row_stride(stage: Stage, view: Contraction) -> int | None:
    """The distance of A's rows in an input, if A lies there unchanged; else None."""
    scope = Scope(wide=stage.wide)
    b, m, k = scope.variables((view.batch, view.m, view.k))
    return _stride(stage, scope, view.op.inputs[0], view.a_index(b, m, k), m, k)


def column_stride(stage: Stage, view: Contraction) -> int | None:
    """The distance of B's rows in an input, if B lies there unchanged; else None."""
    scope = Scope(wide=stage.wide)
    b, k, n = scope.variables((view.batch, view.k, view.n))
    return _stride(stage, scope, view.op.inputs[1], view.b_index(b, k, n), k, n)


def _stride(
    stage: Stage, scope: Scope, tensor: str, index: list[Expr], row: Expr, column: Expr
) -> int | None:
    op = stage.producers.get(tensor)
    while op is not None:
        if op.kind not in ("reshape", "identity", "slice", "permute"):
            return None
        op = stage.producers.get(op.inputs[0])
    probe = Probe(stage, scope)
    probe.follow(tensor, index)
    parts = detect_linear_equation(probe.loads[0][1], [row, column])
    if len(parts) != 3 or not all(isinstance(p, tirx.IntImm) for p in parts[:2]):
        return None
    return int(parts[0].value) if int(parts[1].value) == 1 else None


def stores_columns(view: Contraction, tail: Epilogue) -> bool:
    """True if rows of C, not columns, lie side by side in the output (a transposed store)."""
    scope = Scope(wide=tail.stage.wide)
    b, m, n = scope.variables((view.batch, view.m, view.n))
    return view.n > 1 and _apart(scope, view, tail, (b, m, n), (b, m + 1, n)) == 1


def scatters(view: Contraction, tail: Epilogue, line: int) -> bool:
    """True if neighbours of C along columns lie ``line`` elements or more apart in the output, and
    those along rows not side by side. So every element of a row goes to a cache line of its own,
    and no vector of a column can be stored. Two places decide.
    """
    if view.m < 2 or view.n < 2 or not any(op.kind == "permute" for op in tail.operators):
        return False
    scope = Scope(wide=tail.stage.wide)
    for m, n in ((0, 0), (view.m // 2 - 1, view.n // 2 - 1)):
        b, row, column = (scope.index(i) for i in (0, m, n))
        for there, least in (((b, row + 1, column), 2), ((b, row, column + 1), line)):
            apart = _apart(scope, view, tail, (b, row, column), there)
            if apart is None or abs(apart) < least:
                return False
    return True


def _apart(
    scope: Scope,
    view: Contraction,
    tail: Epilogue,
    here: tuple[Expr, Expr, Expr],
    there: tuple[Expr, Expr, Expr],
) -> int | None:
    """How far two elements (batch, row, column) of C lie apart in the output; None where this is
    not a constant.
    """
    shape = shape_of(tail.stage, tail.stage.output.output)
    first, second = (
        scope.index(flatten(tail.forward(view.c_index(*at)), shape)) for at in (here, there)
    )
    distance = scope.index(second - first)
    return distance if isinstance(distance, int) else None


def _image_apart(stage: Stage, view: ConvView, axis: str) -> int | None:
    """How far neighbours along the input's channel (``c``) or column (``kw``) axis lie apart."""
    scope = Scope(wide=stage.wide)
    names = ("image", "row", "kw", "c")
    extents = (view.result[0], *view.image, view.groups * view.channels)
    sizes = dict(zip(names, extents, strict=True))
    sizes[axis] = max(2, sizes[axis])  # a single channel has a neighbour too: where it would lie
    index = dict(zip(names, scope.variables(tuple(sizes.values())), strict=True))
    place = view.place(*index.values())
    return _apart_in_memory(stage, scope, view.op.inputs[0], place, index[axis])


def _apart_in_memory(
    stage: Stage, scope: Scope, tensor: str, index: list[Expr], var: Expr
) -> int | None:
    """How far neighbours of a tensor along a variable of the index lie apart in memory; None where
    this is not a constant. If the tensor is computed from several (by a gate, for example), the
    largest of them decides.
    """
    probe = Probe(stage, scope)
    probe.follow(tensor, index)
    steps = zip(probe.loads, probe.strides(var), strict=True)
    loads = [(stage.types[name].size, step) for (name, _), step in steps if name]
    return max(loads, key=lambda load: load[0])[1] if loads else None


def along_memory(stage: Stage, view: ConvView) -> ConvView:
    """The view whose k runs along neighbours of the input: its channels, or else its columns. The k
    of a transposed convolution runs along channels, wherever they lie.
    """
    channels = _image_apart(stage, view, "c")
    if channels == 1:
        return view
    if not isinstance(view, TransposedView) and _image_apart(stage, view, "kw") == 1:
        return replace(view, channels_first=True)
    return replace(view, gathered=channels is not None and view.channels > 1)


def gathers(stage: Stage, view: Contraction, tensor: str) -> bool:
    """True if neighbours of k lie apart in memory (tokens that are pixels of an image whose
    channels come first). ``tensor`` is A, or what A is normalised from.
    """
    if view.k < 2 or not any(op.kind == "permute" for op in ancestors(stage, tensor)):
        return False
    scope = Scope(wide=stage.wide)
    b, m, k = scope.variables((view.batch, view.m, view.k))
    return _apart_in_memory(stage, scope, tensor, view.a_index(b, m, k), k) not in (None, 1)


def run_breaks(stage: Stage, view: Contraction) -> tuple[int, ...]:
    """The places at which a run of k passes from one part of a concatenation to the next."""
    width = view.groups * view.channels if isinstance(view, ConvView) else view.k
    if isinstance(view, ConvView) and view.groups > 1:  # a run is a part of the channels
        return ()
    for op in ancestors(stage, view.op.inputs[0]):
        shape = op.type.shape
        if op.kind == "concat" and op["axis"] == len(shape) - 1 and shape[-1] == width:
            ends = itertools.accumulate(int(stage.types[x].shape[-1]) for x in op.inputs)
            return tuple(end for end in ends if end < width)
    return ()

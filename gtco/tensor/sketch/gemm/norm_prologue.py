"""A layer_norm before a contraction: statistics once a task, scale and shift while packing.

::

    y = layer_norm(x); C = y @ W
    -> per row: mean, scale = 1 / sqrt(var + eps); packed A = (x - mean) * scale * gamma + beta
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from tvm import tirx

from gtco.tensor.analysis.chains import ancestors, prologue_readable
from gtco.tensor.analysis.indices import reshape_index
from gtco.tensor.emit.emitter import Array, Expr
from gtco.tensor.emit.fold import add, fold
from gtco.tensor.emit.reader import Reader
from gtco.tensor.stage import Operator, Stage


def find(stage: Stage, contraction: Operator) -> Operator | None:
    """The layer_norm that makes the contraction's A, row for row, with only reshapes and casts
    between.

    Nothing else may read it, because a task knows only the statistics of its own rows of A.
    """
    tensor = contraction.inputs[0]
    op = stage.producers.get(tensor)
    while op is not None and op.kind in ("reshape", "identity", "cast"):
        if stage.types[op.inputs[0]].shape[-1:] != op.type.shape[-1:]:
            return None
        tensor = op.inputs[0]
        op = stage.producers.get(tensor)
    if op is None or op.kind != "layer_norm" or not prologue_readable(stage, op.inputs):
        return None
    others = [o for o in ancestors(stage, contraction.inputs[0]) if o.kind == "layer_norm"]
    return op if len(others) == 1 and not _read_beside(stage, op, contraction) else None


def _read_beside(stage: Stage, norm: Operator, contraction: Operator) -> bool:
    """True if the stage's output depends on the norm also by another way than A."""
    names = {stage.output.output}
    for op in reversed(stage.operators):
        if op.output in names and op is not norm:
            names.update(op.inputs[1:] if op is contraction else op.inputs)
    return norm.output in names


def statistics(
    reader: Reader, op: Operator, row0: Expr, rows: Expr, mean: Array, scale: Array
) -> None:
    """mean[r] and scale[r] = 1 / sqrt(variance + epsilon) of rows ``row0 + r``, in two passes."""
    em = reader.emitter
    shape = reader.shape(op.inputs[0])
    share = tirx.const(1.0 / shape[-1], "float32")
    with em.loop(rows, "r") as r:
        lead = reshape_index([row0 + r], [prod(shape[:-1])], shape[:-1])
        lead = [em.let_index(i, "i") for i in lead]

        def x(k: Expr, lead: list[Expr] = lead) -> Expr:
            return reader.value(op.inputs[0], [*lead, k])

        middle = em.let(fold(em, shape[-1], x, add, 0.0) * share, "mean")

        def square(k: Expr, middle: Expr = middle) -> Expr:
            d = em.let(x(k) - middle, "d")
            return d * d

        variance = fold(em, shape[-1], square, add, 0.0) * share
        em.store(mean, [r], middle)
        epsilon = tirx.const(float(op["epsilon"]), "float32")
        em.store(scale, [r], tirx.const(1.0, "float32") / tirx.sqrt(variance + epsilon))


def normalised(
    reader: Reader, op: Operator, row0: Expr, mean: Array, scale: Array
) -> Callable[[Sequence[Expr]], Expr]:
    """The layer_norm's value at an index of its output, for rows whose statistics are known."""
    em = reader.emitter
    shape = reader.shape(op.inputs[0])

    def value(index: Sequence[Expr]) -> Expr:
        flat: Expr = 0
        for extent, i in zip(shape[:-1], index[:-1], strict=True):
            flat = flat * extent + i
        r = em.index(flat - row0)
        centred = reader.value(op.inputs[0], index) - em.load(mean, [r])
        gamma, beta = (reader.value(x, [index[-1]]) for x in op.inputs[1:])
        return centred * em.load(scale, [r]) * gamma + beta

    return value

"""Where movement operators read and write: index maps, backward and forward."""

from __future__ import annotations

from collections.abc import Sequence

from gtco.tensor.analysis.indices import broadcast_index, floormod, reshape_index
from gtco.tensor.analysis.scope import Expr
from gtco.tensor.stage import Operator

BIJECTIVE = frozenset({"reshape", "permute", "roll", "identity"})
CHOOSING = frozenset({"concat", "pad", "gather"})  # what they read depends on the index
MOVEMENT = BIJECTIVE | CHOOSING | {"slice", "broadcast"}


def source_index(op: Operator, index: Sequence[Expr], shape: Sequence[int]) -> list[Expr]:
    """Where the operator, one of ``MOVEMENT`` that is not choosing, reads its input of ``shape``
    for the element at ``index`` of its output.
    """
    match op.kind:
        case "identity":
            return list(index)
        case "reshape":
            return reshape_index(index, [int(d) for d in op.type.shape], shape)
        case "permute":
            inverse = sorted(range(len(shape)), key=op["axes"].__getitem__)
            return [index[i] for i in inverse]
        case "slice":
            return [
                i if (b, s) == (0, 1) else b + i * s
                for b, i, s in zip(op["begin"], index, op["strides"], strict=True)
            ]
        case "broadcast":
            return broadcast_index(index, shape)
        case "roll":
            return [
                floormod(i + (n - s) % n, n) if s % n else i
                for i, s, n in zip(index, op["shifts"], shape, strict=True)
            ]
    raise AssertionError(f"no index map for {op.kind}")


def result_index(op: Operator, index: Sequence[Expr], shape: Sequence[int]) -> list[Expr]:
    """Where the operator, one of ``BIJECTIVE`` or element-wise, puts what its input of ``shape``
    has at ``index``.
    """
    match op.kind:
        case "reshape":
            return reshape_index(index, shape, [int(d) for d in op.type.shape])
        case "permute":
            return [index[a] for a in op["axes"]]
        case "roll":
            return [
                floormod(i + s % n, n) if s % n else i
                for i, s, n in zip(index, op["shifts"], shape, strict=True)
            ]
    return list(index)

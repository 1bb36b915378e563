"""The places that movement operators read and write: index maps, backward and forward."""

from __future__ import annotations

from collections.abc import Sequence

from gtco.tensor.analysis.indices import broadcast_index, floormod, reshape_index
from gtco.tensor.analysis.scope import Expr
from gtco.tensor.stage import Operator

BIJECTIVE = frozenset({"reshape", "permute", "roll", "identity"})
CHOOSING = frozenset({"concat", "pad", "gather"})  # the index decides which tensor they read
MOVEMENT = BIJECTIVE | CHOOSING | {"slice", "broadcast"}


def source_index(op: Operator, index: Sequence[Expr], shape: Sequence[int]) -> list[Expr]:
    """The index of the input of ``shape`` that the operator reads for the element at ``index`` of
    its output. The operator is one of ``MOVEMENT`` that does not choose between inputs.
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
    """The index of the output at which the operator puts the element at ``index`` of its input of
    ``shape``. The operator is one of ``BIJECTIVE`` or element-wise.
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

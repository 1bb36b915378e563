"""The rule for Relax's einsum: it becomes permute, reshape and matmul, or multiply if nothing is
summed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod

from tvm import relax

from gtco.graph.lower.context import Lowering, NoRule
from gtco.tensor.stage import TensorType


@dataclass(frozen=True)
class _Operand:
    """A tensor and the label of each of its axes. No label occurs twice."""

    tensor: str
    labels: tuple[str, ...]


def einsum(lowering: Lowering, call: relax.Call) -> str:
    """Any number of operands and any pattern. A label that an operand repeats takes its diagonal. A
    label that only one operand has, and the result has not, is summed. The rest is contracted pair
    by pair from the left.

    ::

        before: einsum("bhwc,hkc->bhwk", q, r)
        after:  matmul(q, reshape(permute(r, 021), [1, h, c, k]))
    """
    tensors = lowering.value(call.args[0])
    shapes = [tuple(int(d) for d in lowering.type(t).shape) for t in tensors]
    inputs, wanted = parse(str(call.attrs.subscripts), [len(s) for s in shapes])
    extents: dict[str, int] = {}
    for labels, shape in zip(inputs, shapes, strict=True):
        for label, extent in zip(labels, shape, strict=True):
            if extents.get(label, 1) == 1:
                extents[label] = extent
            elif extent not in (1, extents[label]):
                raise NoRule(f"einsum: an axis has sizes {extents[label]} and {extent}")
    operands = [
        _prepared(lowering, tensor, labels, extents)
        for tensor, labels in zip(tensors, inputs, strict=True)
    ]
    while len(operands) > 1:
        first, second, *rest = operands
        needed = {*wanted, *(label for operand in rest for label in operand.labels)}
        operands = [_pair(lowering, first, second, needed, extents), *rest]
    return _aligned(lowering, _summed(lowering, operands[0], wanted), wanted, extents)


def parse(subscripts: str, ranks: Sequence[int]) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """The labels of every operand's axes and of the result's axes. The ellipsis becomes labels "0",
    "1", ..., counted from the right. The result's labels are added if the text leaves them out.
    """
    left, arrow, right = subscripts.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks):
        raise NoRule(f"einsum '{subscripts}' has {len(terms)} terms for {len(ranks)} operands")
    widest = 0
    for term, rank in zip(terms, ranks, strict=True):
        named = len(term.replace("...", ""))
        if rank < named or (rank > named and "..." not in term):
            raise NoRule(f"einsum '{subscripts}': term '{term}' for a tensor of {rank} axes")
        widest = max(widest, rank - named)

    def written_out(term: str, count: int) -> tuple[str, ...]:
        before, dots, after = term.partition("...")
        unnamed = tuple(str(i) for i in range(count - 1, -1, -1)) if dots else ()
        return (*before, *unnamed, *after)

    inputs = [
        written_out(term, rank - len(term.replace("...", "")))
        for term, rank in zip(terms, ranks, strict=True)
    ]
    if arrow:
        return inputs, written_out(right, widest)
    every = [label for labels in inputs for label in labels]
    once = sorted(label for label in set(every) if label.isalpha() and every.count(label) == 1)
    return inputs, (*written_out("...", widest), *once)


def _prepared(
    lowering: Lowering, tensor: str, labels: tuple[str, ...], extents: dict[str, int]
) -> _Operand:
    """The operand with the diagonals of repeated labels, and without axes of size 1
    that broadcast.
    """
    while len(set(labels)) < len(labels):
        label = next(x for x in labels if labels.count(x) > 1)
        i, j = (n for n, x in enumerate(labels) if x == label)
        tensor, labels = _diagonal(lowering, tensor, labels, i, j)
    shape = tuple(int(d) for d in lowering.type(tensor).shape)
    kept = [n for n, x in enumerate(labels) if shape[n] == extents[x]]
    tensor = lowering.reshape(tensor, tuple(shape[n] for n in kept))
    return _Operand(tensor, tuple(labels[n] for n in kept))


def _diagonal(
    lowering: Lowering, tensor: str, labels: tuple[str, ...], i: int, j: int
) -> tuple[str, tuple[str, ...]]:
    """The diagonal of axes i and j, as the last axis: every (n + 1)-th of n * n elements."""
    known = lowering.type(tensor)
    rest = [n for n in range(len(labels)) if n not in (i, j)]
    shape = tuple(int(known.shape[n]) for n in rest)
    size, other = int(known.shape[i]), int(known.shape[j])
    if size != other:
        raise NoRule(f"einsum: the diagonal of a {size} x {other} matrix")
    tensor = lowering.reshape(lowering.permute(tensor, (*rest, i, j)), (*shape, size * size))
    tensor = lowering.emit(
        "slice",
        (tensor,),
        TensorType((*shape, size), known.dtype),
        begin=(0,) * (len(shape) + 1),
        strides=(1,) * len(shape) + (size + 1,),
    )
    return tensor, (*(labels[n] for n in rest), labels[i])


def _summed(lowering: Lowering, operand: _Operand, needed: Collection[str]) -> _Operand:
    """The operand summed over the labels that nothing else needs."""
    axes = tuple(n for n, label in enumerate(operand.labels) if label not in needed)
    if not axes:
        return operand
    kept = tuple(label for label in operand.labels if label in needed)
    total = lowering.emit("sum", (operand.tensor,), axes=axes, keepdims=False)
    return _Operand(total, kept)


def _pair(
    lowering: Lowering,
    a: _Operand,
    b: _Operand,
    needed: Collection[str],
    extents: dict[str, int],
) -> _Operand:
    """The contraction of two operands over the labels that they share and nothing else needs."""
    a = _summed(lowering, a, {*needed, *b.labels})
    b = _summed(lowering, b, {*needed, *a.labels})
    if lowering.array(a.tensor) is not None and lowering.array(b.tensor) is None:
        a, b = b, a  # weights go to the right, where a kernel packs them
    depth = [x for x in a.labels if x in b.labels and x not in needed]
    columns = [x for x in b.labels if x not in a.labels]
    if not depth:
        labels = (*a.labels, *columns)
        left = _aligned(lowering, a, labels, extents)
        return _Operand(
            lowering.emit("multiply", (left, _aligned(lowering, b, labels, extents))), labels
        )
    own = [x for x in a.labels if x not in b.labels]
    row = own[-1:]
    leading = [x for x in a.labels if x not in depth and x not in row]

    def sizes(labels: Sequence[str]) -> list[int]:
        return [extents[x] for x in labels]

    rows, inner = prod(sizes(row)), prod(sizes(depth))
    left = lowering.reshape(
        _aligned(lowering, a, (*leading, *row, *depth), extents), (*sizes(leading), rows, inner)
    )
    shared = [x for x in leading if x in b.labels]
    right = lowering.reshape(
        _aligned(lowering, b, (*shared, *depth, *columns), extents),
        (*(extents[x] if x in shared else 1 for x in leading), inner, prod(sizes(columns))),
    )
    labels = (*leading, *row, *columns)
    product = lowering.emit("matmul", (left, right))
    return _Operand(lowering.reshape(product, tuple(sizes(labels))), labels)


def _aligned(
    lowering: Lowering, operand: _Operand, labels: Sequence[str], extents: dict[str, int]
) -> str:
    """The operand with its axes in the order of ``labels``; size 1 for labels that it lacks."""
    present = [x for x in labels if x in operand.labels]
    tensor = lowering.permute(operand.tensor, tuple(operand.labels.index(x) for x in present))
    return lowering.reshape(tensor, tuple(extents[x] if x in present else 1 for x in labels))

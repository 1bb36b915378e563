"""The algebra of permutations of axes: composing them, and moving them across other operators.

Axis i of ``permute(x, axes)`` is axis ``axes[i]`` of x, as in numpy.transpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gtco.tensor.operators import ELEMENTWISE, OPERATORS
from gtco.tensor.stage import Attrs, Dim, Operator, make_attrs

Axes = tuple[int, ...]


def is_identity(axes: Axes) -> bool:
    return axes == tuple(range(len(axes)))


def invert(axes: Axes) -> Axes:
    """The permutation that undoes ``axes``."""
    return tuple(sorted(range(len(axes)), key=axes.__getitem__))


def compose(first: Axes, then: Axes) -> Axes:
    """``permute(permute(x, first), then) == permute(x, compose(first, then))``."""
    return tuple(first[axis] for axis in then)


def moves_nothing(shape: Sequence[Dim], axes: Axes) -> bool:
    """True if only axes of size 1 change places, or if there are no elements: the permutation is a
    reshape.
    """
    if 0 in shape:
        return True
    moved = [axis for axis in axes if shape[axis] != 1]
    return moved == sorted(moved)


def permuted(values: Sequence[Any], axes: Axes) -> tuple[Any, ...]:
    return tuple(values[axis] for axis in axes)


def across_reshape(
    shape: Sequence[Dim], axes: Axes, target: Sequence[Dim]
) -> tuple[tuple[Dim, ...], Axes] | None:
    """Swaps a permutation with the reshape after it.

    before: ``reshape(permute(x, axes), target)`` with x of ``shape``
    after:  ``permute(reshape(x, new_target), new_axes)``

    Gives ``(new_target, new_axes)``. None if the reshape merges or splits axes across ones that the
    permutation separated.
    """
    kept = [axis for axis in axes if shape[axis] != 1]  # x's axes in the permuted tensor's order
    slots = [n for n, dim in enumerate(target) if dim != 1]
    groups = _groups([shape[axis] for axis in kept], [target[slot] for slot in slots])
    if groups is None:
        return None
    in_x = {axis: n for n, axis in enumerate(sorted(kept))}
    order: list[tuple[int, list[int]]] = []  # place in x, and the target's axes that it becomes
    for (begin, end), (out_begin, out_end) in groups:
        places = [in_x[axis] for axis in kept[begin:end]]
        if places != list(range(places[0], places[0] + len(places))):
            return None
        order.append((places[0], slots[out_begin:out_end]))
    arranged = [slot for _, group in sorted(order) for slot in group]
    # Axes of size 1 keep their places; the others fill the remaining places in x's order.
    source = list(range(len(target)))
    for place, slot in zip(slots, arranged, strict=True):
        source[place] = slot
    return permuted(target, tuple(source)), invert(tuple(source))


def _groups(
    left: Sequence[Dim], right: Sequence[Dim]
) -> list[tuple[tuple[int, int], tuple[int, int]]] | None:
    """The smallest runs of axes of ``left`` and ``right`` that hold the same elements; None if
    symbolic sizes hide this.
    """
    groups = []
    i = j = 0
    while i < len(left) and j < len(right):
        begin, out_begin = i, j
        a, b = _product(left[i : i + 1]), _product(right[j : j + 1])
        i, j = i + 1, j + 1
        while a != b:
            if (a[0] < b[0] or (a[0] == b[0] and len(a[1]) < len(b[1]))) and i < len(left):
                i += 1
            elif j < len(right):
                j += 1
            elif i < len(left):
                i += 1
            else:
                return None
            a, b = _product(left[begin:i]), _product(right[out_begin:j])
        groups.append(((begin, i), (out_begin, j)))
    return groups if i == len(left) and j == len(right) else None


def _product(dims: Sequence[Dim]) -> tuple[int, tuple[str, ...]]:
    number = 1
    for dim in dims:
        number *= dim if isinstance(dim, int) else 1
    return number, tuple(sorted(dim for dim in dims if isinstance(dim, str)))


def through(op: Operator, axes: Axes) -> tuple[Attrs, tuple[bool, ...]] | None:
    """``op`` on permuted inputs instead of a permuted output.

    before: ``permute(op(x, ...), axes)``    after: ``op'(permute(x, axes), ...)``

    Gives op's new attributes, and for each input whether it must be permuted (the others, such as
    gamma of a layer normalization, stay). None if ``op`` does not let a permutation pass.
    Element-wise inputs of a lower rank count as having leading axes of size 1.
    """
    if OPERATORS[op.kind].pattern == ELEMENTWISE or op.kind in ("identity", "broadcast"):
        return op.attrs, (True,) * len(op.inputs)
    attrs = dict(op.attrs)
    if op.kind in ("concat", "softmax", "log_softmax", "cumsum"):
        attrs["axis"] = axes.index(op["axis"])
        return make_attrs(**attrs), (True,) * len(op.inputs)
    if op.kind in ("pad", "roll", "slice"):
        for key in ("before", "after", "shifts", "begin", "strides"):
            if key in attrs:
                attrs[key] = permuted(attrs[key], axes)
        return make_attrs(**attrs), (True,)
    if op.kind in ("layer_norm", "rms_norm") and axes[-1] == len(axes) - 1:
        return op.attrs, (True,) + (False,) * (len(op.inputs) - 1)
    if op.kind == "group_norm" and axes[0] == 0:
        attrs["axis"] = axes.index(op["axis"])
        return make_attrs(**attrs), (True, False, False)
    if op.kind in ("sum", "mean", "max", "min", "prod") and op["keepdims"]:
        attrs["axes"] = tuple(sorted(axes.index(axis) for axis in op["axes"]))
        return make_attrs(**attrs), (True,)
    return None


def through_reduction(op: Operator, axes: Axes) -> tuple[Attrs, Axes]:
    """A reduction without ``keepdims`` of a permuted tensor.

    before: ``op(permute(x, axes))``    after: ``permute(op'(x), new_axes)``

    Gives the attributes of op' and ``new_axes``.
    """
    reduced = {axes[axis] for axis in op["axes"]}
    kept = [axis for axis in axes if axis not in reduced]
    rank = {axis: n for n, axis in enumerate(sorted(kept))}
    return (
        make_attrs(axes=tuple(sorted(reduced)), keepdims=False),
        tuple(rank[axis] for axis in kept),
    )

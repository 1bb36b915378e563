"""Indices of tensors as expressions: flat positions, groups of axes, and the effect of reshaping
and broadcasting on an index.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

from tvm import tirx

from gtco.tensor.analysis.scope import Expr


def floordiv(a: Expr, b: int) -> Expr:
    return a // b if isinstance(a, int) else tirx.floordiv(a, b)


def floormod(a: Expr, b: int) -> Expr:
    return a % b if isinstance(a, int) else tirx.floormod(a, b)


def flatten(index: Sequence[Expr], shape: Sequence[int]) -> Expr:
    """The flat position of an index, row-major."""
    flat: Expr = 0
    for extent, i in zip(shape, index, strict=True):
        # TIR folds a factor of 1 and a 0 too, but its checks took most of the time here
        flat = flat if extent == 1 else flat * extent
        if isinstance(flat, int) and flat == 0:
            flat = i
        elif not (isinstance(i, int) and i == 0):
            flat = flat + i
    return flat


def split_flat(flat: Expr, shape: Sequence[int]) -> list[Expr]:
    """The index into ``shape`` of a flat position, one expression a part."""
    index: list[Expr] = []
    for k in range(len(shape) - 1, -1, -1):
        if shape[k] == 1:
            index.append(0)
        elif prod(shape[:k]) == 1:
            index.append(flat)
        else:
            index.append(floormod(flat, shape[k]))
            flat = floordiv(flat, shape[k])
    return index[::-1]


Groups = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


@lru_cache(maxsize=4096)  # a search needs the index of a reshape many times
def axis_groups(source: tuple[int, ...], target: tuple[int, ...]) -> Groups:
    """The smallest groups of axes of a reshape with equal products: for each group (axes of source,
    axes of target).
    """
    if 0 in source or 0 in target:
        return ((tuple(range(len(source))), tuple(range(len(target)))),)
    groups = []
    i = j = 0
    while i < len(source) or j < len(target):
        begin, first = i, j
        a, i = (source[i], i + 1) if i < len(source) else (1, i)
        b, j = (target[j], j + 1) if j < len(target) else (1, j)
        while a != b:
            if a < b:
                a, i = a * source[i], i + 1
            else:
                b, j = b * target[j], j + 1
        groups.append((tuple(range(begin, i)), tuple(range(first, j))))
    return tuple(groups)


def reshape_index(index: Sequence[Expr], old: Sequence[int], new: Sequence[int]) -> list[Expr]:
    """The index into shape ``new`` of the element at ``index`` of shape ``old``. Both are row-major
    and have the same size.

    Dimensions are regrouped at equal prefix products, so that [197, 768] -> [197, 12, 64] divides
    only 768.
    """
    result: list[Expr] = []
    for left, right in axis_groups(tuple(old), tuple(new)):
        flat = flatten([index[a] for a in left], [old[a] for a in left])
        result += split_flat(flat, [new[a] for a in right])
    return result


def broadcast_index(index: Sequence[Expr], shape: Sequence[int]) -> list[Expr]:
    """The index into an operand of ``shape`` that numpy's broadcasting reads for ``index`` of the
    result.
    """
    trailing = list(index)[len(index) - len(shape) :]
    return [0 if extent == 1 else i for extent, i in zip(shape, trailing, strict=True)]

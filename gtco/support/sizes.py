"""Lists of sizes for dimensions (``--dim batch=1,4,16``): each choice is compiled as a variant."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from gtco.support.errors import OptionError

MOST_VARIANTS = 16  # in one library
_PLACE = re.compile(r".+\.\d+")  # an input and an axis


def names_of(name: str) -> list[str]:
    """The dimensions that a key of ``dims`` names: ``x.0,y.0`` are two of one size. Names that the
    model's file gives may have commas themselves.
    """
    parts = name.split(",")
    return parts if all(map(_PLACE.fullmatch, parts)) else [name]


def check_dims(dims: Any, shapes: Mapping[str, Any]) -> None:
    """Raises :class:`OptionError` if ``dims`` is not made of lists of sizes, is about a dimension
    that ``shapes`` gives a size, or asks for more than MOST_VARIANTS variants.
    """
    if not isinstance(dims, Mapping):
        raise OptionError(f"dims={dims!r}: give a dictionary, such as {{'batch': [1, 4, 16]}}")
    seen: set[str] = set()
    lengths: list[int] = []
    for key, given in dims.items():
        if not isinstance(key, str):
            raise OptionError(f"dims: {key!r} is no name; dimensions are named 'batch' or 'x.0'")
        sizes = _sizes(key, given)
        if twice := [size for size in sizes if sizes.count(size) > 1]:
            raise OptionError(f"dims: the list of '{key}' has {twice[0]} twice")
        lengths.append(len(sizes))
        for name in names_of(key):
            if name in seen:
                raise OptionError(f"dims: '{name}' is given twice")
            if name in shapes:
                raise OptionError(
                    f"'{name}' is given one size (--shape, shapes) and a list (--dim, dims): leave "
                    "one of them out"
                )
            seen.add(name)
    if (number := prod(lengths)) > MOST_VARIANTS:
        raise OptionError(
            f"dims: {' x '.join(map(str, lengths))} sizes are {number} variants, and one library "
            f"has at most {MOST_VARIANTS}: give fewer sizes, or compile several libraries"
        )


def _sizes(key: str, given: Any) -> list[int]:
    if isinstance(given, str) or not hasattr(given, "__iter__"):
        given = [given]
    sizes = list(given)
    for size in sizes:
        if isinstance(size, bool) or not hasattr(size, "__index__") or size < 1:
            raise OptionError(
                f"dims[{key!r}]={given!r}: give a list of whole numbers of 1 or more, such as "
                f"{{{key!r}: [1, 4, 16]}}. Ranges are not possible yet"
            )
    if not sizes:
        raise OptionError(f"dims[{key!r}] is empty: give one size or more")
    return [int(size) for size in sizes]


def choices(dims: Mapping[str, int | Sequence[int]]) -> list[dict[str, int]]:
    """The sizes of each variant, by the dimension's name: the product of the lists. Dimensions of
    one size are in :func:`fixed` instead; there is one variant at least.
    """
    lists = {key: _sizes(key, given) for key, given in dims.items()}
    several = {key: sizes for key, sizes in lists.items() if len(sizes) > 1}
    return [
        {name: size for key, size in zip(several, chosen, strict=True) for name in names_of(key)}
        for chosen in itertools.product(*several.values())
    ]


def fixed(dims: Mapping[str, int | Sequence[int]]) -> dict[str, int]:
    """The dimensions whose lists have one size."""
    lists = {key: _sizes(key, given) for key, given in dims.items()}
    return {name: s[0] for key, s in lists.items() if len(s) == 1 for name in names_of(key)}


def flags(dims: Mapping[str, Sequence[int]]) -> str:
    """The options that choose one of these sizes for each dimension, as usage shows a choice."""
    return " ".join(f"--dim {name}={'|'.join(map(str, sizes))}" for name, sizes in dims.items())


def said(sizes: Mapping[str, int]) -> str:
    """The sizes of a variant, in words."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items())

"""The ways to read the sizes of a compile. Of several ranges one may be made in parts
(:mod:`gtco.driver.sizes.parts`), and each size of the others is compiled. Which one that is depends
on the model, so there are several ways, and the first that the model allows is taken.

    batch=1..64, width=32..320:32      any batch in parts, at each of 10 widths
                                       any width in parts, at each of 64 batches: too many
                                       each width and each batch: too many
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any, Literal

from gtco.driver.sizes.parts import most_choices
from gtco.support.errors import OptionError, ShapeError
from gtco.support.sizes import (
    MOST_VARIANTS,
    Range,
    dim_text,
    listed,
    names_of,
    number_of_variants,
    range_of,
    read,
)

MANY = 64  # sizes of a range of which each is compiled: fewer may do, and compile sooner
ADVISED = 16  # the advice gives so many sizes at most
Dims = Mapping[str, Any]  # sizes by dimension; at most one range is made in parts


def ways(dims: Mapping[str, Any]) -> list[Dims]:
    """The ways that a library has room for: first those with one range in parts, in the order of
    the options, last the one with none. Raises :class:`OptionError` if there is no such way.
    """
    given = read(dims)
    ranges = [key for key, sizes in given.items() if isinstance(sizes, Range)]
    every = [_way(given, key) for key in (*ranges, None)]
    allowed = [way for way in every if way is not None]
    fitting = [way for way in allowed if number_of_variants(way) <= _most(way)]
    if not fitting:
        nearest = min(allowed, key=number_of_variants)
        raise OptionError(f"dims: {_too_many(nearest)}")
    return fitting


def _way(given: Mapping[str, list[int] | Range], parted: str | None) -> Dims | None:
    """The way with this range in parts; None if a range has to be made in another way."""
    found: dict[str, Any] = {}
    for key, sizes in given.items():
        if isinstance(sizes, Range):
            made: Literal["parts", "each"] = "parts" if key == parted else "each"
            if sizes.made not in (made, "either"):
                return None
            sizes = replace(sizes, made=made)
        found[key] = sizes
    return found


def _most(way: Dims) -> int:
    """How many choices of sizes there may be, beside those of a range in parts."""
    found = range_of(way)
    return most_choices(found[1]) if found else MOST_VARIANTS


def refusal(dims: Mapping[str, Any], way: Dims, reason: ShapeError) -> ShapeError:
    """The error for a model that is not to be had this way, the last that there is room for."""
    key, sizes = range_of(way) or ("", None)
    assert sizes is not None
    text = (
        f"--dim {key}={sizes}: a range of so many sizes needs a model that computes each sample "
        f"along '{sizes.symbol or names_of(key)[0]}' by itself, and {reason}. "
    )
    each = _way(read(dims), None)
    if each is None:
        return ShapeError(f"{text}Compile it for one size (--shape {key}=SIZE), or a list of sizes")
    return ShapeError(f"{text}Otherwise each size is compiled, and {_too_many(each)}")


def _too_many(way: Dims) -> str:
    """Says how many sizes each dimension has and how many a library may have, and names coarser
    steps with which they fit.
    """
    several = {key: sizes for key, sizes in listed(way).items() if len(sizes) > 1}
    most, found = _most(way), range_of(way)
    counts = " and ".join(f"{key}={dim_text(way[key])} has {len(n)}" for key, n in several.items())
    together = f", {number_of_variants(way)} choices together" if len(several) > 1 else ""
    beside = f" beside {found[0]}={found[1]}" if found else ""
    text = f"{counts} sizes{together}, and one library has at most {most}{beside}: "
    if coarse := _coarser(way, most):
        options = " ".join(f"--dim {key}={sizes}" for key, sizes in coarse.items())
        text += f"take a coarser step, such as {options}, or "
    name = max(several, key=lambda key: len(several[key]))
    return f"{text}give a list of the sizes that you need (--dim {name}=SIZE,SIZE,...)"


def _coarser(way: Dims, most: int) -> dict[str, Range]:
    """The ranges of the way with steps so coarse that their choices fit; empty if none fit."""
    ranges = {key: sizes for key, sizes in way.items() if isinstance(sizes, Range)}
    ranges = {key: sizes for key, sizes in ranges.items() if sizes.made == "each"}
    others = prod(len(sizes) for key, sizes in listed(way).items() if key not in ranges)
    factors = dict.fromkeys(ranges, 1)
    coarse = dict(ranges)
    while others * prod(map(len, coarse.values())) > most:
        key = max(coarse, key=lambda one: len(coarse[one]), default=None)
        if key is None or len(coarse[key]) == 1:
            return {}
        factors[key] += 1
        coarse[key] = _every(ranges[key], factors[key])
    return {key: sizes for key, sizes in coarse.items() if factors[key] > 1}


def _every(sizes: Range, factor: int) -> Range:
    """One of so many of its sizes. The largest stays: what is smaller can be padded to it."""
    step = sizes.step * factor
    low = sizes.high - (sizes.high - sizes.low) // step * step
    return replace(sizes, low=low, step=step if low < sizes.high else 1, weighted=())


def _advice(key: str, sizes: Range) -> str:
    coarse = _every(sizes, -(-len(sizes) // ADVISED))
    return f"Fewer sizes compile sooner: --dim {key}={coarse}, or a list of those that you need"


def notes(way: Dims, reasons: Mapping[str, str]) -> list[str]:
    """A note for each range of which every size is compiled, with a coarser one where these are
    many. ``reasons`` says why a range is not made in parts, by its key in ``dims``.
    """
    each = {key: sizes for key, sizes in way.items() if isinstance(sizes, Range)}
    return [
        f"{key}={sizes} has {len(sizes)} sizes: each is compiled"
        + (f", since {reasons[key]}" if key in reasons else "")
        + (f". {_advice(key, sizes)}" if len(sizes) >= MANY else "")
        for key, sizes in each.items()
        if sizes.made == "each" and len(sizes) > 1
    ]

"""The sizes that a library is compiled for: lists (``--dim batch=1,4,16``), of which each choice is
compiled as a variant, and ranges (``--dim batch=1..64``). The sizes of one range may be sums of
variants at each choice of the lists; the others are lists by another name
(:mod:`gtco.driver.sizes.ways`).
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, SupportsIndex

from gtco.support.errors import OptionError

MOST_VARIANTS = 4096  # in one library
# what to do about a model whose sizes are all fixed, as part of a sentence
EXPORT_OPEN = "export the model again (dynamic_shapes of torch.onnx.export)"
MOST_SIZE = 1 << 20  # the largest size of a dimension with a range
MOST_WEIGHTED = 4  # sizes of a range that get a plan of their own
_PLACE = re.compile(r".+\.\d+")  # an input and an axis
_RANGE = re.compile(r"(\d+)\.\.(\d+)(?::(\d+))?(?:@(\d+(?:,\d+)*))?")


@dataclass(frozen=True)
class Range:
    """The sizes ``low``, ``low + step``, ... ``high`` of a dimension; all of them run from one
    compile. As a text it is ``1..64``, ``4..64:4``, ``1..64@1,8``.

    - ``weighted``: sizes that matter most; the library has a plan of each
    - ``symbol``: the dimension's name for readers; "" is the name that the option has
    - ``made``: how these sizes come about: ``parts``, as sums of a few that are compiled;
      ``each``, every one is compiled; ``either``, in parts where the model allows it

    Raises :class:`OptionError` for sizes that make no range.
    """

    low: int
    high: int
    step: int = 1
    weighted: tuple[int, ...] = ()
    symbol: str = ""
    made: Literal["parts", "each", "either"] = "either"

    def __post_init__(self) -> None:
        for name in ("low", "high", "step"):
            value = getattr(self, name)
            if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
                raise OptionError(f"range {self}: {name} is a whole number of 1 or more")
            object.__setattr__(self, name, int(value))  # numpy's integers become Python's
        object.__setattr__(self, "weighted", tuple(map(int, self.weighted)))
        if self.high > MOST_SIZE:
            raise OptionError(f"range {self}: a size is {MOST_SIZE} at most")
        if self.low > self.high:
            raise OptionError(f"range {self}: the first size is larger than the last")
        if (self.high - self.low) % self.step:
            last = self.high - (self.high - self.low) % self.step
            raise OptionError(
                f"range {self}: {self.high} is off the step of {self.step} from {self.low}; the "
                f"last size before it is {last}"
            )
        if off := [size for size in self.weighted if size not in self]:
            raise OptionError(f"range {self}: {off[0]}, behind the @, is not a size of the range")
        if len(self.weighted) > MOST_WEIGHTED:
            raise OptionError(f"range {self}: {MOST_WEIGHTED} sizes at most come behind the @")

    @staticmethod
    def parse(text: str) -> Range | None:
        """The range that the text is; None if it is none."""
        found = _RANGE.fullmatch(text)
        if found is None:
            return None
        low, high, step, weighted = found.groups()
        sizes = dict.fromkeys(map(int, (weighted or "").split(","))) if weighted else ()
        return Range(int(low), int(high), int(step or 1), tuple(sizes))

    def __contains__(self, size: object) -> bool:
        if not isinstance(size, SupportsIndex):  # numpy's whole numbers are sizes too
            return False
        size = operator.index(size)
        return self.low <= size <= self.high and (size - self.low) % self.step == 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.low, self.high + 1, self.step))

    def __len__(self) -> int:
        return (self.high - self.low) // self.step + 1

    @property
    def words(self) -> str:
        """The sizes in words: ``4 to 64 in steps of 4``."""
        step = f" in steps of {self.step}" if self.step > 1 else ""
        return f"{self.low} to {self.high}{step}"

    @property
    def form(self) -> str:
        """What an option for another range like this looks like."""
        return "LOW..HIGH:STEP" if self.step > 1 else "LOW..HIGH"

    def __str__(self) -> str:
        step = f":{self.step}" if self.step != 1 else ""
        weighted = "@" + ",".join(map(str, self.weighted)) if self.weighted else ""
        return f"{self.low}..{self.high}{step}{weighted}"


def names_of(name: str) -> list[str]:
    """The dimensions that a key of ``dims`` names: ``x.0,y.0`` are two of one size. Names that the
    model's file gives may have commas themselves.
    """
    parts = name.split(",")
    return parts if all(map(_PLACE.fullmatch, parts)) else [name]


def check_dims(dims: Any, shapes: Mapping[str, Any]) -> None:
    """Raises :class:`OptionError` if ``dims`` is not made of lists and ranges of sizes, is about a
    dimension that ``shapes`` gives a size, or asks for more than MOST_VARIANTS variants.
    """
    if not isinstance(dims, Mapping):
        raise OptionError(f"dims={dims!r}: give a dictionary, such as {{'batch': [1, 4, 16]}}")
    seen: set[str] = set()
    lengths: list[int] = []
    for key, given in dims.items():
        if not isinstance(key, str):
            raise OptionError(f"dims: {key!r} is not a name; dimensions are named 'batch' or 'x.0'")
        sizes = _sizes(key, given)
        if isinstance(sizes, Range):
            what = "range"
        else:
            if twice := [size for size in sizes if sizes.count(size) > 1]:
                raise OptionError(f"dims: the list of '{key}' has {twice[0]} twice")
            lengths.append(len(sizes))
            what = "list"
        for name in names_of(key):
            if name in seen:
                raise OptionError(f"dims: '{name}' is given twice")
            if name in shapes:
                raise OptionError(
                    f"'{name}' is given one size (--shape, shapes) and a {what} (--dim, dims): "
                    "leave one of them out"
                )
            seen.add(name)
    if (number := prod(lengths)) > MOST_VARIANTS:
        raise OptionError(
            f"dims: {' x '.join(map(str, lengths))} sizes are {number} variants, and one library "
            f"has at most {MOST_VARIANTS}: give fewer sizes, or a range of one (batch=1..64)"
        )


def sizes_in(text: str) -> list[int] | None:
    """``1,4,16`` as [1, 4, 16]; None if it is no list of sizes of 1 or more."""
    sizes = text.split(",")
    if not all(size.isdecimal() and int(size) >= 1 for size in sizes):
        return None
    return list(map(int, sizes))


def _sizes(key: str, given: Any) -> list[int] | Range:
    if isinstance(given, Range):
        return given
    if isinstance(given, str) and (found := Range.parse(given)):
        return found
    sizes: list[Any]
    if isinstance(given, str):
        sizes = sizes_in(given) or [given]
    else:
        sizes = list(given) if hasattr(given, "__iter__") else [given]
    for size in sizes:
        if isinstance(size, bool) or not hasattr(size, "__index__") or size < 1:
            raise OptionError(
                f"dims[{key!r}]={given!r}: give a list of whole numbers of 1 or more, such as "
                f"{{{key!r}: [1, 4, 16]}}, or a range, such as {{{key!r}: '1..64'}}"
            )
    if not sizes:
        raise OptionError(f"dims[{key!r}] is empty: give one size or more")
    return [int(size) for size in sizes]


def read(dims: Mapping[str, Any]) -> dict[str, list[int] | Range]:
    """The same ``dims``, with every range of several sizes as a :class:`Range` and every other
    entry as a list.
    """
    found = {key: _sizes(key, given) for key, given in dims.items()}
    return {key: [*sizes] if len(sizes) == 1 else sizes for key, sizes in found.items()}


def range_of(dims: Mapping[str, Any]) -> tuple[str, Range] | None:
    """The first dimension that has a range whose sizes may be made in parts, as ``dims`` names it,
    and the range.
    """
    for key, sizes in read(dims).items():
        if isinstance(sizes, Range) and sizes.made != "each":
            return key, sizes
    return None


def listed(dims: Mapping[str, Any]) -> dict[str, list[int]]:
    """The sizes that are compiled one by one, by the key in ``dims``: those of lists, and of
    ranges each of whose sizes is compiled.
    """
    return {
        key: [*sizes]
        for key, sizes in read(dims).items()
        if not isinstance(sizes, Range) or sizes.made == "each"
    }


def names_of_dimensions(dims: Mapping[str, Any]) -> dict[str, list[str]]:
    """The dimensions of the model that each name for readers stands for."""
    found: dict[str, list[str]] = {}
    for key, sizes in read(dims).items():
        if isinstance(sizes, Range) and sizes.symbol:
            found[sizes.symbol] = names_of(key)
        elif isinstance(sizes, Range) and sizes.made != "each":
            found[names_of(key)[0]] = names_of(key)
        else:
            found |= {name: [name] for name in names_of(key)}
    return found


def _names_for_readers(key: str, given: Any) -> list[str]:
    return [given.symbol] if isinstance(given, Range) and given.symbol else names_of(key)


def sizes_of_variants(dims: Mapping[str, Any]) -> list[dict[str, int]]:
    """The sizes of each variant, by the dimension's name for readers: the product of the lists.
    Dimensions of one size are in :func:`fixed_sizes` instead; there is one variant at least.
    """
    several = {key: sizes for key, sizes in listed(dims).items() if len(sizes) > 1}
    return [
        {
            name: size
            for key, size in zip(several, chosen, strict=True)
            for name in _names_for_readers(key, dims[key])
        }
        for chosen in itertools.product(*several.values())
    ]


def number_of_variants(dims: Mapping[str, Any]) -> int:
    """The number of :func:`sizes_of_variants`, which may be too many to be made."""
    return prod(len(sizes) for sizes in listed(dims).values())


def several(dims: Mapping[str, Any]) -> bool:
    """True if a library of these sizes runs more than one shape, or a range in parts."""
    return range_of(dims) is not None or number_of_variants(dims) > 1


def evenly_spread(sizes: Sequence[Mapping[str, int]], most: int) -> list[int]:
    """The numbers of at most so many of the sizes, ascending: the smallest, the largest, and others
    evenly between them, by the product of the dimensions.
    """
    if len(sizes) <= most:
        return list(range(len(sizes)))
    order = sorted(range(len(sizes)), key=lambda n: (prod(sizes[n].values()), n))
    return sorted(order[round(i * (len(sizes) - 1) / (most - 1))] for i in range(most))


def fixed_sizes(dims: Mapping[str, Any]) -> dict[str, int]:
    """The dimensions whose lists have one size, as the model names them."""
    return {name: s[0] for key, s in listed(dims).items() if len(s) == 1 for name in names_of(key)}


def stepped_ranges(dims: Mapping[str, Any]) -> dict[str, Range]:
    """The ranges of several sizes each of which is compiled, by the name for readers."""
    return {
        name: sizes
        for key, sizes in read(dims).items()
        if isinstance(sizes, Range) and sizes.made == "each" and len(sizes) > 1
        for name in _names_for_readers(key, sizes)
    }


def dimensions(sizes: Sequence[Mapping[str, int]]) -> dict[str, list[int]]:
    """The sizes of each dimension in the variants, each once, by the dimension's name."""
    found: dict[str, list[int]] = {}
    for one in sizes:
        for name, size in one.items():
            known = found.setdefault(name, [])
            known += [] if size in known else [size]
    return found


def by_other_sizes(
    every: Sequence[Mapping[str, int]], symbol: str
) -> list[tuple[dict[str, int], list[int]]]:
    """The choices of the sizes beside a range of the dimension ``symbol``, each once, and the
    numbers of the variants that have it. ``every``: the sizes of the variants.
    """
    found: list[tuple[dict[str, int], list[int]]] = []
    for number, sizes in enumerate(every):
        others = {name: size for name, size in sizes.items() if name != symbol}
        numbers = next((n for known, n in found if known == others), None)
        if numbers is None:
            found.append((others, [number]))
        else:
            numbers.append(number)
    return found


def flags(dims: Mapping[str, Any]) -> str:
    """The options that choose one of these sizes for each dimension, as usage shows a choice."""
    return " ".join(f"--dim {name}={_alternatives(sizes)}" for name, sizes in dims.items())


def _alternatives(sizes: Any) -> str:
    return "SIZE" if isinstance(sizes, Range) else "|".join(map(str, sizes))


def dim_text(sizes: Sequence[int] | Range) -> str:
    """The sizes of one dimension, as ``--dim`` takes them."""
    return str(sizes) if isinstance(sizes, Range) else ",".join(map(str, sizes))


def sizes_text(sizes: Mapping[str, int]) -> str:
    """The sizes of a variant, in words."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items())

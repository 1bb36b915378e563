"""A library that runs every size of a range, at each choice of its other sizes: its tensors at a
size, and the parts of a size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from gtco.runtime.plan import TensorSpec
from gtco.support.errors import InputError
from gtco.support.sizes import Range, by_other_sizes, dimensions


def known_sizes(
    metadata: Mapping[str, Any], every: Sequence[Mapping[str, int]]
) -> dict[str, Range | list[int]]:
    """The sizes of each dimension in these variants of a library: the range that it has, where all
    of the range's sizes are there, or a list.
    """
    found: dict[str, Range | list[int]] = {}
    for name, sizes in dimensions(every).items():
        given = metadata.get("ranges", {}).get(name)
        whole = Range(given["low"], given["high"], given["step"]) if given else None
        found[name] = whole if whole and [*whole] == sizes else sizes
    return found


def another_range(name: str, sizes: Range) -> str:
    """The sizes in words, and how to get others; for the end of a message."""
    return (
        f"{sizes.words}. Compile it for another range: gtco compile --dim {name}={sizes.form} (in "
        f"Python: dims={{{name!r}: '{sizes.form}'}})"
    )


@dataclass(frozen=True)
class Parts:
    """The variants as which the sizes of a range are run, at one choice of the other sizes.

    - ``others``: the other sizes, by the dimension's name
    - ``first``: the number of the first of these variants
    - ``sizes``: samples of each, ascending; ``nanoseconds``: its predicted time
    """

    others: Mapping[str, int]
    first: int
    sizes: tuple[int, ...]
    nanoseconds: tuple[int, ...]

    def of(self, size: int) -> list[int]:
        """The variants, by number, that a run of this size goes through, in order: those of least
        price. The last may have more samples than are left. The library finds the same
        (csrc/cover.c).
        """
        best = 0
        for number in range(1, len(self.sizes)):
            if (
                self.nanoseconds[number] / self.sizes[number]
                <= self.nanoseconds[best] / self.sizes[best]
            ):
                best = number
        counts = [0] * len(self.sizes)
        entries = (self.sizes[best] + 1) * self.sizes[-1] + 1
        if size >= entries:
            counts[best] = (size - entries + self.sizes[best]) // self.sizes[best]
            size -= counts[best] * self.sizes[best]
        price: list[float] = [0.0]
        part = [-1]
        for n in range(1, size + 1):
            least, of = inf, -1
            for number, samples in enumerate(self.sizes):
                if samples <= n and price[n - samples] + self.nanoseconds[number] <= least:
                    least, of = price[n - samples] + self.nanoseconds[number], number
            price.append(least)
            part.append(of)
        least, rest, last = price[size], size, -1
        for number, samples in enumerate(self.sizes):
            for n in range(max(0, size - samples + 1), size):
                if price[n] + self.nanoseconds[number] < least:
                    least, rest, last = price[n] + self.nanoseconds[number], n, number
                if not n:  # with others before it, it costs more
                    break
        while rest:
            counts[part[rest]] += 1
            rest -= self.sizes[part[rest]]
        found = [n for n in reversed(range(len(counts))) for _ in range(counts[n])]
        return [self.first + n for n in (*found, *([last] if last >= 0 else []))]


@dataclass(frozen=True)
class Covered:
    """What a library's metadata say of its range.

    - ``symbol``: the dimension's name
    - ``choices``: the parts at each choice of the other sizes
    - ``axes``: where each input and output has its samples, by its name; None for one that is the
      same for all samples
    """

    symbol: str
    sizes: Range
    choices: tuple[Parts, ...]
    axes: Mapping[str, int | None]
    metadata: Mapping[str, Any]

    @staticmethod
    def of(metadata: Mapping[str, Any]) -> Covered | None:
        """The library's range; None if it has none."""
        if (found := metadata.get("range")) is None:
            return None
        variants = [variant["sizes"] for variant in metadata["variants"]]
        return Covered(
            found["symbol"],
            Range(found["low"], found["high"], found["step"]),
            tuple(
                Parts(
                    others,
                    numbers[0],
                    tuple(found["sizes"][n] for n in numbers),
                    tuple(found["nanoseconds"][n] for n in numbers),
                )
                for others, numbers in by_other_sizes(variants, found["symbol"])
            ),
            found["axes"],
            metadata,
        )

    @property
    def others(self) -> list[dict[str, int]]:
        """The choices of the other sizes."""
        return [dict(parts.others) for parts in self.choices]

    @property
    def dims(self) -> dict[str, Range | list[int]]:
        """The sizes of each dimension that has several, by its name."""
        return {self.symbol: self.sizes, **known_sizes(self.metadata, self.others)}

    def only(self, numbers: Sequence[int]) -> Covered:
        """The range at these choices of the other sizes alone."""
        return replace(self, choices=tuple(self.choices[number] for number in numbers))

    @property
    def variants(self) -> list[Mapping[str, Any]]:
        """The variants that are these parts, as metadata describe them."""
        every = self.metadata["variants"]
        numbers = (parts.first + n for parts in self.choices for n in range(len(parts.sizes)))
        return [every[number] for number in numbers]

    @property
    def first(self) -> dict[str, int]:
        """The sizes of the first model that the library runs."""
        return {self.symbol: self.sizes.low, **self.choices[0].others}

    def size_of(self, inputs: Sequence[TensorSpec], shapes: Sequence[tuple[int, ...]]) -> int:
        """The size of the range's dimension in these shapes of the inputs. Raises
        :class:`InputError` for one that the library does not run.
        """
        found: dict[int, str] = {}
        for spec, shape in zip(inputs, shapes, strict=True):
            what = f"input '{spec.name}' has shape {shape}"
            if len(shape) != len(spec.shape):
                raise InputError(
                    f"{what}, of {len(shape)} axes; expected {spec}, of {len(spec.shape)}"
                )
            if (axis := self.axes[spec.name]) is None:
                continue
            if shape[axis] not in self.sizes:
                raise InputError(
                    f"{what}: '{self.symbol}' (axis {axis}) is {shape[axis]}, and this library was "
                    f"compiled for {self.symbol} of {another_range(self.symbol, self.sizes)}"
                )
            found.setdefault(shape[axis], spec.name)
        if len(found) > 1:
            (one, first), (two, second), *_ = found.items()
            raise InputError(
                f"'{self.symbol}' is {one} in input '{first}' and {two} in input '{second}': sizes "
                "of one name are equal in all inputs"
            )
        return next(iter(found), self.sizes.low)

    def chosen(self, number: int, size: int) -> Mapping[str, Any]:
        """The model at this size and choice of the other sizes, as metadata describe a variant."""
        found = self.described(self.choices[number], size)
        return {**found, "steps": found["steps"]()}

    def described(self, parts: Parts, size: int) -> dict[str, Any]:
        """The model at this size of the range and the other sizes of ``parts``, as metadata
        describe a variant, but ``steps`` is a function that collects those of all its parts.
        """
        every = self.metadata["variants"]

        def tensors(kind: str) -> list[dict[str, Any]]:
            found = []
            for given in every[parts.first][kind]:
                shape = list(given["shape"])
                if (axis := self.axes[given["name"]]) is not None:
                    shape[axis] = shape[axis] // parts.sizes[0] * size
                found.append({**given, "shape": shape})
            return found

        def steps() -> list[dict[str, Any]]:
            return [step for number in parts.of(size) for step in every[number]["steps"]]

        return {
            "sizes": {self.symbol: size, **parts.others},
            "inputs": tensors("inputs"),
            "outputs": tensors("outputs"),
            "arena_bytes": self.metadata["arena_bytes"],
            "steps": steps,
        }

"""A library that runs every size of a range: its tensors at a size, and the parts of a size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from gtco.runtime.plan import TensorSpec
from gtco.support.errors import InputError, OptionError
from gtco.support.sizes import Range


@dataclass(frozen=True)
class Covered:
    """What a library's metadata say of its range.

    - ``symbol``: the dimension's name
    - ``parts``: samples of each variant, ascending; ``nanoseconds``: its predicted time
    """

    symbol: str
    sizes: Range
    parts: tuple[int, ...]
    nanoseconds: tuple[int, ...]
    metadata: Mapping[str, Any]

    @staticmethod
    def of(metadata: Mapping[str, Any]) -> Covered | None:
        """The library's range; None if it has none."""
        if (found := metadata.get("range")) is None:
            return None
        return Covered(
            found["symbol"],
            Range(found["low"], found["high"], found["step"]),
            tuple(found["sizes"]),
            tuple(found["nanoseconds"]),
            metadata,
        )

    def chosen(self, dims: Mapping[str, Any], where: object) -> Mapping[str, Any] | None:
        """The model at the size that ``dims`` gives, of the range or of a part; None if they are
        empty. Raises :class:`OptionError` for another dimension or size.
        """
        for name, size in dims.items():
            if name != self.symbol:
                raise OptionError(
                    f"{where} has no dimension {name!r} of several sizes: it has {self.symbol!r}, "
                    f"of {self.sizes}"
                )
            if size not in self.sizes and size not in self.parts:
                raise OptionError(
                    f"{name}={size}: {where} was compiled for {name}={self.sizes}; compile it "
                    "again with a range that has this size (--dim; in Python: dims)"
                )
        if not dims:
            return None
        found = self.described(dims[self.symbol])
        return {**found, "steps": found["steps"]()}

    def size_of(self, inputs: Sequence[TensorSpec], shapes: Sequence[tuple[int, ...]]) -> int:
        """The size of the dimension in these shapes of the inputs. Raises :class:`InputError` for
        shapes that the library does not run.
        """
        found: dict[int, str] = {}
        for spec, shape in zip(inputs, shapes, strict=True):
            what = f"input '{spec.name}' has shape {shape}"
            if len(shape) != len(spec.shape):
                raise InputError(
                    f"{what}, of {len(shape)} axes; expected {spec}, of {len(spec.shape)}"
                )
            for axis, (size, wanted) in enumerate(zip(shape, spec.shape, strict=True)):
                if not isinstance(wanted, str):
                    if size != wanted:
                        raise InputError(
                            f"{what}, expected {spec}: axis {axis} is {wanted} in every call"
                        )
                elif size not in self.sizes:
                    raise InputError(
                        f"{what}: '{self.symbol}' (axis {axis}) is {size}, and this library was "
                        f"compiled for {self._words}. Compile it for another range: gtco compile "
                        f"--dim {self.symbol}=LOW..HIGH (in Python: "
                        f"dims={{{self.symbol!r}: 'LOW..HIGH'}})"
                    )
                else:
                    found.setdefault(size, spec.name)
        if len(found) > 1:
            (one, first), (two, second), *_ = found.items()
            raise InputError(
                f"'{self.symbol}' is {one} in input '{first}' and {two} in input '{second}': sizes "
                "of one name are equal in all inputs"
            )
        return next(iter(found), self.sizes.low)

    @property
    def _words(self) -> str:
        step = f" in steps of {self.sizes.step}" if self.sizes.step > 1 else ""
        return f"{self.symbol} of {self.sizes.low} to {self.sizes.high}{step}"

    def described(self, size: int) -> dict[str, Any]:
        """The model at this size, as metadata describe a variant, but ``steps`` is a function that
        collects those of all parts.
        """
        first = self.metadata["variants"][0]

        def tensors(kind: str) -> list[dict[str, Any]]:
            return [
                {
                    **given,
                    "shape": [
                        of_part // self.parts[0] * size if isinstance(of_all, str) else of_all
                        for of_all, of_part in zip(given["shape"], part["shape"], strict=True)
                    ],
                }
                for given, part in zip(self.metadata[kind], first[kind], strict=True)
            ]

        def steps() -> list[dict[str, Any]]:
            every = self.metadata["variants"]
            return [step for number in self.parts_of(size) for step in every[number]["steps"]]

        return {
            "sizes": {self.symbol: size},
            "inputs": tensors("inputs"),
            "outputs": tensors("outputs"),
            "arena_bytes": self.metadata["arena_bytes"],
            "steps": steps,
        }

    def parts_of(self, size: int) -> list[int]:
        """The variants, by number, that a run of this size goes through, in order: those of least
        price. The library finds the same (csrc/cover.c).
        """
        best = 0
        for number in range(1, len(self.parts)):
            if (
                self.nanoseconds[number] / self.parts[number]
                <= self.nanoseconds[best] / self.parts[best]
            ):
                best = number
        entries = min((self.parts[best] + 1) * self.parts[-1] + 1, self.sizes.high + 1)
        counts = [0] * len(self.parts)
        if size >= entries:
            counts[best] = (size - entries + self.parts[best]) // self.parts[best]
            size -= counts[best] * self.parts[best]
        price: list[float] = [0.0]
        part = [-1]
        for n in range(1, size + 1):
            least, of = inf, -1
            for number, samples in enumerate(self.parts):
                if samples <= n and price[n - samples] + self.nanoseconds[number] <= least:
                    least, of = price[n - samples] + self.nanoseconds[number], number
            price.append(least)
            part.append(of)
        while size:
            counts[part[size]] += 1
            size -= self.parts[part[size]]
        return [n for n in reversed(range(len(counts))) for _ in range(counts[n])]

"""The variants of a library as calls see them, and the choice of the one that a call takes. With a
range (:mod:`gtco.runtime.ranges`) every size of it is one, made when a call first has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import addressof, c_int64, c_void_p
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from gtco.runtime.library import tensor_specs
from gtco.runtime.plan import TensorSpec
from gtco.runtime.ranges import Covered, another_range, known_sizes
from gtco.runtime.tensors import Place, dense, shape_of, to_numpy
from gtco.support.errors import InputError, OptionError
from gtco.support.options import check_whole
from gtco.support.sizes import Range, dim_text, sizes_text


class SizedModel:
    """One variant: its tensors with all sizes, and everything that is the same for all its calls.

    - ``sizes``: by the dimension's name; empty if the library has one shape
    - ``stages``: a dictionary for each step, in order
    - ``parts``: how often a run goes through them, each time on other samples
    - ``shapes``: those of the inputs, as ``gtco_set_shapes`` takes them
    """

    __slots__ = (
        *("inputs", "input_places", "output_places", "outputs", "shapes", "sizes"),
        *("_arrays", "_steps", "parts"),
    )

    def __init__(self, described: Mapping[str, Any]) -> None:
        self.sizes: dict[str, int] = described.get("sizes", {})
        self.parts = len(described.get("parts", (0,)))
        self.inputs = tensor_specs(described, "inputs")
        self.outputs = tensor_specs(described, "outputs")
        # the steps of a size of a range are collected when they are asked for
        self._steps: list[dict[str, Any]] | Callable[[], list[dict[str, Any]]] = described["steps"]
        self.input_places = [Place(spec) for spec in self.inputs]
        self.output_places = [Place(spec) for spec in self.outputs]
        sizes: list[list[Any]] = [list(spec.shape) for spec in self.inputs]
        self._arrays = [(c_int64 * max(1, len(shape)))(*shape) for shape in sizes]
        self.shapes = (c_void_p * max(1, len(sizes)))(*map(addressof, self._arrays))

    @property
    def stages(self) -> list[dict[str, Any]]:
        if not isinstance(self._steps, list):
            self._steps = self._steps()
        return self._steps

    def fit(self, values: Sequence[Any]) -> bool:
        """True if all inputs are arrays that kernels can read as they are."""
        return all(map(Place.fits, self.input_places, values))

    def read(self, values: Sequence[Any]) -> list[np.ndarray]:
        """The inputs as dense arrays. Raises :class:`InputError` if one does not fit."""
        return [dense(array) for array in map(to_numpy, self.inputs, values)]

    def __str__(self) -> str:
        return sizes_text(self.sizes)


def described_variants(metadata: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The variants in a library's metadata. That of a library of one shape is the metadata
    itself.
    """
    found: list[Mapping[str, Any]] = metadata.get("variants") or [metadata]
    return found


def dims_of(metadata: Mapping[str, Any]) -> Mapping[str, list[int] | Range]:
    """The sizes that a library runs, by the dimension's name; empty if it has one shape."""
    if covered := Covered.of(metadata):
        return covered.dims
    return known_sizes(metadata, [one.get("sizes", {}) for one in described_variants(metadata)])


def choose(
    metadata: Mapping[str, Any], dims: Mapping[str, Any], where: object
) -> Mapping[str, Any] | None:
    """The one model of these sizes, of which one may be of a range or of a part; None if ``dims``
    is empty and there are several. Sizes that the other sizes decide may be left out. Raises
    :class:`OptionError` if the library has no model of these sizes, or several.
    """
    found = choose_some(metadata, dims, where)
    if found.covered is None and len(found.every) == 1:
        return found.every[0]
    if not dims:
        return None
    more = ", ".join(f"{name}={dim_text(sizes)}" for name, sizes in found.dims.items())
    raise OptionError(f"{where} has several models of these sizes: give {more}")


@dataclass(frozen=True)
class Chosen:
    """The models of a library that have some sizes.

    - ``every``: these variants, or one model of a size of a range, as metadata describe them
    - ``covered``: the range of which every size runs, if its size is not among those
    - ``dims``: the sizes that are still open, by the dimension's name
    """

    every: Sequence[Mapping[str, Any]]
    covered: Covered | None
    dims: Mapping[str, list[int] | Range]


def choose_some(metadata: Mapping[str, Any], dims: Mapping[str, Any], where: object) -> Chosen:
    """The models that have these sizes. Raises :class:`OptionError` if no model has them."""
    if not isinstance(dims, Mapping):
        raise OptionError(f"dims={dims!r}: give the sizes by name, as in dims={{'batch': 4}}")
    covered, known = Covered.of(metadata), dims_of(metadata)
    for name, size in dims.items():
        if name not in known:
            names = ", ".join(f"{n!r}, of {dim_text(sizes)}" for n, sizes in known.items())
            raise OptionError(
                f"{where} has no dimension {name!r} of several sizes: "
                + (f"it has {names}" if names else "it was compiled for one shape")
            )
        check_whole(f"dims: {name}", size, 1)
        if size not in known[name] and not (covered and name == covered.symbol):
            raise _not_compiled(name, size, known[name], where)
    every = described_variants(metadata)
    choices = covered.others if covered else [one.get("sizes", {}) for one in every]
    found = [
        number
        for number, sizes in enumerate(choices)
        if all(dims.get(name, size) == size for name, size in sizes.items())
    ]
    if not found:
        raise OptionError(f"{where} was not compiled for {sizes_text(dims)} at once")
    left = known_sizes(metadata, [choices[number] for number in found])
    left = {name: sizes for name, sizes in left.items() if len(sizes) > 1}
    if covered is None:
        return Chosen([every[number] for number in found], None, left)
    size = dims.get(covered.symbol)
    if size is None:
        some = covered.only(found)
        return Chosen(some.variants, some, {covered.symbol: covered.sizes, **left})
    found = [n for n in found if size in covered.sizes or size in covered.choices[n].sizes]
    if not found:
        raise _not_compiled(covered.symbol, size, covered.sizes, where)
    return Chosen([covered.chosen(number, size) for number in found], None, left)


def open_sizes(
    specs: Sequence[TensorSpec], every: Sequence[Sequence[TensorSpec]], covered: Covered | None
) -> tuple[TensorSpec, ...]:
    """The tensors of a library that are left when only some of its models are: a size that all of
    these have is a number. ``every``: the tensors of each.
    """
    found = []
    for spec, *same in zip(specs, *every, strict=True):
        kept = covered.axes[spec.name] if covered is not None else None
        shape = tuple(
            name if axis == kept or len({one.shape[axis] for one in same}) > 1 else size
            for axis, (name, size) in enumerate(zip(spec.shape, same[0].shape, strict=True))
        )
        found.append(replace(spec, shape=shape))
    return tuple(found)


def _not_compiled(name: str, size: int, known: Sequence[int] | Range, where: object) -> OptionError:
    wanted = "with a range that has" if isinstance(known, Range) else "with a list that has"
    return OptionError(
        f"{name}={size}: {where} was compiled for {name}={dim_text(known)}; compile it again "
        f"{wanted} this size (--dim; in Python: dims)"
    )


MOST_KEPT = 1024  # sizes of a range whose descriptions are kept


class Variants:
    """The variants of a library, by the shapes of their inputs. ``only``: the variant, if there is
    no choice. ``covered``: the range of sizes that they make together, if there is one. ``dims``:
    the sizes of each dimension.
    """

    def __init__(
        self,
        found: Sequence[SizedModel],
        inputs: Sequence[TensorSpec],
        covered: Covered | None = None,
        dims: Mapping[str, list[int] | Range] = MappingProxyType({}),
    ) -> None:
        self.every, self.inputs, self.covered = tuple(found), inputs, covered
        self.dims = dims
        self.only = found[0] if len(found) == 1 and covered is None else None
        self._by_shapes: dict[tuple[tuple[int | str, ...], ...], SizedModel] = {}
        if covered is None:
            self._by_shapes = {tuple(spec.shape for spec in one.inputs): one for one in found}

    def given(self, args: Sequence[Any]) -> SizedModel | None:
        """The variant of these inputs, if they are arrays of the right shapes."""
        if self.only is not None:
            return self.only
        try:
            return self._by_shapes.get(tuple([value.shape for value in args]))
        except (AttributeError, TypeError):  # no tensors; unhashable shapes
            return None

    def of(self, values: Sequence[Any]) -> SizedModel:
        """The variant whose inputs have the shapes of these values, which are one for each input,
        in order. Raises :class:`InputError` if no variant has them.
        """
        if self.only is not None:
            return self.only
        shapes = tuple(map(shape_of, self.inputs, values))
        if found := self._by_shapes.get(shapes):
            return found
        if self.covered is not None:
            for found in self.at(self.covered.size_of(self.inputs, shapes)):
                if tuple(spec.shape for spec in found.inputs) == shapes:
                    if len(self._by_shapes) >= MOST_KEPT:
                        self._by_shapes.clear()
                    self._by_shapes[shapes] = found
                    return found
        raise InputError(self._refusal(shapes))

    def at(self, size: int) -> Iterator[SizedModel]:
        """The models at a size of the range, one for each choice of the other sizes."""
        assert self.covered is not None
        for parts in self.covered.choices:
            yield SizedModel(self.covered.described(parts, size))

    def _refusal(self, shapes: Sequence[tuple[int, ...]]) -> str:
        for number, (spec, shape) in enumerate(zip(self.inputs, shapes, strict=True)):
            what = f"input '{spec.name}' has shape {shape}"
            if len(shape) != len(spec.shape):
                return f"{what}, of {len(shape)} axes; expected {spec}, of {len(spec.shape)}"
            for axis, (size, name) in enumerate(zip(shape, spec.shape, strict=True)):
                if self.covered is not None and axis == self.covered.axes[spec.name]:
                    continue
                known = list(dict.fromkeys(one.inputs[number].shape[axis] for one in self.every))
                if size in known:
                    continue
                if not isinstance(name, str):
                    return f"{what}, expected {spec}: axis {axis} is {name} in every call"
                is_size = f"{what}: '{name}' (axis {axis}) is {size}"
                if isinstance(whole := self.dims.get(name), Range):
                    return (
                        f"{is_size}, and this library was compiled for {name} of "
                        f"{another_range(name, whole)}"
                    )
                sizes = ", ".join(map(str, known))
                return (
                    f"{is_size}, and this library was compiled for {name} of {sizes}. Add the size "
                    f"to the list: gtco compile --dim {name}="
                    f"{sizes.replace(' ', '')},{size} (in Python: dims={{{name!r}: [{sizes}, "
                    f"{size}]}})"
                )
        every = ", ".join(
            f"'{spec.name}' {shape}" for spec, shape in zip(self.inputs, shapes, strict=True)
        )
        models = [one.sizes for one in self.every]
        if self.covered is not None:
            models = self.covered.others
        return (
            f"the shapes of the inputs do not go together: {every}. This library was compiled for "
            f"{'; '.join(map(sizes_text, models))}: sizes of one name are equal in all inputs"
        )

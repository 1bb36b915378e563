"""``dynamic_shapes`` as torch.export takes it, as the ``dims`` of a compile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gtco.frontend.source import is_onnx, is_program, source_of
from gtco.support.errors import OptionError
from gtco.support.sizes import Range

UNBOUNDED = 1 << 40  # torch's own largest size is near 2^63


def dims_of(model: Any, example_inputs: Any, dynamic_shapes: Any) -> dict[str, Any]:
    """The ``dims`` that ``dynamic_shapes`` means, with dimensions named by input and axis.

    By input, in a dictionary or, for a module, in the order of its arguments: what its axes are, in
    a dictionary by axis or in order. An axis is None (one size), a ``torch.export.Dim`` with a
    least and a largest size, such a ``Dim`` times a number, which is a step (``32 * Dim("w", min=1,
    max=10)``), ``(low, high)`` or ``(low, high, step)``, a list of sizes, or a
    :class:`~gtco.support.sizes.Range`. Axes with one ``Dim`` have one size. A range of another
    dimension than the batch is a list by another name. Raises :class:`OptionError` for anything
    else.
    """
    found: dict[str, Any] = {}
    shared: dict[str, tuple[list[str], Range]] = {}
    roots: dict[str, str] = {}
    for name, axes in _by_input(model, example_inputs, dynamic_shapes).items():
        for axis, given in _by_axis(name, axes).items():
            place = f"{name}.{axis}"
            if given is None:
                continue
            if hasattr(given, "__name__") and hasattr(given, "min"):
                _check_apart(place, given, roots)
                known = shared.setdefault(given.__name__, ([], _of_dim(place, given)))
                known[0].append(place)
            else:
                found[place] = _plain(place, given)
    for places, sizes in shared.values():
        found[",".join(places)] = sizes
    return found


def _check_apart(place: str, dim: Any, roots: dict[str, str]) -> None:
    """Raises :class:`OptionError` for a dimension that follows from one that was seen. ``roots``:
    the name of what was seen, by the name of the ``Dim`` in it.
    """
    name = dim.__name__
    root = dim.root.__name__ if hasattr(dim, "root") else name
    if roots.setdefault(root, name) != name:
        raise OptionError(
            f"dynamic_shapes: {place} is {name}, which follows from another dimension, "
            f"{roots[root]}: export the model (torch.export.export), and give the program"
        )


def _by_input(model: Any, example_inputs: Any, given: Any) -> Mapping[str, Any]:
    if isinstance(given, Mapping):
        return {str(name): axes for name, axes in given.items() if axes is not None}
    source = source_of(model)
    if not isinstance(given, tuple | list) or is_onnx(source) or is_program(source):
        raise OptionError(
            f"dynamic_shapes={given!r}: give a dictionary by the input's name, such as "
            "{'x': {0: Dim('batch', min=1, max=64)}}"
        )
    from gtco.frontend.pytorch.examples import names_of_arguments

    names = names_of_arguments(model, example_inputs)
    if len(given) > len(names):
        raise OptionError(
            f"dynamic_shapes has {len(given)} entries, and example_inputs {len(names)} arguments"
        )
    return {n: axes for n, axes in zip(names, given, strict=False) if axes is not None}


def _by_axis(name: str, axes: Any) -> Mapping[int, Any]:
    if isinstance(axes, Mapping):
        found = dict(axes)
    elif isinstance(axes, Sequence) and not isinstance(axes, str):
        found = dict(enumerate(axes))
    else:
        found = {-1: axes}
    if any(not hasattr(axis, "__index__") or axis < 0 for axis in found):
        raise OptionError(
            f"dynamic_shapes[{name!r}]={axes!r}: give a dictionary by axis, counted from 0, such "
            "as {0: Dim('batch', min=1, max=64)}"
        )
    return {int(axis): given for axis, given in found.items()}


def _of_dim(place: str, dim: Any) -> Range:
    """The range of a ``torch.export.Dim``."""
    name = dim.__name__
    # torch has a number of its own for "unbounded"
    low, high = (
        bound if isinstance(bound, int) else unknown
        for bound, unknown in ((dim.min, 0), (dim.max, UNBOUNDED))
    )
    if high >= UNBOUNDED:
        raise OptionError(
            f"dynamic_shapes: {place} is Dim('{name}') without a largest size, which the library "
            f"has to know: Dim('{name}', min=1, max=64)"
        )
    if hasattr(dim, "root"):  # increasing, and linear; its name is not a name of a dimension
        steps = dim.root.max - dim.root.min
        step = (high - low) // steps if steps else 1
        return Range(low or step, high, step)  # torch's least size is 0, which no tensor has here
    return Range(max(low, 1), high, symbol=name)


def _plain(place: str, given: Any) -> Any:
    if isinstance(given, tuple) and 2 <= len(given) <= 3:
        return Range(*given)
    if isinstance(given, Range | list | str) or hasattr(given, "__index__"):
        return given
    raise OptionError(
        f"dynamic_shapes: {place} is {given!r}: give a torch.export.Dim with min and max, (low, "
        "high), (low, high, step), a list of sizes, or None"
    )

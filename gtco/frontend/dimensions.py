"""The sizes that a model's inputs leave open: their names, and the sizes that the user gives.

An axis without a size has one of two names:

- the name in the file, if axes of different inputs share it (``batch``);
- ``input.axis``, with axes counted from 0, if the file has no name. A negative size, ``?``, an
  empty name, and a name that one input has on two of its axes all mean "unknown". Exporters that
  know no sizes write the same word everywhere, so equal names do not mean equal sizes.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import onnx.shape_inference

from gtco.support.errors import ShapeError, UnknownDimension
from gtco.support.onnx_messages import MAX_ELEMENTS
from gtco.support.sizes import EXPORT_OPEN

Shapes = Mapping[str, int | Sequence[int]]
"""Sizes by dimension (``batch``, ``x.0``), and whole shapes by input."""

_UNNAMED = frozenset({"", "?", "-1", "None"})  # written by exporters that know no name


@dataclass(frozen=True)
class OpenAxis:
    """An axis of an input that has no size in the file."""

    dim: Any  # the dimension in the message
    input: str
    axis: int
    name: str  # the name in flags and errors
    written: str

    @property
    def place(self) -> str:
        return f"{self.input}.{self.axis}"


def inputs_of(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """The graph's inputs but its own weights, which old files list there too."""
    weights = {tensor.name for tensor in graph.initializer}
    return [value for value in graph.input if value.name not in weights]


def set_sizes(
    inputs: Sequence[onnx.ValueInfoProto], shapes: Shapes, *, symbols: bool = False
) -> dict[str, int] | None:
    """Writes a size into every open axis of the inputs. With ``symbols`` the names are symbols of
    torch's, so axes of one name have one size, also within an input.

    The most exact size wins: that of ``input.axis``, then the input's whole shape, then that of the
    dimension's name, then the size of another axis of that name. Returns the sizes by the names in
    the file; None if no axis was open. Raises :class:`ShapeError` for sizes that are missing, that
    belong to nothing, or that differ from those in the file.
    """
    shapes = {name: _whole_numbers(given) for name, given in shapes.items()}
    whole = _whole_shapes(inputs, shapes)
    _require_shapes(inputs, whole)
    for value in inputs:
        if value.name in whole:
            _require_fit(value, whole[value.name])
    found = open_axes(inputs, symbols)
    written = {axis.written for axis in found} - _UNNAMED
    _require_known(inputs, found, written, shapes, whole)

    def explicit(axis: OpenAxis) -> int | None:
        if axis.place in shapes:
            return _size(shapes, axis.place)
        return whole[axis.input][axis.axis] if axis.input in whole else None

    by_name = {name: _size(shapes, name) for name in written if name in shapes}
    for name in written - set(by_name):
        told = {size for axis in found if axis.name == name and (size := explicit(axis))}
        if len(told) == 1:
            by_name[name] = told.pop()
    missing = []
    for axis in found:
        size = explicit(axis) or by_name.get(axis.written)
        if size is None:
            missing.append(axis)
        else:
            axis.dim.dim_value = size
    if missing:
        raise ShapeError(_ask(inputs, missing))
    for value in inputs:
        sizes = _sizes(value)
        if math.prod(sizes) > MAX_ELEMENTS:
            raise ShapeError(
                f"input '{value.name}' would have {math.prod(sizes):.1e} elements "
                f"({sizes}): give smaller sizes, or export the model again"
            )
    return by_name if found else None


def open_axes(inputs: Sequence[onnx.ValueInfoProto], symbols: bool) -> list[OpenAxis]:
    """Every axis without a size, in order. Raises :class:`ShapeError` for one of size 0."""
    unknown = set(_UNNAMED)
    for value in () if symbols else inputs:
        names = Counter(_written(dim) for dim in value.type.tensor_type.shape.dim)
        unknown |= {name for name, count in names.items() if count > 1}
    found = []
    for value in inputs:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.HasField("dim_value") and dim.dim_value > 0:
                continue
            if dim.HasField("dim_value") and dim.dim_value == 0:
                raise ShapeError(
                    f"input '{value.name}' is empty: axis {axis} has size 0. Give an example with "
                    "sizes of 1 or more, or export the model with them"
                )
            written = _written(dim)
            name = f"{value.name}.{axis}" if written in unknown else written
            found.append(OpenAxis(dim, value.name, axis, name, written))
    return found


def infer_outputs(model: onnx.ModelProto, sizes: Mapping[str, int] | None) -> set[str]:
    """Gives each output the type and the shape that ONNX's checker and onnxsim need, and returns
    the names of those whose shape is made up.

    ``sizes`` are the inputs' sizes by name; None if the file has all sizes. Types and shapes that
    an output lacks are inferred. ONNX infers nothing after an operator that it does not know; there
    they are made up, because only the name of an output is read later.
    """
    bare = False
    for value in model.graph.output:
        if not value.HasField("type") or value.type.HasField("tensor_type"):
            tensor = value.type.tensor_type
            for dim in tensor.shape.dim if tensor.HasField("shape") else ():
                if sizes is not None or dim.dim_value < 0:
                    _set_output(dim, sizes or {})
            bare = bare or not (tensor.HasField("shape") and tensor.elem_type)
    if not bare:
        return set()
    made_up = set()
    try:
        inferred = onnx.shape_inference.infer_shapes(model).graph.output
    except Exception:  # the model is wrong: the checker that runs next says where
        inferred = model.graph.output
    for value, known in zip(model.graph.output, inferred, strict=True):
        if not value.HasField("type") or value.type.HasField("tensor_type"):
            value.type.CopyFrom(known.type)
            tensor = value.type.tensor_type
            tensor.elem_type = tensor.elem_type or onnx.TensorProto.FLOAT
            if not tensor.HasField("shape"):
                made_up.add(value.name)
            tensor.shape.SetInParent()
    return made_up


def _set_output(dim: Any, sizes: Mapping[str, int]) -> None:
    if dim.dim_value > 0:
        return
    size = sizes.get(dim.dim_param)
    dim.Clear()
    if size is not None:
        dim.dim_value = size


def _written(dim: Any) -> str:
    """The dimension's name in the file."""
    return str(dim.dim_param).strip() if not dim.HasField("dim_value") else ""


def _sizes(value: onnx.ValueInfoProto) -> list[int]:
    return [int(dim.dim_value) for dim in value.type.tensor_type.shape.dim]


def _size(shapes: Shapes, name: str) -> int:
    size = shapes[name]
    if not isinstance(size, int):
        raise ShapeError(
            f"'{name}' is a dimension, and {_by_x(size)} is a whole shape: give one size "
            f"({_flag(name, 'SIZE')})"
        )
    if size < 1:
        raise ShapeError(f"{_flag(name, size)}: a size is 1 or more")
    return size


def _whole_shapes(
    inputs: Sequence[onnx.ValueInfoProto], shapes: Shapes
) -> dict[str, tuple[int, ...]]:
    """The shapes that are given for whole inputs. A single number is the shape of an input of one
    axis. If a dimension has the same name, the number is for the dimension.
    """
    names = {value.name for value in inputs}
    dims = {_written(dim) for value in inputs for dim in value.type.tensor_type.shape.dim}
    found: dict[str, tuple[int, ...]] = {}
    for name, given in shapes.items():
        if name not in names or (isinstance(given, int) and name in dims):
            continue
        found[name] = (given,) if isinstance(given, int) else tuple(given)
        if min(found[name], default=1) < 1:
            raise ShapeError(f"{_flag(name, _by_x(found[name]))}: a size is 1 or more")
    return found


def _require_shapes(
    inputs: Sequence[onnx.ValueInfoProto], whole: Mapping[str, tuple[int, ...]]
) -> None:
    """Gives each input without a shape, even without a rank, the axes of the whole shape that the
    user gave for it.
    """
    bare = [value for value in inputs if not value.type.tensor_type.HasField("shape")]
    missing = [value.name for value in bare if value.name not in whole]
    if missing:
        one = len(missing) == 1
        flags = " ".join(_flag(name, "SIZExSIZE...") for name in missing)
        raise ShapeError(
            f"{'input' if one else 'inputs'} {', '.join(map(repr, missing))} "
            f"{'has' if one else 'have'} no shape at all, not even a rank. Give "
            f"{'it' if one else 'each'} whole, as 1x3x224x224: {flags}"
        )
    for value in bare:
        for _ in whole[value.name]:
            value.type.tensor_type.shape.dim.add()
        value.type.tensor_type.shape.SetInParent()


def _require_fit(value: onnx.ValueInfoProto, given: tuple[int, ...]) -> None:
    dims = value.type.tensor_type.shape.dim
    known = [str(d.dim_value) if d.dim_value > 0 else (_written(d) or "?") for d in dims]
    if len(given) != len(dims) or any(
        d.dim_value > 0 and d.dim_value != size for d, size in zip(dims, given, strict=False)
    ):
        raise ShapeError(
            f"{_flag(value.name, _by_x(given))}: the model's input '{value.name}' is "
            f"[{', '.join(known)}], of {len(dims)} axes; sizes that the file states cannot be "
            "changed here, only by a new export"
        )


def _require_known(
    inputs: Sequence[onnx.ValueInfoProto],
    found: Sequence[OpenAxis],
    written: set[str],
    shapes: Shapes,
    whole: Mapping[str, object],
) -> None:
    """Raises :class:`ShapeError` for a name that is neither a dimension nor an input."""
    fixed = {
        f"{value.name}.{axis}": size for value in inputs for axis, size in enumerate(_sizes(value))
    }
    places = {axis.place for axis in found}
    unknown = []
    for name in shapes:
        if name in whole or name in written or name in places:
            continue
        if name not in fixed:
            unknown.append(name)
        elif fixed[name] != shapes[name]:
            raise ShapeError(
                f"{name}={_by_x(shapes[name])}: the file states {fixed[name]} for this axis; "
                "export the model again for another size"
            )
    if unknown:
        names = dict.fromkeys(axis.name for axis in found)
        raise UnknownDimension(
            f"the model has no symbolic dimension and no input named "
            f"{', '.join(map(repr, unknown))}. Symbolic dimensions: "
            f"{', '.join(map(repr, names)) or 'none'}. Inputs: "
            f"{', '.join(repr(value.name) for value in inputs) or 'none'}. To leave a size open, "
            f"{EXPORT_OPEN}"
        )


def _ask(inputs: Sequence[onnx.ValueInfoProto], missing: Sequence[OpenAxis]) -> str:
    """The error that asks for sizes, with the flags as they are typed."""
    where: dict[str, list[str]] = {}
    for axis in missing:
        where.setdefault(axis.name, []).append(f"{axis.input} axis {axis.axis}")
    listed = "; ".join(f"'{name}' ({', '.join(axes)})" for name, axes in where.items())

    def example(axis: OpenAxis) -> int | str:
        batch = "batch" in axis.name.lower() or (axis.axis == 0 and axis.name == axis.place)
        return 1 if batch else "SIZE"

    flags = " ".join(_flag(*pair) for pair in {a.name: example(a) for a in missing}.items())
    first = next(value for value in inputs if value.name == missing[0].input)
    examples: dict[int, int | str] = {a.axis: example(a) for a in missing if a.input == first.name}
    whole = [examples.get(axis, size) for axis, size in enumerate(_sizes(first))]
    shared = {a.written: a.input for a in missing if a.written not in _UNNAMED | {a.name}}
    alike = "".join(
        f" '{name}' names several axes of '{tensor}', whose sizes may differ: "
        f"{_flag(name, 'SIZE')} gives all of them one size."
        for name, tensor in shared.items()
    )
    return (
        f"symbolic dimensions without a value: {listed}. Give each a size: {flags} "
        f"(in Python: shapes={{{', '.join(f'{name!r}: ...' for name in where)}}}).{alike} An "
        f"input's whole shape also works: {_flag(first.name, whole)}. One library can have several "
        f"sizes: --dim {shlex.quote(missing[0].name)}=1,4,16"
    )


def _whole_numbers(given: Any) -> int | tuple[int, ...]:
    return tuple(int(size) for size in given) if hasattr(given, "__len__") else int(given)


def _flag(name: str, size: object) -> str:
    return f"--shape {shlex.quote(name)}={_by_x(size)}"


def _by_x(size: object) -> str:
    return "x".join(map(str, size)) if isinstance(size, tuple | list) else str(size)

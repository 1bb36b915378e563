"""Example inputs of a PyTorch module, brought to other sizes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from gtco.support.errors import OptionError
from gtco.support.nested import call_arguments


def resized(module: Any, example_inputs: Any, sizes: Mapping[str, int]) -> Any:
    """The example inputs with these sizes, by input and axis (``{"x.0": 4}``): arguments for
    another compile of the module. A tensor repeats its elements along an axis that grows, so
    indices and masks stay in their range. Raises OptionError for a name that is not an argument's
    tensor and one of its axes.
    """
    args, kwargs = call_arguments(example_inputs)
    values = dict(zip(_names(module, len(args)), args, strict=True)) | kwargs
    for place, size in sizes.items():
        name, _, axis = place.rpartition(".")
        tensor = values.get(name)
        if tensor is None or not hasattr(tensor, "__dlpack__") or not axis.isdecimal():
            known = [name for name, value in values.items() if hasattr(value, "__dlpack__")]
            raise OptionError(
                f"dims: {place!r} is not an input of the module with an axis, such as "
                f"{(known or ['x'])[0] + '.0'!r}; its tensors are {', '.join(known) or 'none'}"
            )
        if int(axis) >= len(tensor.shape) or tensor.shape[int(axis)] < 1:
            raise OptionError(
                f"dims: {place!r}: '{name}' has the shape {tuple(tensor.shape)} in example_inputs, "
                "without such an axis of size 1 or more; axes are counted from 0"
            )
        values[name] = _resized(tensor, int(axis), size)
    if kwargs:
        return values
    return tuple(values.values())


def names_of_arguments(module: Any, example_inputs: Any) -> list[str]:
    """The names of the module's arguments that the example inputs give."""
    args, kwargs = call_arguments(example_inputs)
    return [*_names(module, len(args)), *kwargs]


def _names(module: Any, count: int) -> list[str]:
    """The names of the first arguments of the module's forward. Those of ``*rest`` are ``rest_0``,
    ``rest_1``, as the inputs of the program are called.
    """
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    found = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    return [*found, *(f"{rest}_{n}" for n in range(max(0, count - len(found))))][:count]


def _resized(tensor: Any, axis: int, size: int) -> Any:
    import torch

    whole = torch.as_tensor(tensor)
    index = torch.arange(size, device=whole.device) % whole.shape[axis]
    return whole.index_select(axis, index)

"""The arguments and results of a PyTorch module: tensors inside other values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any


def call_arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``(args, kwargs)`` of the call that ``example_inputs`` describes. A mapping is keyword
    arguments, a list or tuple is positional arguments, any other value except None is the only
    argument.
    """
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, list | tuple):
        return tuple(example_inputs), {}
    return (() if example_inputs is None else (example_inputs,)), {}


def tensors(value: Any) -> list[Any]:
    """The tensors of a module's output, in order: those in sequences, mappings and dataclasses.

    None, numbers and strings are not outputs.
    """
    return [tensor for _, tensor in named_tensors(value)]


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Each tensor with its name: the keys that lead to it, joined by underscores."""
    if hasattr(value, "__dlpack__"):
        yield name, value
        return
    items: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        items = list(value.items())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    elif hasattr(value, "_fields"):  # a named tuple
        items = list(zip(value._fields, value, strict=True))
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    for key, item in items:
        yield from named_tensors(item, f"{name}_{key}" if name else str(key))

"""What rules for operators take and ask: the arguments of a node, as TVM's importer has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import tvm

Attributes = Mapping[str, Any]
# (builder, inputs, attributes) -> Relax for the node's outputs; None leaves it to TVM's importer
Override = Callable[[Any, Sequence[Any], Attributes], Any]


class Refused(Exception):
    """A use of an operator that would be compiled wrongly; the message says which."""


def outputs_of(attrs: Attributes) -> int:
    """The number of outputs that the node has."""
    return int(attrs["tvm_custom"]["num_outputs"])


def text_of(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def shape_of(tensor: Any) -> list[int]:
    return [int(dim) for dim in tensor.ty.shape]


def padded(inputs: Sequence[Any], count: int) -> list[Any]:
    """The inputs, ``count`` of them; None for each that is left out."""
    return [inputs[i] if i < len(inputs) else None for i in range(count)]


def constant_of(tensor: Any) -> numpy.ndarray | None:
    """The value of a constant; None for a tensor that is known only at run time."""
    return tensor.value.numpy() if isinstance(tensor, tvm.ir.expr.GenericConst) else None

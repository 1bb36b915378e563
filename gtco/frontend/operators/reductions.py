"""Reductions over no axes, as ``noop_with_empty_axes`` asks for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import relax

# What a reduction over no axes still computes from each element.
_OF_ONE: dict[str, Callable[[Any], Any]] = {
    "ReduceL1": relax.op.abs,
    "ReduceL2": relax.op.abs,
    "ReduceLogSum": relax.op.log,
    "ReduceSumSquare": lambda x: relax.op.multiply(x, x),
}


def _of_no_axes(kind: str) -> Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]:
    """The rule of a reduction that does more than sum. Over no axes the rest is still done, where
    TVM gives the input itself. None where there are axes, or where all of them are meant.
    """

    def rule(builder: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
        axes = inputs[1] if len(inputs) > 1 else None
        given = axes is not None and int(axes.ty.shape[0]) > 0
        if given or not attrs.get("noop_with_empty_axes", 0):
            return None
        return builder.emit(_OF_ONE[kind](inputs[0]))

    return rule


RULES = {kind: _of_no_axes(kind) for kind in _OF_ONE}

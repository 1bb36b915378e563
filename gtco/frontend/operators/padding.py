"""The padding of convolutions and poolings whose attribute ``auto_pad`` asks for it.

TVM 0.27 pads a convolution's input by loops, which only the fallback can compile. Of poolings it
makes outputs that are too small for SAME_LOWER, and it leaves out dilations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_SAME = ("SAME_UPPER", "SAME_LOWER")
_PADDED = frozenset(["Conv", "MaxPool", "AveragePool", "LpPool"])


def auto_pad(attrs: Mapping[str, Any]) -> str:
    mode = attrs.get("auto_pad", b"NOTSET")
    return mode.decode() if isinstance(mode, bytes) else str(mode)


def padding(
    sizes: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilation: Sequence[int],
    attrs: Mapping[str, Any],
) -> list[int]:
    """The padding before all axes, then after them. SAME makes outputs of ``ceil(size / stride)``,
    as ONNX's Conv defines it.
    """
    mode = auto_pad(attrs)
    if mode not in _SAME:
        given = attrs.get("pads", [0] * (2 * len(sizes))) if mode == "NOTSET" else None
        return [int(p) for p in given or [0] * (2 * len(sizes))]
    before, after = [], []
    for n, k, s, d in zip(sizes, kernel, strides, dilation, strict=True):
        total = max(0, (-(-n // s) - 1) * s + (k - 1) * d + 1 - n)
        small, large = total // 2, total - total // 2
        before.append(small if mode == "SAME_UPPER" else large)
        after.append(large if mode == "SAME_UPPER" else small)
    return [*before, *after]


def with_pads(kind: str, inputs: Sequence[Any], attrs: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a node of this kind, with ``pads`` instead of an ``auto_pad`` of SAME."""
    if kind not in _PADDED or auto_pad(attrs) not in _SAME:
        return attrs
    sizes = [int(dim) for dim in inputs[0].ty.shape][2:]
    kernel = attrs.get("kernel_shape")
    if kernel is None:
        kernel = [int(dim) for dim in inputs[1].ty.shape][2:]
    ones = [1] * len(sizes)
    strides, dilation = attrs.get("strides", ones), attrs.get("dilations", ones)
    kept = {name: value for name, value in attrs.items() if name != "auto_pad"}
    return kept | {"pads": padding(sizes, kernel, strides, dilation, attrs)}

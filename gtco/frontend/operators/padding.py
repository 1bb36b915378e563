"""The windows of convolutions and poolings, written so that TVM makes what ONNX defines.

- ``auto_pad``: TVM 0.27 pads a convolution's input by loops, which only the fallback can compile.
  Of poolings it makes outputs that are too small for SAME_LOWER, and it leaves out dilations.
- A pooling's window that is larger than the padded image: ONNX divides a negative number by the
  stride and rounds towards 0, so there is one window if less than a stride is missing. Its taps
  outside of the padded image do not count, except in a mean that counts padding of an opset before
  19. TVM makes no window.
- LpPool with ``ceil_mode``: TVM makes a sum from the mean of the taps inside the padded image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

_SAME = ("SAME_UPPER", "SAME_LOWER")
_POOLS = frozenset(["MaxPool", "AveragePool", "LpPool"])
_PADDED = _POOLS | {"Conv"}


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


def with_windows(
    kind: str, inputs: Sequence[Any], attrs: dict[str, Any], opset: int
) -> dict[str, Any]:
    """The attributes of a node of this kind, such that TVM makes its windows as ONNX does: with
    ``pads`` instead of an ``auto_pad`` of SAME, and with the taps of a pooling's only window cut at
    the end of the padded image.
    """
    if kind not in _PADDED:
        return attrs
    sizes = [int(dim) for dim in inputs[0].ty.shape][2:]
    kernel = attrs.get("kernel_shape")
    if kernel is None:
        kernel = [int(dim) for dim in inputs[1].ty.shape][2:]
    ones = [1] * len(sizes)
    strides, dilation = attrs.get("strides", ones), attrs.get("dilations", ones)
    pads = padding(sizes, kernel, strides, dilation, attrs)
    if auto_pad(attrs) in _SAME:
        attrs = {name: value for name, value in attrs.items() if name != "auto_pad"}
        attrs["pads"] = pads
    if kind not in _POOLS or 0 in sizes:
        return attrs
    axes = _axes(sizes, kernel, strides, dilation, pads)
    if not attrs.get("ceil_mode", 0):
        if all(axis.rest >= 0 for axis in axes):
            return attrs
        if opset < 19 and attrs.get("count_include_pad", 0):
            attrs = {name: value for name, value in attrs.items() if name != "auto_pad"}
            return attrs | {"pads": [*pads[: len(sizes)], *(a.padded_to_one() for a in axes)]}
        axes = [axis.cut() for axis in axes]
        return attrs | {
            "kernel_shape": [axis.kernel for axis in axes],
            "strides": [axis.stride for axis in axes],
        }
    if kind != "LpPool":
        return attrs
    kept = {name: value for name, value in attrs.items() if name not in ("auto_pad", "ceil_mode")}
    return kept | {"pads": whole_windows(sizes, attrs)}


def whole_windows(sizes: Sequence[int], attrs: Mapping[str, Any]) -> list[int]:
    """The padding of a pooling, before all axes, then after them, with which as many windows fit as
    ``ceil_mode`` asks for.
    """
    ones = [1] * len(sizes)
    steps = attrs["kernel_shape"], attrs.get("strides", ones), attrs.get("dilations", ones)
    axes = _axes(sizes, *steps, padding(sizes, *steps, attrs))
    return [*(axis.before for axis in axes), *(axis.padded_to_ceil() for axis in axes)]


def _axes(
    sizes: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilation: Sequence[int],
    pads: Sequence[int],
) -> list[_Axis]:
    number = len(sizes)
    parts = zip(sizes, kernel, strides, dilation, pads[:number], pads[number:], strict=True)
    return [_Axis(*part) for part in parts]


@dataclass(frozen=True)
class _Axis:
    """A pooling along one axis of an image; ``before`` and ``after`` are its padding."""

    size: int
    kernel: int
    stride: int
    dilation: int
    before: int
    after: int

    @property
    def padded(self) -> int:
        return self.before + self.size + self.after

    @property
    def reach(self) -> int:
        """The elements from the first tap of a window to its last."""
        return (self.kernel - 1) * self.dilation + 1

    @property
    def rest(self) -> int:
        """The elements of the padded image after the first window; negative if it is too small."""
        return self.padded - self.reach

    def cut(self) -> _Axis:
        """The axis without taps outside of the padded image, if it has one window, and this is
        larger than the padded image.
        """
        if not -self.stride < self.rest < 0:
            return self
        kernel = -(-self.padded // self.dilation)
        return replace(self, kernel=kernel, stride=max(self.stride, self.padded))

    def padded_to_one(self) -> int:
        """The padding after the axis, with which one window fits that :meth:`cut` would cut."""
        return self.after - self.rest if -self.stride < self.rest < 0 else self.after

    def padded_to_ceil(self) -> int:
        """The padding after the axis with which as many windows fit as ``ceil_mode`` asks for. Each
        begins before the padding after the axis.
        """
        windows = -(-self.rest // self.stride) + 1
        if (windows - 1) * self.stride >= self.before + self.size:
            windows -= 1
        end = (windows - 1) * self.stride + self.reach
        return max(self.after, end - self.before - self.size)

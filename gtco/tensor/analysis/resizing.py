"""The positions that resizing reads, in whole numbers."""

from __future__ import annotations

from math import gcd


def places(size: int, out: int, coordinates: str) -> tuple[int, int, int]:
    """(times, plus, over): output position ``i`` of ``out`` is at ``(i * times + plus) / over`` of
    ``size``. This is ONNX's Resize by sizes, with its names.
    """
    match coordinates:
        case "align_corners":
            return (size - 1, 0, out - 1) if out > 1 else (0, 0, 1)
        case "asymmetric":
            return size, 0, out
        case "pytorch_half_pixel" if out == 1:
            return 0, 0, 1
        case "half_pixel" | "pytorch_half_pixel":
            return 2 * size, size - out, 2 * out
    raise AssertionError(coordinates)


def nearest(size: int, out: int, coordinates: str, rounding: str) -> tuple[int, int, int]:
    """(times, plus, over): output position ``i`` of ``out`` copies position ``(i * times + plus) //
    over`` of ``size``, cut to the axis. ``rounding`` has ONNX's names (``round`` is
    ``round_prefer_floor``).
    """
    times, plus, over = places(size, out, coordinates)
    match rounding:
        case "floor":
            pass
        case "ceil":
            plus += over - 1
        case "round_prefer_ceil":
            times, plus, over = 2 * times, 2 * plus + over, 2 * over
        case _:  # the least whole number that is not below the position minus a half
            times, plus, over = 2 * times, 2 * plus + over - 1, 2 * over
    common = gcd(times, over)
    # the part of plus that is lost is less than the step between two positions
    return times // common, plus // common, over // common

"""What an access of a warp costs by the places that its 32 lanes name.

L2 delivers sectors of 32 bytes, and L1 looks up one line of 128 bytes a clock. So lanes that read
neighbours of two bytes move 64 bytes and touch one line. Lanes whose two bytes lie far apart move
32 sectors, 16 times as many bytes, and touch 32 lines, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import tvm
from tvm import tirx

from gtco.machine.gpu import WARP
from gtco.tensor.analysis.probe import Probe, depends_on
from gtco.tensor.analysis.scope import Expr
from gtco.tensor.stage import ITEM_BYTES

SECTOR, LINE = 32, 128  # bytes
SCATTERED = 4  # times the bytes that its lanes use: a warp that moves more has none left for others
# Integer operations: a division by a number that is not a power of two is a multiplication whose
# upper half is taken, a shift and a correction; a remainder is a product and a difference more.
DIVISION, REMAINDER = 3, 5
# Operands of nodes of TIR that compute
OPERANDS = ("a", "b", "condition", "true_value", "false_value")


@dataclass(frozen=True)
class Touched:
    """The mean numbers of ``sectors`` and ``lines`` of an access of a whole warp."""

    sectors: float
    lines: float

    def bytes(self, lanes: float) -> float:
        """Bytes that L2 delivers for accesses of so many lanes."""
        return lanes / WARP * self.sectors * SECTOR

    def scattered(self, used: int) -> bool:
        """True if L1 cannot serve the warp's other accesses from the sectors of this one, of which
        each lane uses so many bytes.
        """
        return self.sectors * SECTOR > SCATTERED * WARP * used

    def clocks(self, lanes: float) -> float:
        """Lines that accesses of so many lanes touch."""
        return lanes / WARP * self.lines


def touched(places: Iterable[int], width: int) -> Touched:
    """What one access touches whose lanes name ``width`` bytes from each of these places on."""
    first = list(places)
    ends = [(at, at + width - 1) for at in first]
    sectors = {s for low, high in ends for s in range(low // SECTOR, high // SECTOR + 1)}
    lines = {s * SECTOR // LINE for s in sectors}
    scale = WARP / len(first)
    return Touched(len(sectors) * scale, len(lines) * scale)


def along(axes: Sequence[tuple[int, float | None]], width: int) -> Touched:
    """What an access touches whose lanes run along axes, the fastest first. Each axis has an extent
    and the mean bytes from one position to the next; None if places follow no rule, which counts as
    far apart.
    """
    lanes = min(WARP, max(1, prod(extent for extent, _ in axes)))
    places = []
    for lane in range(lanes):
        at, rest = 0, lane
        for number, (extent, step) in enumerate(axes):
            last = number == len(axes) - 1
            position = rest if last else rest % extent
            rest //= extent
            at += int(position * (LINE if step is None else abs(step)))
        places.append(at)
    return touched(places, width)


@dataclass(frozen=True)
class Access:
    """A load or a store of elements of ``item`` bytes, and the mean bytes from one position to the
    next along some axes (None if places follow no rule).
    """

    item: int
    steps: tuple[float | None, ...]

    def touched(self, axes: Sequence[tuple[int, int, int]], vector: int) -> Touched:
        """What a warp's access of ``vector`` neighbours a lane touches. Lanes run along ``axes``,
        the fastest first: each says which of the steps it takes, its extent, and the positions from
        lane to lane.
        """
        taken = []
        for number, extent, times in axes:
            step = self.steps[number]
            taken.append((extent, None if step is None else step * times))
        return along(taken, vector * self.item)


def accesses(probe: Probe, ways: Sequence[tuple[Expr, float]], begin: int = 0) -> list[Access]:
    """The accesses that a probe has recorded from ``begin`` on. ``ways``: the variable of an axis,
    and the mean positions by which it moves for one of the axis.
    """
    strides, found = [probe.strides(variable) for variable, _ in ways], []
    for number, (tensor, _) in enumerate(probe.loads):
        if number < begin or not tensor:  # no tensor: a padding's constant
            continue
        item = ITEM_BYTES[probe.stage.types[tensor].dtype]
        steps: list[float | None] = []
        for (_, times), of_way in zip(ways, strides, strict=True):
            stride = of_way[number]
            steps.append(None if stride is None else stride * item * times)
        found.append(Access(item, tuple(steps)))
    return found


def lines_and_traffic(
    made: Iterable[tuple[Access, float]], axes: Sequence[tuple[int, int, int]], vector: int
) -> tuple[float, float]:
    """Lines that accesses touch, each made by so many lanes, and bytes that L2 delivers for the
    scattered ones alone: those of all others depend on what L1 keeps.
    """
    lines = traffic = 0.0
    for access, lanes in made:
        found = access.touched(axes, vector)
        lines += found.clocks(lanes)
        if found.scattered(vector * access.item):
            traffic += found.bytes(lanes)
    return lines, traffic


def operations(expressions: Iterable[Expr], varying: Expr | None = None) -> int:
    """Integer operations that compute these expressions; parts that occur again count once. With
    ``varying`` only those that depend on this variable count.
    """
    seen: set[str] = set()
    total, left = 0, [x for x in expressions if isinstance(x, tvm.ir.Expr)]
    while left:
        node = left.pop()
        parts = [getattr(node, name) for name in OPERANDS if hasattr(node, name)]
        if not parts or (name := str(node)) in seen:
            continue
        if varying is not None and not depends_on(node, varying):
            continue
        seen.add(name)
        total += _operations(node)
        left += parts
    return total


def _operations(node: Expr) -> int:
    divides = isinstance(node, tirx.FloorDiv | tirx.Div)
    if divides or isinstance(node, tirx.FloorMod | tirx.Mod):
        by = int(node.b) if isinstance(node.b, tirx.IntImm) else 0
        if by > 0 and by & (by - 1) == 0:
            return 1
        return DIVISION if divides else REMAINDER
    return 1

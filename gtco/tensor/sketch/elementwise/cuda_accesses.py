"""What the warps of an element-wise kernel move, by the places that their lanes read."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from gtco.machine.gpu import WARP
from gtco.tensor.analysis.probe import Probe, depends_on
from gtco.tensor.analysis.scope import Expr
from gtco.tensor.sketch.shared.cuda_lanes import LINE, Touched, touched
from gtco.tensor.stage import ITEM_BYTES, Stage

At = Callable[[Expr, Expr], Sequence[Expr]]  # (row, position in it) -> the output's index


@dataclass(frozen=True)
class Moved:
    """What an element-wise kernel moves.

    - ``bytes``: those that warps ask L2 for;
    - ``lines``: of L1, for loads whose neighbours lie apart;
    - ``in_order``: True if no load is scattered.
    """

    bytes: float
    lines: float
    in_order: bool


def moved(stage: Stage, size: tuple[int, int], at: At, neighbours: int) -> Moved:
    """What the kernel moves.

    - ``size``: the number of rows of the output, and of elements in a row;
    - ``at``: the output's index of a row and a position in it;
    - ``neighbours``: the number of elements of a row that one lane computes.
    """
    count, length = size
    probe = Probe(stage)
    row, j = probe.scope.variables(size)
    probe.follow(stage.output.output, at(row, j))
    elements, total = count * length, float(stage.output.type.nbytes)
    apart: set[str] = set()
    for (tensor, flat), stride in zip(probe.loads, probe.strides(j), strict=True):
        # The place of a gather is found in the loop over neighbours, so these are loaded alone.
        alone = neighbours > 1 and any(depends_on(flat, at) for at in probe.rows.values())
        if tensor and stride in (-1, 1) and not alone:
            total += float(elements * ITEM_BYTES[stage.types[tensor].dtype])
        elif tensor and stride != 0:
            apart.add(tensor)
    found = _warp(stage, size, at, apart, neighbours) if apart else []
    return Moved(
        total + sum(x.bytes(elements) for x, _ in found),
        sum(x.clocks(elements) for x, _ in found),
        not any(x.scattered(item) for x, item in found),
    )


def _warp(
    stage: Stage, size: tuple[int, int], at: At, tensors: Set[str], neighbours: int
) -> list[tuple[Touched, int]]:
    """What a load of a warp in the middle of the output touches of each of these inputs, and the
    bytes of an element there. The place of a gather is known at run time alone, and may be
    anywhere.
    """
    (count, length), places = size, dict[str, list[int]]()
    first = count // 2 * length
    for element in range(first, count * length, neighbours)[:WARP]:
        probe = Probe(stage)
        probe.follow(stage.output.output, at(*divmod(element, length)))
        for tensor, flat in probe.loads:
            if tensor in tensors:
                place = flat if isinstance(flat, int) else LINE * element
                places.setdefault(tensor, []).append(ITEM_BYTES[stage.types[tensor].dtype] * place)
    items = ((found, ITEM_BYTES[stage.types[tensor].dtype]) for tensor, found in places.items())
    return [(touched(found, item), item) for found, item in items]

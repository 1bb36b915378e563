"""The tensors that kernels can copy in whole pieces: neighbours that lie side by side, in order and
aligned, as asynchronous copies of 16 bytes need them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm.sym import detect_linear_equation
from tvm.tirx import IntImm

from gtco.tensor.analysis.indices import floormod
from gtco.tensor.analysis.probe import Probe, depends_on
from gtco.tensor.analysis.scope import Expr
from gtco.tensor.cuda.lambdas import addressable
from gtco.tensor.stage import Stage


def in_pieces(
    stage: Stage,
    tensor: str,
    extents: Sequence[int],
    index: Callable[[Sequence[Expr]], Sequence[Expr]],
    piece: int,
) -> bool:
    """True if ``piece`` neighbours along the last of these axes, from each multiple of ``piece``
    on, lie side by side in one of the stage's inputs, at a multiple of ``piece`` of its elements.

    ``index`` maps positions within ``extents`` to an index of ``tensor``.
    """
    if extents[-1] % piece or not addressable(stage, tensor):
        return False
    probe = Probe(stage)
    scope = probe.scope
    *lead, first, within = scope.variables([*extents[:-1], extents[-1] // piece, piece])
    probe.follow(tensor, index([*lead, first * piece + within]))
    ((_, flat),) = probe.loads
    begin = scope.index(flat - within)
    return not depends_on(begin, within) and scope.index(floormod(begin, piece)) == 0


def row_stride(
    stage: Stage,
    tensor: str,
    extents: Sequence[int],
    index: Callable[[Sequence[Expr]], Sequence[Expr]],
) -> int | None:
    """How many elements apart neighbours along the last but one of these axes lie in memory, where
    all of them lie evenly; else None. ``tensor`` and ``index`` are those of :func:`in_pieces`.
    """
    probe = Probe(stage)
    places = probe.scope.variables(extents)
    probe.follow(tensor, index(places))
    ((_, flat),) = probe.loads
    found = detect_linear_equation(flat, [places[-2]])
    return int(found[0]) if len(found) and isinstance(found[0], IntImm) else None

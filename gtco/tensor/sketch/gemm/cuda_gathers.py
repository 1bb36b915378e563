"""The price of what the threads of a product find one by one: elements of operands that lie in
memory in no whole pieces of 16 bytes, pieces of images, and results whose neighbours are stored
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gtco.machine.gpu import WARP
from gtco.tensor.analysis.contraction import ConvView
from gtco.tensor.analysis.probe import Probe
from gtco.tensor.analysis.scope import Expr
from gtco.tensor.sketch.gemm.cuda_operands import CHUNK, Reading, Source
from gtco.tensor.sketch.gemm.cuda_tiles import Tiles
from gtco.tensor.sketch.shared.cuda_lanes import LINE, Touched, operations, touched
from gtco.tensor.stage import ITEM_BYTES, Stage

PAIR = 2  # neighbours that a lane computes one after the other, and stores at once
BOUNDS = 4  # integer operations that say whether an element is one of the operand
Follow = Callable[[Probe, int, int], None]  # records the accesses at a column and a row


@dataclass(frozen=True)
class Rows:
    """An access whose lanes run along rows, one row after the other.

    - ``width``: bytes of a lane;
    - ``first``: the places of the lanes of a long row, in bytes;
    - ``step``: bytes from there to the next row.
    """

    width: int
    first: tuple[int, ...]
    step: int

    def touched(self, lanes: int) -> Touched:
        """What a warp touches if a row has so many lanes."""
        across = max(1, min(WARP, lanes))
        down = range(WARP // across)
        places = [x + row * self.step for row in down for x in self.first[:across]]
        return touched(places, self.width)


def rows(stage: Stage, follow: Follow, columns: int, run: int) -> tuple[Rows, ...]:
    """The accesses of lanes that have ``run`` neighbours each, of the ``columns`` of a row."""
    lanes = [_places(stage, follow, min(run * lane, columns - 1), 0) for lane in range(WARP)]
    below = _places(stage, follow, 0, 1)
    count = min(map(len, (*lanes, below)))  # padding and parts of a concatenation differ by place
    return tuple(
        Rows(lanes[0][n][0], tuple(lane[n][1] for lane in lanes), below[n][1] - lanes[0][n][1])
        for n in range(count)
    )


def side_by_side(stage: Stage, follow: Follow, columns: int, run: int) -> bool:
    """True if the second lane reads and stores beside the first, or the same. It takes a fraction
    of the time of :func:`rows`.
    """
    here, beside = (_places(stage, follow, min(at, columns - 1), 0) for at in (0, run))
    pairs = zip(here, beside, strict=False)
    return all(there - at in (0, run * item) for (item, at), (_, there) in pairs)


def _places(stage: Stage, follow: Follow, column: int, row: int) -> list[tuple[int, int]]:
    """The bytes of an element, and its place in bytes, of each access. The place of a gather is
    known at run time alone, and may be anywhere.
    """
    probe, found = Probe(stage), []
    follow(probe, column, row)
    for tensor, at in probe.loads:
        if tensor:
            item = ITEM_BYTES[stage.types[tensor].dtype]
            anywhere = LINE * (column + WARP * WARP * row)
            found.append((item, item * at if isinstance(at, int) else anywhere))
    return found


@dataclass(frozen=True)
class Gather:
    """An operand whose elements are found one by one, or piece by piece.

    - ``operations``: integer operations of an element;
    - ``along_k``: True if lanes follow each other along k, False for the operand's own axis;
    - ``loads``: those of elements. There are none if whole pieces are copied.
    """

    operations: float
    along_k: bool
    loads: tuple[Rows, ...] = ()

    def lines(self, length: int) -> float:
        """Lines of L1 that an element takes, if rows of the tile have so many elements."""
        return sum(x.touched(length // PAIR).lines for x in self.loads) / WARP


def gather(source: Source, reading: Reading) -> Gather | None:
    """How the operand is found, if that takes more than to count its rows."""
    along_k = reading.along_k
    if reading.way == "in_place" and source.image:
        pieces = CHUNK // ITEM_BYTES[source.stage.types[source.tensor].dtype]
        return Gather(_placing(source, by_k=True) / pieces, along_k)
    if reading.way != "computed" or reading.run > 1:
        return None
    _, (_, size), (_, depth) = source.params

    def follow(probe: Probe, column: int, row: int) -> None:
        own, k = (row, column) if along_k else (column, row)
        probe.follow(source.tensor, source.index(0, min(own, size - 1), min(k, depth - 1)))

    found = rows(source.stage, follow, depth if along_k else size, PAIR)
    return Gather(BOUNDS + _placing(source), along_k, found)


def _placing(source: Source, by_k: bool = False) -> int:
    """Integer operations that find an element, and that say if it lies outside a padded image;
    ``by_k``: only those that each step of k needs again.
    """
    probe = Probe(source.stage)
    index = probe.scope.variables([extent for _, extent in source.params])
    probe.follow(source.tensor, source.index(*index))
    found: list[Expr] = [flat for _, flat in probe.loads] + list(probe.conditions)
    view = source.product.view
    if source.padded and isinstance(view, ConvView):
        for at, extent in zip(source.product.source(*index), view.image, strict=True):
            place = probe.scope.index(at)
            found += [place >= 0, place < extent]
    return operations(found, index[2] if by_k else None)


def scattered(stores: Iterable[Rows], lanes: int, run: int) -> tuple[float, float]:
    """Of an element of the result: lines of L1, and bytes of L2, of those accesses of ``run``
    neighbours a lane whose lanes lie far apart; ``lanes`` of them follow each other.
    """
    lines = traffic = 0.0
    for access in stores:
        found = access.touched(lanes)
        if found.scattered(access.width * run):
            lines += found.clocks(1 / run)
            traffic += found.bytes(1 / run)
    return lines, traffic


def one_by_one(
    tiles: Tiles, gathers: Sequence[Gather | None], placing: float, stores: Sequence[Rows], run: int
) -> tuple[float, float, float]:
    """Integer operations, lines of L1, and bytes of L2 beside those of whole tiles, for what a
    product reads and stores one by one. ``placing``: integer operations of an element of the
    result. ``stores``: its epilogue's accesses, of ``run`` neighbours a lane.
    """
    bm, bn, bk = tiles.block
    made = float(tiles.tiles * bm * bn)
    lines, traffic = scattered(stores, (32 if tiles.transposed else tiles.warp[1]) // run, run)
    indexing, lines, traffic = placing * made, lines * made, traffic * made
    for found, size in zip(gathers, (bm, bn), strict=True):
        if found is not None:
            elements = float(tiles.tiles * size * tiles.slices * bk)
            indexing += found.operations * elements
            lines += found.lines(bk if found.along_k else size) * elements
    return indexing, lines, traffic


def distinct(
    gathers: Sequence[Gather | None], placing: int, stores: Sequence[Rows], run: int
) -> tuple[object, ...]:
    """All that tells the prices of :func:`one_by_one` apart, beside the tiles."""
    found = tuple(x and (x.operations, x.lines(WARP)) for x in gathers)
    return (*found, placing, scattered(stores, WARP // run, run))

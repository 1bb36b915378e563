"""The axes of a stage's output that run as one: the distance of neighbours along them in every
input.

A row is the output's axes from ``cut`` on, taken as one; one variable counts its positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

from gtco.tensor.analysis.chains import shape_of
from gtco.tensor.analysis.indices import split_flat
from gtco.tensor.analysis.probe import Probe
from gtco.tensor.analysis.remembered import remembered
from gtco.tensor.analysis.scope import Expr, Scope
from gtco.tensor.stage import Stage

MOST_SEGMENTS = 16  # more segments are not worth their code
PROBED_ROW = 8192  # longer rows are not probed position by position


def output_shape(stage: Stage) -> tuple[int, ...]:
    return shape_of(stage, stage.output.output)


def spans(stage: Stage) -> set[int]:
    """The elements of trailing axes, of every tensor."""
    shapes = (shape_of(stage, name) for name in stage.types)
    return {prod(shape[k:]) for shape in shapes for k in range(len(shape))}


# rows ---------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Segment:
    """Positions ``begin + k * length + [0, length)`` of a row, ``k < repeat``, regular in every
    input for each k.

    ``smooth`` is true if no condition depends on the position inside a run, so that its lanes may
    be vectors.
    """

    begin: int
    length: int
    repeat: int = 1
    smooth: bool = True


def regular(stage: Stage, cut: int) -> bool:
    """True if every load is contiguous or constant along a row."""
    shape = output_shape(stage)
    probe = Probe(stage)
    j, *index = probe.scope.variables((prod(shape[cut:]), *shape[:cut]))
    return probe.even(stage.output.output, [*index, *split_flat(j, shape[cut:])], j, 1)


def longest_row(stage: Stage) -> int | None:
    """The first axis of the longest row that is regular; None if there is none. The whole output is
    tried first, then the shortest row, which is a part of all others.
    """
    shape = output_shape(stage)
    last = len(shape) - 1
    if last >= 0 and regular(stage, 0):
        return 0
    if last < 1 or not regular(stage, last):
        return None
    # with axes of size 1 in front the shortest row is the same one
    least = next(cut for cut in range(last + 1) if prod(shape[cut:]) == shape[last])
    return next((cut for cut in range(1, least) if regular(stage, cut)), least)


def longest_piece(stage: Stage, lanes: int) -> int | None:
    """The longest piece of the last axis, of ``lanes`` positions at least, in which every load is
    contiguous or constant, wherever the piece begins. It is a divisor that some tensor's trailing
    axes span.
    """
    shape = output_shape(stage)
    row = shape[-1] if shape else 1
    found = (n for n in spans(stage) if lanes <= n < row and row % n == 0)
    for length in sorted(found, reverse=True):
        probe = Probe(stage)
        j, piece, *index = probe.scope.variables((length, row // length, *shape[:-1]))
        at = [*index, piece * length + j]
        if probe.even(stage.output.output, at, j, 1) and not probe.conditions:
            return length
    return None


def gathers(stage: Stage, cut: int) -> int:
    """The number of loads that are not vectors along a row."""
    probe, j = _probed(stage, cut, Segment(0, prod(output_shape(stage)[cut:])))
    return probe.apart(j)


def picks(stage: Stage, cut: int) -> bool:
    """True if a gather reads another place for each position of a row."""
    if not any(op.kind == "gather" for op in stage.operators):
        return False
    probe, j = _probed(stage, cut, Segment(0, prod(output_shape(stage)[cut:])))
    return probe.picked_by(j)


def segments(stage: Stage, cut: int) -> tuple[Segment, ...]:
    """A row, cut at the places where the source of some load jumps in the first, middle or last
    row. It takes a probe for each position, so only kernels use it; a price does not need it.
    """
    shape = output_shape(stage)
    length = prod(shape[cut:])
    cuts: set[int] = set()
    if length <= PROBED_ROW:
        for at in (0, 2, 1):
            cuts |= _jumps(stage, [at * (extent - 1) // 2 for extent in shape[:cut]], length)
    edges = [0, *sorted(cuts), length]
    lengths = [b - a for a, b in pairwise(edges)]
    each = [Segment(a, n) for a, n in zip(edges, lengths, strict=False)]
    if len(set(lengths)) == 1 and len(lengths) > 2:
        same = Segment(0, lengths[0], len(lengths))
        # the position tells the parts of a concat apart: in one loop no part is known
        if len(lengths) > MOST_SEGMENTS or _smooth(stage, cut, same):
            each = [same]
    elif len(lengths) > MOST_SEGMENTS:
        each = [Segment(0, length)]
    return tuple(replace(s, smooth=_smooth(stage, cut, s)) for s in each)


def _probed(stage: Stage, cut: int, segment: Segment) -> tuple[Probe, Expr]:
    """The access pattern of a segment's run, and the variable that counts its positions."""
    shape = output_shape(stage)
    probe = Probe(stage)
    j, k = probe.scope.variables((segment.length, segment.repeat))
    index = probe.scope.variables(shape[:cut])
    position = segment.begin + j + (k * segment.length if segment.repeat > 1 else 0)
    probe.follow(stage.output.output, [*index, *split_flat(position, shape[cut:])])
    return probe, j


def _smooth(stage: Stage, cut: int, segment: Segment) -> bool:
    probe, j = _probed(stage, cut, segment)
    return not probe.decided_by(j)


def _jumps(stage: Stage, row: Sequence[int], length: int) -> set[int]:
    """The positions of a row at which some load's address does not continue as before, or another
    part of a concat begins.
    """
    cuts: set[int] = set()
    before: list[tuple[str, Expr]] = []
    parts: list[int] = []
    steps: list[Expr] | None = None
    scope = Scope(wide=stage.wide)
    gathered: dict[str, Expr] = {}
    for j in range(length):
        probe = Probe(stage, scope, rows=gathered)
        probe.follow(stage.output.output, [*row, j])
        now = probe.loads
        if j:
            same = [t for t, _ in now] == [t for t, _ in before] and parts == probe.parts
            delta = None
            if same:
                delta = [scope.index(b - a) for (_, a), (_, b) in zip(before, now, strict=True)]
            if delta is None or (steps is not None and delta != steps):
                cuts.add(j)
                delta = None
            steps = delta
        before, parts = now, probe.parts
    return cuts


# phases -------------------------------------------------------------------------------------------
def phase_steps(
    stage: Stage, cut: int, phases: int, phase: int, most: int
) -> tuple[int, ...] | None:
    """The steps over 1 by which every ``phases``-th position of a row, from ``phase`` on, runs
    through the inputs. None if a step is uneven or longer than ``most``, or if what lies at such
    steps is loaded where no operator chooses it.
    """
    shape = output_shape(stage)
    probe = Probe(stage)
    i, *rest = probe.scope.variables((prod(shape[cut:]) // phases, *shape[:cut]))
    position = i * phases + phase
    if not probe.even(stage.output.output, [*rest, *split_flat(position, shape[cut:])], i, most):
        return None
    found = [(n, s) for n, s in enumerate(probe.strides(i)) if s is not None and s > 1]
    return tuple(s for _, s in found) if all(probe.inside(n) for n, _ in found) else None


# axes that inputs do not have ---------------------------------------------------------------------
@dataclass(frozen=True)
class Standing:
    """Inputs of ``nbytes`` that are the same along the output's axes ``first`` to ``stop``, so that
    each step there reads them again.
    """

    first: int
    stop: int
    nbytes: float


def standing(stage: Stage, cut: int) -> Standing | None:
    """The axes before ``cut`` along which the most bytes are read again; None if there are none."""
    axes = _axes(stage)
    best, most = None, 0.0
    for first in range(cut):
        for stop in range(first + 1, cut + 1):
            nbytes = axes.same(first, stop)
            again = (prod(axes.shape[first:stop]) - 1) * prod(axes.shape[:first]) * nbytes
            if again > most:
                best, most = Standing(first, stop, nbytes), again
    return best


# turned axes --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Turned:
    """The axes of a transposing stage. ``inputs`` are contiguous along the output's axes ``first``
    to ``stop`` as one (t). All other inputs, and the output of ``shape``, are contiguous along
    those from ``cut`` on (j).
    """

    shape: tuple[int, ...]
    first: int
    stop: int
    cut: int
    inputs: tuple[str, ...]

    @property
    def extents(self) -> tuple[int, int]:
        """The extents of t and of j."""
        return prod(self.shape[self.first : self.stop]), prod(self.shape[self.cut :])

    @property
    def others(self) -> tuple[int, ...]:
        """The axes that belong neither to t nor to j."""
        return (*self.shape[: self.first], *self.shape[self.stop : self.cut])

    def index(self, rest: Sequence[Expr], t: Expr, j: Expr) -> list[Expr]:
        """The output's index at positions ``t`` and ``j``, with ``rest`` along the other axes."""
        return [
            *rest[: self.first],
            *split_flat(t, self.shape[self.first : self.stop]),
            *rest[self.first :],
            *split_flat(j, self.shape[self.cut :]),
        ]


def turned(stage: Stage, lanes: int, dtypes: Sequence[str] = ("float32",)) -> Turned | None:
    """The axes whose blocks of ``lanes`` x ``lanes``, if turned, make every load a vector; None if
    there are none. Turned inputs have one of the ``dtypes``.
    """
    if any(op.kind == "gather" for op in stage.operators):
        return None
    axes = _axes(stage)
    for cut in range(1, len(axes.shape)):
        if not axes.carry(cut, len(axes.shape), lanes):
            continue
        loads = axes.apart(cut)
        inputs = tuple(axes.loads[n] for n in loads)
        if not loads or any(axes.loads.count(x) > 1 for x in inputs):
            continue
        if any(stage.types[x].dtype not in dtypes for x in inputs):
            continue
        if not all(axes.probe.inside(n) for n in loads):
            continue
        for stop in range(cut, 0, -1):
            for first in range(stop):
                if axes.carry(first, stop, lanes) and all(
                    axes.along(n, first, stop) == 1 for n in loads
                ):
                    return Turned(axes.shape, first, stop, cut, inputs)
    return None


@remembered
def _axes(stage: Stage) -> _Axes:
    return _Axes(stage)


class _Axes:
    """The distances of neighbours, for each load and each axis of the output."""

    def __init__(self, stage: Stage) -> None:
        self.shape = output_shape(stage)
        probe = Probe(stage)
        axes = probe.scope.variables(self.shape)
        index = [axis if n > 1 else 0 for axis, n in zip(axes, self.shape, strict=True)]
        probe.follow(stage.output.output, index)
        self.stage, self.probe = stage, probe
        self.loads = [name for name, _ in probe.loads]
        self.steps = [probe.strides(axis) for axis in axes]  # steps, by axis and load
        self.smooth = [not probe.decided_by(axis) for axis in axes]

    def carry(self, first: int, stop: int, lanes: int) -> bool:
        """True if vectors may run along these axes as one."""
        return prod(self.shape[first:stop]) >= lanes and all(self.smooth[first:stop])

    def along(self, load: int, first: int, stop: int) -> int | None:
        """The distance of neighbours along these axes as one; None if it varies."""
        found: int | None = 0
        reach = 1
        for n in range(stop - 1, first - 1, -1):
            if self.shape[n] == 1:
                continue
            step = self.steps[n][load]
            if reach == 1:
                found = step
            elif step is None or found is None or step != found * reach:
                return None
            reach *= self.shape[n]
        return found

    def same(self, first: int, stop: int) -> float:
        """Bytes of the inputs that do not change along these axes, at one place of the axes
        before.
        """
        still: dict[str, float] = {}
        moving = {""}  # the constant of a padding
        for n, name in enumerate(self.loads):
            if any(self.steps[a][n] != 0 for a in range(first, stop)):
                moving.add(name)
            else:
                places = prod(self.shape[a] for a in range(first) if self.steps[a][n] != 0)
                if name:
                    still[name] = self.stage.types[name].nbytes / places
        return sum(nbytes for name, nbytes in still.items() if name not in moving)

    def apart(self, cut: int) -> list[int]:
        """The loads that are not vectors along a row."""
        rank = len(self.shape)
        return [n for n in range(len(self.loads)) if self.along(n, cut, rank) not in (0, 1)]

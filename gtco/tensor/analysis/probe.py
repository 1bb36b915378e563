"""The places of a stage's tensors in memory along a variable. Index maps are followed; no code is
emitted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate

import tvm
from tvm import tirx
from tvm.sym import detect_linear_equation

from gtco.tensor.analysis.chains import Epilogue, shape_of
from gtco.tensor.analysis.indices import broadcast_index, flatten
from gtco.tensor.analysis.movement import source_index
from gtco.tensor.analysis.scope import Expr, Scope
from gtco.tensor.operators import ELEMENTWISE, pattern
from gtco.tensor.stage import Operator, Stage


class _Uneven(Exception):
    """The answer is already known to be no."""


@dataclass
class _Place:
    """The results at one index, in simplest form, that later calls need again: the tensors that
    were followed there (None if that is not kept), and by shape of a tensor its flat place and the
    index that broadcasting reads.
    """

    index: list[Expr]
    seen: set[str] | None
    flat: dict[tuple[int, ...], Expr] = field(default_factory=dict)
    broadcast: dict[tuple[int, ...], _Place] = field(default_factory=dict)


@dataclass(frozen=True)
class Picked:
    """A gather that was followed at an index; ``inside`` the data of another one or not."""

    op: Operator
    index: tuple[Expr, ...]
    inside: bool


@dataclass
class Probe:
    """Records the flat place of each load of a stage, and each condition that a range does not
    decide, for the tensors that are followed.
    """

    stage: Stage
    scope: Scope = None  # type: ignore[assignment]  # for the stage's indices, if none is given
    loads: list[tuple[str, Expr]] = field(default_factory=list)
    conditions: list[Expr] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)  # the begins of the concat parts that are read
    indices: list[Expr] = field(default_factory=list)  # the flat places of the indices of gathers
    # each gather that was followed, those that are in the indices of another one before it
    picked: list[Picked] = field(default_factory=list)
    # The places that gathers read along their axis, by their outputs. They are known only at run
    # time, so each is a variable, the same for all places of the output. Probes of a stage may
    # share them.
    rows: dict[str, Expr] = field(default_factory=dict)
    # places, by the ids of an index's expressions; a place holds these, so that no id is used again
    _places: dict[tuple[int, ...], _Place] = field(default_factory=dict)
    # the expressions in simplest form, by their ids
    _simple: dict[int, Expr] = field(default_factory=dict)

    _within: int = 0  # the gathers whose data is followed
    # the variable along which loads must run evenly, and the greatest distance
    _asked: tuple[Expr, int] | None = None

    def __post_init__(self) -> None:
        if self.scope is None:
            self.scope = Scope(wide=self.stage.wide)

    def even(self, tensor: str, index: Sequence[Expr], var: Expr, most: int) -> bool:
        """True if all places that ``tensor`` reads at an index are 0 to ``most`` apart for
        neighbours along ``var``, and no condition depends on ``var``. It stops at the first load
        that is not so.
        """
        self._asked = (var, most)
        try:
            self.follow(tensor, index)
        except _Uneven:
            return False
        finally:
            self._asked = None
        return True

    def follow(self, tensor: str, index: Sequence[Expr]) -> None:
        """Records everything that ``tensor`` reads at an index."""
        self._follow(tensor, self._place([self._simplified(i) for i in index]))

    def _simplified(self, value: Expr) -> Expr:
        """The expression in simplest form. Operators that move data pass most indices on, and these
        are in simplest form already.
        """
        if id(value) in self._simple:
            return value
        simple = self.scope.index(value)
        self._simple[id(simple)] = simple
        return simple

    def _place(self, index: list[Expr]) -> _Place:
        """The results at an index in simplest form. An index of numbers alone is not kept: it costs
        little, and every reader of it counts.
        """
        if all(type(i) is int for i in index):
            return _Place(index, None)
        return self._places.setdefault(tuple(map(id, index)), _Place(index, set()))

    def _follow(self, tensor: str, place: _Place) -> None:
        """Follows ``tensor`` at a place. A tensor that several operators read at one symbolic index
        is followed once.
        """
        if place.seen is not None:
            if tensor in place.seen:
                return
            place.seen.add(tensor)
        op = self.stage.producers.get(tensor)
        if op is None:
            self._load(tensor, place)
        elif pattern(op.kind) == ELEMENTWISE:
            for x in op.inputs:
                shape = shape_of(self.stage, x)
                if shape == op.type.shape and 1 not in shape:
                    self._follow(x, place)
                    continue
                if shape not in place.broadcast:
                    place.broadcast[shape] = self._place(broadcast_index(place.index, shape))
                self._follow(x, place.broadcast[shape])
        else:
            self._moved(op, place.index)

    def _load(self, tensor: str, place: _Place) -> None:
        shape = shape_of(self.stage, tensor)
        if shape not in place.flat:
            flat = self.scope.index(flatten(place.index, shape))
            if self._asked is not None:
                step = _stride(flat, self._asked[0])
                if step is None or not 0 <= step <= self._asked[1]:
                    raise _Uneven
            place.flat[shape] = flat
        self.loads.append((tensor, place.flat[shape]))

    def _decides(self, condition: Expr) -> None:
        if self._asked is not None and depends_on(condition, self._asked[0]):
            raise _Uneven
        self.conditions.append(condition)

    def _moved(self, op: Operator, index: list[Expr]) -> None:
        source = op.inputs[0]
        match op.kind:
            case "concat":
                self._concatenated(op, index)
            case "pad":
                self._padded(op, index)
            case "gather":
                axis, rank = op["axis"], len(shape_of(self.stage, op.inputs[1]))
                picked = index[axis : axis + rank]
                self.indices.append(flatten(picked, shape_of(self.stage, op.inputs[1])))
                self.follow(op.inputs[1], picked)
                self.picked.append(Picked(op, tuple(index), self._within > 0))
                self._within += 1
                self.follow(source, [*index[:axis], self._row(op, index), *index[axis + rank :]])
                self._within -= 1
            case _:
                self.follow(source, source_index(op, index, shape_of(self.stage, source)))

    def _row(self, op: Operator, index: Sequence[Expr]) -> Expr:
        """The variable for the place along its axis that a gather reads for the element at
        ``index``.
        """
        if op.output not in self.rows:
            extent = shape_of(self.stage, op.inputs[0])[op["axis"]]
            (self.rows[op.output],) = self.scope.variables((extent,), "row")
        return self.rows[op.output]

    def _concatenated(self, op: Operator, index: list[Expr]) -> None:
        axis = op["axis"]
        place = index[axis]
        stops = list(accumulate(shape_of(self.stage, x)[axis] for x in op.inputs))
        below = cache(lambda stop: self.scope.known(place < stop))
        if below(0) is True:
            return
        # The parts that may be read follow one another, so few of many ends are compared.
        first = bisect_left(stops, True, key=lambda stop: below(stop) is not False)
        last = bisect_left(stops, True, first, key=lambda stop: below(stop) is True)
        for n, x in enumerate(op.inputs[first : last + 1], first):
            start = stops[n - 1] if n else 0
            if n > first or below(start) is None:
                self._decides(place >= start)
            if n < last:
                self._decides(place < stops[n])
            self.parts.append(start)
            self.follow(x, [*index[:axis], place - start, *index[axis + 1 :]])

    def _padded(self, op: Operator, index: list[Expr]) -> None:
        inner = [i - b for i, b in zip(index, op["before"], strict=True)]
        shape = shape_of(self.stage, op.inputs[0])
        for i, b, a, n in zip(inner, op["before"], op["after"], shape, strict=True):
            for condition in ([i >= 0] if b > 0 else []) + ([i < n] if a > 0 else []):
                known = self.scope.known(condition)
                if known is False:
                    self.loads.append(("", 0))  # the padding's constant
                    return
                if known is None:
                    self._decides(condition)
        self.follow(op.inputs[0], inner)

    def inside(self, load: int) -> bool:
        """True if a load stays inside its tensor even if no condition guards it. A load after a
        concat or a pad need not: its index has a meaning only if the operator chooses it.
        """
        if not self.conditions:
            return True
        (name, flat), known = self.loads[load], self.scope.known
        return known(flat >= 0) is True and known(flat < self.stage.types[name].size) is True

    def through(self, tail: Epilogue, index: Sequence[Expr]) -> None:
        """Records the loads of the epilogue for the anchor's element at ``index``, and the place of
        its result like a load.
        """
        where = tail.positions([self.scope.index(i) for i in index])
        for op in tail.operators:
            for x in op.inputs:
                if x not in where:
                    self.follow(x, broadcast_index(where[op.output], shape_of(self.stage, x)))
        output = tail.stage.output.output
        self._load(output, self._place(list(where[output])))

    def strides(self, var: Expr) -> list[int | None]:
        """For each load, the distance in memory to the next value of ``var``; None if it varies
        from place to place.
        """
        return [_stride(flat, var) for _, flat in self.loads]

    def apart(self, var: Expr) -> int:
        """The number of loads that are not vectors along ``var``."""
        return sum(s not in (0, 1) for s in self.strides(var))

    def picked_by(self, var: Expr) -> bool:
        """True if a gather reads another place for the next value of ``var``."""
        return any(depends_on(index, var) for index in self.indices)

    def decided_by(self, var: Expr) -> int:
        """The number of conditions that depend on ``var``."""
        return sum(depends_on(condition, var) for condition in self.conditions)


def _stride(flat: Expr, var: Expr) -> int | None:
    """The distance by which ``flat`` moves with ``var``; None if it varies from place to place."""
    parts = (0, 0) if isinstance(flat, int) else detect_linear_equation(flat, [var])
    return int(parts[0]) if len(parts) == 2 else None


def depends_on(expr: Expr, var: Expr) -> bool:
    """True if the variable occurs in the expression."""
    return isinstance(expr, tvm.ir.Expr) and any(
        v.same_as(var) for v in tirx.analysis.undefined_vars(expr)
    )

"""Features of a built program, as numbers for a learned cost model: the scheme of Ansor (Zheng et
al., OSDI 2020), which GTCO's Section IV-E names, for kernels of explicit vectors on CPUs.

Ansor has a vector for each innermost statement and sums predictions over them; here the statements
are added up first, each as often as it runs, so that a program is one vector of ``len(NAMES)``
numbers. Counts and bytes are logarithms, log2(1 + x), as in Ansor. The groups:

- ``op_KIND``: vector instructions by kind (:data:`~gtco.search.learning.statements.KINDS`);
  ``elements`` what the floating-point ones compute, ``lanes`` elements an instruction
  (vectorization);
- for each place (:data:`~gtco.search.learning.statements.PLACES`) ``read``, ``written``: bytes of
  all accesses, ``unique``: different bytes, ``reuse``: how often each of them is touched,
  ``lines``: cache lines asked for, ``stride``: bytes from one iteration of the innermost loop that
  moves an access to the next, ``distance``: bytes touched before the same ones are again,
  ``scalar``: the share of accesses that are not vectors;
- ``beyond_N``: bytes that come from beyond the Nth cache, were it to hold what the outermost loops
  that fit touch; ``intensity_N``: elements for each of these bytes;
- ``depth``, ``trips``: of the innermost loops; ``body``: statements in one of them (unrolling),
  ``statements``: of the whole program; ``unrolled``: iterations of unrolled loops;
- ``tasks``, ``rounds``: tasks a core has at most, ``idle``: the share of core time that waits for
  the last of them (parallelism);
- ``scratch``, ``local``: bytes allocated; ``predicted``: the analytic seconds; ``rate``: elements
  in each of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, log2, prod

import numpy as np

from gtco.machine.target import CACHE_LINE, Machine, cpu_target
from gtco.search.learning.statements import BESIDE, KINDS, PLACES, Access, Statement, statements
from gtco.tensor.space import Program
from gtco.tensor.stage import Stage

CACHES = 3
_ACCESS = ("read", "written", "unique", "reuse", "lines", "stride", "distance", "scalar")
NAMES: tuple[str, ...] = (
    *(f"op_{kind}" for kind in KINDS),
    *("elements", "lanes"),
    *(f"{place}_{what}" for place in PLACES for what in _ACCESS),
    *(f"beyond_{n + 1}" for n in range(CACHES)),
    *(f"intensity_{n + 1}" for n in range(CACHES)),
    *("depth", "trips", "body", "statements", "unrolled"),
    *("tasks", "rounds", "idle", "scratch", "local", "predicted", "rate"),
)


def features(program: Program, stage: Stage, machine: Machine, seconds: float) -> np.ndarray:
    """The vector [len(NAMES)] of a program of ``stage``, for which the policy predicts ``seconds``.
    The same program gives the same numbers in every process.
    """
    target = cpu_target(machine)
    found = statements(program, stage, 4 * target.lanes)
    values = _arithmetic(found)
    memory = _Memory(found)
    values |= memory.places()
    elements = values["elements"]
    for n, level in enumerate(target.memory[:CACHES]):
        beyond = memory.beyond(level.capacity)
        values[f"beyond_{n + 1}"] = beyond
        values[f"intensity_{n + 1}"] = elements / max(beyond, CACHE_LINE)
    values |= _loops(found)
    rounds = ceil(program.tasks / target.cores)
    values |= {
        "tasks": program.tasks,
        "rounds": rounds,
        "idle": 1 - program.tasks / (rounds * target.cores) if rounds else 0.0,
        "scratch": program.workspace,
        "local": memory.local,
        "predicted": 1e9 * seconds,
        "rate": elements / (1e9 * seconds) if seconds > 0 else 0.0,
    }
    return np.array([_scaled(name, values.get(name, 0.0)) for name in NAMES], np.float32)


def _scaled(name: str, value: float) -> float:
    shares = name in ("idle", "depth", "lanes") or name.endswith("_scalar")
    return value if shares else log2(1 + max(value, 0.0))


def _arithmetic(found: Iterable[Statement]) -> dict[str, float]:
    values = dict.fromkeys((f"op_{kind}" for kind in KINDS), 0.0)
    elements = instructions = 0.0
    for statement in found:
        elements += statement.runs * statement.elements
        for kind, count in statement.operations.items():
            values[f"op_{kind}"] += statement.runs * count
            if kind not in BESIDE:
                instructions += statement.runs * count
    lanes = elements / instructions if instructions else 0.0
    return {**values, "elements": elements, "lanes": lanes}


def _loops(found: Sequence[Statement]) -> dict[str, float]:
    """What is known of the innermost loops, weighted by how often their statements run."""
    bodies: dict[int, int] = {}
    for statement in found:
        if statement.loops:
            number = statement.loops[-1].number
            bodies[number] = bodies.get(number, 0) + 1
    inside = [s for s in found if s.loops]
    total = sum(s.runs for s in inside) or 1.0
    weights = [s.runs / total for s in inside]
    unrolled = {x.number: x.extent for s in inside for x in s.loops if x.kind == "unrolled"}
    last = [s.loops[-1] for s in inside]
    return {
        "depth": sum(w * len(s.loops) for w, s in zip(weights, inside, strict=True)),
        "trips": sum(w * loop.extent for w, loop in zip(weights, last, strict=True)),
        "body": sum(w * bodies[loop.number] for w, loop in zip(weights, last, strict=True)),
        "statements": len(found),
        "unrolled": sum(unrolled.values()),
    }


class _Memory:
    """The accesses of a program, and what each iteration of each loop touches in all."""

    def __init__(self, found: Sequence[Statement]) -> None:
        self.local = 0.0
        # (access, statement, elements that it touches inside the first d loops around, by d)
        self.accesses: list[tuple[Access, Statement, list[float]]] = []
        self.sets: dict[int, float] = {}  # bytes in one iteration, by the loop around; 0 is none
        held: dict[tuple[int, int], float] = {}  # bytes, by loop and buffer
        seen: set[tuple[int, float, tuple[int, ...]]] = set()
        locals_: dict[int, float] = {}
        for statement in found:
            numbers = (0, *(loop.number for loop in statement.loops))
            for access in statement.accesses:
                if access.place == "local":
                    locals_[access.buffer] = access.item * access.size
                touched = _touched(access, statement)
                self.accesses.append((access, statement, touched))
                same = (access.buffer, access.base, numbers)
                if access.place == "local" or same in seen:
                    continue
                seen.add(same)
                for number, elements in zip(numbers, touched, strict=True):
                    before = held.get((number, access.buffer), 0.0)
                    most = access.item * access.size
                    held[number, access.buffer] = min(before + access.item * elements, most)
        for (number, _), nbytes in held.items():
            self.sets[number] = self.sets.get(number, 0.0) + nbytes
        self.local = sum(locals_.values())

    def places(self) -> dict[str, float]:
        values = {f"{place}_{what}": 0.0 for place in PLACES for what in _ACCESS}
        unique: dict[tuple[str, int], float] = {}
        weights = dict.fromkeys(PLACES, 0.0)
        logs: dict[str, float] = {}
        for access, statement, touched in self.accesses:
            place, nbytes = access.place, statement.runs * access.item * access.lanes
            values[f"{place}_{'written' if access.write else 'read'}"] += nbytes
            dense = abs(access.lane) <= 1
            lines = max(1.0, access.item * access.lanes / CACHE_LINE) if dense else access.lanes
            values[f"{place}_lines"] += statement.runs * lines
            key = (place, access.buffer)
            most = access.item * access.size
            unique[key] = min(unique.get(key, 0.0) + access.item * touched[0], most)
            weights[place] += statement.runs
            values[f"{place}_scalar"] += statement.runs * (access.lanes == 1)
            stride, distance = self._reuse(access, statement)
            for what, value in (("stride", stride), ("distance", distance)):
                name = f"{place}_{what}"
                logs[name] = logs.get(name, 0.0) + statement.runs * log2(1 + value)
        for (owner, _), nbytes in unique.items():
            values[f"{owner}_unique"] += nbytes
        for place in PLACES:
            if weights[place]:
                values[f"{place}_scalar"] /= weights[place]
                nbytes = values[f"{place}_read"] + values[f"{place}_written"]
                values[f"{place}_reuse"] = nbytes / max(values[f"{place}_unique"], 1.0)
                for what in ("stride", "distance"):
                    name = f"{place}_{what}"
                    values[name] = 2 ** (logs[name] / weights[place]) - 1
        return values

    def _reuse(self, access: Access, statement: Statement) -> tuple[float, float]:
        """Bytes from one iteration to the next of the innermost loop that moves the access, and
        those touched between two iterations of the innermost that does not; 0 without one.
        """
        stride = distance = 0.0
        for loop in reversed(statement.loops):
            step = abs(access.steps.get(loop.number, 0.0))
            if step and not stride:
                stride = access.item * step
            if not step and loop.extent > 1 and not distance:
                distance = self.sets.get(loop.number, 0.0)
        return stride, distance

    def beyond(self, capacity: float) -> float:
        """Bytes that come from beyond a cache of so many bytes, in all tasks."""
        total = 0.0
        for access, statement, touched in self.accesses:
            if access.place == "local":
                continue
            times, depth = 1.0, 0
            around = 0  # the number of the innermost loop that is left outside
            while self.sets.get(around, 0.0) > capacity and depth < len(statement.loops):
                around = statement.loops[depth].number
                times *= statement.loops[depth].extent
                depth += 1
            share = statement.runs / max(prod(loop.extent for loop in statement.loops), 1e-9)
            total += min(share, 1.0) * times * touched[depth] * access.item
        return total


def _touched(access: Access, statement: Statement) -> list[float]:
    """Different elements that an access touches, at most: in all of the loops around, inside the
    first, the first two and so on.
    """
    count, span = float(access.lanes), (access.lanes - 1) * abs(access.lane) + 1
    found = [max(1.0, min(count, span, access.size))]
    for loop in reversed(statement.loops):
        step = abs(access.steps.get(loop.number, 0.0))
        if step:
            count *= loop.extent
            span += step * max(loop.extent - 1, 0.0)
        found.append(max(1.0, min(count, span, access.size)))
    return found[::-1]

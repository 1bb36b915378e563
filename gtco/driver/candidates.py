"""Builds candidates of a model's heavy stages into one library, to be timed on a GPU elsewhere.
Each step launches one candidate, and running them needs nothing but a driver
(:mod:`gtco.tuning.offline`).

The data is random. Constants are taken from a ring as large as the model's own constants, at most
twice L2, so that as much of them is in L2 as of the model's. Activations are in one place, like
those that the stage before has just written. All data consists of float16 normals: in every float
format their bits are numbers of moderate size. Integers are zeros, which are valid indices.

After the timed launches, every candidate runs once more, on constants that are the same for all
candidates of a stage, packed as each kernel reads them. These results are the model's outputs, and
the measuring side compares them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np

from gtco.codegen.jobs import Failure, GpuKernel, Job
from gtco.codegen.workers import Workers
from gtco.driver.compilation import Compilation
from gtco.driver.linking.assembly import images_of, step_of
from gtco.driver.linking.metadata import describe, versions
from gtco.driver.linking.places import counter_bytes
from gtco.driver.phases import Fused
from gtco.machine.gpu import GpuTarget
from gtco.runtime.gpu.plan import GpuArtifact, GpuStep
from gtco.runtime.plan import BufferRef, TensorSpec, round_up
from gtco.search.policy import Policy, priced
from gtco.support.errors import BuildError
from gtco.tensor.packing import Packing, packed_types
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Pick
from gtco.tensor.stage import Stage, TensorType
from gtco.tuning.timing import TOLERANCE, values

HEAVY = 0.95  # share of the predicted time that the measured stages have
MOST_COMPARED = 2 << 30  # bytes of compared results; the heaviest stages come first

Built = TypeVar("Built")  # the candidates of a stage


@dataclass(frozen=True)
class BundledKernel:
    """A config of a stage with its kernel."""

    stage: Stage
    pick: Pick
    kernel: GpuKernel


@dataclass(frozen=True)
class _Room:
    """The sizes of weights and arena, in bytes.

    - The weights hold the ring of the constants, from 0, then floats, then zeros.
    - The arena holds results, from 0, then the ``scratch`` of kernels whose blocks work together,
      then ``counters``.
    - ``counters`` gives bytes by symbol. Each symbol has counters of its own, so that the leftovers
      of a faulty kernel affect no other kernel.
    """

    ring: int
    floats: int
    zeros: int
    results: int
    scratch: int
    counters: Mapping[str, int]

    @property
    def counter_bytes(self) -> int:
        return sum(self.counters.values())

    @property
    def arena(self) -> int:
        return self.results + self.scratch + self.counter_bytes

    @cached_property
    def _counters_at(self) -> Mapping[str, int]:
        """The place of each symbol's counters in the arena."""
        places = accumulate(self.counters.values(), initial=self.results + self.scratch)
        return dict(zip(self.counters, places, strict=False))  # the last place is the end

    def between(self, candidate: BundledKernel) -> tuple[BufferRef, ...]:
        """The kernel's scratch and counters, if it has some."""
        if not candidate.kernel.counters:
            return ()
        counters = self._counters_at[candidate.kernel.symbol]
        return BufferRef("arena", self.results), BufferRef("arena", counters)


def comparable(stages: Iterable[Built], count: Callable[[Built], int]) -> list[Built]:
    """Those of the stages with two candidates or more. Raises :class:`BuildError` if none has."""
    found = [stage for stage in stages if count(stage) > 1]
    if not found:
        raise BuildError(
            "no stage of this model has two candidates to compare: there is nothing to measure"
        )
    return found


def bundle(run: Compilation, fused: Fused, per_stage: int, workers: Workers) -> GpuArtifact:
    """The ``per_stage`` most promising configs of each heavy stage of a model that was cut into
    stages, the policy's pick first. They are one artifact without inputs and outputs. Raises
    :class:`BuildError` if no stage has two configs that can be built.
    """
    target = fused.policy.target
    assert isinstance(target, GpuTarget)
    stages = heavy(fused.partition.stages, fused.policy)
    found = built(stages, fused.policy, target, per_stage, workers, run.report.notes)
    groups = comparable(found, len)
    every = [candidate for rivals in groups for candidate in rivals]
    room = _room(every, sum(array.nbytes for array in fused.graph.constants.values()), target)
    rng = np.random.default_rng(0)
    checks = _Checks(room, rng)
    compared = checks.of(groups, run.report.notes)
    normals = rng.standard_normal((room.ring + room.floats) // 2, np.float32).astype(np.float16)
    zeros = np.zeros(max(room.zeros, 64), np.uint8)
    return GpuArtifact(
        name="candidates",
        inputs=(),
        outputs=tuple(checks.outputs),
        steps=(*_steps(groups, room), *compared),
        arena_bytes=room.arena,
        counter_bytes=room.counter_bytes,
        images=images_of((c.kernel for c in every), target),
        weights=[(0, normals), (normals.nbytes, zeros), *checks.constants],
        metadata={
            **versions(target),
            "precision": fused.whole.facts.precision,
            "notes": list(run.report.notes),
            "candidates": {
                "stages": len(groups),
                "kernels": len(every),
                "compared": checks.compared,
            },
        },
    )


def heavy(stages: Sequence[Stage], policy: Policy) -> list[Stage]:
    """The different stages that take :data:`HEAVY` of the predicted time, the heaviest first."""
    counts = Counter(stage.key for stage in stages)
    different = {stage.key: stage for stage in stages}
    seconds = {key: n * policy.predict(different[key]) for key, n in counts.items()}
    left = HEAVY * sum(seconds.values())
    found = []
    for key in sorted(seconds, key=lambda key: -seconds[key]):
        if left <= 0:
            break
        found.append(different[key])
        left -= seconds[key]
    return found


def built(
    stages: Sequence[Stage],
    policy: Policy,
    target: GpuTarget,
    per_stage: int,
    workers: Workers,
    notes: list[str],
) -> list[list[BundledKernel]]:
    """Each stage's candidates in the policy's order. A candidate without a kernel is left out and
    noted.
    """
    jobs: dict[str, tuple[Job, Pick]] = {}
    for stage in stages:
        space = space_of(stage.canonical, target)
        for n, config in enumerate(policy.propose(stage, per_stage)):
            pick = priced(policy, space, config)
            assert pick is not None
            symbol = f"gtco_{stage.key}_{n}"
            jobs[symbol] = Job(symbol, stage.canonical, config, target), pick
    kernels: dict[str, GpuKernel] = {}
    for answer in workers.build(job for job, _ in jobs.values()):
        if isinstance(answer, Failure):
            job, pick = jobs[answer.symbol]
            what = f"{job.stage.label} ({job.stage.key}, {pick.config.to_json()})"
            notes.append(f"a candidate of stage {what} was left out: {answer.reason}")
        else:
            assert isinstance(answer, GpuKernel)
            kernels[answer.symbol] = answer
    return [
        [
            BundledKernel(job.stage, pick, kernels[symbol])
            for symbol, (job, pick) in jobs.items()
            if job.stage.key == stage.key and symbol in kernels
        ]
        for stage in stages
    ]


def _steps(groups: Sequence[Sequence[BundledKernel]], room: _Room) -> tuple[GpuStep, ...]:
    """One round: the candidates of each stage in turn, and then the stage's first one again.
    ``info["rival"]`` is the candidate's number in its stage (None for a launch that is compared and
    not timed). The two readings of the first candidate show how much readings differ.
    """
    deal = _Deal(room)
    return tuple(
        deal.step(rivals[n % len(rivals)], n % len(rivals))
        for n in range(1 + max(map(len, groups)))
        for rivals in groups
        if n <= len(rivals)
    )


def _step(candidate: BundledKernel, buffers: tuple[BufferRef, ...], rival: int | None) -> GpuStep:
    stage = candidate.stage
    info = {**describe(stage, candidate.pick), "label": stage.label, "rival": rival}
    made = step_of(candidate.kernel, buffers, info)
    assert isinstance(made, GpuStep)
    return made


class _Deal:
    """The places of the candidates' buffers."""

    def __init__(self, room: _Room) -> None:
        self.room, self.at = room, 0

    def step(self, candidate: BundledKernel, rival: int) -> GpuStep:
        floats, zeros = self.room.ring, self.room.ring + self.room.floats
        buffers = []
        for type, constant in _inputs(candidate):
            nbytes = round_up(type.nbytes)
            if not _is_float(type):
                place, zeros = zeros, zeros + nbytes
            elif constant:
                place = self.at if self.at + nbytes <= self.room.ring else 0
                self.at = place + nbytes
            else:
                place, floats = floats, floats + nbytes
            buffers.append(BufferRef("weight", place))
        buffers += self.room.between(candidate)
        return _step(candidate, (*buffers, BufferRef("arena", 0)), rival)


class _Checks:
    """The launches whose results are compared.

    - ``constants``: those of their weights that are placed after all others;
    - ``outputs``: the results; bfloat16 as its bits;
    - ``compared``: for each stage its outputs, and by how much of the largest value they may
      differ.
    """

    def __init__(self, room: _Room, rng: np.random.Generator) -> None:
        self.room, self.rng = room, rng
        self.at = room.ring + room.floats + round_up(max(room.zeros, 64))
        self.constants: list[tuple[int, np.ndarray]] = []
        self.outputs: list[TensorSpec] = []
        self.compared: list[dict[str, Any]] = []
        self.bytes = 0

    def of(self, groups: Sequence[Sequence[BundledKernel]], notes: list[str]) -> list[GpuStep]:
        steps: list[GpuStep] = []
        for rivals in groups:
            stage = rivals[0].stage
            self.bytes += len(rivals) * stage.output.type.nbytes
            if self.bytes > MOST_COMPARED:
                notes.append(
                    f"results of {stage.label} ({stage.key}) and of lighter stages are too large "
                    "to be compared on the machine that times them"
                )
                break
            types = {type_.dtype for type_ in stage.types.values()}
            self.compared.append(
                {
                    "key": stage.key,
                    "first": len(self.outputs),
                    "count": len(rivals),
                    "tolerance": max(TOLERANCE.get(dtype, 0.0) for dtype in (*types, "float32")),
                }
            )
            steps += self.stage(rivals)
        return steps

    def stage(self, rivals: Sequence[BundledKernel]) -> Iterator[GpuStep]:
        given = rivals[0].stage.inputs
        drawn = {i.name: values(self.rng, i.type) for i in given if i.constant}
        packed: dict[tuple[str, Packing | None], int] = {}
        for candidate in rivals:
            stage, packings = candidate.stage, candidate.kernel.packings
            for name, array in drawn.items():
                if (name, packings.get(name)) not in packed:
                    packed[name, packings.get(name)] = self.place(array, packings.get(name))
            floats, zeros = self.room.ring, self.room.ring + self.room.floats
            buffers = []
            for i in given:
                if i.constant:
                    buffers.append(BufferRef("weight", packed[i.name, packings.get(i.name)]))
                elif _is_float(i.type):
                    buffers.append(BufferRef("weight", floats))
                    floats += round_up(i.type.nbytes)
                else:
                    buffers.append(BufferRef("weight", zeros))
                    zeros += round_up(i.type.nbytes)
            buffers += self.room.between(candidate)
            number, result = len(self.outputs), stage.output.type
            dtype = "uint16" if result.dtype == "bfloat16" else result.dtype
            self.outputs.append(TensorSpec(f"result_{number}", dtype, result.sizes))
            yield _step(candidate, (*buffers, BufferRef("output", number)), None)

    def place(self, array: np.ndarray, packing: Packing | None) -> int:
        """The place of the constant, packed."""
        laid = packing.apply(array) if packing else np.ascontiguousarray(array)
        place, self.at = self.at, self.at + round_up(laid.nbytes)
        self.constants.append((place, laid))
        return place


def _inputs(candidate: BundledKernel) -> list[tuple[TensorType, bool]]:
    """The types as the kernel sees them, and whether each is a constant."""
    types: Mapping[str, TensorType] = packed_types(candidate.stage, candidate.kernel.packings)
    return [(types[i.name], i.constant) for i in candidate.stage.inputs]


def _is_float(type: TensorType) -> bool:
    return "float" in type.dtype


def _room(candidates: Sequence[BundledKernel], constants: int, target: GpuTarget) -> _Room:
    """The room that each candidate needs alone. ``constants`` are the bytes of the model's
    constants; the ring needs no more of them than L2 cannot keep.
    """

    def most(floats: bool, fixed: bool | None) -> int:
        return max(
            sum(
                round_up(type.nbytes)
                for type, constant in _inputs(candidate)
                if _is_float(type) is floats and fixed in (None, constant)
            )
            for candidate in candidates
        )

    ring = max(most(True, True), min(round_up(constants), 2 * target.l2))
    return _Room(
        ring,
        most(True, False),
        most(False, None),
        max(round_up(c.stage.output.type.nbytes) for c in candidates),
        max(round_up(c.kernel.scratch) for c in candidates),
        {c.kernel.symbol: counter_bytes([c.kernel]) for c in candidates},
    )

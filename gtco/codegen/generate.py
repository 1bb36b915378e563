"""Every stage of a model -> kernels. If the kernel of a stage cannot be built, the other sketches
of the stage are tried, and then the stage is cut into single operators; the last sketch of those is
the fallback. On a GPU, a kernel that spills gives way to the stage's next-best configs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gtco.codegen.jobs import Failure, Job, Kernel
from gtco.codegen.spilling import StandIns, without_spills
from gtco.codegen.workers import Workers
from gtco.machine.target import Machine
from gtco.support.errors import REPORT, BuildError, InternalError
from gtco.tensor.space import Config, Pick
from gtco.tensor.stage import Stage, make_stage

# An error shows at most so many earlier failures, beside those of operators that cannot be built.
MOST_NOTES = 5
# A stage and the names of sketches that are out of the question for it.
Choose = Callable[[Stage, Collection[str]], Pick | None]


@dataclass
class Generated:
    """The stages as they were built in the end, with kernels and choices by stage key.
    ``notes`` say what failed, and ``spills`` which kernels for GPUs spill registers. ``rejections``
    counts, by reason, the configs that were not in the space of their stage. A run calls each stage
    ``times``: once for each part of a batch. ``wrong`` has, by stage key, configs that were
    measured to compute something else.
    """

    stages: list[Stage]
    kernels: dict[str, Kernel] = field(default_factory=dict)
    choices: dict[str, Pick] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    spills: list[str] = field(default_factory=list)
    rejections: Counter[str] = field(default_factory=Counter)
    times: int = 1
    wrong: Mapping[str, Collection[Config]] = field(default_factory=dict)

    @property
    def different(self) -> dict[str, Stage]:
        """The stages by key, each once."""
        return {stage.key: stage for stage in self.stages}

    def copy(self) -> Generated:
        """A copy whose choices can be changed without changing this one's."""
        return replace(self, kernels=dict(self.kernels), choices=dict(self.choices))

    def same(self, other: Generated) -> bool:
        """True if both have the same stages with the same configs."""
        mine, its = (
            {key: pick.config for key, pick in made.choices.items()} for made in (self, other)
        )
        return [s.key for s in self.stages] == [s.key for s in other.stages] and mine == its


def generate(
    stages: Sequence[Stage],
    choose: Choose,
    target: Machine,
    workers: Workers,
    *,
    text: bool = False,
    ptx: bool = False,
    strict: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    stand_ins: StandIns = lambda stage, pick: (),
    known: dict[str, tuple[Config, Kernel]] | None = None,
) -> Generated:
    """Builds each different stage once, in ``workers``.

    If a stage cannot be built with the config that ``choose`` picks, ``choose`` is asked again
    without that sketch. If no sketch is left, the stage is cut into single operators. Every failure
    becomes a note or, if ``strict``, an :class:`InternalError`. Raises :class:`BuildError` if a
    single operator has no sketch left. :func:`gtco.codegen.spilling.without_spills` tries the
    ``stand_ins``; ``spills`` names a kernel that spills nevertheless. ``known`` are kernels by the
    stage's key that were built before with this config: they are taken, and new ones join them.
    """
    result = Generated(list(stages))
    tried: dict[str, set[str]] = {}
    while todo := {s.key: s for s in result.stages if s.key not in result.kernels}:
        hopeless = _attempt(
            todo, tried, choose, target, workers, text, ptx, progress, result, known or {}
        )
        if strict and result.notes:
            reasons = "\n  ".join(result.notes)
            raise InternalError(
                f"strict: not every stage was built as chosen. {REPORT}:\n  {reasons}"
            )
        alone = [note for key, note in hopeless.items() if len(todo[key].operators) == 1]
        if alone:
            before = [note for note in result.notes if note not in "\n".join(alone)]
            reasons = "\n  ".join([*alone, *before[:MOST_NOTES]])
            raise BuildError(
                f"code generation failed even operator by operator. {REPORT}:\n  {reasons}"
            )
        result.stages = [
            piece
            for stage in result.stages
            for piece in (split(stage) if stage.key in hopeless else [stage])
        ]
    result.spills += without_spills(
        result.different, result.kernels, result.choices, stand_ins, target, workers, text, ptx
    )
    if known is not None:
        known |= {key: (result.choices[key].config, k) for key, k in result.kernels.items()}
    return result


def split(stage: Stage) -> list[Stage]:
    """The operators of the stage, each as a stage of its own."""
    return [make_stage([op], stage.types, stage.constants) for op in stage.operators]


def _attempt(
    todo: dict[str, Stage],
    tried: dict[str, set[str]],
    choose: Choose,
    target: Machine,
    workers: Workers,
    text: bool,
    ptx: bool,
    progress: Callable[[int, int], None],
    result: Generated,
    known: Mapping[str, tuple[Config, Kernel]],
) -> dict[str, str]:
    """Builds ``todo`` into ``result``. Gives the keys of the stages that have no sketch left, with
    all their failures.
    """
    hopeless: dict[str, str] = {}
    jobs = []
    for key, stage in todo.items():
        without = tried.setdefault(key, set())
        choice = choose(stage, without)
        if choice is None or choice.config.sketch in without:
            why = [note for note in result.notes if f"({key}, " in note]
            if not why:
                why = [f"no kernel can compute {stage.label} ({key}, {stage.output.type})"]
                result.notes += why
            hopeless[key] = "\n  ".join(why)
            continue
        without.add(choice.config.sketch)
        result.choices[key] = choice
        if key in known and known[key][0] == choice.config:
            result.kernels[key] = known[key][1]
            continue
        jobs.append(Job(f"gtco_{key}", stage.canonical, choice.config, target, text, ptx))
    answers: dict[str, Kernel | Failure] = {}
    for answer in workers.build(jobs):
        answers[answer.symbol] = answer
        progress(len(answers), len(jobs))
    for job in jobs:  # not as the workers came to an end, so that a build repeats
        key, answer = job.symbol.removeprefix("gtco_"), answers[job.symbol]
        if isinstance(answer, Failure):
            what = f"{todo[key].label} ({key}, {result.choices[key].config.to_json()})"
            result.notes.append(f"stage {what} could not be built: {answer.reason}")
            if answer.rejected:
                result.rejections[answer.rejected] += 1
        else:
            result.kernels[key] = answer
    return hopeless

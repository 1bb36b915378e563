"""Stages to kernels: each different stage is built once. A stage that fails is split, and then
falls back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import pytest

from gtco.codegen.build import build
from gtco.codegen.generate import generate, split
from gtco.codegen.jobs import Failure, Job, Kernel
from gtco.machine.target import target
from gtco.support.errors import BuildError, InternalError
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Config, Pick
from gtco.tensor.stage import Operator, Stage, TensorType, make_stage
from tests.kernels import first_config

MACHINE = target("x86-64-v3")
SHAPE = TensorType((4, 8))


def chain(*kinds: str, start: str = "x") -> Stage:
    operators, at = [], start
    for number, kind in enumerate(kinds):
        operators.append(Operator(kind, (at,), f"{start}{number}", SHAPE))
        at = f"{start}{number}"
    return make_stage(operators, {start: SHAPE}, [])


class Sketch:
    """An empty sketch: a choice needs nothing of it here."""


def choose_from(*names: str) -> Any:
    """A choice of the first of these sketches that is not excluded."""

    def choose(stage: Stage, without: Collection[str]) -> Pick | None:
        left = [name for name in names if name not in without]
        return Pick(Sketch(), Config(left[0]), 1.0) if left else None  # type: ignore[arg-type]

    return choose


class Builder:
    """Workers that fail every job for which ``fails`` has a reason, and remember the jobs."""

    def __init__(self, fails: Any = lambda job: False) -> None:
        self.fails, self.jobs = fails, list[Job]()

    def build(self, jobs: Iterable[Job]) -> Iterator[Kernel | Failure]:
        for job in reversed(list(jobs)):  # answers come in any order
            self.jobs.append(job)
            yield (
                Failure(job.symbol, "SIGSEGV")
                if self.fails(job)
                else Kernel(job.symbol, b"code", 1, 0, {})
            )


def run(stages: list[Stage], builder: Builder, choose: Any = None, **options: Any) -> Any:
    return generate(
        stages,
        choose or choose_from("best", "fallback"),
        MACHINE,
        builder,  # type: ignore[arg-type]
        **options,
    )


def test_equal_stages_are_built_once() -> None:
    builder = Builder()
    stages = [chain("relu", "exp"), chain("relu", "exp", start="z"), chain("tanh")]
    seen: list[tuple[int, int]] = []
    result = run(stages, builder, progress=lambda done, total: seen.append((done, total)))
    assert result.stages == stages and len(builder.jobs) == 2 and seen == [(1, 2), (2, 2)]
    assert result.kernels.keys() == {s.key for s in stages} == result.choices.keys()
    assert not result.notes


def test_a_stage_that_fails_is_given_to_its_other_sketches() -> None:
    builder = Builder(lambda job: job.config.sketch == "best" and len(job.stage.operators) > 1)
    stages = [chain("relu", "exp"), chain("tanh")]
    result = run(stages, builder, choose_from("best", "other"))
    assert result.stages == stages and len(builder.jobs) == 3
    assert [result.choices[s.key].config.sketch for s in stages] == ["other", "best"]
    assert len(result.notes) == 1


class Here:
    """No workers: this process does the jobs."""

    def build(self, jobs: Iterable[Job]) -> Iterator[Kernel | Failure]:
        return map(build, jobs)


def test_rejections_are_counted_by_reason() -> None:
    """A choice outside the stage's space excludes its sketch, with a note."""

    def choose(stage: Stage, without: Collection[str]) -> Pick | None:
        first, last = space_of(stage, MACHINE).sketches
        picked = [
            Config("no such sketch"),
            Config(first.name, (*first_config(first).choices, ("more", 1))),
            first_config(last),
        ]
        config = next(c for c in picked if c.sketch not in without)
        return Pick(last, config, 1.0)

    stages = [chain("exp"), chain("tanh")]
    result = run(stages, Here(), choose)  # type: ignore[arg-type]
    assert result.rejections == {"unknown sketch": 2, "unknown decision": 2}
    assert {c.config.sketch for c in result.choices.values()} == {"fallback"}
    assert len(result.notes) == 4 and "'more' is given, and nothing is left" in result.notes[-1]


def test_a_stage_that_fails_is_cut_into_operators() -> None:
    builder = Builder(lambda job: len(job.stage.operators) > 1)
    stages = [chain("relu", "exp"), chain("tanh")]
    result = run(stages, builder, choose_from("best"))
    assert [s.label for s in result.stages] == ["relu", "exp", "tanh"]
    assert [s.output.output for s in result.stages] == ["x0", "x1", "x0"]
    assert all(s.key in result.kernels for s in result.stages)
    assert [c.config.sketch for c in result.choices.values()] == ["best"] * 4
    (note,) = result.notes
    assert "relu+exp" in note and "SIGSEGV" in note


def test_an_operator_that_fails_falls_back() -> None:
    builder = Builder(lambda job: job.config.sketch == "best" and "exp" in job.stage.label)
    choose = choose_from("best", "fallback")
    result = run(
        [chain("relu", "exp")],
        builder,
        lambda stage, without: choose(stage, without if len(stage.operators) == 1 else ()),
    )
    chosen = {s.label: result.choices[s.key].config.sketch for s in result.stages}
    assert chosen == {"relu": "best", "exp": "fallback"}
    assert len(result.notes) == 2


def test_no_choice_is_a_failure_too() -> None:
    def choose(stage: Stage, without: Collection[str]) -> Any:
        return None if "+" in stage.label else choose_from("best")(stage, without)

    result = run([chain("relu", "exp")], Builder(), choose)
    assert [s.label for s in result.stages] == ["relu", "exp"]
    assert any("no kernel can compute relu+exp" in note for note in result.notes)


def test_strict_gives_up_at_the_first_failure() -> None:
    builder = Builder(lambda job: job.config.sketch == "best" and "exp" in job.stage.label)
    with pytest.raises(InternalError, match=r"(?s)strict.*relu\+exp.*SIGSEGV"):
        run([chain("relu", "exp")], builder, strict=True)


def test_where_even_the_fallback_fails_the_error_names_the_operators() -> None:
    builder = Builder(lambda job: "exp" in job.stage.label)
    with pytest.raises(BuildError, match=r"operator by operator") as caught:
        run([chain("relu", "exp"), chain("tanh", "relu", start="z")], builder)
    assert "exp" in str(caught.value) and "SIGSEGV" in str(caught.value)
    assert "tanh" not in str(caught.value)


def test_split_keeps_constants() -> None:
    operators = [
        Operator("matmul", ("x", "w"), "y", TensorType((4, 4))),
        Operator("add", ("y", "b"), "z", TensorType((4, 4))),
    ]
    types = {"x": TensorType((4, 8)), "w": TensorType((8, 4)), "b": TensorType((4,))}
    first, second = split(make_stage(operators, types, ["w", "b"]))
    assert [(i.name, i.constant) for i in first.inputs] == [("x", False), ("w", True)]
    assert [(i.name, i.constant) for i in second.inputs] == [("y", False), ("b", True)]


def test_what_failed_before_the_operators_is_in_the_error_too() -> None:
    """If operators have no kernel of their own, only the failure of the stage says why."""

    def choose(stage: Stage, without: Collection[str]) -> Pick | None:
        fused = len(stage.operators) > 1 and "best" not in without
        return Pick(Sketch(), Config("best"), 1.0) if fused else None  # type: ignore[arg-type]

    with pytest.raises(BuildError, match=r"no kernel can compute relu(?s:.*)relu\+exp.*SIGSEGV"):
        run([chain("relu", "exp")], Builder(lambda job: True), choose)

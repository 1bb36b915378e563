"""The process that times candidates: what it reads and compares, and what happens if it dies."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gtco.codegen.build import build
from gtco.codegen.jobs import Job, Kernel
from gtco.machine.target import Target, detect
from gtco.search.analytic import AnalyticPolicy
from gtco.tensor.space import Config
from gtco.tensor.stage import Operator, Stage, TensorType, make_attrs, make_stage
from gtco.tuning import local, timing
from gtco.tuning.timing import agree
from gtco.tuning.trial import Trial, artifact, batches
from tests.tuning.small import integers, linear


@pytest.fixture(scope="module")
def machine() -> Target:
    return detect()


def kernel(stage: Stage, config: Config, machine: Target, symbol: str) -> Kernel:
    made = build(Job(symbol, stage, config, machine))
    assert isinstance(made, Kernel), made
    return made


def test_results_agree_up_to_the_order_of_sums() -> None:
    x = np.random.default_rng(0).random((4, 5), np.float32)
    assert agree(x, x * np.float32(1 + 1e-6))
    broken = x.copy()
    broken[2, 3] = 0
    assert not agree(x, broken)
    assert not agree(x, x * np.float32(1.01)) and agree(x, x * np.float32(1.01), 2e-2)
    assert not agree(x, np.full_like(x, np.inf)) and not agree(np.full_like(x, np.inf), x)
    infinite = np.full_like(x, np.inf)
    assert agree(infinite, infinite) and agree(np.full_like(x, 3e38), np.full_like(x, 3e38))
    assert not agree(np.full_like(x, 3e38), np.full_like(x, -3e38))
    unfinished = x.copy()
    unfinished[0, 0] = np.nan
    assert not agree(x, unfinished)
    assert not agree(np.arange(5), np.arange(5)[::-1])
    steps = np.array([0, 255, 7], np.uint8)
    near = np.array([1, 254, 7], np.uint8)
    assert agree(steps, near, steps=1) and not agree(steps, near)
    assert not agree(steps, np.array([255, 255, 7], np.uint8), steps=1)


def trial(machine: Target, symbols: str, *stages: Stage) -> list[Trial]:
    """Each stage with its pick and one rival."""
    policy = AnalyticPolicy(machine)
    found = []
    for number, stage in enumerate(stages):
        pick = policy.choose(stage)
        assert pick is not None
        rival = policy.alternatives(stage, pick, {pick.config})[0]
        kernels = tuple(
            kernel(stage, p.config, machine, f"{symbols}_{number}_{n}")
            for n, p in enumerate((pick, rival))
        )
        found.append(Trial(stage, (pick, rival), kernels))
    return found


def test_every_candidate_is_timed_and_compared(
    machine: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real kernels in the real process: every step has readings, and no result is wrong. A number
    of threads for deployments does not count.
    """
    from gtco.runtime.writing.linking import write_artifact

    trials = trial(machine, "fine", linear(), linear(33, 40, 24))
    made = artifact(trials, machine, 2)
    assert made.metadata["trials"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    library = write_artifact(made, tmp_path / "trials.so")
    monkeypatch.setenv("GTCO_NUM_THREADS", "all")
    said = local.run(library, 0.1)
    assert isinstance(said, dict) and said["wrong"] == []
    readings = np.array(said["seconds"])
    assert readings.shape[1] == 8 and len(readings) >= timing.LEAST_ROUNDS - timing.WARM_ROUNDS
    assert (readings > 0).all()
    # a timing that needs more than the whole time ends with the fewest readings
    said = local.run(library, 100.0, 0.0)
    assert isinstance(said, dict) and len(said["seconds"]) == 1


def test_a_candidate_that_computes_something_else_is_named(machine: Target, tmp_path: Path) -> None:
    """A kernel of relu takes the place of a rival of gelu."""
    from gtco.runtime.writing.linking import write_artifact

    (good,) = trial(machine, "good", linear())
    stage = linear()
    other = replace(
        stage,
        operators=(
            *stage.operators[:2],
            Operator(
                "relu", (stage.operators[1].output,), stage.operators[2].output, stage.output.type
            ),
        ),
    )
    wrong = kernel(other, good.picks[1].config, machine, "wrong")
    posed = replace(good, kernels=(good.kernels[0], wrong))
    library = write_artifact(artifact([posed], machine, 1), tmp_path / "trials.so")
    said = local.run(library, 0.05)
    assert isinstance(said, dict) and said["wrong"] == [2]


def test_a_wrong_product_of_integers_is_named(machine: Target, tmp_path: Path) -> None:
    """Two kernels that are right for zeros alone: one subtracts what the zero point adds, the other
    multiplies by 7 bits.
    """
    from gtco.runtime.writing.linking import write_artifact

    (good,) = trial(machine, "integer", integers())
    stage = good.stage
    product, added, *rest = stage.operators
    sums = Operator("subtract", added.inputs, added.output, added.type)
    first = stage.inputs[0]
    kept = Operator("clip", (first.name,), "kept", first.type, make_attrs(min=0.0, max=127.0))
    shifted = replace(product, inputs=("kept", product.inputs[1]))
    others = [
        replace(stage, operators=(product, sums, *rest)),
        replace(stage, operators=(kept, shifted, added, *rest)),
    ]
    policy = AnalyticPolicy(machine)
    wrong = []
    for number, other in enumerate(others):
        pick = policy.choose(other)
        assert pick is not None
        wrong.append(kernel(other, pick.config, machine, f"wrong_integer_{number}"))
    posed = replace(
        good, picks=(*good.picks, *good.picks[1:]), kernels=(*good.kernels, *wrong)
    )
    library = write_artifact(artifact([posed], machine, 1), tmp_path / "trials.so")
    said = local.run(library, 0.05)
    assert isinstance(said, dict) and said["wrong"] == [3, 4]


def test_indices_are_of_any_table() -> None:
    """The integers of a stage that gathers stay 0."""
    table, index = TensorType((3, 8)), TensorType((5,), "int64")
    types = {"t": table, "i": index}
    gather = Operator("gather", ("t", "i"), "y", TensorType((5, 8)), make_attrs(axis=0))
    gathering = make_stage([gather], types, [])
    assert not Trial(gathering, (), ()).numbers and Trial(integers(), (), ()).numbers
    random = np.random.default_rng(0)
    assert not timing.values(random, index).any()
    assert set(timing.values(random, TensorType((9999,), "int8"), True)) == {*range(-128, 128)}


def test_batches_keep_the_order_and_the_limit(machine: Target) -> None:
    trials = trial(machine, "batch", linear(), linear(30), linear(20))
    most = trials[0].nbytes + trials[1].nbytes
    assert [[t.stage for t in b] for b in batches(trials, most)] == [
        [trials[0].stage, trials[1].stage],
        [trials[2].stage],
    ]
    assert [len(b) for b in batches(trials, 1)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("code", "said"),
    [("raise SystemExit(3)", "crashed"), ("import time; time.sleep(60)", "hung")],
)
def test_the_process_that_times_may_die_or_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, said: str
) -> None:
    """A script takes the place of the interpreter. GRACE is how much longer than its time it may
    run.
    """
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\n{code}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(local, "GRACE", 1.0)
    answer = local.run(tmp_path / "no.so", 0.1)
    assert isinstance(answer, str) and answer.startswith(said)

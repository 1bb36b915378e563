"""``python -m bench trials``: its arithmetic, and TVM's programs for gtco's stages as steps."""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from dataclasses import replace
from math import inf
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import s_tir

from bench.search import trials
from bench.search.metaschedule import WORKER, Found, Search, Task, beside, programs
from bench.search.trials import compare, curve, reached, tried
from bench.search.tvm_kernels import PREPROC, Program, TvmJob, artifact, build, layouts
from bench.search.tvm_stage import LAYOUT_FREE, program
from gtco.codegen.workers import Workers
from gtco.machine.target import Target, detect
from gtco.runtime.module import load
from gtco.runtime.writing.linking import write_artifact
from gtco.search.analytic import AnalyticPolicy
from gtco.search.records.records import Outcome, Record
from gtco.support.errors import InternalError, OptionError, UnsupportedError
from gtco.tensor.space import Config, Pick
from gtco.tensor.stage import Stage
from gtco.tuning.result import StageResult
from gtco.tuning.timing import values
from tests.kernels import assert_close, reference
from tests.stages import Drawing

TOLERANCE = 2e-5  # of the largest magnitude: sums of some dozens in another order


# arithmetic ---------------------------------------------------------------------------------------
def test_a_curve_begins_when_every_stage_was_read_and_keeps_the_best() -> None:
    found = curve([(0, 3.0), (0, 2.0), (1, 1.0), (0, 5.0), (1, inf), (1, 0.5)], (2, 10))
    assert found == [inf, inf, 14.0, 14.0, 14.0, 9.0]


def test_trials_to_match_count_from_one_and_may_never_be() -> None:
    assert reached([5.0, 4.0, 3.0, 3.0], 4.0) == 2
    assert reached([5.0], 5.0) == 1
    assert reached([5.0, 4.5], 4.0) is None


def test_metaschedule_may_be_one_percent_off_its_least_and_gtco_may_not() -> None:
    theirs = [inf, 2.0, 1.009, 1.0]
    assert compare([1.005, 1.001, 1.0], theirs) == (3, 3, 1.0)
    assert compare([0.9], theirs) == (3, 1, 1.0)
    assert compare([1.005, 1.001], theirs) == (3, None, 1.0)
    with pytest.raises(UnsupportedError, match="no right program"):
        compare([1.0], [inf, inf])


def test_the_best_program_is_the_fastest_that_is_right() -> None:
    found = Found()
    slow, fast = Program(b"", ()), Program(b"", ())
    for seconds, made in ((2.0, slow), (1.0, fast), (1.5, slow), (inf, None)):
        found.add(0, seconds, made)
    assert found.best[0] == (1.0, fast) and found.best[0][1] is fast
    assert [seconds for _, seconds in found.trials] == [2.0, 1.0, 1.5, inf]


def test_the_best_program_after_so_many_trials_and_the_seconds_until_then() -> None:
    found = Found(begin=time.monotonic() - 7)
    slow, fast = Program(b"slow", ()), Program(b"fast", ())
    for seconds, made in ((inf, None), (2.0, slow), (2.5, fast), (1.0, fast)):
        found.add(0, seconds, made)
    assert found.after(0, 1) is None and found.after(1, 4) is None
    best = [found.after(0, k) for k in (2, 3, 4)]
    assert [one[0] for one in best if one] == [slow, slow, fast]
    assert all(one and 7 <= one[1] < 60 for one in best)


def test_nothing_is_built_for_metaschedule_when_its_time_is_over() -> None:
    search = Search([Task(_product(), 1, Program(b"", ()), 1.0)], detect(), threads=1)
    search.end = 0.0
    with pytest.raises(RuntimeError, match="the time is over"):  # ends its loop
        search.build([tvm.IRModule()], None)  # type: ignore[arg-type]
    assert search.over and search.found.trials == []


def test_a_stage_without_a_right_program_fails_its_row() -> None:
    tasks = [Task(_product(), 1, Program(b"", ()), 1.0)]
    found = Found([(0, inf)])
    assert trials.outcome(tasks, [(0, 1.0)], found) == (0, None, 0.0)
    sums, wrong = trials.side_by_side(tasks, [Program(b"", ())], found, detect(), 1)
    assert (sums, wrong) == ((0.0, 0.0, 0.0), ("matmul+add+gelu",))
    row = trials.Row("m", 1, 1.0, 1, 1, 0, None, 0.0, *sums, wrong, 1.0, 1.0)
    assert row.ratio == inf
    trials.show([row])


def _config(number: int) -> Config:
    return Config("gemm", (("number", number),))


def _record(stage: Stage, number: int, outcome: Outcome, ratio: float | None) -> Record:
    pick: Any = Pick(None, _config(number), 1.0)  # type: ignore[arg-type]
    seconds = None if ratio is None else 7.0
    return Record.of(stage, pick, "", outcome, (seconds, ratio, 0.0))


def _result(stage: Stage, seconds: float) -> StageResult:
    pick: Any = Pick(None, _config(0), 1.0)  # type: ignore[arg-type]
    return StageResult(stage, (1,), pick, pick, history=[seconds, seconds])


def test_trials_of_gtco_are_its_first_picks_then_each_candidate_once() -> None:
    stages = [_product(rows) for rows in (3, 4)]
    results = list(map(_result, stages, (2.0, 10.0)))
    a, b = stages
    records = [
        _record(a, 0, "beaten", 1.0),
        _record(a, 1, "taken", 0.5),
        _record(a, 2, "slower", 3.0),
        _record(b, 1, "failed", None),
        _record(b, 0, "kept", 1.0),
        _record(b, 2, "wrong", 0.1),
        _record(a, 1, "kept", 1.0),  # the pick, beside which the next are timed
        _record(a, 3, "slower", 1.5),  # relative to half of the first pick's time
    ]
    assert tried(records, results) == [
        *((0, 2.0), (1, 10.0)),
        *((0, 1.0), (0, 6.0), (1, inf), (1, inf), (0, 1.5)),
    ]


def test_a_subgraph_that_there_is_not() -> None:
    with pytest.raises(OptionError, match="vit-mha, vit-encoder"):
        trials.main(["--models", "vit-mha,bert"])


def test_a_stage_of_which_nothing_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All its builds failed, so it has records and no result."""
    a, b = (_result(_product(rows), 1.0) for rows in (3, 4))
    made = SimpleNamespace(kernels={}, notes=["b: no candidate could be built"])
    stubs = {
        "subgraph": (None, None),
        "stages_of": (SimpleNamespace(target=None, choose=None), []),
        "cpu_target": SimpleNamespace(lanes=8),
        "Workers": nullcontext(),
        "generate": made,
        "heavy": ([a, b], 1.0),
        "restricted": made,
        "keyed": [],
        "Records": nullcontext(SimpleNamespace(all=lambda: [_record(b.stage, 1, "failed", None)])),
        "tune": [a],
    }
    for name, found in stubs.items():
        monkeypatch.setattr(trials, name, lambda *_, found=found, **__: found)
    options = argparse.Namespace(threads=1, trials=4, stages=2)
    with pytest.raises(OptionError, match="4 trials are too few to measure every stage"):
        trials.measure("small", options)


# TVM's programs -----------------------------------------------------------------------------------
def _drawing() -> Drawing:
    return Drawing(Random(0), Random(0), depth=0)


def _product(rows: int = 20) -> Stage:
    d = _drawing()
    x, w, bias = d.input((rows, 24)), d.input((24, 32), True), d.input((32,), True)
    d.add("gelu", d.add("add", d.add("matmul", x, w), bias))
    return d.stage()


def _normalised() -> Stage:
    d = _drawing()
    x = d.add("add", d.input((2, 9, 40)), d.input((2, 9, 40)))
    d.add("layer_norm", x, d.input((40,), True), d.input((40,), True), epsilon=1e-6)
    return d.stage()


def _attention() -> Stage:
    """Query, key and value from one tensor; the heads are merged afterwards."""
    d = _drawing()
    whole = d.input((1, 12, 3 * 32))
    parts = []
    for n in range(3):
        part = d.add("slice", whole, begin=(0, 0, 32 * n), strides=(1, 1, 1), out=(1, 12, 32))
        heads = d.add("reshape", part, out=(1, 12, 4, 8))
        parts.append(d.add("permute", heads, axes=(0, 2, 1, 3)))
    mixed = d.add("attention", *parts, scale=0.3)
    d.add("reshape", d.add("permute", mixed, axes=(0, 2, 1, 3)), out=(1, 12, 32))
    return d.stage()


def _convolution() -> Stage:
    d = _drawing()
    x, w, bias = d.input((1, 9, 10, 6)), d.input((8, 6, 3, 3), True), d.input((8,), True)
    attrs = {"strides": (2, 2), "padding": (1, 1, 1, 1), "dilation": (1, 1)}
    y = d.add("conv2d", x, w, groups=1, layout="NHWC", **attrs)
    d.add("relu", d.add("add", y, bias))
    return d.stage()


def _grouped() -> Stage:
    d = _drawing()
    x, w = d.input((2, 6, 7, 5)), d.input((4, 3, 3, 3), True)
    attrs = {"strides": (1, 1), "padding": (0, 1, 1, 0), "dilation": (1, 1)}
    d.add("conv2d", x, w, groups=2, layout="NCHW", **attrs)
    return d.stage()


def _softmax() -> Stage:
    d = _drawing()
    d.add("softmax", d.add("multiply", d.input((5, 33, 4)), d.input((4,))), axis=1)
    return d.stage()


def _mean() -> Stage:
    d = _drawing()
    d.add("mean", d.input((3, 17, 8)), axes=(1,), keepdims=False)
    return d.stage()


def _ran(stage: Stage, module: Any, machine: Target, folder: Path) -> None:
    """Checks that a scheduled module, run from a library, computes the same as the reference."""
    kernels = build(TvmJob("under_test", tvm.ir.save_json(module), machine))
    made, runs = artifact(stage, [Program.of_tvm(kernels, module)], machine, threads=2)
    constants = np.random.default_rng(0)  # the same constants as in the library
    # tensors of the same type are one input of the library
    handed = {i.type: values(np.random.default_rng(7), i.type) for i in stage.inputs}
    given = [values(constants, i.type) if i.constant else handed[i.type] for i in stage.inputs]
    inputs = dict.fromkeys(i.type for i in stage.inputs if not i.constant)
    with load(write_artifact(made, folder / "trials.so")) as library:
        results = library(*(handed[type_] for type_ in inputs))
    assert len(results) == len(runs)
    for result in results:
        assert_close(result, reference(stage, given), TOLERANCE)


@pytest.mark.parametrize(
    "make",
    [_product, _normalised, _attention, _convolution, _grouped, _softmax, _mean],
    ids=lambda make: make.__name__.strip("_"),
)
def test_a_stage_for_tvm_computes_what_the_reference_does(make: Any, tmp_path: Path) -> None:
    stage, machine = make().canonical, detect()
    _ran(stage, tvm.IRModule({"main": program(stage, machine.lanes)}), machine, tmp_path)


def test_nests_layouts_and_scratch_of_a_schedule(tmp_path: Path) -> None:
    """A schedule like MetaSchedule's: tiles, a parallel loop, a weight in another layout, and a
    tile of the result in a separate buffer.
    """
    stage, machine = _product().canonical, detect()
    function = program(stage, machine.lanes)
    assert list(function.attrs[LAYOUT_FREE]) == [1]  # not the bias
    schedule = s_tir.Schedule(tvm.IRModule({"main": function}))
    block = schedule.get_sblock("matmul")
    kept = schedule.cache_write(block, 0, "global")
    weight = schedule.cache_read(block, 1, "global")
    schedule.transform_layout(
        block, ("read", 1), lambda k, n: (n // 16, k // 4, k % 4, n % 16)
    )
    schedule.annotate(weight, PREPROC, True)
    i = schedule.get_loops(block)[0]
    rows, _ = schedule.split(i, [5, 4])
    schedule.reverse_compute_at(kept, rows)
    schedule.parallel(rows)
    array = np.arange(24 * 32, dtype=np.float32).reshape(24, 32)
    laid = layouts(schedule.mod)[1](array)
    wanted = array.reshape(6, 4, 2, 16).transpose(2, 0, 1, 3)
    assert np.array_equal(laid, wanted)
    kernels = build(TvmJob("nests", tvm.ir.save_json(schedule.mod), machine))
    assert 5 in [nest.tasks for nest in kernels.nests]
    assert len({nest.symbol for nest in kernels.nests}) == len(kernels.nests) > 1
    _ran(stage, schedule.mod, machine, tmp_path)


def test_what_is_not_written_for_tvm_says_so() -> None:
    d = _drawing()
    attrs = {"strides": (2, 2), "padding": (0, 0, 0, 0), "dilation": (1, 1), "layout": "NHWC"}
    d.add("max_pool2d", d.input((1, 4, 4, 8)), kernel=(2, 2), out=(1, 2, 2, 8), **attrs)
    with pytest.raises(UnsupportedError, match="max_pool2d"):
        program(d.stage(), 16)
    with pytest.raises(UnsupportedError, match="bfloat16"):
        d = _drawing()
        d.add("relu", d.input((4,), dtype="bfloat16"))
        program(d.stage(), 16)


def test_a_function_in_a_vectorized_loop(tmp_path: Path) -> None:
    d = _drawing()
    d.add("gelu", d.input((6, 64)))
    stage, machine = d.stage().canonical, detect()
    schedule = s_tir.Schedule(tvm.IRModule({"main": program(stage, machine.lanes)}))
    _, columns = schedule.get_loops(schedule.get_sblock("compute"))
    _, lane = schedule.split(columns, [None, machine.lanes])
    schedule.vectorize(lane)
    _ran(stage, schedule.mod, machine, tmp_path)


def test_the_worker_that_builds_for_metaschedule_answers_with_programs() -> None:
    stage, machine = _product().canonical, detect()
    task = Task(stage, 1, Program(b"", ()), 1.0)
    search = Search([task], machine, threads=2)
    function = program(stage, machine.lanes).with_attr("task", 0)
    with Workers(1, command=WORKER) as workers:
        assert search.build([tvm.IRModule({"main": function})], workers) == [("tvm_1", "")]
    assert isinstance(search.built["tvm_1"][1], Program)


def test_programs_are_timed_beside_the_first_pick() -> None:
    stage, machine = _product().canonical, detect()
    policy = AnalyticPolicy(machine)
    first, other = policy.best(stage, 2)
    with Workers(1) as workers:
        made = programs(stage, [first.config, other.config], machine, workers)
    task = Task(stage, 1, made[first.config], first.seconds)
    read = beside(task, [made[other.config]], machine, 1, (0.0, 0.1))
    assert not isinstance(read, str) and len(read) == 1 and read[0]
    twin = replace(made[other.config], nests=made[first.config].nests)
    with pytest.raises(InternalError, match="two programs"):
        artifact(stage, [made[first.config], twin], machine, threads=1)


@pytest.mark.scheduled
def test_a_row_of_a_small_attention(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def small() -> tuple[Any, Any]:
        import torch

        from models.layers import SelfAttention

        return SelfAttention(64, 4), torch.zeros(1, 48, 64)

    monkeypatch.setitem(trials.SUBGRAPHS, "small", small)
    options = argparse.Namespace(folder=tmp_path, threads=2, trials=16, stages=2)
    row = trials.measure("small", options)
    assert row.stages == 2 and row.trials == 32 and 0 < row.share <= 1
    assert not row.wrong and row.failed < row.trials
    assert 0 < row.metaschedule_trials <= row.trials
    assert row.gtco_trials is None or row.gtco_trials >= row.stages
    assert min(row.least, row.untuned, row.gtco, row.metaschedule) > 0

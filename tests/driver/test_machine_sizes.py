"""Models for machines of any size. Whatever sysfs says of caches and cores, results stay right, and
what a model takes of memory and tasks stays within a bound.
"""
# ruff: noqa: F811 (a fixture is imported, and arguments of the same name)

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

import gtco
from gtco.machine import target as targets
from gtco.search.analytic import AnalyticPolicy
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Program
from gtco.tensor.stage import Operator, Stage, TensorType, make_attrs, make_stage
from tests.driver.test_repeatable import model  # noqa: F401

SCRATCH = 4 << 20  # bytes of one thread: its data fit in its caches, whatever their real size


@pytest.fixture(scope="module")
def expected(model: Path) -> tuple[np.ndarray, list[np.ndarray]]:
    """An input, and the outputs in float64."""
    x = np.random.default_rng().standard_normal((1, 3, 24, 24)).astype(np.float32)
    made = onnx.load(model)
    for tensor in made.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            value = onnx.numpy_helper.to_array(tensor).astype(np.float64)
            tensor.CopyFrom(onnx.numpy_helper.from_array(value, tensor.name))
    for value in (*made.graph.input, *made.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    return x, ReferenceEvaluator(made).run(None, {"x": x.astype(np.float64)})


@pytest.mark.parametrize("capacity", [0, 1 << 30])
@pytest.mark.parametrize("threads", [1, 3, 64, 192])
def test_any_number_of_threads_and_any_caches(
    model: Path,
    expected: tuple[np.ndarray, list[np.ndarray]],
    monkeypatch: pytest.MonkeyPatch,
    threads: int,
    capacity: int,
) -> None:
    """Compiled and run with more threads than there are cores, for caches of no bytes and of a
    gigabyte.
    """
    known = targets.TARGETS["x86-64-v3"]
    caches = (replace(level, capacity=capacity) for level in known.memory[:-1])
    faked = replace(known, name="faked", cores=threads, memory=(*caches, known.memory[-1]))
    monkeypatch.setitem(targets.TARGETS, "faked", faked)
    compiled = gtco.compile_model(str(model), target="faked", threads=threads)
    assert compiled.threads == threads
    x, wanted = expected
    for got, value in zip(compiled(x), wanted, strict=True):
        np.testing.assert_allclose(got, value, rtol=1e-4, atol=1e-4 * np.abs(value).max())
    for stage in compiled.stages:
        assert stage["workspace"] <= SCRATCH, stage["schedule"]
        assert stage["tasks"] <= 16 * max(threads, 4), stage["schedule"]


def product(m: int, k: int, n: int) -> Stage:
    a, b, c = TensorType((m, k)), TensorType((k, n)), TensorType((m, n))
    return make_stage([Operator("matmul", ("a", "b"), "y", c)], {"a": a, "b": b}, ["b"])


def softmax(rows: int, length: int) -> Stage:
    shape = TensorType((rows, length))
    work = Operator("softmax", ("x",), "y", shape, make_attrs(axis=1))
    return make_stage([work], {"x": shape}, [])


LARGE = {"product": product(2048, 1024, 2048), "softmax": softmax(512, 8192)}


@pytest.mark.parametrize("cores", [1, 192])
@pytest.mark.parametrize("stage", LARGE.values(), ids=LARGE)
def test_scratch_and_tasks_of_large_stages_are_bounded(stage: Stage, cores: int) -> None:
    """The machine has the largest caches that :func:`gtco.machine.target.detect` believes. A thread
    still works on no more than its own cache holds, and there are only a few tasks for each core.
    """
    known = targets.TARGETS["x86-64-v4"]
    levels = (replace(m, capacity=targets.CACHE_BOUNDS[m.name][1]) for m in known.memory[:-1])
    machine = replace(known, cores=cores, memory=(*levels, known.memory[-1]))
    pick = AnalyticPolicy(machine).choose(stage)
    assert pick is not None
    program = space_of(stage, machine).build(pick.config, "f")
    assert isinstance(program, Program)
    assert program.workspace <= machine.memory[1].capacity
    assert program.tasks <= 16 * max(cores, 4)

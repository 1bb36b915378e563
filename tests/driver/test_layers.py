"""What each stage loses: known roundings, a fault that is found where it is, and compiles."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest

from gtco import cli
from gtco.cli.commands import compile_command
from gtco.compiler import compile_to_file
from gtco.driver.cache.caching import cache_of
from gtco.driver.linking import layers
from gtco.driver.linking.layers import Twins, compared, error, losses, with_outputs
from gtco.graph.graph import Graph
from gtco.graph.precision import narrow_operands
from gtco.graph.rewrites.fold_constants import fold_constants
from gtco.support.errors import OptionError
from gtco.support.options import CompileOptions
from gtco.support.sizes import Range
from gtco.tensor.reference import evaluate
from gtco.tensor.stage import Operator, Stage, TensorType, make_stage
from tests.driver.test_compiler import mlp

HALF = 2.0**-8  # the largest relative error of a rounding to bfloat16


def plain() -> Graph:
    """x -> relu -> slice -> matmul -> gelu -> matmul -> add."""
    rng = np.random.default_rng(3)
    graph = Graph(("x",), ("y",), {"x": TensorType((6, 32))})
    first, second = (
        graph.add_constant(rng.standard_normal(shape).astype(np.float32) / 6, name)
        for name, shape in (("w", (32, 40)), ("v", (40, 32)))
    )
    positive = graph.add("relu", ["x"], output="positive")
    whole = TensorType((4, 32))
    part = graph.add("slice", [positive], whole, output="part", begin=(1, 0), strides=(1, 1))
    a = graph.add("matmul", [part, first], output="a")
    b = graph.add("gelu", [a], output="b")
    c = graph.add("matmul", [b, second], output="c")
    graph.add("add", [c, part], output="y")
    return graph.check()


def stages_of(graph: Graph) -> list[Stage]:
    """Each operator as a stage."""
    return [make_stage([op], graph.types, graph.constants) for op in graph.operators.values()]


def run(graph: Graph, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    values = {**given, **graph.constants}
    for op in graph.operators.values():
        values[op.output] = evaluate(op, *(values[x] for x in op.inputs))
    return {name: values[name] for name in graph.operators}


@pytest.fixture
def rounded() -> Graph:
    return fold_constants(narrow_operands(plain(), "bfloat16")).check()


@pytest.fixture
def given() -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(4).standard_normal((6, 32)).astype(np.float32)}


def named(rounded: Graph, given: Mapping, made: Mapping) -> dict[str, tuple[float, float]]:
    stages = stages_of(rounded)
    found = losses(rounded, plain(), stages, given, made)
    assert found.left_out == ()
    return {stages[loss.stage].output.output: (loss.own, loss.accumulated) for loss in found.stages}


def test_roundings_are_lost_where_they_are(rounded: Graph, given: dict) -> None:
    found = named(rounded, given, run(rounded, given))
    assert len(found) == len(rounded.operators)
    casts = [op.output for op in rounded.operators.values() if op.kind == "cast"]
    products = [op.output for op in rounded.operators.values() if op.kind == "matmul"]
    assert casts and len(products) == 2
    for name in (*casts, *products):  # a product has rounded weights
        assert HALF / 10 < found[name][0] < HALF, name
    for name in set(found) - {*casts, *products}:
        assert found[name][0] < 1e-6, name
    wanted = run(plain(), given)["y"]
    got = run(rounded, given)["y"]
    whole = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
    assert found["y"][1] == pytest.approx(whole, rel=1e-3) and whole > HALF / 10


def test_a_fault_is_seen_at_its_stage(rounded: Graph, given: dict) -> None:
    made = run(rounded, given)
    (gelu,) = (op for op in rounded.operators.values() if op.kind == "gelu")
    values = {**given, **rounded.constants, **made, gelu.output: 1.5 * made[gelu.output]}
    behind = list(rounded.operators.values())
    for op in behind[behind.index(gelu) + 1 :]:
        values[op.output] = evaluate(op, *(values[x] for x in op.inputs))
    found = named(rounded, given, {name: values[name] for name in made})
    own = {name: loss[0] for name, loss in found.items()}
    assert own.pop(gelu.output) == pytest.approx(0.5)
    assert max(own.values()) < HALF
    assert found["y"][1] > 0.1


def test_tensors_are_matched_by_what_they_are(rounded: Graph) -> None:
    twins = Twins(rounded, plain())
    for op in rounded.operators.values():
        assert twins.of(op.output) is not None, op
    (moved,) = (op.output for op in rounded.operators.values() if op.kind == "slice")
    assert twins.of(moved) == "part"
    other = plain()
    other.put(Operator("relu", ("a",), "b", other.types["b"]))
    assert Twins(other, plain()).of("b") is None  # of the same name, and another operator


def test_what_is_not_compared_is_said(rounded: Graph, given: dict, monkeypatch) -> None:
    stages = stages_of(rounded)
    every, why = compared(stages)
    assert set(every) == set(rounded.operators) and why == ()
    assert set(with_outputs(rounded, every).outputs) == set(every)
    largest = max(s.output.type.nbytes for s in stages)
    monkeypatch.setattr(layers, "MOST_BYTES", sum(s.output.type.nbytes for s in stages) - 1)
    kept, (said,) = compared(stages)
    (gone,) = set(every) - set(kept)
    assert rounded.types[gone].nbytes == largest and said.startswith("the outputs of 1 stage ")
    made = run(rounded, given)
    monkeypatch.setattr(layers, "MOST_SECONDS", -1.0)
    found = losses(rounded, plain(), stages, given, {n: made[n] for n in kept}, [said])
    assert len(found.stages) == len(kept) and all(loss.own is None for loss in found.stages)
    assert found.left_out[0] == said and "took longer" in found.left_out[1]


def test_errors() -> None:
    ones = np.ones(4, np.float32)
    assert error(1.5 * ones, ones) == 0.5 and error(ones, ones) == 0.0
    assert error(np.zeros(4, np.int64), np.array([0, 1, 0, 0])) == 0.25
    infinite = np.array([1.0, np.inf, 1.0, 1.0], np.float32)
    assert error(infinite, infinite) == 0.0 and error(ones, infinite) is None
    assert error(ones, np.zeros(4, np.float32)) is None


def test_a_compile_compares_every_stage(tmp_path: Path) -> None:
    report = compile_to_file(
        mlp(layers=3),
        tmp_path / "m.so",
        tune="off",
        threads=1,
        precision="bf16",
        verify_layers=True,
    )
    assert report.losses is not None and report.losses.left_out == ()
    assert [loss.stage for loss in report.losses.stages] == list(range(len(report.stages)))
    for loss in report.losses.stages:
        assert loss.own is not None and loss.own < 2 * HALF
    assert max(loss.accumulated for loss in report.losses.stages) > HALF / 10


def test_a_compile_that_compares_stages_needs_its_kernels(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("GTCO_CACHE", str(tmp_path))
    monkeypatch.setenv("GTCO_CACHE_GB", "1")
    assert cache_of(CompileOptions(), None) is not None
    assert cache_of(CompileOptions(verify_layers=True), None) is None


@pytest.mark.parametrize("sizes", [[1, 3], "1..5"])
def test_every_variant_is_compared(
    tmp_path: Path, capsys, monkeypatch, sizes: list[int] | str
) -> None:
    report = compile_to_file(
        mlp("batch", layers=2),
        tmp_path / "m.so",
        tune="off",
        threads=1,
        precision="bf16",
        dims={"batch": Range.parse(sizes) if isinstance(sizes, str) else sizes},
        verify_layers=True,
    )
    assert report.losses is None and len(report.variants) > 1
    for sized in report.variants.values():
        assert sized.losses is not None and sized.losses.left_out == ()
        assert [loss.stage for loss in sized.losses.stages] == list(range(len(sized.stages)))
        assert 2 * HALF > max(loss.own for loss in sized.losses.stages) > HALF / 10
    assert [name for name, _ in report.phases].count("layers") == len(report.variants)
    monkeypatch.setattr(compile_command, "MOST_TABLES", len(report.variants))
    compile_command.summary(tmp_path / "m.so", report)
    assert capsys.readouterr().out.count("what stages lose") == len(report.variants)
    monkeypatch.setattr(compile_command, "MOST_TABLES", 1)
    compile_command.summary(tmp_path / "m.so", report)
    said = capsys.readouterr().out
    for name, sized in report.variants.items():
        assert f"{name}: {len(sized.stages)} stages compared with" in said


def test_what_it_is_not_for(tmp_path: Path, capsys) -> None:
    with pytest.raises(OptionError, match="libraries for CPUs"):
        compile_to_file(mlp(), tmp_path / "m.so", target="cuda:sm_80", verify_layers=True)
    assert list(tmp_path.iterdir()) == []


def test_the_command_shows_what_loses_most(tmp_path: Path, capsys) -> None:
    onnx.save(mlp(layers=2), tmp_path / "m.onnx")
    argv = ["compile", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "m.so"), "--tune", "off"]
    assert cli.main([*argv, "--verify-layers", "--threads", "1"]) == 0
    out = capsys.readouterr().out
    assert "what stages lose" in out and "with all before it" in out
    assert cli.main(["inspect", str(tmp_path / "m.so"), "--loops", "--no-profile"]) == 0
    out = capsys.readouterr().out
    assert "for task in 1 (threads):" in out and "C += A[" in out and "-> output" in out

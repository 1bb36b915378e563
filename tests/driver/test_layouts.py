"""Variants of one library read a weight in few layouts, at hardly any cost, and what was measured
stands.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import gtco
from gtco.codegen.build import build
from gtco.codegen.jobs import Job, Kernel
from gtco.driver.sizes import layouts
from gtco.machine.target import TARGETS
from gtco.search.analytic import AnalyticPolicy
from gtco.search.policy import Policy, priced
from gtco.search.recorded import RecordedPolicy
from gtco.search.records.records import Record, Records, circumstances
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Pick
from gtco.tensor.stage import Operator, Stage, TensorType, make_stage

MACHINE = TARGETS["x86-64-v3"]
COLUMNS, DEPTH = 100, 64
ROWS = (4, 8, 16)  # by its price each is best with a tile of another width


def product(rows: int) -> Stage:
    shapes = {"x": (rows, DEPTH), "w": (DEPTH, COLUMNS), "y": (rows, COLUMNS)}
    types = {name: TensorType(shape, "float32") for name, shape in shapes.items()}
    return make_stage([Operator("matmul", ("x", "w"), "y", types["y"])], types, {"w"})


def large_product(rows: int) -> Stage:
    shapes = {"x": (1, rows, 768), "w": (768, 3072), "y": (1, rows, 3072)}
    types = {name: TensorType(shape, "float32") for name, shape in shapes.items()}
    return make_stage([Operator("matmul", ("x", "w"), "y", types["y"])], types, {"w"})


def kernel(pick: Pick, stage: Stage) -> Kernel:
    made = build(Job("kernel", stage.canonical, pick.config, MACHINE))
    assert isinstance(made, Kernel)
    return made


def copies(
    found: layouts.Layouts, policy: Policy, stage: Stage, weights: dict[str, np.ndarray]
) -> layouts.Copies:
    """Of a variant that has this stage alone."""
    return layouts.Copies(found, [stage], lambda: policy.predict(stage), weights)


def test_a_layout_that_is_there_is_taken() -> None:
    policy, found = AnalyticPolicy(MACHINE), layouts.Layouts()
    weights = {"w": np.zeros((DEPTH, COLUMNS), np.float32)}
    built: dict[str, tuple[layouts.Config, Kernel]] = {}
    for rows in ROWS:
        stage = product(rows)
        here = copies(found, policy, stage, weights)
        pick, best = here.choose(policy, built, stage), policy.choose(stage)
        assert pick is not None and best is not None
        assert best.seconds <= pick.seconds <= 1.03 * best.seconds
        made = kernel(pick, stage)
        built[stage.key] = pick.config, made
        found.add([stage], {stage.key: made}, weights)
        assert here.choose(policy, built, stage) == pick
        other = copies(found, policy, stage, {"w": weights["w"].copy()})
        elsewhere = other.choose(policy, {}, stage)
        assert elsewhere is not None and elsewhere.config == best.config  # of another weight
    assert len({made.packings["p1"] for _, made in built.values()}) == 1
    bests = [policy.choose(product(rows)) for rows in ROWS]
    packed = {best.sketch.layouts(best.config)["w"] for best in bests if best}  # type: ignore[attr-defined]
    assert len(packed) > 1, "each would have brought its own"


def test_a_copy_costs_a_part_of_the_whole_variant() -> None:
    """The less of a model's time a weight's stage takes, the less its own layout is worth."""
    policy, found, stage = AnalyticPolicy(MACHINE), layouts.Layouts(), product(ROWS[1])
    weights = {"w": np.zeros((DEPTH, COLUMNS), np.float32)}
    first, best = policy.choose(product(ROWS[0])), policy.choose(stage)
    assert first is not None and best is not None
    found.add_picks([stage], {stage.key: first}, weights)
    taken = []
    for whole in (0.0, best.seconds, 1000 * best.seconds):
        here = layouts.Copies(found, [stage], lambda seconds=whole: seconds, weights)
        pick = here.choose(policy, {}, stage)
        assert pick is not None
        assert here.bytes(pick, stage) in (0, pytest.approx(weights["w"].nbytes, rel=0.3))
        taken.append((pick == best, here.bytes(pick, stage) > 0))
    assert taken == [(True, True), (False, False), (False, False)]


def test_equal_stages_share_what_their_weights_cost() -> None:
    """A stage of two layers is chosen once; the weight that has the layout makes it half as dear.
    """
    policy, found, stage = AnalyticPolicy(MACHINE), layouts.Layouts(), product(ROWS[1])
    renamed = {"x": "x2", "w": "w2", "y": "y2"}
    types = {renamed[one.name]: one.type for one in stage.inputs}
    types["y2"] = stage.operators[0].type
    second = make_stage([Operator("matmul", ("x2", "w2"), "y2", types["y2"])], types, {"w2"})
    assert second.key == stage.key
    weights = {name: np.full((DEPTH, COLUMNS), 1.0, np.float32) for name in ("w", "w2")}
    other, best = policy.choose(product(ROWS[0])), policy.choose(stage)
    assert other is not None and best is not None
    found.add_picks([stage, second], {stage.key: other}, weights)
    both = layouts.Copies(found, [stage, second], lambda: 1.0, weights).bytes(best, stage)
    found.add_picks([second], {stage.key: best}, weights)
    one = layouts.Copies(found, [stage, second], lambda: 1.0, weights).bytes(best, stage)
    assert both == 2 * one > 0


def test_what_was_measured_stands() -> None:
    stage, found = product(ROWS[1]), layouts.Layouts()
    policy = AnalyticPolicy(MACHINE)
    weights = {"w": np.zeros((DEPTH, COLUMNS), np.float32)}
    first = policy.choose(product(ROWS[0]))
    assert first is not None
    found.add([stage], {stage.key: kernel(first, product(ROWS[0]))}, weights)
    measured = policy.best(stage, 20)[-1]

    class Measured(AnalyticPolicy):
        def choose(self, stage: Stage, without: object = ()) -> Pick | None:
            return priced(self, space_of(stage, self.target), measured.config)

    here = copies(found, policy, stage, weights)
    assert here.choose(Measured(MACHINE), {}, stage) == measured


def test_the_first_choice_stands_too_where_it_was_measured(tmp_path: Path) -> None:
    """It gives way to a layout that is there, until a record of the user says that it won."""
    stage, found, policy = product(ROWS[1]), layouts.Layouts(), AnalyticPolicy(MACHINE)
    weights = {"w": np.zeros((DEPTH, COLUMNS), np.float32)}
    other, best = policy.choose(product(ROWS[0])), policy.choose(stage)
    assert other is not None and best is not None
    found.add([stage], {stage.key: kernel(other, product(ROWS[0]))}, weights)
    config, machine = json.dumps(best.config.to_json()), circumstances(MACHINE)
    won = Record(stage.key, stage.label, machine, config, "taken", best.seconds, best.seconds)
    with Records(tmp_path / "r") as records:
        measured = RecordedPolicy(policy, records)
        here = copies(found, policy, stage, weights)
        assert here.choose(measured, {}, stage) != best
        records.add([won])
        measured.observe()
        assert here.choose(measured, {}, stage) == best
    shipped = RecordedPolicy(policy, shipped=[won])
    assert here.choose(shipped, {}, stage) != best


@pytest.mark.parametrize("copy", [0.0, layouts.COPY])
def test_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copy: float) -> None:
    monkeypatch.setattr(layouts, "COPY", copy)
    rng = np.random.default_rng(0)
    w = rng.standard_normal((DEPTH, COLUMNS), dtype=np.float32)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", DEPTH])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", COLUMNS])
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = helper.make_graph([node], "g", [x], [y], [numpy_helper.from_array(w, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    onnx.save(model, tmp_path / "m.onnx")
    sizes = {"rows": list(ROWS)}
    options = {"target": MACHINE.name, "tune": "off", "cache": False}
    with gtco.compile_model(tmp_path / "m.onnx", dims=sizes, **options) as compiled:
        stored = w.nbytes * 1.3  # once, with what panels pad
        assert (compiled.report.weights_bytes <= stored) == (copy > 0)
        for rows in ROWS:
            given = rng.standard_normal((rows, DEPTH), dtype=np.float32)
            np.testing.assert_allclose(compiled(given), given @ w, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("smallest", "sketches"), [(100, {"gemm"}), (1024, {"strassen"})])
def test_a_layout_that_is_larger_than_the_weight(smallest: int, sketches: set[str]) -> None:
    """Sizes multiply by Strassen's algorithm, whose sums of the weight take 7/4 of its room, where
    the smallest does. Else the large ones would have the weight once more.
    """
    machine, found = TARGETS["znver4"], layouts.Layouts()
    policy, weights = AnalyticPolicy(machine), {"w": np.zeros((768, 3072), np.float32)}
    built: dict[str, tuple[layouts.Config, Kernel]] = {}
    taken, packed = set[str](), set[object]()
    for rows in (smallest, 1536, 2048):
        stage = large_product(rows)
        here = copies(found, policy, stage, weights)
        best, pick = policy.choose(stage), here.choose(policy, built, stage)
        assert best is not None and pick is not None
        assert best.sketch.name == ("strassen" if rows > 100 else "gemm")
        assert best.seconds <= pick.seconds <= 1.2 * best.seconds
        found.add_picks([stage], {stage.key: pick}, weights)
        taken.add(pick.sketch.name)
        packed.add(pick.sketch.layouts(pick.config)["w"])  # type: ignore[attr-defined]
    assert taken == sketches and len(packed) <= 2


def test_the_order_of_a_list_does_not_matter(tmp_path: Path) -> None:
    """A list that begins with its largest size has the weights of one that begins with the
    smallest.
    """
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, "rows", 768])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, "rows", 1536])
    w = np.random.default_rng(0).standard_normal((768, 1536), dtype=np.float32)
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = helper.make_graph([node], "g", [x], [y], [numpy_helper.from_array(w, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    options = {"target": "znver4", "threads": 2, "tune": "off", "cache": False}
    found = [
        gtco.compile_to_file(model, tmp_path / "m.so", dims={"rows": rows}, **options)
        for rows in ([1024, 64], [64, 1024], [1024, 2048], [2048, 1024])
    ]
    assert [one.weights_bytes // w.nbytes for one in found] == [1, 1, 1, 1]
    assert [one.weights_bytes > 1.7 * w.nbytes for one in found] == [False, False, True, True]
    assert [*found[0].variants] == ["rows=1024", "rows=64"]

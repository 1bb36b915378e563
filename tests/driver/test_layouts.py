"""Variants of one library read a weight in few layouts, at hardly any cost, and what was measured
stands.
"""

from __future__ import annotations

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
from gtco.search.policy import priced
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Pick
from gtco.tensor.stage import Operator, Stage, TensorType, make_stage

MACHINE = TARGETS["x86-64-v3"]
COLUMNS, DEPTH = 100, 64
ROWS = (4, 8, 16)  # by its price each is best with a tile of another width
LARGE = {"x": (1, 1024, 768), "w": (768, 3072), "y": (1, 1024, 3072)}


def product(rows: int) -> Stage:
    shapes = {"x": (rows, DEPTH), "w": (DEPTH, COLUMNS), "y": (rows, COLUMNS)}
    types = {name: TensorType(shape, "float32") for name, shape in shapes.items()}
    return make_stage([Operator("matmul", ("x", "w"), "y", types["y"])], types, {"w"})


def kernel(pick: Pick, stage: Stage) -> Kernel:
    made = build(Job("kernel", stage.canonical, pick.config, MACHINE))
    assert isinstance(made, Kernel)
    return made


def test_a_layout_that_is_there_is_taken() -> None:
    policy, found = AnalyticPolicy(MACHINE), layouts.Layouts()
    weights = {"w": np.zeros((DEPTH, COLUMNS), np.float32)}
    built: dict[str, tuple[layouts.Config, Kernel]] = {}
    for rows in ROWS:
        stage = product(rows)
        pick, best = found.choose(policy, built, weights, stage), policy.choose(stage)
        assert pick is not None and best is not None
        assert best.seconds <= pick.seconds <= layouts.CLOSE * best.seconds
        made = kernel(pick, stage)
        built[stage.key] = pick.config, made
        found.add([stage], {stage.key: made}, weights)
        assert found.choose(policy, built, weights, stage) == pick
        elsewhere = found.choose(policy, {}, {"w": weights["w"].copy()}, stage)
        assert elsewhere is not None and elsewhere.config == best.config  # of another weight
    assert len({made.packings["p1"] for _, made in built.values()}) == 1
    bests = [policy.choose(product(rows)) for rows in ROWS]
    packed = {best.sketch.layouts(best.config)["w"] for best in bests if best}  # type: ignore[attr-defined]
    assert len(packed) > 1, "each would have brought its own"


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

    assert found.choose(Measured(MACHINE), {}, weights, stage) == measured


@pytest.mark.parametrize("close", [1.0, layouts.CLOSE])
def test_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, close: float) -> None:
    monkeypatch.setattr(layouts, "CLOSE", close)
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
        assert (compiled.report.weights_bytes <= stored) == (close > 1)
        for rows in ROWS:
            given = rng.standard_normal((rows, DEPTH), dtype=np.float32)
            np.testing.assert_allclose(compiled(given), given @ w, rtol=1e-4, atol=1e-4)


def test_a_layout_that_is_larger_than_the_weight() -> None:
    """A library of one size multiplies by Strassen's algorithm. In one of several sizes the small
    ones would bring the weight once more, so none does.
    """
    policy, found = AnalyticPolicy(TARGETS["znver4"]), layouts.Layouts()
    types = {name: TensorType(size, "float32") for name, size in LARGE.items()}
    stage = make_stage([Operator("matmul", ("x", "w"), "y", types["y"])], types, {"w"})
    best = policy.choose(stage)
    pick = found.choose(policy, {}, {"w": np.zeros(LARGE["w"], np.float32)}, stage)
    assert best is not None and pick is not None
    assert best.sketch.name == "strassen" and pick.sketch.name == "gemm"
    assert best.seconds < pick.seconds <= layouts.GROWN * best.seconds

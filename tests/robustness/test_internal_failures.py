"""Failures of gtco itself, injected at every point of a compile. The model compiles by what is left
and says so, ``strict`` makes the failure an error, and a failure that cannot be worked around names
its place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from gtco.cli import main
from gtco.codegen.workers import Workers
from gtco.compiler import compile_model, compile_to_file
from gtco.driver import making
from gtco.driver.compiled import CompileReport
from gtco.graph.lower import operators as lower_operators
from gtco.graph.rewrites import pipeline
from gtco.machine.target import target
from gtco.search.analytic import AnalyticPolicy
from gtco.support.errors import BuildError, GtcoError, InternalError, UnsupportedError, guarded
from gtco.tensor import sketch
from gtco.tensor.sketch.fallback import cpu as fallback
from gtco.tensor.sketch.gemm import cpu as gemm
from gtco.tensor.sketch.rows import cpu as rows
from gtco.tensor.stage import Operator, TensorType, make_attrs, make_stage

RNG = np.random.default_rng(3)
W = RNG.standard_normal((16, 16), dtype=np.float32)


def model() -> onnx.ModelProto:
    """y = softmax(silu(x W)): a GEMM, a reduction and element-wise operators."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("Sigmoid", ["m"], ["s"]),
        helper.make_node("Mul", ["m", "s"], ["g"]),
        helper.make_node("Softmax", ["g"], ["y"], axis=-1),
    ]
    value = partial(helper.make_tensor_value_info, elem_type=TensorProto.FLOAT, shape=(5, 16))
    graph = helper.make_graph(
        nodes, "gated", [value("x")], [value("y")], [numpy_helper.from_array(W, "w")]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def check(**options: Any) -> CompileReport:
    """Compiles, compares with float64, and gives the report."""
    compiled = compile_model(model(), workers=1, **options)
    x = RNG.standard_normal((5, 16), dtype=np.float32)
    m = x.astype(np.float64) @ W
    e = np.exp(m / (1 + np.exp(-m)))
    np.testing.assert_allclose(compiled(x), e / e.sum(-1, keepdims=True), rtol=1e-4, atol=1e-6)
    return compiled.report


def raising(*_: object, **__: object) -> Any:
    return {}["what is not there"]


def bad_match(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = [raising if rule is gemm.match else rule for rule in sketch.RULES]
    monkeypatch.setattr(sketch, "RULES", tuple(rules))


def bad_price(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm.Gemm, "workload", raising)


def bad_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm.Gemm, "next_decision", raising)


def bad_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm.Gemm, "signature", property(raising))


def no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = AnalyticPolicy.seconds

    def priced(self: Any, work: Any) -> float:
        return float("nan") if work.kernel.startswith("fma:") else seconds(self, work)

    monkeypatch.setattr(AnalyticPolicy, "seconds", priced)


@pytest.mark.parametrize("inject", [bad_match, bad_price, bad_decision, bad_signature, no_number])
def test_a_sketch_that_fails_is_passed_over(
    inject: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    inject(monkeypatch)
    report = check()
    used = {s["schedule"]["sketch"] for s in report.stages}
    assert "gemm" not in used and "fallback" in used
    notes = [n for n in report.notes if "failed" in n]
    cause = "nan predicted" if inject is no_number else "KeyError: 'what is not there'"
    assert notes  # one, or two where the batch is priced in parts too
    for note in notes:
        assert cause in note and "matmul" in note and "please report it" in note
    if inject is not bad_match:
        return
    with pytest.raises(InternalError, match=r"sketch '.*' failed") as caught:
        compile_to_file(model(), tmp_path / "m.so", strict=True, workers=1)
    assert "matmul" in str(caught.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", range(len(sketch.RULES)))
def test_any_one_rule_may_fail(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operator still has a sketch: its own or, if that rule fails, the fallback."""
    rules = list(sketch.RULES)
    name, rules[number] = sketch.family(rules[number]), raising
    monkeypatch.setattr(sketch, "RULES", tuple(rules))
    policy = AnalyticPolicy(target("x86-64-v3"))
    square = TensorType((16, 16))
    for kind, attrs in {"matmul": {}, "softmax": {"axis": 1}, "silu": {}, "relax": {}}.items():
        inputs = ("x", "w") if kind == "matmul" else ("x",)
        op = Operator(kind, inputs, "y", square, make_attrs(**attrs))
        chosen = policy.choose(make_stage([op], {"x": square, "w": square}, ["w"]))
        assert chosen is not None or (kind, name) == ("relax", "fallback")
        assert chosen is None or chosen.sketch.name != name
    (failure,) = policy.failures
    assert "what is not there" in failure and "matmul" in failure and "3 more" in failure


@pytest.mark.parametrize("inject", [bad_price, bad_decision, no_number])
def test_what_is_measured_beside_a_pick_leaves_out_a_sketch_that_fails(
    inject: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a tuning goes on."""
    wide = TensorType((16, 16))
    op = Operator("matmul", ("x", "w"), "y", wide, make_attrs())
    stage = make_stage([op], {"x": wide, "w": wide}, ["w"])
    first = AnalyticPolicy(target("x86-64-v3")).choose(stage)
    assert first is not None and first.sketch.name == "gemm"
    known = {first.config}
    inject(monkeypatch)
    policy = AnalyticPolicy(target("x86-64-v3"))
    (pick,) = policy.best(stage, 1)
    assert pick.sketch.name != "gemm"
    for found in (
        policy.alternatives(stage, pick, set()),
        policy.nearby(stage, known, {"gemm", "fallback"}),
        policy.closest(stage, known),
    ):
        assert "gemm" not in {other.sketch.name for other in found}
    assert any("'gemm' failed" in failure for failure in policy.failures)


def test_no_sketch_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This is not the model's fault, and so no UnsupportedError."""
    monkeypatch.setattr(sketch, "RULES", (raising,))
    with pytest.raises(InternalError, match="what is not there") as caught:
        compile_to_file(model(), tmp_path / "m.so", workers=1)
    assert not isinstance(caught.value, UnsupportedError) and "report" in str(caught.value)


BUILDS = """
import sys
from multiprocessing.connection import Connection
from gtco.codegen.serve import serve
from gtco.tensor.sketch.{module}.cpu import {name}
def build(self, config, symbol):
    raise KeyError("what is not there")
{name}.build = build
serve(Connection(int(sys.argv[1])))
"""


@pytest.mark.parametrize("kind", [gemm.Gemm, rows.Rows])
def test_a_build_that_fails(kind: type, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = sketch.family(kind)
    script = tmp_path / "worker.py"
    script.write_text(BUILDS.format(module=name, name=kind.__name__))
    command = (sys.executable, str(script))
    monkeypatch.setattr(making, "Workers", partial(Workers, command=command))
    report = check()
    assert name not in {s["schedule"]["sketch"] for s in report.stages}
    notes = [n for n in report.notes if "could not be built" in n]
    assert notes and all("KeyError" in n and f'"{name}"' in n.replace("'", '"') for n in notes)
    if kind is gemm.Gemm:
        with pytest.raises(InternalError, match=r"strict[\s\S]*what is not there"):
            compile_to_file(model(), tmp_path / "m.so", strict=True, workers=1)


SINGLE = """
import sys
from multiprocessing.connection import Connection
from gtco.codegen.serve import serve
from gtco.tensor.sketch.elementwise.cpu import Elementwise
from gtco.tensor.sketch.fallback.cpu import Fallback
def alone(build):
    def built(self, config, symbol):
        if len(self.stage.operators) > 1:
            raise KeyError("what is not there")
        return build(self, config, symbol)
    return built
for sketch in (Elementwise, Fallback):
    sketch.build = alone(sketch.build)
serve(Connection(int(sys.argv[1])))
"""


def test_a_quantizing_stage_is_cut_into_operators(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Inside of a stage, what it quantizes are floats, which the graph does not know."""
    script = tmp_path / "worker.py"
    script.write_text(SINGLE)
    command = (sys.executable, str(script))
    monkeypatch.setattr(making, "Workers", partial(Workers, command=command))
    quantized = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 20]>
        quantized (float[5, 16] x) => (float[5, 16] y)
        <float s = {0.0625}, uint8 z = {128}>
        { q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) y = Sin(d) }""")
    compiled = compile_model(quantized, workers=1)
    x = RNG.standard_normal((5, 16), dtype=np.float32)
    wanted = np.sin(np.rint(x * 16) / 16)
    np.testing.assert_allclose(compiled(x), wanted, rtol=1e-5, atol=1e-6)
    assert len(compiled.report.stages) == 3


def test_the_fallback_fails_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sketch, "RULES", (fallback.match,))
    script = tmp_path / "worker.py"
    script.write_text(BUILDS.format(module="fallback", name="Fallback"))
    command = (sys.executable, str(script))
    monkeypatch.setattr(making, "Workers", partial(Workers, command=command))
    with pytest.raises(BuildError, match=r"operator by operator[\s\S]*what is not there"):
        compile_to_file(model(), tmp_path / "m.so", workers=1)


def test_a_rewrite_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(graph: Any) -> Any:
        return raising()

    rewrites = [broken if r is pipeline.softmax else r for r in pipeline.PIPELINE]
    monkeypatch.setattr(pipeline, "PIPELINE", tuple(rewrites))
    (note,) = [n for n in check().notes if "rewrite" in n]
    assert "'broken'" in note and "KeyError" in note and "compiled without it" in note
    with pytest.raises(InternalError, match="the rewrite 'broken'"):
        compile_to_file(model(), tmp_path / "m.so", strict=True, workers=1)


@pytest.mark.parametrize(
    ("where", "phase", "error"),
    [
        ("gtco.graph.lower.walk.lower", "read", KeyError("x")),
        ("gtco.driver.canonical.channels_last", "simplify", RecursionError("deep")),
        ("gtco.driver.fusing.fuse", "fuse", AssertionError()),
        ("gtco.driver.generating.generate", "generate", KeyError("x")),
        ("gtco.driver.linking.finishing.assemble", "link", AssertionError()),
        ("gtco.verification.verify", "verify", RecursionError("deep")),
    ],
)
def test_a_phase_that_fails_is_named(
    where: str,
    phase: str,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(where, fails)
    source = tmp_path / "m.onnx"
    onnx.save(model(), source)
    if not isinstance(error, KeyError):  # once through the command line
        with pytest.raises(InternalError) as caught:
            compile_to_file(source, tmp_path / "m.so", verify=True, workers=1)
        text = str(caught.value)
        assert caught.value.__cause__ is error
    else:
        assert main(["compile", str(source), "--verify", "--workers", "1", "--tune", "off"]) == 1
        text = capsys.readouterr().err
        assert "Traceback" not in text
    assert f"phase '{phase}'" in text and type(error).__name__ in text
    assert "please report it" in text


def test_a_node_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(lower_operators.RULES, "matmul", raising)
    named = model()
    named.graph.node[0].name = "projection"
    with pytest.raises(InternalError, match=r"the lowering of node .*projection.*KeyError"):
        compile_to_file(named, tmp_path / "m.so", workers=1, simplify=False)


def test_a_command_that_fails_gives_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gtco.cli.commands.doctor_command.main", raising)
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().err
    assert "internal failure in gtco doctor: KeyError" in shown and "Traceback" not in shown


def test_what_the_machine_refuses_is_no_fault_of_gtcos() -> None:
    for error in (MemoryError(), OSError(28, "No space left on device", "/x")):
        with pytest.raises(BuildError) as caught, guarded("the phase 'link'"):
            raise error
        assert "link" in str(caught.value) and not isinstance(caught.value, InternalError)
    with pytest.raises(GtcoError, match="as it is") as kept, guarded("anything"):
        raise UnsupportedError("as it is")
    assert isinstance(kept.value, UnsupportedError)

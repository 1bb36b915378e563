"""A model that cannot be exported, compiled or compared costs its own rows and the exit status."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench import __main__ as entry
from bench.harness import by_model, suite
from bench.harness.rounds import Comparison, Measurement
from bench.harness.workload import check_models
from bench.models import ablation, end_to_end, int8, tuning
from gtco.support.errors import BuildError, GtcoError, ModelError
from gtco.verification.outputs import OutputJudge
from tests.bench.harness.onnx_files import one
from tests.bench.models.test_tables import result


@pytest.fixture
def options(tmp_path: Path) -> argparse.Namespace:
    return argparse.Namespace(
        **{"folder": tmp_path, "threads": 1, "rounds": 1, "json": None, "samples": 1},
        **{"models": "a.onnx,b.onnx,c.onnx", "peers": "onnxruntime", "quantizer": "gtco"},
        **{"effort": "quick", "variants": "greedy"},
    )


def test_one_model_of_a_suite_may_fail(
    workload: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(name: str, *_: Any, **__: Any) -> suite.Result:
        if name == "b.onnx":
            raise ModelError("cannot export b")
        return result(replace(workload, name=name))

    monkeypatch.setattr(end_to_end, "run_model", run)
    given = ["end_to_end", "--peers", "onnxruntime", "--efforts", ""]
    assert entry.main([*given, "--models", "a.onnx,b.onnx,c.onnx"]) == 1
    said = capsys.readouterr().out
    assert "b.onnx failed: cannot export b" in said
    assert "over 2 models" in said and said.endswith("not measured: b.onnx\n")
    assert entry.main([*given, "--models", "a.onnx,c.onnx"]) == 0


def test_one_model_of_a_loop_may_fail(
    options: argparse.Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(name: str, _: argparse.Namespace) -> list[str]:
        if name != "b.onnx":
            raise BuildError(f"no kernel for {name}")
        return [name]

    assert by_model.every_model(options, measure) == (["b.onnx"], ["a.onnx", "c.onnx"])
    assert "a.onnx failed: no kernel for a.onnx" in capsys.readouterr().out
    assert by_model.ended(["a.onnx", "c.onnx"]) == 1 and by_model.ended([]) == 0
    assert by_model.ended([], sound=False) == 1
    assert capsys.readouterr().out == "not measured: a.onnx, c.onnx\n"
    options.models = "a.onnx,c.onnx"
    with pytest.raises(GtcoError, match="no model could be measured"):
        by_model.every_model(options, measure)


def test_names_are_checked_before_anything_is_measured(tmp_path: Path) -> None:
    check_models(["vit-ti-16", "swinv2-t", "file.onnx", "library.so"], tmp_path)
    with pytest.raises(ModelError, match="unknown model vit-giant, swim-t: "):
        check_models(["vit-ti-16", "vit-giant", "swim-t"], tmp_path)


@pytest.fixture
def prepared(workload: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model that is compiled already, for benchmarks that compile it once more."""
    one(workload.onnx, "Relu", [(100,)], (100,))
    np.savez(workload.inputs, i0=np.ones(100, np.float32))
    for module in (ablation, tuning, int8):
        monkeypatch.setattr(module, "prepare", lambda *_: workload)
    report = SimpleNamespace(predicted_seconds=1.0, stages=(), tuning=(), seconds=1.0)
    monkeypatch.setattr(tuning, "compile_to_file", lambda *_, **__: report)
    monkeypatch.setattr(ablation.compiler, "compile_to_file", lambda *_, **__: report)
    monkeypatch.setattr(int8, "quantize", lambda *_: workload.onnx)
    monkeypatch.setattr(int8, "installed", lambda _: False)
    return workload


@pytest.mark.parametrize("module", [ablation, tuning, int8])
def test_float64_decides_where_outputs_differ(
    module: Any, prepared: Any, options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def compare(*_: Any, **how: Any) -> None:
        seen.update(how)
        raise BuildError("enough")

    monkeypatch.setattr(module, "compare", compare)
    with pytest.raises(BuildError, match="enough"):
        module.measure("m", options)
    assert isinstance(seen["judge"], OutputJudge) and seen["judge"].model == prepared.onnx
    quantized = module is int8
    assert seen["tolerance"] == (suite.QUANTIZED if quantized else suite.tolerance(prepared))


@pytest.mark.parametrize("module", [ablation, tuning, int8])
def test_a_model_that_gtco_cannot_compile_has_no_row(
    module: Any, prepared: Any, options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = replace(prepared, build=replace(prepared.build, error="no kernel for Loop"))
    monkeypatch.setattr(module, "prepare", lambda *_: failed)
    with pytest.raises(BuildError, match="m cannot be compiled: no kernel for Loop"):
        module.measure("m", options)


def test_what_the_reference_did_not_run_is_not_compared(
    prepared: Any, options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [Measurement(name, rounds=((0.01,),)) for name in ("gtco", "greedy")]
    peer = Measurement("onnxruntime", error="crashed")
    monkeypatch.setattr(ablation, "compare", lambda *_, **__: Comparison((*own, peer)))
    (row,) = ablation.measure("m", options)
    assert row.error == "not compared: crashed"
    lost = replace(own[0], system=tuning.TUNED, rounds=(), error="killed")
    monkeypatch.setattr(tuning, "compare", lambda *_, **__: Comparison((own[0], lost, peer)))
    with pytest.raises(BuildError, match="gtco-tuned could not run m: killed"):
        tuning.measure("m", options)

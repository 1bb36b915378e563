"""``python -m bench gpu`` where there is no GPU: what it says, and what it prepares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as bench
from bench import gpu
from bench.harness import Comparison, Measurement
from gtco.errors import UnsupportedError


def test_measuring_needs_a_gpu_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert bench.main(["gpu", "measure", "--folder", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "error: no GPU to measure on" in said and "'bench gpu prepare' needs no GPU" in said
    monkeypatch.setattr(gpu, "_gpu", lambda: "Fake GPU")
    assert bench.main(["gpu", "measure", "--folder", str(tmp_path)]) == 1
    assert "nothing to measure in" in capsys.readouterr().err


def test_what_cannot_be_compiled_is_kept_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked: list[Any] = []

    def compile_to_file(onnx: Path, library: Path, **options: Any) -> None:
        asked.append((onnx.name, library.name, options))
        if onnx.name.startswith("vit-ti-16.b8"):
            raise UnsupportedError("no kernel for Loop")

    monkeypatch.setattr("gtco.compiler.compile_to_file", compile_to_file)
    monkeypatch.setattr(gpu, "_export", lambda *_: None)
    arguments = ["--models", "vit-ti-16", "--batches", "1,8", "--folder", str(tmp_path)]
    arguments += ["--kernels", ""]
    assert bench.main(["gpu", "prepare", *arguments]) == 1
    options = {"target": "cuda:sm_90a", "precision": "fp16", "launches": "persistent"}
    options |= {"untrusted": False}
    assert asked[0] == ("vit-ti-16.b1.onnx", "vit-ti-16.b1.so", options)
    job = json.loads((tmp_path / "vit-ti-16.b8.json").read_text())
    assert job["error"] == "no kernel for Loop" and job["batch"] == 8
    assert capsys.readouterr().out.splitlines()[0] == "vit-ti-16.b1: ready"


def test_cells_of_the_table() -> None:
    timed = Measurement("gtco", rounds=((0.002,), (0.002,)))
    slower = Measurement("torch", rounds=((0.005,), (0.005,)))
    absent = Measurement("onnxruntime", error="RuntimeError: no CUDA provider")
    found = Comparison((timed, slower, absent))
    cells = gpu._cells(found, ("torch", "onnxruntime"), {})
    assert cells == ["2.000", "2.50", "RuntimeError: no CUDA provider"]
    wrong = Comparison((Measurement("gtco", rounds=((1.0,),), disagrees="differs by 1"), slower))
    assert gpu._cells(wrong, ("torch",), {}) == ["wrong: differs by 1", "-"]
    assert gpu._cells(found, ("torch",), {"error": "no kernel"}) == ["not compiled", "-"]

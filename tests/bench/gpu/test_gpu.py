"""``python -m bench gpu`` without a GPU: what it says, and what it prepares."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench import __main__ as bench
from bench.gpu import gpu
from bench.gpu import peers as gpu_peers
from bench.harness.rounds import Comparison, Measurement
from gtco.support.errors import UnsupportedError
from tests.bench.harness.onnx_files import one


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
    assert asked[0] == ("vit-ti-16.b1.onnx", "vit-ti-16.b1.so", options)
    job = json.loads((tmp_path / "vit-ti-16.b8.json").read_text())
    assert job["error"] == "no kernel for Loop" and job["batch"] == 8
    assert capsys.readouterr().out.splitlines()[0] == "vit-ti-16.b1: ready"


def test_models_are_exported_again_with_other_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def exported(module: Any, inputs: Any, path: Path) -> None:
        made.append(path.name)
        path.touch()

    monkeypatch.setattr("gtco.models.create", lambda _: torch.nn.Linear(2, 2))
    monkeypatch.setattr("gtco.models.example_inputs", lambda *_: (torch.zeros(1, 2),))
    monkeypatch.setattr("gtco.models.export_onnx", exported)
    (tmp_path / "vit.b1.onnx").touch()
    both = ["vit.b1.onnx", "vit.b1.half.onnx"]
    for version, expected in (("1", both), ("1", []), ("2", both)):
        monkeypatch.setattr(gpu.kept, "installed", lambda _, version=version: version)
        gpu._export("vit", 1, tmp_path / "vit.b1")
        assert made == expected
        made.clear()
    assert not list(tmp_path.glob("*.b*.json"))  # those are the jobs


def test_a_target_that_is_none_is_refused_before_anything_is_exported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "gpu"
    assert bench.main(["gpu", "prepare", "--target", "cuda:sm_70", "--folder", str(folder)]) == 1
    assert "CUDA 13 ended" in capsys.readouterr().err and not folder.exists()


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


def test_each_model_is_kept_before_its_stages_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Batch 1 comes first. Three things cost only their own rows: a missing library, a model whose
    kernels fault, and one whose profile never ends.
    """
    for name in ("b.b8", "a.b8", "big.b1", "small.b1", "faulty.b1"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"model": name, "precision": "fp16"}))
        if name != "a.b8":
            (tmp_path / f"{name}.so").write_bytes(b"x" * len(name))
    report = tmp_path / "all.json"
    order: list[Any] = []
    timed = Measurement("gtco", rounds=((0.002,), (0.002,)))

    def compare(candidates: Any, *_: Any, judge: Any, **__: Any) -> Comparison:
        stem = Path(candidates[0].job["library"]).stem
        order.append(stem)
        others = (Measurement(c.name, error="not here") for c in candidates if c.name != "gtco")
        own = Measurement("gtco", error="a fault") if stem == "faulty.b1" else timed
        return Comparison((own, *others) if "error" not in candidates[0].job else tuple(others))

    def inspected(command: list[str], **_: Any) -> Any:
        stem = Path(command[-2]).stem
        assert stem in json.loads(report.read_text())["models"]
        order.append(f"stages of {stem}")
        if stem == "big.b1":
            raise subprocess.TimeoutExpired(command, 1)
        said = json.dumps({"stages": [{"name": "s0", "measured_seconds": 1e-5}]})
        return subprocess.CompletedProcess(command, int(stem == "b.b8"), said, "error: no device")

    monkeypatch.setattr(gpu, "_gpu", lambda: "Fake GPU")
    monkeypatch.setattr(gpu, "compare", compare)
    monkeypatch.setattr(gpu, "ways", lambda library: ["gtco"])
    monkeypatch.setattr(gpu.subprocess, "run", inspected)
    arguments = ["gpu", "measure", "--folder", str(tmp_path), "--json", str(report)]
    assert bench.main([*arguments, "--no-sanitizer"]) == 1
    models = json.loads(report.read_text())["models"]
    assert list(models) == ["big.b1", "small.b1", "faulty.b1", "a.b8", "b.b8"]
    assert order == [
        *("big.b1", "stages of big.b1", "small.b1", "stages of small.b1", "faulty.b1"),
        *("a.b8", "b.b8", "stages of b.b8"),
    ]
    assert models["small.b1"]["stages"] == [{"name": "s0", "measured_seconds": 1e-5}]
    assert models["big.b1"]["stages"]["error"] == "not done in 120 s"
    assert models["b.b8"]["stages"]["error"] == "error: no device"
    assert "a.b8.so is not there" in models["a.b8"]["job"]["error"]
    assert "stages" not in models["a.b8"] and "stages" not in models["faulty.b1"]


def test_what_is_wrong_ends_with_status_1() -> None:
    kernel = {"kernel": "gelu", "wrong": False}
    gtco, peer = ({"system": s, "error": None, "disagrees": None} for s in ("gtco", "torch"))

    def sound(one: Any = kernel, own: Any = gtco, other: Any = peer, said: Any = "0 errors") -> Any:
        models = {"vit": {"job": {}, "systems": [own, other]}}
        watched = {"compute-sanitizer": {"vit": {"memcheck": said}}}
        return gpu._sound({"kernels": [one], "models": models, **watched})

    assert sound() and sound(other={**peer, "error": "no CUDA provider"})
    assert gpu._sound({"kernels": [], "models": {}, "compute-sanitizer": "not there"})
    assert not sound(one={**kernel, "wrong": True}) and not sound(one={"error": "a fault"})
    assert not sound(own={**gtco, "system": "gtco:graph", "disagrees": "off by 1"})
    assert not sound(own={**gtco, "error": "a fault"}) and not sound(said="1 error\nat 0x0")
    failed = {"vit": {"job": {"error": "no kernel"}, "systems": [peer]}}
    assert not gpu._sound({"kernels": [], "models": failed})


def test_float64_decides_about_models(tmp_path: Path) -> None:
    """The inputs were written without their names."""
    path = one(tmp_path / "m.onnx", "Sub", [(2, 3), (2, 3)], (2, 3))
    a, b = np.ones((2, 3), np.float32), np.full((2, 3), 5, np.float32)
    np.savez(tmp_path / "in.npz", a, b)
    job = {"onnx": str(path), "inputs": str(tmp_path / "in.npz"), "precision": "fp16"}
    assert gpu._judge(job)([a - b], [a + b], "torch:float32").right
    assert not gpu._judge(job)([a + b], [a - b], "torch:float32").right


def test_onnxruntime_has_a_cuda_graph_and_no_tf32_in_fp32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(gpu_peers, "bound", lambda _, *more: asked.append(more[-1]))
    for system in gpu.PEERS[-2:]:
        for precision in ("fp32", "fp16"):
            gpu_peers.OPENERS[system]({"precision": precision})
    graph = {"enable_cuda_graph": "1"}
    assert asked == [{"use_tf32": "0"}, {}, {**graph, "use_tf32": "0"}, graph]


def test_the_outputs_of_a_cuda_graph_stay_where_they_are(tmp_path: Path) -> None:
    """The CPU's provider takes the place of CUDA's, which alone has graphs."""
    path = one(tmp_path / "m.onnx", "Sub", [(2, 3), (2, 3)], (2, 3))
    np.savez(tmp_path / "in.npz", np.ones((2, 3), np.float32), np.zeros((2, 3), np.float32))
    job = {"onnx": str(path), "inputs": str(tmp_path / "in.npz"), "precision": "fp32"}
    graph = {"enable_cuda_graph": "1"}
    system = gpu_peers.bound(job, "CPUExecutionProvider", "cpu", graph)
    system.call()
    assert (system.outputs()[0] == 1).all()


def test_prices_hold_beside_what_a_gpu_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The readings of an H200 are part of the repository, so a change of a price shows here."""
    file = tmp_path / "policy.json"
    assert bench.main(["gpu", "policy", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert len(found["picks"]) > 80 and sum(found["picks"].values()) / len(found["picks"]) < 1.12
    for unit in ("wgmma", "mma", "attention", "rows"):
        count, ratio, error = found["errors"][unit]
        assert count > 100 and 0.75 < ratio < 1.3 and error < 0.3, unit
    assert "picks of" in capsys.readouterr().out


def test_measuring_needs_no_tvm(tmp_path: Path) -> None:
    """A machine with a GPU may have no compiler."""
    code = (
        "import sys\n"
        "sys.modules |= dict.fromkeys(('tvm', 'tvm_ffi', 'onnxsim', 'cuda'))\n"
        "from bench.gpu import gpu, kernel_times, peers\n"
        "from gtco.support.errors import OptionError\n"
        f"try: gpu.main(['measure', '--folder', {str(tmp_path)!r}])\n"
        "except OptionError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "no GPU to measure on" in done.stdout, done.stderr

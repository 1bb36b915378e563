"""``gtco bench --target cuda`` without a GPU, and gtco's own column on the fake driver."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx.parser
import pytest

from bench.gpu.peers import bound
from gtco.cli import main
from gtco.cli.commands.doctor_command import gpus_check
from gtco.machine.gpu import ARCHITECTURES, gpu_target, target_of
from gtco.support.errors import OptionError
from tests.cuda.fake_driver import ILLEGAL_ADDRESS, FakeDriver
from tests.runtime.test_models import SCALE


@pytest.fixture(scope="module")
def small_onnx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small GPU model as ONNX."""
    scale = ", ".join(map(str, SCALE))
    made = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]>
        small (float[96,40] x, int8[96] mask) => (float[96,40] y, float[40] total)
        <float[40] scale = {{{scale}}}, int64[1] one = {{1}}, int64[1] zero = {{0}}> {{
          wide = Cast <to = 1> (mask)
          column = Unsqueeze (wide, one)
          scaled = Mul (x, scale)
          sum = Add (scaled, column)
          y = Relu (sum)
          total = ReduceSum <keepdims = 0> (y, zero)
        }}"""
    )
    path = tmp_path_factory.mktemp("onnx") / "small.onnx"
    onnx.save(made, path)
    return path


def test_without_a_gpu_there_is_one_error(
    driver: FakeDriver, small_onnx: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver.reset(0, 8, 0, 1)
    assert main(["bench", str(small_onnx), "--target", "cuda"]) == 1
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1
    assert said.err.startswith("error: gtco bench --target cuda times on this machine's GPU: there")
    assert "python -m gtco.bench gpu prepare" in said.err


def test_a_driver_that_does_not_start_is_named(
    driver: FakeDriver, small_onnx: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver.fail_call(b"cuInit", 1, ILLEGAL_ADDRESS)
    assert main(["bench", str(small_onnx), "--target", "cuda"]) == 1
    text = "the NVIDIA driver does not start: CUDA_ERROR_ILLEGAL_ADDRESS"
    assert text in capsys.readouterr().err
    driver.fail_call(b"cuInit", 1, 999_999)
    assert gpus_check().found.startswith("the NVIDIA driver does not start: its error 999999")
    driver.fail_call(b"cuDeviceGetName", 1, ILLEGAL_ADDRESS)
    assert gpus_check().found == "device 0 (CUDA_ERROR_ILLEGAL_ADDRESS), Fake GPU 1 (sm_80)"
    assert gpus_check().found == "Fake GPU 0 (sm_80), Fake GPU 1 (sm_80)"


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--target", "znver4"], "native or cuda"),
        (["--precision", "fp16"], "fp16 is for GPUs: --target cuda"),
        (["--target", "cuda", "--threads", "2"], "--threads is of CPUs"),
        (["--target", "cuda", "--peers", "openvino"], "unknown peer openvino: choose from torch,"),
        (["--target", "cuda:sm_70"], "CUDA 13 ended"),
        (["--target", "cuda", "--peers", "torch"], "an .onnx file has no torch source"),
    ],
)
def test_options_that_do_not_go_together(
    driver: FakeDriver,
    small_onnx: Path,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    text: str,
) -> None:
    assert main(["bench", str(small_onnx), *more]) == 1
    assert text in capsys.readouterr().err


def test_a_gpu_that_no_image_runs_on(
    driver: FakeDriver, small_onnx: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver.device(0, 7, 0, 1 << 20)
    assert main(["bench", str(small_onnx), "--target", "cuda"]) == 1
    assert "no images are made for Fake GPU 0 (sm_70)" in capsys.readouterr().err


def test_gtco_beside_peers_that_are_not_there(
    driver: FakeDriver,
    small_gpu: Path,
    small_onnx: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The workers open the fake driver, each in its own process. The result is that of ONNX
    Runtime.
    """
    monkeypatch.setenv("LD_LIBRARY_PATH", str(driver.library.parent))
    monkeypatch.setenv("COLUMNS", "200")
    report = tmp_path / "bench.json"
    command = ["bench", str(small_onnx), "--target", "cuda", "--library", str(small_gpu)]
    command += ["--rounds", "2", "--precision", "fp32"]  # torch, a default peer, takes no file
    assert main([*command, "--json", str(report)]) == 1
    said = capsys.readouterr()
    assert "Fake GPU 0 (sm_80), --target cuda:sm_80" in said.out
    for text in (said.out, said.err):
        assert "this onnxruntime has no CUDA provider: pip install onnxruntime-gpu" in text
    found = json.loads(report.read_text())
    assert (found["gpu"], found["target"]) == ("Fake GPU 0 (sm_80)", "cuda:sm_80")
    systems = {system["system"]: system for system in found["models"][0]["systems"]}
    assert list(systems) == ["gtco", "onnxruntime", "onnxruntime:cpu"]
    own = systems["gtco"]
    assert own["median_s"] > 0 and own["disagrees"] is None and 0 <= own["difference"] < 1e-6
    assert "copies from and to the host" in own["version"]


def test_onnxruntime_bound_to_its_device_in_float16(small_onnx: Path, tmp_path: Path) -> None:
    """The CPU's provider takes the place of CUDA's: the binding and the conversion are the same."""
    rng = np.random.default_rng(0)
    x, mask = rng.standard_normal((96, 40), np.float32), rng.integers(0, 2, 96).astype(np.int8)
    np.savez(tmp_path / "inputs.npz", x=x, mask=mask)
    job = {"onnx": str(small_onnx), "inputs": str(tmp_path / "inputs.npz")}
    expected = np.maximum(x.astype(np.float64) * SCALE + mask[:, None], 0)
    for precision, tolerance in (("fp32", 1e-6), ("fp16", 2e-3)):
        system = bound({**job, "precision": precision}, "CPUExecutionProvider", "cpu")
        system.call()
        y, total = system.outputs()
        assert y.dtype == total.dtype == np.float32
        assert np.abs(y - expected).max() <= tolerance * expected.max()
        assert np.abs(total - expected.sum(0)).max() <= tolerance * expected.sum(0).max()
        exact = np.array_equal(y, y.astype(np.float16))
        assert exact == (precision == "fp16")


@pytest.mark.parametrize(
    ("name", "major", "minor", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 9, 0, "cuda:h100"),
        ("NVIDIA H200", 9, 0, "cuda:h200"),
        ("NVIDIA GH200 480GB", 9, 0, "cuda:sm_90a"),
        ("NVIDIA A100-SXM4-40GB", 8, 0, "cuda:a100"),
        ("NVIDIA GeForce RTX 4090", 8, 9, "cuda:rtx4090"),
        ("NVIDIA GeForce RTX 2080 Ti", 7, 5, "cuda:2080ti"),
        ("NVIDIA L4", 8, 9, "cuda:l4"),
        ("NVIDIA L40S", 8, 9, "cuda:sm_89"),
        ("NVIDIA A10", 8, 6, "cuda:sm_80,sm_89"),
        ("Tesla T4", 7, 5, "cuda:sm_75"),
        ("Tesla V100", 7, 0, None),
        ("NVIDIA B200", 10, 0, "cuda:sm_89"),
        ("NVIDIA GeForce RTX 5090", 12, 0, "cuda:sm_89"),
    ],
)
def test_the_target_of_a_gpu(name: str, major: int, minor: int, expected: str | None) -> None:
    if expected is None:
        with pytest.raises(OptionError, match=rf"sm_{major}{minor}\): gtco has {ARCHITECTURES[0]}"):
            target_of(name, major, minor)
    else:
        assert target_of(name, major, minor) == expected
        assert gpu_target(expected).name == expected


def test_programs_for_ampere_gpus_of_consumers_fit_their_blocks() -> None:
    """Compute capability 8.6 gives a block 99 KiB of shared memory; 8.0 gives it 163."""
    chosen = gpu_target(target_of("NVIDIA A10", 8, 6))
    assert (chosen.shared, chosen.threads_sm) == (99 << 10, 1536) and chosen.runs_on(8, 6)

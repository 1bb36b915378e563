"""The kernels that ``bench gpu`` checks and times one by one: which they are, and how it reads the
answers of a GPU, a process and compute-sanitizer.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import __main__ as bench
from bench.gpu import gpu
from bench.gpu import kernel_times as times
from bench.gpu import peers as gpu_peers
from bench.gpu.kernels import KERNELS, dtype_of
from gtco.driver.compilation import Compilation, silent
from gtco.machine.gpu import gpu_target
from gtco.support.options import CompileOptions
from models import export_onnx

# One kernel of every sketch for GPUs.
FAMILIES = {
    "gemm": "product-1050x250x91",
    "attention": "attention-detr",
    "depthwise": "depthwise-3x3",
    "rows": "layer-norm",
    "counts": "counted",
    "moments": "norm-of-image",
    "merged_moments": "norm-of-image",
    "pool": "pool-greatest",
    "resize": "resize-linear",
    "grid_sample": "grid-sample",
    "elementwise": "transposed",
    "fallback": "sorted",
}


def test_every_family_has_a_kernel(tmp_path: Path) -> None:
    sketches = (Path(__file__).parents[3] / "gtco/tensor/sketch").glob("*/cuda*.py")
    named = {
        line.split('"')[1]
        for path in sketches
        for line in path.read_text().splitlines()
        if line.startswith('    name = "')
    }
    assert named == set(FAMILIES)
    found: set[str] = set()
    for name in dict.fromkeys(FAMILIES.values()):
        case, dtype = KERNELS[name], dtype_of(name)
        onnx = tmp_path / f"{name}.onnx"
        export_onnx(case.create().to(dtype), [x.to(dtype) for x in case.inputs()], onnx)
        options = CompileOptions(target="cuda:sm_90a", precision="fp16")
        run = Compilation(onnx, tmp_path / "m.so", None, options, silent)
        fused = run.to_stages(gpu_target("cuda:sm_90a"))
        picks = [fused.policy.choose(stage) for stage in fused.partition.stages]
        assert not run.report.notes
        found |= {pick.sketch.name for pick in picks if pick}
    assert found == set(FAMILIES)


def test_what_is_greatest_is_so_alone() -> None:
    """If two elements were equal, torch might find the other one."""
    x = KERNELS["greatest"].inputs()[0].half().float()
    first, second = x.topk(2).values.unbind(-1)
    assert (first > second).all()


class Device:
    """A device that does nothing before its pause is over. ``host`` and ``free`` are the cycles at
    which the host and the device have done all their work.
    """

    def __init__(self, host: int, device: int) -> None:
        self.of_host, self.of_device = host, device  # cycles of a call
        self.host = self.free = 0
        self.pauses: list[int] = []

    def _sleep(self, cycles: int) -> None:
        self.pauses.append(cycles)
        self.free = self.host + cycles

    def call(self) -> None:
        self.host += self.of_host
        self.free = max(self.free, self.host) + self.of_device

    def Event(self, enable_timing: bool) -> Any:
        event = SimpleNamespace(at=0)
        event.record = lambda: setattr(event, "at", max(self.free, self.host))
        event.query = lambda: event.at <= self.host
        event.synchronize = lambda: setattr(self, "host", max(self.host, event.at))
        event.elapsed_time = lambda end: float(end.at - event.at)
        return event


@pytest.mark.parametrize(("host", "pauses"), [(5, 1), (300, 2), (2000, 5)])
def test_a_kernel_is_timed_and_not_the_hosts_share(host: int, pauses: int) -> None:
    device = Device(host, 7)
    seconds = times._seconds(SimpleNamespace(cuda=device), device.call, 4000)
    assert seconds == pytest.approx(7e-3) and len(device.pauses) == pauses


def test_a_host_that_no_pause_is_long_enough_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "LONGEST_PAUSE", 16000)
    device = Device(2000, 7)
    assert times._seconds(SimpleNamespace(cuda=device), device.call, 4000) > 7e-3
    assert device.pauses == [4000, 8000, 16000]


@pytest.mark.parametrize(
    ("name", "factor", "wrong"),
    [
        ("mean-of-tokens", 1.0, False),
        ("mean-of-tokens", 1.02, True),
        ("mean-of-tokens", float("nan"), True),
        ("norm-of-image", 1.0, False),
    ],
)
def test_a_kernel_beside_torch(
    monkeypatch: pytest.MonkeyPatch, name: str, factor: float, wrong: bool
) -> None:
    """Runs on the CPU, with a function instead of the library."""
    calls: list[torch.dtype] = []

    class Model:
        def __enter__(self) -> Model:
            return self

        def __exit__(self, *_: object) -> None: ...

        def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
            calls.append(inputs[0].dtype)
            right: torch.Tensor = KERNELS[name].create()(*[x.float() for x in inputs])
            return (right * factor).to(inputs[0].dtype)

    monkeypatch.setattr(gpu_peers, "cuda_torch", lambda: torch)
    monkeypatch.setattr("gtco.runtime.module.load", lambda path: Model())
    for kind in (torch.Tensor, torch.nn.Module):
        monkeypatch.setattr(kind, "cuda", lambda self: self)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(times, "_seconds", lambda torch, run: (run(), 1.5e-3)[1])
    found = times._kernel(Path("folder"), name, 2)
    assert found["kernel"] == name and found["wrong"] is wrong
    assert found["torch_s"] == 1.5e-3
    assert set(calls) == {dtype_of(name)} and len(calls) == 1 + times.WARM + 2


def test_a_fault_ends_the_process_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that never ends does not end the run either. The result of each kernel is there
    before the next one is asked.
    """
    names = list(KERNELS)[:5]
    for name in names:
        times.library(tmp_path, name).touch()
    worker = tmp_path / "worker.py"
    worker.write_text(f"""import os, time
from bench.harness.worker import answer
def kernel(request):
    name = request["kernel"]
    with open({str(tmp_path / "asked")!r}, "a") as file:
        print(os.getpid(), name, file=file)
    if name == {names[1]!r}:
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
    if name == {names[2]!r}:
        time.sleep(60)
    if name == {names[3]!r}:
        os.abort()
    return {{"kernel": name, "wrong": False}}
answer(kernel)
""")
    monkeypatch.setattr(times, "KERNEL_TIMEOUT", 5.0)
    found = []
    for one in times.measure(tmp_path, 3, (sys.executable, str(worker))):
        found.append(one)
        assert len((tmp_path / "asked").read_text().splitlines()) == len(found)
    assert [one["kernel"] for one in found] == names
    assert "ILLEGAL_ADDRESS" in found[1]["error"] and "no answer in 5 s" in found[2]["error"]
    assert "killed by SIGABRT" in found[3]["error"]
    assert not any("error" in found[n] for n in (0, 4))
    asked = [line.split()[0] for line in (tmp_path / "asked").read_text().splitlines()]
    assert len(set(asked)) == 4 and asked[0] == asked[1]


def test_what_compute_sanitizer_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text("""#!/bin/sh
[ "$2" = racecheck ] && { echo "========= Error: Race reported between"; \
echo "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"; exit 86; }
[ "$2" = synccheck ] && exit 3
echo "========= ERROR SUMMARY: 0 errors"
""")
    program.chmod(0o755)
    found = times.sanitized(str(program), tmp_path / "m.so")
    assert found["memcheck"] == found["initcheck"] == "0 errors"
    assert found["racecheck"].startswith("1 hazard displayed") and "Race rep" in found["racecheck"]
    assert found["synccheck"].startswith("ended with 3")
    monkeypatch.setattr(times, "tool", lambda name: str(program))
    assert times.sanitizer() == str(program)


def test_kernels_are_prepared_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(
        "gtco.compiler.compile_to_file", lambda onnx, so, **options: made.append((so, options))
    )
    arguments = ["--folder", str(tmp_path), "--models", "", "--kernels", "joined"]
    assert bench.main(["gpu", "prepare", *arguments]) == 0
    assert capsys.readouterr().out == "kernel.joined: ready\n"
    assert [so.name for so, _ in made] == ["kernel.joined.so"]
    assert (tmp_path / "kernel.joined.onnx").exists()
    with pytest.raises(SystemExit):
        bench.main(["gpu", "prepare", "--kernels", "cat"])
    assert "unknown kernel cat: choose from product-197x" in capsys.readouterr().err


def test_a_whole_measurement_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kernels, no model, and the checks that watched them, in one file."""
    times.library(tmp_path, "joined").touch()
    right = {"kernel": "joined", "difference": 0.0, "wrong": False}
    lines = [{**right, "gtco_s": 2e-6, "torch_s": 5e-6}, {"kernel": "gelu", "error": "a fault"}]
    monkeypatch.setattr(gpu, "_gpu", lambda: "Fake GPU")
    monkeypatch.setattr(times, "measure", lambda folder, rounds: iter(lines))
    monkeypatch.setattr(times, "sanitizer", lambda: "program")
    said = SimpleNamespace(seen=[])

    def sanitized(program: str, path: Path) -> dict[str, str]:
        said.seen.append(path.name)
        return dict.fromkeys(times.TOOLS, "0 errors")

    monkeypatch.setattr(times, "sanitized", sanitized)
    report = tmp_path / "all.json"
    arguments = ["gpu", "measure", "--folder", str(tmp_path), "--json", str(report)]
    assert bench.main(arguments) == 1
    shown = capsys.readouterr().out
    assert "joined" in shown and "2.50" in shown and "a fault" in shown
    kept = report.read_text()
    assert '"kernel": "gelu"' in kept and '"memcheck": "0 errors"' in kept
    assert said.seen == ["kernel.joined.so"]

"""Checks and times kernels on a GPU, one by one, beside torch's (``python -m bench gpu``).
compute-sanitizer watches them if it is installed.

``python -m bench.gpu.kernel_times`` is the process in which they run (the line protocol of
``bench/harness/worker.py``). A fault destroys the process's context, and a kernel may never end. In
both cases another process continues.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from gtco.codegen.processes import python
from gtco.codegen.sass import tool
from gtco.support.errors import BuildError, GtcoError
from gtco.support.nested import tensors
from gtco.support.torchless import import_tvm

from ..harness.process import Worker, WorkerError
from ..harness.worker import answer
from .kernels import KERNELS, dtype_of

PREFIX = "kernel."  # of the files of one
CALLS = 20  # between two events of the device
WARM = 3  # rounds that do not count
TOLERANCE = 0.01  # of the largest result, or twice torch's own difference in float16
FAULTS_EXIT = 86  # how compute-sanitizer ends where it found something
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
KERNEL_TIMEOUT = 120.0  # seconds, the first one's with the process's start
PATIENCE = 300.0  # seconds for a library under compute-sanitizer
WORKER = python("gtco.bench.gpu.kernel_times")
# Cycles of the GPU in which the host enqueues what is timed: some 10 ms, doubled where they are too
# few. Kernels shorter than the host's share of a call would wait for it otherwise.
PAUSE, LONGEST_PAUSE = 20_000_000, 2_000_000_000


def library(folder: Path, name: str) -> Path:
    return folder / f"{PREFIX}{name}.so"


def prepare(folder: Path, names: Sequence[str], target: str) -> Iterator[str]:
    """Compiles the kernels; needs no GPU. Gives a line about each, ``error: ...`` for one that
    cannot be compiled.
    """
    import_tvm()
    from gtco.compiler import compile_to_file
    from gtco.models import export_onnx

    for name in names:
        dtype, onnx = dtype_of(name), folder / f"{PREFIX}{name}.onnx"
        inputs = tuple(x.to(dtype) for x in KERNELS[name].inputs())
        said = "ready"
        try:
            export_onnx(KERNELS[name].create().to(dtype), inputs, onnx)
            compile_to_file(
                onnx,
                library(folder, name),
                target=target,
                precision="fp16",
            )
        except GtcoError as error:
            said = f"error: {error}"
        yield f"{PREFIX}{name}: {said}"


def measure(folder: Path, rounds: int, command: Sequence[str] = WORKER) -> Iterator[dict[str, Any]]:
    """The results of each kernel in the folder, one after the other: ``difference`` from torch in
    float32, as a share of the largest result; ``gtco_s`` and ``torch_s``, medians of a call; or
    ``error``. ``command`` starts the process; by default it is this module.
    """
    worker: Worker | None = None
    try:
        for name in KERNELS:
            if not library(folder, name).exists():
                continue
            worker = worker or Worker(command)
            asked = {"folder": str(folder), "kernel": name, "rounds": rounds}
            try:
                yield worker.ask(KERNEL_TIMEOUT, **asked)
            except WorkerError as error:
                worker.kill()
                worker = None
                yield {"kernel": name, "error": str(error)}
    finally:
        if worker is not None:
            worker.kill()


def sanitizer() -> str | None:
    """compute-sanitizer's path; None if it is not installed."""
    try:
        return tool("compute-sanitizer")
    except BuildError:
        return None


def sanitized(program: str, model: Path) -> Mapping[str, str]:
    """The summary of each of compute-sanitizer's tools for a run of the library, and the first
    fault if it found one.
    """
    run = [*python("gtco"), "run", str(model)]
    found = {}
    for name in TOOLS:
        command = [program, "--tool", name, "--error-exitcode", str(FAULTS_EXIT), *run]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            found[name] = f"not done in {PATIENCE:.0f} s"
            continue
        summary = re.findall(r"SUMMARY: (.*)", done.stdout)
        said = summary[-1] if summary else f"ended with {done.returncode}"
        if done.returncode:
            said += "\n" + "\n".join([*done.stdout.splitlines()[:12], done.stderr.strip()[-300:]])
        found[name] = said
    return found


# ---- the process in which they run ---------------------------------------------------------------


def _kernel(folder: Path, name: str, rounds: int) -> dict[str, Any]:
    from gtco.runtime.module import load

    from .peers import cuda_torch

    torch, dtype = cuda_torch(), dtype_of(name)
    torch.backends.cudnn.benchmark = True  # its fastest kernels, not those that it would guess
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    inputs = [x.to(dtype).cuda() for x in KERNELS[name].inputs()]
    half = [x.half() for x in inputs]
    module = KERNELS[name].create().to(dtype).cuda()
    with torch.inference_mode():
        wanted = tensors(module.float()(*[x.float() for x in inputs]))[0].double()
    module = module.half()

    def peer() -> Any:
        with torch.inference_mode():
            return module(*half)

    with load(library(folder, name)) as model:
        largest = float(wanted.abs().max()) or 1.0
        differences = [
            float((tensors(found)[0].double() - wanted).abs().max()) / largest
            for found in (model(*inputs), peer())
        ]
        torch.cuda.synchronize()
        systems = {"gtco_s": lambda: model(*inputs), "torch_s": peer}
        readings: dict[str, list[float]] = {which: [] for which in systems}
        for _ in range(WARM + rounds):
            for which, run in systems.items():
                readings[which].append(_seconds(torch, run))
    return {
        "kernel": name,
        "difference": differences[0],
        "torch's difference": differences[1],
        "wrong": not differences[0] <= max(TOLERANCE, 2 * differences[1]),  # NaN is
        **{which: median(seconds[WARM:]) for which, seconds in readings.items()},
    }


def _seconds(torch: Any, run: Callable[[], Any], pause: int = PAUSE) -> float:
    """Seconds of a call, by events of the device around ``CALLS`` calls. All of them are enqueued
    before the first one begins.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(pause)
    start.record()
    for _ in range(CALLS):
        run()
    end.record()
    waited = not start.query()
    end.synchronize()
    if not waited and pause < LONGEST_PAUSE:
        return _seconds(torch, run, 2 * pause)
    return float(start.elapsed_time(end)) / 1e3 / CALLS


def _answered(request: Mapping[str, Any]) -> dict[str, Any]:
    return _kernel(Path(request["folder"]), request["kernel"], int(request["rounds"]))


if __name__ == "__main__":
    answer(_answered)

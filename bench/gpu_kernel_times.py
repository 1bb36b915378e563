"""Kernels on a GPU, one by one, beside torch's (``python -m bench gpu``): are they right there, and
how long do they take? compute-sanitizer watches them where it is to be had.

``python -m bench.gpu_kernel_times FOLDER ROUNDS NAME...`` is the process in which they run, a line
of JSON each. A fault takes the process's context with it, so that it ends there, and another one
goes on behind it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.gpu_kernels import KERNELS, dtype_of
from gtco.codegen.sass import tool
from gtco.errors import BuildError, GtcoError
from gtco.nested import tensors
from gtco.torchless import import_tvm

PREFIX = "kernel."  # of the files of one
CALLS = 20  # between two events of the device: a call takes the host some time too
WARM = 3  # rounds that do not count
TOLERANCE = 0.01  # of the largest result: float16 in, float16 out, sums in float32
FAULTS_EXIT = 86  # how compute-sanitizer ends where it found something
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
PATIENCE = 300.0  # seconds for a kernel, and for a library under compute-sanitizer


def library(folder: Path, name: str) -> Path:
    return folder / f"{PREFIX}{name}.so"


def prepare(folder: Path, names: Sequence[str], target: str, untrusted: bool) -> Iterator[str]:
    """Compile the kernels, no GPU needed; a line about each, ``error: ...`` where there is none."""
    import_tvm()
    from gtco.compiler import compile_to_file
    from models import export_onnx

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
                untrusted=untrusted,
            )
        except GtcoError as error:
            said = f"error: {error}"
        yield f"{PREFIX}{name}: {said}"


def measure(folder: Path, rounds: int, command: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """What is known of each kernel in the folder: ``difference`` from torch in float32, as a share
    of the largest result; ``gtco_s`` and ``torch_s``, medians of a call; or ``error``. ``command``
    is the process, this module as it stands.
    """
    left = [name for name in KERNELS if library(folder, name).exists()]
    while left:
        start = [
            *(command or (sys.executable, "-m", "bench.gpu_kernel_times")),
            str(folder),
            str(rounds),
        ]
        try:
            done = subprocess.run(
                [*start, *left], capture_output=True, text=True, timeout=PATIENCE * len(left)
            )
            lines, ended = done.stdout.splitlines(), f"it ended with {done.returncode}"
            ended += f": {done.stderr.strip().splitlines()[-1:]}"
        except subprocess.TimeoutExpired as error:
            lines, ended = _text(error.stdout).splitlines(), "it did not end"
        found = [json.loads(line) for line in lines if line.startswith('{"kernel"')]
        yield from found
        done_with = len(found)
        if done_with < len(left) and not (found and "error" in found[-1]):
            yield {"kernel": left[done_with], "error": ended}
            done_with += 1
        left = left[done_with:]


def _text(said: bytes | str | None) -> str:
    return said.decode() if isinstance(said, bytes) else said or ""


def sanitizer() -> str | None:
    """compute-sanitizer's path; None where it is not."""
    try:
        return tool("compute-sanitizer")
    except BuildError:
        return None


def sanitized(program: str, model: Path) -> Mapping[str, str]:
    """What each of compute-sanitizer's tools says of a run of the library: its summary, and where
    it found something the first of that.
    """
    run = [sys.executable, "-m", "gtco", "run", str(model)]
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
    from bench.gpu_peers import cuda_torch
    from gtco.runtime.module import load

    torch, dtype = cuda_torch(), dtype_of(name)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    inputs = [x.to(dtype).cuda() for x in KERNELS[name].inputs()]
    half = [x.half() for x in inputs]
    module = KERNELS[name].create().to(dtype).cuda()
    with torch.inference_mode():
        wanted = tensors(module.float()(*[x.float() for x in inputs]))[0].double()
    module = module.half()

    def peer() -> None:
        with torch.inference_mode():
            module(*half)

    with load(library(folder, name)) as model:
        got = tensors(model(*inputs))[0].double()
        torch.cuda.synchronize()
        difference = float((got - wanted).abs().max()) / (float(wanted.abs().max()) or 1.0)
        systems = {"gtco_s": lambda: model(*inputs), "torch_s": peer}
        readings: dict[str, list[float]] = {which: [] for which in systems}
        for _ in range(WARM + rounds):
            for which, run in systems.items():
                readings[which].append(_seconds(torch, run))
    return {
        "kernel": name,
        "difference": difference,
        "wrong": not difference <= TOLERANCE,  # NaN is
        **{which: median(seconds[WARM:]) for which, seconds in readings.items()},
    }


def _seconds(torch: Any, run: Callable[[], Any]) -> float:
    """Of a call, by events of the device around ``CALLS`` of them."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(CALLS):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / CALLS


def main(folder: str, rounds: str, *names: str) -> int:
    for name in names:
        try:
            print(json.dumps(_kernel(Path(folder), name, int(rounds))), flush=True)
        except Exception as error:  # the next one may find the device as it was left
            what = f"{type(error).__name__}: {error}"
            print(json.dumps({"kernel": name, "error": what}), flush=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

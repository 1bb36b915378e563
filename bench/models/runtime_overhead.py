"""What a run costs outside its kernels: a model of many steps whose kernels do nothing.

    python -m bench runtime_overhead [--steps 60] [--tasks 24] [--threads 1 2 4] [--json FILE]

Prints the median and the 90th percentile of microseconds per run through the C interface, the time
between runs of one thread being zero (workers spin) and 5 ms (workers sleep and must be woken), and
through Python.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from gtco.cli.arguments import new_file
from gtco.runtime.artifact import Artifact
from gtco.runtime.module import Model, load
from gtco.runtime.plan import BufferRef, Step, TensorSpec
from gtco.runtime.writing.linking import write_artifact
from gtco.support.environment import c_compiler

from ..harness.suite import write_value

KERNEL = """
#include <stdint.h>
void nothing(void* x, void* y, void* w, int64_t begin, int64_t end) {}
"""


def empty_model(folder: Path, steps: int, tasks: int) -> Path:
    """An artifact of ``steps`` steps of ``tasks`` tasks each, every fourth of one task."""
    (folder / "kernel.c").write_text(KERNEL)
    command = [c_compiler(), "-O2", "-fPIC", "-c", "kernel.c", "-o", "kernel.o"]
    subprocess.run(command, cwd=folder, check=True)
    buffers = (BufferRef("input", 0), BufferRef("output", 0))
    x, y = (TensorSpec(name, "float32", (16,)) for name in ("x", "y"))
    plan = tuple(Step("nothing", buffers, 1 if n % 4 == 3 else tasks) for n in range(steps))
    kernels = {"kernel.o": (folder / "kernel.o").read_bytes()}
    return write_artifact(Artifact("empty", (x,), (y,), plan, 0, kernels), folder / "empty.so")


def measure_c(model: Model, runs: int, pause: float) -> tuple[float, float]:
    """Median and 90th percentile of microseconds of gtco_run, called through ctypes with its
    arguments ready.
    """
    model(np.zeros(16, np.float32))  # fills the arrays of pointers
    run, handle = model._library.run, model._handle
    buffers = np.zeros(64, np.float32)
    start = -buffers.ctypes.data % 64
    model._input_pointers[0] = buffers.ctypes.data + start
    model._output_pointers[0] = buffers.ctypes.data + start + 64
    times = []
    for _ in range(runs):
        if pause:
            time.sleep(pause)
        began = time.perf_counter_ns()
        run(handle, model._input_pointers, model._output_pointers)
        times.append((time.perf_counter_ns() - began) / 1e3)
    return float(np.median(times)), float(np.percentile(times, 90))


def measure_python(model: Model, runs: int) -> tuple[float, float]:
    x = np.zeros(16, np.float32)
    times = []
    for _ in range(runs):
        began = time.perf_counter_ns()
        model(x)
        times.append((time.perf_counter_ns() - began) / 1e3)
    return float(np.median(times)), float(np.percentile(times, 90))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench runtime_overhead", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tasks", type=int, default=24)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=new_file)
    options = parser.parse_args(arguments)
    report: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "steps": options.steps,
        "tasks": options.tasks,
        "rows": [],
    }
    print(
        f"{options.steps} empty steps of {options.tasks} tasks, microseconds per run: median (90 %)"
    )
    with tempfile.TemporaryDirectory() as name:
        path = empty_model(Path(name), options.steps, options.tasks)
        for threads in options.threads:
            with load(path, threads) as model:
                row = {
                    "threads": threads,
                    "spinning": measure_c(model, 5000, 0),
                    "sleeping": measure_c(model, 200, 0.005),
                    "python": measure_python(model, 5000),
                }
            report["rows"].append(row)
            print(
                f"  {threads} threads: "
                + ", ".join(
                    f"{key} {row[key][0]:.1f} ({row[key][1]:.1f})"
                    for key in ("spinning", "sleeping", "python")
                )
            )
    if options.json:
        write_value(options.json, report)


if __name__ == "__main__":
    main()

"""Times one small graph by itself; the benchmarks of kernels share this.

The fastest run counts, because other tenants of a machine can only make a run slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import onnx.parser

from gtco.runtime.module import Model
from gtco.runtime.tensors import aligned_empty

from .peers import onnxruntime_session

SECONDS = 0.2  # that a system runs for
LEAST_RUNS = 20

Stages = tuple[tuple[str, float, float], ...]  # operators, predicted and measured seconds of each


def model(inputs: str, nodes: str, output: str) -> onnx.ModelProto:
    """The case as ONNX, with every statement on a line of its own."""
    body = "\n".join(line.strip() for line in nodes.splitlines())
    text = f'<ir_version: 10, opset_import: ["": 21]>\ncase ({inputs}) => ({output}) {{\n{body}\n}}'
    made = onnx.parser.parse_model(text)
    onnx.checker.check_model(made)
    return made


def profiled(runtime: Model, arrays: Mapping[str, np.ndarray]) -> Stages:
    """The stages of gtco's fastest run. The outputs are allocated beforehand, like the peer's,
    because fresh pages might be mapped while a stage writes.
    """
    values = [arrays[spec.name] for spec in runtime.inputs]
    results = [aligned_empty(spec) for spec in runtime.outputs]
    seconds = min(repeat(lambda: runtime.timed(values, results)), key=sum)
    return tuple(
        ("+".join(step["operators"]), float(step["predicted_seconds"]), t)
        for step, t in zip(runtime.stages, seconds, strict=True)
    )


def onnxruntime_seconds(
    made: onnx.ModelProto, arrays: Mapping[str, np.ndarray], threads: int
) -> tuple[float, np.ndarray]:
    """ONNX Runtime's fastest run, with inputs and the output bound beforehand, and its output."""
    session = onnxruntime_session(made.SerializeToString(), threads)
    binding = session.io_binding()
    for name, array in arrays.items():
        binding.bind_cpu_input(name, array)
    binding.bind_output("y", "cpu")
    seconds = fastest(lambda: session.run_with_iobinding(binding))
    return seconds, binding.copy_outputs_to_cpu()[0]


def fastest(call: Callable[[], object]) -> float:
    """Seconds of the fastest of :func:`repeat`'s calls."""

    def once() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return min(repeat(once))


def repeat(call: Callable[[], Any]) -> list[Any]:
    """The results of ``call``, repeated for SECONDS after three calls to warm up."""
    for _ in range(3):
        call()
    found: list[Any] = []
    end = time.perf_counter() + SECONDS
    while len(found) < LEAST_RUNS or time.perf_counter() < end:
        found.append(call())
    return found

"""The systems that are timed: how each is loaded and called, every one with the same threads,
inputs and fp32 arithmetic.

An opener takes the job (a plain dictionary: ``system``, ``threads``, ``inputs`` a .npz file, and
where they apply ``onnx``, ``library``, ``model``) and runs in the worker process, so importing this
module imports no framework.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bench.worker import Job, Opener, System

PEERS = ("onnxruntime", "openvino", "torch", "torch-compile")  # what --peers takes
NEEDS_MODEL = ("torch", "torch-compile")  # these run the source model and not the ONNX file


def load_inputs(job: Job) -> dict[str, np.ndarray]:
    """The inputs by name, in the model's order, C-contiguous."""
    with np.load(job["inputs"]) as file:
        return {name: np.ascontiguousarray(file[name]) for name in file.files}


def open_gtco(job: Job) -> System:
    from gtco.runtime.module import load
    from gtco.version import __version__

    model = load(job["library"], threads=int(job["threads"]))
    feed = load_inputs(job)
    return System(
        __version__,
        lambda: model.run(feed),
        lambda: list(model.run(feed).values()),
    )


def open_onnxruntime(job: Job) -> System:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = int(job["threads"])
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3
    session = ort.InferenceSession(job["onnx"], options, providers=["CPUExecutionProvider"])
    feed = load_inputs(job)
    return System(
        ort.__version__, lambda: session.run(None, feed), lambda: list(session.run(None, feed))
    )


def open_openvino(job: Job) -> System:
    import openvino as ov

    core = ov.Core()
    model = core.read_model(job["onnx"])
    feed = load_inputs(job)
    if any(port.partial_shape.is_dynamic for port in model.inputs):
        model.reshape({name: list(value.shape) for name, value in feed.items()})
    compiled = core.compile_model(
        model,
        "CPU",
        {
            "INFERENCE_NUM_THREADS": int(job["threads"]),
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,
            "INFERENCE_PRECISION_HINT": "f32",
        },
    )
    request = compiled.create_infer_request()
    ports = list(compiled.outputs)

    def call() -> Any:
        return request.infer(feed, share_inputs=True, share_outputs=True)

    def outputs() -> list[np.ndarray]:
        result = call()
        return [np.array(result[port]) for port in ports]

    return System(ov.__version__.split("-")[0], call, outputs)


def open_torch(job: Job) -> System:
    return _open_torch(job, compiled=False)


def open_torch_compile(job: Job) -> System:
    return _open_torch(job, compiled=True)


def _open_torch(job: Job, compiled: bool) -> System:
    import torch

    from models import create

    torch.set_num_threads(int(job["threads"]))
    module = create(job["model"]).eval()
    inputs = [torch.from_numpy(value) for value in load_inputs(job).values()]
    function: Callable[..., Any] = torch.compile(module) if compiled else module

    def call() -> Any:
        with torch.inference_mode():
            return function(*inputs)

    return System(torch.__version__, call, lambda: [tensor.numpy() for tensor in flatten(call())])


def flatten(value: Any) -> list[Any]:
    """Tensors of a model's output in order: a tensor, or tuples, lists, dictionaries and
    dataclasses of them.
    """
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in flatten(item)]
    return [] if value is None else [value]


def open_peak(job: Job) -> System:
    """Not a system: a call measures the machine's fp32 peak, and the output is FLOP/s."""
    from gtco.search.profile import measure_peak

    def measure() -> list[np.ndarray]:
        return [np.array(measure_peak(int(job["threads"])), dtype=np.float64)]

    return System("-", measure, measure)


OPENERS: dict[str, Opener] = {
    "gtco": open_gtco,
    "onnxruntime": open_onnxruntime,
    "openvino": open_openvino,
    "torch": open_torch,
    "torch-compile": open_torch_compile,
    "peak": open_peak,
}

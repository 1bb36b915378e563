"""The systems that are timed: how each is loaded and called. All have the same threads, inputs and
precision, except that ONNX Runtime has no bf16 on a CPU; it then runs in fp32 and its row says so.

An opener takes the job, a plain dictionary: ``system``, ``threads``, ``inputs`` (a .npz file) and,
if they apply, ``onnx``, ``library``, ``model``, ``precision``. It runs in the worker process, so
importing this module imports no framework.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from gtco.support.nested import tensors
from gtco.support.options import PRECISIONS

from .worker import Job, Opener, System

# Every peer in each setting that its own documentation tells a user to try; its best counts. A
# system's name is the peer's, or PEER:SETTING.
SETTINGS: dict[str, tuple[str, ...]] = {
    "onnxruntime": ("onnxruntime", "onnxruntime:optimizer"),
    "openvino": ("openvino",),
    "torch": ("torch", "torch:channels-last"),
    "torch-compile": ("torch-compile", "torch-compile:max-autotune"),
}
PACKAGES = {  # the package that each peer imports
    "onnxruntime": "onnxruntime",
    "openvino": "openvino",
    "torch": "torch",
    "torch-compile": "torch",
}
NEEDS_MODEL = ("torch", "torch-compile")  # these run the source model and not the ONNX file
LARGE = 1_900_000_000  # bytes; near protobuf's limit the weights go to a file beside
FUSIONS = ("vit", "swin")  # model types of ONNX Runtime's transformer optimizer that fit


def peer_of(system: str) -> str:
    """``torch`` of ``torch:channels-last``."""
    return system.partition(":")[0]


def load_inputs(job: Job) -> dict[str, np.ndarray]:
    """The inputs by name, in the model's order, C-contiguous."""
    with np.load(job["inputs"]) as file:
        # not ascontiguousarray, which makes a vector of a scalar
        return {name: np.asarray(file[name], order="C") for name in file.files}


def open_gtco(job: Job) -> System:
    from gtco.runtime.module import load
    from gtco.support.version import __version__

    model = load(job["library"], threads=int(job["threads"]))
    feed = load_inputs(job)
    return System(
        __version__,
        lambda: model.run(feed),
        lambda: list(model.run(feed).values()),
    )


def open_onnxruntime(job: Job) -> System:
    return _open_onnxruntime(job, job["onnx"])


def open_onnxruntime_optimizer(job: Job) -> System:
    """The model after ``onnxruntime.transformers``' fusions. Of the model types that fit a vision
    transformer, it uses the one that leaves the fewest nodes.
    """
    from onnxruntime.transformers import optimizer

    optimized = [optimizer.optimize_model(job["onnx"], model_type=kind) for kind in FUSIONS]
    best = min(optimized, key=lambda model: len(model.model.graph.node))
    with tempfile.TemporaryDirectory(prefix="gtco-bench-") as folder:
        path = f"{folder}/model.onnx"
        best.save_model_to_file(path, use_external_data_format=best.model.ByteSize() > LARGE)
        return _open_onnxruntime(job, path)


def _open_onnxruntime(job: Job, path: str) -> System:
    import onnxruntime as ort

    session = onnxruntime_session(path, int(job["threads"]))
    feed = load_inputs(job)
    version = ort.__version__ + (" (fp32)" if job.get("precision", "fp32") != "fp32" else "")
    return System(version, lambda: session.run(None, feed), lambda: list(session.run(None, feed)))


def onnxruntime_session(
    model: str | bytes, threads: int, entries: Mapping[str, str] = MappingProxyType({})
) -> Any:
    """An ONNX Runtime session of a model's path or bytes, with all graph optimisations and these
    entries of its configuration.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def open_openvino(job: Job) -> System:
    import openvino as ov

    core = ov.Core()
    model = core.read_model(job["onnx"])
    feed = load_inputs(job)
    open_sizes = any(port.partial_shape.is_dynamic for port in model.inputs)
    if open_sizes and not job.get("dynamic"):
        model.reshape({name: list(value.shape) for name, value in feed.items()})
    compiled = core.compile_model(model, "CPU", _settings(job))
    request = compiled.create_infer_request()
    ports = list(compiled.outputs)

    def call() -> Any:
        return request.infer(feed, share_inputs=True, share_outputs=True)

    def outputs() -> list[np.ndarray]:
        result = call()
        return [np.array(result[port]) for port in ports]

    return System(ov.__version__.split("-")[0], call, outputs)


def _settings(job: Job) -> dict[str, Any]:
    return openvino_settings(int(job["threads"]), job.get("precision", "fp32"))


def openvino_settings(threads: int, precision: str = "fp32") -> dict[str, Any]:
    """The settings for the best latency in this precision."""
    return {
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_PRECISION_HINT": {"fp32": "f32", "bf16": "bf16"}[precision],
    }


def open_torch(job: Job) -> System:
    return _open_torch(job)


def open_torch_channels_last(job: Job) -> System:
    return _open_torch(job, channels_last=True)


def open_torch_compile(job: Job) -> System:
    import torch

    return _open_torch(job, torch.compile)


def open_torch_compile_max_autotune(job: Job) -> System:
    """Kernels chosen by measuring, and weights frozen into the graph (packed for oneDNN)."""
    import torch
    from torch._inductor import config

    config.freezing = True
    return _open_torch(job, functools.partial(torch.compile, mode="max-autotune-no-cudagraphs"))


def _open_torch(
    job: Job, compiler: Callable[[Any], Any] | None = None, channels_last: bool = False
) -> System:
    import torch

    from ..models.wide import create

    torch.set_num_threads(int(job["threads"]))
    module = create(job["model"]).eval()
    inputs = [torch.from_numpy(value) for value in load_inputs(job).values()]
    if channels_last:
        module = module.to(memory_format=torch.channels_last)
        inputs = [
            x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x for x in inputs
        ]
    function: Callable[..., Any] = compiler(module) if compiler else module

    half = job.get("precision", "fp32") == "bf16"

    def call() -> Any:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=half):
            return function(*inputs)

    def outputs() -> list[np.ndarray]:
        found = tensors(call())
        return [(t.float() if t.dtype == torch.bfloat16 else t).numpy() for t in found]

    return System(torch.__version__, call, outputs)


def open_peak(job: Job) -> System:
    """Measures the machine's peak instead of a system: the output of a call is FLOP/s."""
    from gtco.search.calibration.peak import machine_peak

    operand = PRECISIONS[job.get("precision", "fp32")]

    def measure() -> list[np.ndarray]:
        return [np.array(machine_peak(int(job["threads"]), operand).flops, dtype=np.float64)]

    return System("-", measure, measure)


OPENERS: dict[str, Opener] = {
    "gtco": open_gtco,
    "onnxruntime": open_onnxruntime,
    "onnxruntime:optimizer": open_onnxruntime_optimizer,
    "openvino": open_openvino,
    "torch": open_torch,
    "torch:channels-last": open_torch_channels_last,
    "torch-compile": open_torch_compile,
    "torch-compile:max-autotune": open_torch_compile_max_autotune,
    "peak": open_peak,
}

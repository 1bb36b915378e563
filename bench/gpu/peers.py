"""The systems that are timed on a GPU: how each is loaded and called. ``python -m bench.gpu.peers``
is the process of one system.

An opener takes the job, a plain dictionary: ``system``, ``inputs`` (a .npz file) and, if they
apply, ``library``, ``model``, ``onnx``, ``half`` (the ONNX file in float16), ``precision``,
``threads``. If torch has CUDA, tensors stay on the device. Without it, gtco's tensors are on the
host and are copied both ways in every call, and its version says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from gtco.codegen.processes import python
from gtco.support.errors import OptionError
from gtco.support.nested import tensors

from ..harness import peers
from ..harness.worker import Job, Opener, System, serve

WORKER = python("gtco.bench.gpu.peers")
# Every peer in each setting; its best counts.
SETTINGS: dict[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "torch-compile": ("torch-compile", "torch-compile:reduce-overhead"),
    "onnxruntime": ("onnxruntime",),
}
REFERENCE, HOST_REFERENCE, GRAPH = "torch:float32", "onnxruntime:cpu", "gtco:graph"
TYPES = {  # of ONNX Runtime's outputs
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
}
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}  # of torch, by precision


def cuda_torch() -> Any:
    """torch. Raises :class:`OptionError` if it is not installed or finds no GPU."""
    try:
        import torch
    except ImportError:
        raise OptionError("torch is not installed (pip install torch)") from None
    if not torch.cuda.is_available():
        built = torch.version.cuda
        raise OptionError(
            f"torch (for CUDA {built}) finds no GPU; is the NVIDIA driver there (nvidia-smi)?"
            if built
            else f"this torch ({torch.__version__}) is built without CUDA"
        )
    return torch


def ways(library: Path) -> list[str]:
    """gtco's systems: the library as it was compiled and, if it can be launched in both ways, the
    other way too.
    """
    from gtco.runtime.library import read_metadata

    both = read_metadata(library).get("launches") == "persistent"
    return ["gtco", *([GRAPH] if both else [])]


def arrays(job: Mapping[str, Any]) -> list[np.ndarray]:
    return list(peers.load_inputs(job).values())


def _system(version: str, run: Callable[[], Any]) -> System:
    """A system whose call ends when the device has done its work."""
    torch = cuda_torch()

    def call() -> None:
        run()
        torch.cuda.synchronize()

    def outputs() -> list[np.ndarray]:
        found = [t.float() if t.is_floating_point() else t for t in tensors(run())]
        return [t.cpu().numpy() for t in found]

    return System(version, call, outputs)


def _device_inputs(job: Job, dtype: str) -> list[Any]:
    torch = cuda_torch()
    found = [torch.from_numpy(array).cuda() for array in arrays(job)]
    return [x.to(getattr(torch, dtype)) if x.is_floating_point() else x for x in found]


def open_gtco(job: Job, launches: Literal["graph", "persistent"] | None = None) -> System:
    """The library, with inputs and outputs as the model was compiled: float32."""
    from gtco.runtime.module import load
    from gtco.support.version import __version__

    model = load(job["library"], launches=launches)
    try:
        cuda_torch()
    except OptionError:
        values = arrays(job)
        return System(
            f"{__version__} (with copies from and to the host)",
            lambda: model(*values),
            lambda: tensors(model(*values)),
        )
    inputs = _device_inputs(job, "float32")
    return _system(__version__, lambda: model(*inputs))


def open_gtco_graph(job: Job) -> System:
    """The same library, launched as a graph."""
    return open_gtco(job, "graph")


def _open_torch(job: Job, dtype: str, compiler: Callable[[Any], Any] | None = None) -> System:
    torch = cuda_torch()
    from ..models.wide import create

    tf32 = dtype != "float32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = True  # its fastest kernels, not those that it would guess
    module = create(job["model"]).eval().cuda().to(getattr(torch, dtype))
    inputs = _device_inputs(job, dtype)
    function: Callable[..., Any] = compiler(module) if compiler else module

    def run() -> Any:
        with torch.inference_mode():
            return function(*inputs)

    return _system(torch.__version__, run)


def open_reference(job: Job) -> System:
    return _open_torch(job, "float32")


def open_torch(job: Job) -> System:
    return _open_torch(job, DTYPES[job["precision"]])


def open_torch_compile(job: Job) -> System:
    """Kernels chosen by measuring, and CUDA graphs."""
    return _compiled(job, "max-autotune")


def open_torch_compile_reduce_overhead(job: Job) -> System:
    return _compiled(job, "reduce-overhead")


def _compiled(job: Job, mode: str) -> System:
    torch = cuda_torch()
    return _open_torch(job, DTYPES[job["precision"]], lambda m: torch.compile(m, mode=mode))


def open_onnxruntime(job: Job) -> System:
    return _on_cuda(job, {})


def open_onnxruntime_cuda_graph(job: Job) -> System:
    """All kernels of a call in one CUDA graph, as its documentation recommends for fixed shapes."""
    return _on_cuda(job, {"enable_cuda_graph": "1"})


def _on_cuda(job: Job, options: Mapping[str, str]) -> System:
    """The CUDA provider, in float16 unless float32 is asked for. Then it has no TF32, as the
    reference and gtco have none.
    """
    try:
        import onnxruntime as ort
    except ImportError:
        raise OptionError("onnxruntime is not installed (pip install onnxruntime-gpu)") from None
    if hasattr(ort, "preload_dlls"):  # CUDA's libraries where they are pip's
        ort.preload_dlls()
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        raise OptionError("this onnxruntime has no CUDA provider: pip install onnxruntime-gpu")
    exact = {"use_tf32": "0"} if job["precision"] == "fp32" else {}
    return bound(job, "CUDAExecutionProvider", "cuda", {**options, **exact})


def bound(
    job: Job, provider: str, device: str, options: Mapping[str, str] = MappingProxyType({})
) -> System:
    """A provider of ONNX Runtime with these options, and with inputs and outputs bound to its
    device. A CUDA graph has outputs that stay where they are.
    """
    import onnxruntime as ort

    session = ort.InferenceSession(_onnx(job), providers=[(provider, dict(options))])
    if provider not in session.get_providers():
        raise OptionError(f"onnxruntime's {provider} does not start")
    binding = session.io_binding()
    for spec, array in zip(session.get_inputs(), arrays(job), strict=True):
        cast = array.astype(np.float16) if spec.type == "tensor(float16)" else array
        binding.bind_ortvalue_input(spec.name, ort.OrtValue.ortvalue_from_numpy(cast, device, 0))
    for spec in session.get_outputs():
        if "enable_cuda_graph" in options:
            place = ort.OrtValue.ortvalue_from_shape_and_type(
                spec.shape, TYPES[spec.type], device, 0
            )
            binding.bind_ortvalue_output(spec.name, place)
        else:
            binding.bind_output(spec.name, device)

    def call() -> None:
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()

    def outputs() -> list[np.ndarray]:
        call()
        found = binding.copy_outputs_to_cpu()
        return [a.astype(np.float32) if a.dtype == np.float16 else a for a in found]

    version = ort.__version__ + (" (fp16)" if job["precision"] == "bf16" else "")
    return System(version, call, outputs)


def _onnx(job: Job) -> str | bytes:
    """The file in the job's precision; it is converted if there is no float16 file."""
    if job["precision"] == "fp32":
        return str(job["onnx"])
    if "half" in job:
        return str(job["half"])
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    made: bytes = convert_float_to_float16(onnx.load(job["onnx"])).SerializeToString()
    return made


OPENERS: dict[str, Opener] = {
    REFERENCE: open_reference,
    HOST_REFERENCE: peers.open_onnxruntime,
    "gtco": open_gtco,
    GRAPH: open_gtco_graph,
    "torch": open_torch,
    "torch-compile": open_torch_compile,
    "torch-compile:reduce-overhead": open_torch_compile_reduce_overhead,
    "onnxruntime": open_onnxruntime,
    "onnxruntime:cuda-graph": open_onnxruntime_cuda_graph,
}


if __name__ == "__main__":
    serve(OPENERS)

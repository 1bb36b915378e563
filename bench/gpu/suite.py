"""``gtco bench --target cuda``: models beside their peers on this machine's GPU, compiled for it
here. (``bench/gpu/gpu.py`` is for a machine without a compiler.)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gtco.cli.console import status
from gtco.frontend.dimensions import Shapes
from gtco.machine.gpu import gpu_target, target_of
from gtco.runtime.gpu.driver import Gpu, gpu
from gtco.support.errors import ArtifactError, OptionError

from ..harness.peers import peer_of
from ..harness.rounds import Comparison, Contender, Measurement, compare
from ..harness.suite import Result, available_threads, judge
from ..harness.workload import TORCH_NEEDS_SOURCE, check_peers, prepare
from .peers import HOST_REFERENCE, REFERENCE, SETTINGS, WORKER, cuda_torch, ways

PEERS = "torch,torch-compile,onnxruntime"
# of an output's largest magnitude, float16 and bfloat16 through some fifty layers
TOLERANCES = {"fp32": 1e-3, "fp16": 3e-2, "bf16": 6e-2}


def peers_of(text: str) -> tuple[str, ...]:
    """The systems that a text such as ``torch,torch-compile`` names; see
    :func:`bench.harness.workload.check_peers`.
    """
    return check_peers(text, SETTINGS)


def gpu_here() -> Gpu:
    """The first GPU. Raises :class:`OptionError` if there is none."""
    try:
        return gpu(0)
    except ArtifactError as error:
        raise OptionError(
            f"gtco bench --target cuda times on this machine's GPU: {error}. A machine without one "
            "compiles (gtco compile --target cuda:sm_80, python -m gtco.bench gpu prepare)"
        ) from error


def target(asked: str, found: Gpu) -> str:
    """``cuda`` becomes the target of the GPU that was found; other names stay. Raises
    :class:`OptionError` for an unknown name.
    """
    if asked == "cuda":
        return target_of(found.name, found.major, found.minor)
    return gpu_target(asked).name


def run_model(
    source: str,
    peers: Sequence[str],
    folder: Path,
    rounds: int,
    shapes: Shapes | None,
    library: Path | None,
    precision: str,
    target: str,
) -> Result:
    """Prepares and compares one model, as :func:`bench.harness.suite.run_model` does on a CPU.
    Outputs are compared with torch's in float32 if torch has CUDA and the model's source, else with
    ONNX Runtime's on the CPU.
    """
    threads = available_threads()
    with status() as update:
        update(f"{source}: prepare")
        workload = prepare(
            source,
            folder,
            0,
            shapes,
            library,
            lambda text: update(f"{source}: {text}"),
            precision,
            target,
        )
        job = {
            "library": workload.build.library,
            "inputs": str(workload.inputs),
            "onnx": str(workload.onnx) if workload.onnx else None,
            "model": workload.model,
            "precision": precision,
            "threads": threads,
        }
        failed = workload.build.error
        skipped = {"gtco": failed} if failed else {}
        own = ["gtco"] if failed else ways(Path(workload.build.library))
        reference = HOST_REFERENCE if workload.model is None or _no_torch() else REFERENCE
        order = [*own, *peers, *([reference] if workload.onnx else [])]
        for name in peers:
            if peer_of(name) != "onnxruntime" and workload.model is None:
                skipped[name] = TORCH_NEEDS_SOURCE
        comparison = compare(
            [
                Contender(
                    name,
                    {**job, "system": name, **({"precision": "fp32"} if name == reference else {})},
                    WORKER,
                )
                for name in order
                if name not in skipped
            ],
            rounds,
            reference=reference,
            tolerance=TOLERANCES[workload.precision],
            judge=judge(workload),
            progress=lambda text: update(f"{source}: {text}"),
        )
    missing = (Measurement(name, error=reason) for name, reason in skipped.items())
    found = sorted((*comparison.measurements, *missing), key=lambda m: order.index(m.system))
    return Result(workload, Comparison(tuple(found)))


def _no_torch() -> bool:
    try:
        cuda_torch()
    except OptionError:
        return True
    return False

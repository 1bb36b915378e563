"""Models for GPUs beside their peers, in one run: ``python -m bench gpu prepare`` compiles them, on
any machine; ``python -m bench gpu measure``, on a machine with a GPU, checks and times everything
that lies in the folder, and writes JSON after each model.

``prepare --folder build/gpu [--models vit-base-16,...] [--batches 1,8,32] [--precision fp16]
[--target cuda:sm_90a] [--launches persistent]``: the ONNX files in float32 and float16, and gtco's
libraries.

``measure --folder build/gpu [--json FILE] [--rounds 7] [--peers torch,...]``: each system lives in
a process of its own, all but one stopped (``bench/harness.py``). Inputs and outputs stay on the
device; a call ends when the device has done its work. A library with the persistent kernel is timed
launched as a graph too (``gtco:graph``). Peers run in float16: torch eager,
torch.compile (``max-autotune`` with CUDA graphs, and ``reduce-overhead``), ONNX Runtime's CUDA
provider where it is installed. Outputs are held against torch eager in float32. For gtco the time
of each stage is kept too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.table import Table

from bench.harness import Candidate, Comparison, compare
from bench.machine import describe
from bench.suite import console
from bench.worker import Job, Opener, System, serve
from gtco.cli.arguments import positive
from gtco.errors import BuildError, GtcoError, OptionError
from gtco.nested import tensors
from gtco.options import LAUNCHES

MODELS = (
    "vit-ti-16,vit-s-16,vit-base-16,vit-large-16,swin-t,dinov2-s-14,segformer-b0,"
    "detr-resnet50-e3,detr-resnet50-e6,detr-resnet50-e12,setr-naive-base,setr-naive,setr-pup,"
    "vit-huge-14"
)
PEERS = ("torch", "torch-compile", "torch-compile:reduce-overhead", "onnxruntime")
REFERENCE, GRAPH = "torch:float32", "gtco:graph"
TOLERANCE = 0.03  # of the largest output, for float16 through some fifty layers
WORKER = (sys.executable, "-m", "bench.gpu", "worker")


def main(argv: Sequence[str]) -> int:
    if list(argv) == ["worker"]:
        serve(OPENERS)
        return 0
    options = _parser().parse_args(argv)
    return int(prepare(options) if options.do == "prepare" else measure(options))


# ---- without a GPU: what is to be measured -------------------------------------------------------


def prepare(options: argparse.Namespace) -> int:
    from gtco.torchless import import_tvm

    import_tvm()
    options.folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in options.models.split(","):
        for batch in options.batches:
            stem = options.folder / f"{name}.b{batch}"
            job: dict[str, Any] = {"model": name, "batch": batch, "precision": options.precision}
            try:
                _export(name, batch, stem)
                _compile(stem, options, job)
            except GtcoError as error:
                job["error"], failed = str(error), failed + 1
            stem.with_name(f"{stem.name}.json").write_text(json.dumps(job, indent=1))
            print(f"{stem.name}: {job.get('error', 'ready')}", flush=True)
    return 1 if failed else 0


def _compile(stem: Path, options: argparse.Namespace, job: dict[str, Any]) -> None:
    """The library; as a graph where it cannot be launched as was asked, which the job says."""
    from gtco.compiler import compile_to_file

    def compiled(launches: str) -> None:
        compile_to_file(
            stem.with_name(f"{stem.name}.onnx"),
            stem.with_name(f"{stem.name}.so"),
            target=options.target,
            precision=options.precision,
            launches=launches,
        )

    try:
        compiled(options.launches)
    except BuildError as error:
        if options.launches != "persistent":
            raise
        job["not persistent"] = str(error)
        compiled("graph")


def _export(name: str, batch: int, stem: Path) -> None:
    """NAME.bN.onnx in float32 and NAME.bN.half.onnx in float16, and the inputs."""
    import torch

    from models import create, example_inputs, export_onnx

    inputs = example_inputs(name, batch)
    np.savez(stem.with_name(f"{stem.name}.inputs.npz"), *[x.numpy() for x in inputs])
    module = create(name).eval()
    for suffix, dtype in (("", torch.float32), (".half", torch.float16)):
        path = stem.with_name(f"{stem.name}{suffix}.onnx")
        if not path.exists():
            cast = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
            export_onnx(module.to(dtype), tuple(cast), path)


# ---- with one ------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> int:
    gpu = _gpu()
    jobs = sorted(options.folder.glob("*.b*.json"))
    if not jobs:
        raise OptionError(f"nothing to measure in {options.folder}: run 'bench gpu prepare' first")
    output = console()
    output.print(f"{gpu}", highlight=False, markup=False)
    report: dict[str, Any] = {"gpu": gpu, "machine": describe(1), "models": {}}
    table = Table(title="ms a call; peers as their time over gtco's", title_justify="left")
    peers = [peer for peer in options.peers.split(",") if peer]
    others = [GRAPH, *peers]
    for heading in ("model", "gtco", *others):
        table.add_column(heading, justify="right" if heading != "model" else "left")
    for path in jobs:
        stem = path.name.removesuffix(".json")
        job = {**json.loads(path.read_text()), "stem": str(path.with_name(stem))}
        systems = [REFERENCE, *([] if "error" in job else ways(job)), *peers]
        found = compare(
            [Candidate(name, {**job, "system": name}, WORKER) for name in systems],
            options.rounds,
            reference=REFERENCE,
            tolerance=TOLERANCE,
            progress=lambda text, stem=stem: output.print(f"{stem}: {text}", style="dim"),  # type: ignore[misc]
        )
        entry: dict[str, Any] = {"job": job, "systems": [asdict(m) for m in found.measurements]}
        if "error" not in job:
            entry["stages"] = _stages(job)
        report["models"][stem] = entry
        table.add_row(stem, *_cells(found, others, job))
        if options.json:  # after each: a long run keeps what it has
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(report, indent=1, default=str))
    output.print(table)
    return 0


def ways(job: Mapping[str, Any]) -> list[str]:
    """gtco as compiled and, where the library can be launched in both ways, the other one too."""
    from gtco.runtime.library import read_metadata

    both = read_metadata(Path(f"{job['stem']}.so")).get("launches") == "persistent"
    return ["gtco", *([GRAPH] if both else [])]


def _cells(found: Comparison, peers: Sequence[str], job: Mapping[str, Any]) -> list[str]:
    if "error" in job:
        return ["not compiled", *["-" for _ in peers]]
    own = found["gtco"]
    if own.error or own.disagrees:
        return [own.error or f"wrong: {own.disagrees}", *["-" for _ in peers]]
    cells = [f"{own.median * 1e3:.3f}"]
    for peer in peers:
        if peer not in [m.system for m in found.measurements]:
            cells.append("-")  # the library is launched in one way alone
            continue
        one = found[peer]
        cells.append(one.error[:40] if one.error else f"{one.median / own.median:.2f}")
    return cells


def _stages(job: Mapping[str, Any]) -> Any:
    """Each stage's seconds, by events of the device, beside what it is."""
    from gtco.runtime.module import load

    try:
        with load(f"{job['stem']}.so") as model:
            seconds = model.profile(*_arrays(job), repeat=20)
            return [
                {**stage, "measured_seconds": took}
                for stage, took in zip(model.stages, seconds, strict=True)
            ]
    except GtcoError as error:
        return {"error": str(error)}


def _gpu() -> str:
    """The GPU's name; an error where there is none that torch can use."""
    try:
        import torch
    except ImportError:
        raise OptionError(
            "measuring needs a torch with CUDA, which holds the tensors and is the reference; "
            "install one (pip install torch)"
        ) from None
    if not torch.cuda.is_available():
        built = torch.version.cuda
        raise OptionError(
            "no GPU to measure on: "
            + (
                f"torch (for CUDA {built}) finds none; is the NVIDIA driver there (nvidia-smi)?"
                if built
                else f"this torch ({torch.__version__}) is built without CUDA"
            )
            + ". 'bench gpu prepare' needs no GPU: carry its folder to a machine that has one"
        )
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} (sm_{major}{minor}), CUDA {torch.version.cuda}"


def _arrays(job: Mapping[str, Any]) -> list[np.ndarray]:
    with np.load(f"{job['stem']}.inputs.npz") as file:
        return [file[name] for name in file.files]


def _system(version: str, run: Callable[[], Any]) -> System:
    """A system whose call ends when the device has done its work."""
    import torch

    def call() -> None:
        run()
        torch.cuda.synchronize()

    def outputs() -> list[np.ndarray]:
        found = [t.float() if t.is_floating_point() else t for t in tensors(run())]
        return [t.cpu().numpy() for t in found]

    return System(version, call, outputs)


def _device_inputs(job: Job, half: bool) -> list[Any]:
    import torch

    found = [torch.from_numpy(array).cuda() for array in _arrays(job)]
    return [x.half() if half and x.is_floating_point() else x for x in found]


def open_gtco(job: Job, launches: Literal["graph", "persistent"] | None = None) -> System:
    """Inputs and outputs as the model was compiled: float32, on the device."""
    from gtco.runtime.module import load
    from gtco.version import __version__

    model = load(f"{job['stem']}.so", launches=launches)
    inputs = _device_inputs(job, half=False)
    return _system(__version__, lambda: model(*inputs))


def open_gtco_graph(job: Job) -> System:
    """The same library, launched as a graph."""
    return open_gtco(job, "graph")


def _open_torch(
    job: Job, half: bool = True, compiler: Callable[[Any], Any] | None = None
) -> System:
    import torch

    from models import create

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = half
    module = create(job["model"]).eval().cuda()
    module = module.half() if half else module
    inputs = _device_inputs(job, half)
    function: Callable[..., Any] = compiler(module) if compiler else module

    def run() -> Any:
        with torch.inference_mode():
            return function(*inputs)

    return _system(torch.__version__, run)


def open_reference(job: Job) -> System:
    return _open_torch(job, half=False)


def open_torch(job: Job) -> System:
    return _open_torch(job)


def open_torch_compile(job: Job) -> System:
    """Kernels chosen by measuring, and CUDA graphs."""
    import torch

    return _open_torch(job, compiler=lambda m: torch.compile(m, mode="max-autotune"))


def open_torch_compile_reduce_overhead(job: Job) -> System:
    import torch

    return _open_torch(job, compiler=lambda m: torch.compile(m, mode="reduce-overhead"))


def open_onnxruntime(job: Job) -> System:
    """The float16 model on the CUDA provider, its inputs and outputs bound to the device."""
    import onnxruntime as ort

    if "CUDAExecutionProvider" not in ort.get_available_providers():
        raise RuntimeError("this onnxruntime has no CUDA provider: pip install onnxruntime-gpu")
    session = ort.InferenceSession(
        f"{job['stem']}.half.onnx", providers=[("CUDAExecutionProvider", {})]
    )
    if "CUDAExecutionProvider" not in session.get_providers():
        raise RuntimeError("onnxruntime's CUDA provider does not start")
    binding = session.io_binding()
    inputs = _device_inputs(job, half=True)
    for spec, x in zip(session.get_inputs(), inputs, strict=True):
        kind = np.float16 if x.is_floating_point() else np.int64
        binding.bind_input(spec.name, "cuda", 0, kind, list(x.shape), x.data_ptr())
    for spec in session.get_outputs():
        binding.bind_output(spec.name, "cuda")

    def call() -> None:
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()

    def outputs() -> list[np.ndarray]:
        call()
        return [a.astype(np.float32) for a in binding.copy_outputs_to_cpu()]

    return System(ort.__version__, call, outputs)


OPENERS: dict[str, Opener] = {
    REFERENCE: open_reference,
    "gtco": open_gtco,
    GRAPH: open_gtco_graph,
    "torch": open_torch,
    "torch-compile": open_torch_compile,
    "torch-compile:reduce-overhead": open_torch_compile_reduce_overhead,
    "onnxruntime": open_onnxruntime,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench gpu", description="models for GPUs beside their peers"
    )
    commands = parser.add_subparsers(dest="do", required=True)
    ready = commands.add_parser("prepare", help="export and compile; needs no GPU")
    timed = commands.add_parser("measure", help="check and time what is in the folder")
    for command in (ready, timed):
        command.add_argument("--folder", type=Path, default=Path("build/gpu"))
    ready.add_argument("--models", default=MODELS)
    ready.add_argument("--precision", default="fp16")
    ready.add_argument("--target", default="cuda:sm_90a")
    # the libraries are launched in both ways where they can, so that one run measures both
    ready.add_argument("--launches", choices=LAUNCHES, default="persistent")
    ready.add_argument(
        "--batches", type=lambda text: [positive(n) for n in text.split(",")], default=[1, 8, 32]
    )
    timed.add_argument("--rounds", type=positive, default=7)
    timed.add_argument("--peers", default=",".join(PEERS))
    timed.add_argument("--json", type=Path)
    return parser


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

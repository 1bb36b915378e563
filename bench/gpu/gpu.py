"""Models for GPUs beside their peers, in one run: ``python -m bench gpu prepare`` compiles them, on
any machine; ``python -m bench gpu measure``, on a machine with a GPU, checks and times everything
that lies in the folder, and writes JSON after each part.

``prepare --folder build/gpu [--models vit-base-16,...] [--kernels product-197x768x768,...]
[--batches 1,8,32] [--precision fp16] [--target cuda:sm_90a] [--launches persistent]``: the ONNX
files in float32 and float16, and gtco's libraries.

``measure --folder build/gpu [--json FILE] [--rounds 7] [--peers torch,...] [--no-sanitizer]``:
first kernels of every family, each held against torch's (products against cuBLAS, attention against
scaled_dot_product_attention) and timed beside it (``bench/gpu/kernel_times.py``). Then the models:
each system lives in a process of its own, all but one stopped (``bench/harness/rounds.py``). Inputs
and outputs stay on the device; a call ends when the device has done its work. A library with the
persistent kernel is timed launched as a graph too (``gtco:graph``). Peers run in float16: torch
eager, torch.compile (``max-autotune`` with CUDA graphs, and ``reduce-overhead``), ONNX Runtime's
CUDA provider where it is installed, without and with a CUDA graph. Outputs are held against torch
eager in float32; where they differ by more than the tolerance, float64 decides. For gtco the time
of each stage is kept too. Last, compute-sanitizer watches the kernels and ViT-Ti at batch 1, where
it is to be had (``pip install nvidia-cuda-sanitizer-api``, a wheel that can be carried along). The
status is 1 if a kernel or a model of gtco's fails or is wrong, or compute-sanitizer finds a fault.

``policy`` needs no GPU: it compares the prices with kernels that one has timed
(``bench/gpu/policy.py``).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from rich.console import Console
from rich.table import Table

from gtco.cli.arguments import positive
from gtco.codegen.processes import python
from gtco.frontend.dimensions import inputs_of
from gtco.machine.gpu import gpu_target
from gtco.support.errors import BuildError, GtcoError, OptionError
from gtco.support.options import GPU_PRECISIONS, LAUNCHES
from gtco.verification.outputs import OutputJudge, Verdict

from ..harness import kept
from ..harness.agreement import Judge, Outputs
from ..harness.machine import describe
from ..harness.peers import peer_of
from ..harness.process import child_environment
from ..harness.rounds import Comparison, Contender, compare
from ..harness.suite import console, write_value
from . import kernel_times as kernels
from .kernels import KERNELS
from .peers import GRAPH, REFERENCE, WORKER, arrays, cuda_torch, ways

MODELS = (
    "vit-ti-16,vit-s-16,vit-base-16,vit-large-16,swin-t,dinov2-s-14,segformer-b0,"
    "detr-resnet50-e3,detr-resnet50-e6,detr-resnet50-e12,setr-naive-base,setr-naive,setr-pup,"
    "vit-huge-14"
)
PEERS = (
    *("torch", "torch-compile", "torch-compile:reduce-overhead"),
    *("onnxruntime", "onnxruntime:cuda-graph"),
)
WATCHED = "vit-ti-16.b1"  # by compute-sanitizer, beside the kernels: a whole model, one kernel
STAGES_TIMEOUT = 120.0  # seconds
READINGS = Path(__file__).parent / "readings" / "h200.jsonl.gz"
TOLERANCE = 0.03  # of the largest output, for float16 through some fifty layers


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    if options.do == "policy":  # it needs TVM, which a machine that measures has not
        from . import policy

        return policy.main(options)
    return int(prepare(options) if options.do == "prepare" else measure(options))


# ---- without a GPU: what is to be measured -------------------------------------------------------


def prepare(options: argparse.Namespace) -> int:
    from gtco.support.torchless import import_tvm

    gpu_target(options.target)  # refused before anything is exported
    import_tvm()
    options.folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for said in kernels.prepare(options.folder, options.kernels, options.target):
        failed += ": error: " in said
        print(said, flush=True)
    for name in filter(None, options.models.split(",")):
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
    """Compiles the library. If it cannot be launched as was asked, it is compiled as a graph, and
    the job says so.
    """
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
    """Writes NAME.bN.onnx in float32, NAME.bN.half.onnx in float16, and the inputs."""
    import torch

    from gtco.models import create, example_inputs, export_onnx

    inputs = example_inputs(name, batch)
    np.savez(stem.with_name(f"{stem.name}.inputs.npz"), *[x.numpy() for x in inputs])
    module = create(name).eval()
    for suffix, dtype in (("", torch.float32), (".half", torch.float16)):
        path = stem.with_name(f"{stem.name}{suffix}.onnx")
        if not kept.current(path, kept.exporters()):
            cast = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
            export_onnx(module.to(dtype), tuple(cast), path)
            kept.note(path, kept.exporters())


# ---- with one ------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> int:
    gpu = _gpu()
    jobs = sorted(options.folder.glob("*.b*.json"), key=_turn)
    if not jobs and not list(options.folder.glob(f"{kernels.PREFIX}*.so")):
        raise OptionError(f"nothing to measure in {options.folder}: run 'bench gpu prepare' first")
    output = console()
    output.print(f"{gpu}", highlight=False, markup=False)
    report: dict[str, Any] = {"gpu": gpu, "machine": describe(1), "kernels": [], "models": {}}

    def keep() -> None:  # after each: a long run keeps what it has
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            write_value(options.json, report)

    table = _table("us a call, by the device's events", "kernel", "gtco", "torch over gtco's")
    for one in kernels.measure(options.folder, options.rounds):
        report["kernels"].append(one)
        table.add_row(one["kernel"], *_kernel_cells(one))
        keep()
    output.print(table)
    _measure_models(jobs, options, report["models"], keep, output)
    if options.sanitizer:
        report["compute-sanitizer"] = _watched(options.folder, output)
        keep()
    return 0 if _sound(report) else 1


def _sound(report: Mapping[str, Any]) -> bool:
    """True if gtco ran every kernel and model, all are right, and compute-sanitizer, if it was
    there, has found nothing.
    """
    models = report["models"].values()
    own = [s for model in models for s in model["systems"] if peer_of(s["system"]) == "gtco"]
    watched = report.get("compute-sanitizer", {})
    seen = () if isinstance(watched, str) else watched.values()
    return not (
        any("error" in one or one["wrong"] for one in report["kernels"])
        or any("error" in model["job"] for model in models)
        or any(system["error"] or system["disagrees"] for system in own)
        # a fault stands below the summary
        or any("\n" in said for by_tool in seen for said in by_tool.values())
    )


def _judge(job: Mapping[str, Any]) -> Judge:
    """Float64, which reads the model and its inputs where it is asked."""

    def judge(actual: Outputs, expected: Outputs, reference: str) -> Verdict:
        graph = onnx.load(job["onnx"], load_external_data=False).graph
        names = [value.name for value in inputs_of(graph)]
        inputs = dict(zip(names, arrays(job), strict=True))
        return OutputJudge(Path(job["onnx"]), inputs, job["precision"])(actual, expected, reference)

    return judge


def _measure_models(
    jobs: Sequence[Path],
    options: argparse.Namespace,
    report: dict[str, Any],
    keep: Callable[[], None],
    output: Console,
) -> None:
    peers = [peer for peer in options.peers.split(",") if peer]
    others = [GRAPH, *peers]
    table = _table("ms a call; peers as their time over gtco's", "model", "gtco", *others)
    for path in jobs:
        stem = path.name.removesuffix(".json")
        job = {**json.loads(path.read_text()), **_files(path.with_name(stem))}
        if "error" not in job and not Path(job["library"]).exists():
            job["error"] = f"{job['library']} is not there"
        systems = [REFERENCE, *([] if "error" in job else ways(Path(job["library"]))), *peers]
        found = compare(
            [Contender(name, {**job, "system": name}, WORKER) for name in systems],
            options.rounds,
            reference=REFERENCE,
            tolerance=TOLERANCE,
            judge=_judge(job),
            progress=lambda text, stem=stem: output.print(f"{stem}: {text}", style="dim"),  # type: ignore[misc]
        )
        report[stem] = entry = {"job": job, "systems": [asdict(m) for m in found.measurements]}
        table.add_row(stem, *_cells(found, others, job))
        keep()
        if "error" not in job and found["gtco"].error is None:
            entry["stages"] = _stages(job["library"])
            keep()
    output.print(table)


def _watched(folder: Path, output: Console) -> Any:
    """What compute-sanitizer says about each library, or why it says nothing."""
    program = kernels.sanitizer()
    if program is None:
        output.print("no compute-sanitizer: pip install nvidia-cuda-sanitizer-api")
        return "not there"
    libraries = [*sorted(folder.glob(f"{kernels.PREFIX}*.so")), folder / f"{WATCHED}.so"]
    found = {}
    table = _table("compute-sanitizer", "library", *kernels.TOOLS)
    for path in filter(Path.exists, libraries):
        found[path.stem] = said = kernels.sanitized(program, path)
        table.add_row(path.stem, *(said[name].splitlines()[0] for name in kernels.TOOLS))
    output.print(table)
    return found


def _table(title: str, *headings: str) -> Table:
    """A table whose first column is aligned to the left."""
    table = Table(title=title, title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    return table


def _kernel_cells(one: Mapping[str, Any]) -> list[str]:
    if "error" in one:
        return [str(one["error"])[:40], "-"]
    if one["wrong"]:
        return [f"wrong: {one['difference']:.2g} of the largest result", "-"]
    return [f"{one['gtco_s'] * 1e6:.1f}", f"{one['torch_s'] / one['gtco_s']:.2f}"]


def _files(stem: Path) -> dict[str, str]:
    """The files that :func:`prepare` wrote, by the names that the systems use."""
    names = {"library": ".so", "inputs": ".inputs.npz", "onnx": ".onnx", "half": ".half.onnx"}
    return {key: f"{stem}{suffix}" for key, suffix in names.items()}


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


def _stages(library: str) -> Any:
    """Each stage with its ``measured_seconds``, by events of the device. They are measured in a
    process of their own, because a kernel that faults or never ends ends its process too.
    """
    command = [*python("gtco"), "inspect", library, "--json"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=STAGES_TIMEOUT, env=child_environment()
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done in {STAGES_TIMEOUT:.0f} s"}
    if done.returncode:
        return {"error": done.stderr.strip() or f"ended with {done.returncode}"}
    return json.loads(done.stdout)["stages"]


def _turn(job: Path) -> tuple[int, int]:
    """The order of the jobs: batch 1 first, and for each batch the smallest model first, because
    the last ones may be cut off.
    """
    library = job.with_suffix(".so")
    return int(job.stem.rpartition(".b")[2]), library.stat().st_size if library.exists() else 0


def _gpu() -> str:
    """The GPU's name. Raises an error if there is none that torch can use."""
    try:
        torch = cuda_torch()
    except OptionError as error:
        raise OptionError(
            f"no GPU to measure on: {error}; torch holds the tensors and is the reference. "
            "'bench gpu prepare' needs no GPU: carry its folder to a machine that has one"
        ) from None
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} (sm_{major}{minor}), CUDA {torch.version.cuda}"


def _kernels(text: str) -> tuple[str, ...]:
    """The kernels that a text such as ``gelu,joined`` names; "" means none."""
    names = tuple(filter(None, text.split(",")))
    if unknown := [name for name in names if name not in KERNELS]:
        raise argparse.ArgumentTypeError(
            f"unknown kernel {unknown[0]}: choose from {', '.join(KERNELS)}"
        )
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench gpu", description="models for GPUs beside their peers"
    )
    commands = parser.add_subparsers(dest="do", required=True)
    ready = commands.add_parser("prepare", help="export and compile; needs no GPU")
    timed = commands.add_parser("measure", help="check and time what is in the folder")
    priced = commands.add_parser("policy", help="the prices beside kernels that a GPU timed")
    priced.add_argument("--readings", type=Path, default=READINGS, help="(%(default)s)")
    priced.add_argument("--json", type=Path, metavar="FILE")
    for command in (ready, timed):
        command.add_argument(
            "--folder", type=Path, default=Path("build/gpu"), help="what is carried (%(default)s)"
        )
    ready.add_argument("--models", default=MODELS, help='by name, with commas; "" is none')
    ready.add_argument(
        "--kernels", type=_kernels, default=tuple(KERNELS), help='by name, with commas; "" is none'
    )
    ready.add_argument("--precision", default="fp16", choices=GPU_PRECISIONS, help="(%(default)s)")
    ready.add_argument("--target", default="cuda:sm_90a", help="of the GPU (%(default)s)")
    # the libraries are launched in both ways where they can, so that one run measures both
    ready.add_argument(
        "--launches", choices=LAUNCHES, default="persistent", help="of models (%(default)s)"
    )
    ready.add_argument(
        "--batches",
        type=lambda text: [positive(n) for n in text.split(",")],
        default=[1, 8, 32],
        help="of models (1,8,32)",
    )
    timed.add_argument("--rounds", type=positive, default=7, help="(%(default)s)")
    timed.add_argument("--peers", default=",".join(PEERS), help="(%(default)s)")
    timed.add_argument("--json", type=Path, metavar="FILE", help="kept after each part")
    timed.add_argument(
        "--sanitizer",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run compute-sanitizer where it is (default: yes)",
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

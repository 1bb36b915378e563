"""``gtco bench MODEL.onnx ...``: gtco beside other engines, on the CPU or a GPU."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gtco.cli import arguments
from gtco.cli.console import say
from gtco.cli.outputs import add_force, check_ours
from gtco.support.errors import GtcoError, ModelError, OptionError, installing
from gtco.support.options import GPU_PRECISIONS, PRECISIONS, check_apart

# the function that benchmarks one model in a folder, the peers, the threads, the report's words
Runner = tuple[Callable[[str, Sequence[str], Path], Any], Sequence[str], int, dict[str, str]]
CPU_PEERS = "onnxruntime,openvino,torch,torch-compile"


def add(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench", help="compare with other engines, side by side"
    )
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="an .onnx file; a name of python -m gtco.models list (needed for the torch peers); or "
        "a library of gtco's (.so), which is timed by itself",
    )
    parser.add_argument(
        "--peers",
        metavar="A,B,...",
        help=f"default: those of {CPU_PEERS} that are installed and run the MODEL; on a GPU of "
        "torch,torch-compile,onnxruntime. The command fails where one of them does",
    )
    parser.add_argument(
        "--rounds",
        type=arguments.positive,
        default=7,
        metavar="N",
        help="interleaved rounds of calls (default 7)",
    )
    parser.add_argument(
        "--precision",
        choices=GPU_PRECISIONS,
        help="for gtco and for every engine that supports it (default fp32, on a GPU fp16; with "
        "--library its own)",
    )
    parser.add_argument(
        "--target",
        default="native",
        metavar="NAME",
        help="native (default): this machine's CPU; cuda: its GPU, also cuda:sm_80, ...",
    )
    parser.add_argument(
        "--threads",
        type=arguments.threads,
        default=0,
        metavar="N",
        help="for every system, on the CPU (default 0: every core that the process may use)",
    )
    arguments.add_shape(parser)
    arguments.add_dim(parser)
    parser.add_argument(
        "--library",
        type=Path,
        metavar="FILE.so",
        help="the compiled library of the only MODEL (default: compile it now)",
    )
    parser.add_argument(
        "--json",
        type=arguments.new_file,
        metavar="FILE",
        help="write machine, versions and every timed call",
    )
    add_force(parser)
    return parser


def main(options: argparse.Namespace) -> int:
    try:
        from gtco.bench.harness import suite
    except ImportError as error:
        raise OptionError(
            f"benchmarks need more than is installed ({error}): {installing('bench')} installs it"
        ) from None
    on_gpu = options.target.partition(":")[0].lower() == "cuda"
    if not on_gpu and options.target != "native":
        raise OptionError(
            f"--target is '{options.target}', and a benchmark runs here: native or cuda"
        )
    check_apart(options.json, options.library, *map(Path, options.models))
    check_ours(options.json, options.force, _is_benchmark, "a benchmark")
    _check_files(options, on_gpu)
    run, peers, threads, about = (_on_gpu if on_gpu else _on_cpu)(options)
    results: list[suite.Result] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="gtco-bench-") as folder:
        for model in options.models:
            able = _able(peers, model)
            results.append(run(model, able, Path(folder)))
            failed += suite.failed_peers(results[-1], able)
            suite.show(results[-1])
            if options.json:
                suite.write_json(options.json, results, threads, options.rounds, about)
    if failed:
        raise GtcoError(
            f"these peers were not compared: {'; '.join(failed)}. Mend what keeps them, or name "
            "the others with --peers"
        )
    return 0 if suite.sound(results) else 1


def _is_benchmark(first: bytes) -> bool:
    return first.startswith(b'{\n "machine": ')


def _check_files(options: argparse.Namespace, on_gpu: bool) -> None:
    """Checks, before anything is compiled, that all files exist and each library is a model that
    can be timed so. A library of ``--library`` decides the precision.
    """
    from gtco.bench.harness.workload import check_library

    if options.library and len(options.models) != 1:
        raise OptionError("--library goes with one MODEL")
    for model in map(Path, options.models):
        if model.suffix == ".so":
            if options.library:
                raise OptionError(f"{model} is a library itself: leave out --library")
            _check_fits(options, on_gpu, model, check_library(model))
        elif model.suffix == ".onnx" and not model.is_file():
            raise ModelError(f"no such file: {model}")
    if options.library:
        model = Path(options.models[0])
        metadata = check_library(options.library, model if model.suffix == ".onnx" else None)
        _check_fits(options, on_gpu, options.library, metadata)
        options.precision = metadata.get("precision", "fp32")


def _check_fits(
    options: argparse.Namespace, on_gpu: bool, library: Path, metadata: dict[str, Any]
) -> None:
    """Checks that a library is for what ``--target`` names and computes in ``--precision``."""
    if ("images" in metadata) != on_gpu:
        there, mend = ("CPU", "leave out --target") if on_gpu else ("GPU", "add --target cuda")
        raise OptionError(f"{library} was compiled for a {there}: {mend}")
    found = metadata.get("precision", "fp32")
    if options.precision not in (None, found):
        raise OptionError(
            f"{library} computes in {found}, and --precision is {options.precision}: leave it out"
        )


def _chosen(
    options: argparse.Namespace, every: str, check: Callable[[str], Sequence[str]]
) -> Sequence[str]:
    """The systems that ``--peers`` names; each must be able to run every model. By default, those
    of ``every`` that are installed.
    """
    from gtco.bench.harness.peers import PACKAGES, peer_of
    from gtco.bench.harness.workload import TORCH_NEEDS_SOURCE

    if options.peers is None:
        missing = [name for name in every.split(",") if find_spec(PACKAGES[name]) is None]
        asked = ",".join(name for name in every.split(",") if name not in missing)
        if wanted := [name for name in missing if any(_able([name], m) for m in options.models)]:
            packages = " ".join(dict.fromkeys(PACKAGES[name] for name in wanted))
            say(f"note: not installed, so not timed: {', '.join(wanted)} (pip install {packages})")
        return check(asked)
    peers = check(options.peers)
    needed = {name: PACKAGES[peer_of(name)] for name in peers}
    if missing := [name for name, package in needed.items() if find_spec(package) is None]:
        packages = " ".join(dict.fromkeys(needed[name] for name in missing))
        raise OptionError(
            f"not installed: {', '.join(missing)}. Install what is missing (pip install "
            f"{packages}), or name other peers with --peers"
        )
    for model in options.models:
        unable = sorted({*peers} - {*_able(peers, model)})
        if unable and Path(model).suffix == ".so":
            raise OptionError(
                f"{model} is a library, which gtco alone runs: give the .onnx file and --library "
                f"{model} to time {', '.join(unable)} too"
            )
        if unable:
            raise OptionError(f"{', '.join(unable)} cannot run {model}: {TORCH_NEEDS_SOURCE}")
    return peers


def _able(peers: Sequence[str], model: str) -> list[str]:
    """The peers that can run this model. No peer runs a library of gtco's, and some need the
    model's source, which an .onnx file does not have.
    """
    from gtco.bench.harness.peers import NEEDS_MODEL, peer_of

    kind = Path(model).suffix
    if kind == ".so":
        return []
    return [peer for peer in peers if not (kind == ".onnx" and peer_of(peer) in NEEDS_MODEL)]


def _shapes(options: argparse.Namespace) -> dict[str, Any]:
    """The sizes of symbolic dimensions, by --shape and by --dim, which here has one size each."""
    shapes: dict[str, Any] = arguments.unique(options.shape, "--shape")
    dims = arguments.one_size_each(options.dim)
    if both := [name for name in dims if name in shapes]:
        raise OptionError(f"--dim and --shape both give '{both[0]}' a size: leave one out")
    return shapes | dims


def _on_cpu(options: argparse.Namespace) -> Runner:
    from gtco.bench.harness import suite, workload

    precision = options.precision or "fp32"
    if precision not in PRECISIONS:
        raise OptionError(f"--precision {precision} is for GPUs: --target cuda")
    shapes = _shapes(options)
    peers = _chosen(options, CPU_PEERS, workload.check_peers)
    threads = options.threads or suite.available_threads()
    suite.header(threads)

    def run(model: str, peers: Sequence[str], folder: Path) -> Any:
        return suite.run_model(
            model,
            peers,
            folder,
            threads,
            options.rounds,
            shapes,
            options.library,
            precision,
        )

    return run, peers, threads, {}


def _on_gpu(options: argparse.Namespace) -> Runner:
    from gtco.bench.gpu import suite as gpu_suite
    from gtco.bench.harness import suite

    if options.threads:
        raise OptionError("--threads is of CPUs, and the target is a GPU")
    shapes = _shapes(options)
    peers = _chosen(options, gpu_suite.PEERS, gpu_suite.peers_of)
    found = gpu_suite.gpu_here()
    target = gpu_suite.target(options.target, found)
    suite.header(suite.available_threads())
    say(f"{found}, --target {target}")

    def run(model: str, peers: Sequence[str], folder: Path) -> Any:
        return gpu_suite.run_model(
            model,
            peers,
            folder,
            options.rounds,
            shapes,
            options.library,
            options.precision or "fp16",
            target,
        )

    return run, peers, suite.available_threads(), {"gpu": str(found), "target": target}

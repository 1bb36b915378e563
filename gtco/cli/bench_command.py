"""``gtco bench MODEL.onnx ...``: gtco beside other engines, on the CPU or a GPU."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from gtco.cli import arguments
from gtco.cli.console import stdout
from gtco.support.errors import GtcoError, OptionError, installing
from gtco.support.options import GPU_PRECISIONS, PRECISIONS

# what benchmarks one model in a folder beside peers, the peers, the threads, what the report says
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
        help="an .onnx file, or a name of python -m models list (needed for the torch peers)",
    )
    parser.add_argument(
        "--peers",
        metavar="A,B,...",
        help=f"default: {CPU_PEERS}; on a GPU torch,torch-compile,onnxruntime; of an .onnx file "
        "those that read it. The command fails where one of them cannot run",
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
        help="of gtco, and of every engine that has it (default fp32; on a GPU fp16)",
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
        help="of every system on the CPU (default 0: every core that the process may use)",
    )
    arguments.add_shape(parser)
    parser.add_argument(
        "--library",
        type=Path,
        metavar="FILE.so",
        help="the library of the one MODEL, compiled already (default: compile it now)",
    )
    parser.add_argument(
        "--json",
        type=arguments.new_file,
        metavar="FILE",
        help="write machine, versions and every timed call",
    )
    return parser


def main(options: argparse.Namespace) -> int:
    try:
        from bench.harness import suite
    except ImportError as error:
        raise OptionError(
            f"the benchmark harness is not there ({error}): {installing('bench')} installs it and "
            "what it needs"
        ) from None
    if options.library and len(options.models) != 1:
        raise OptionError("--library goes with one MODEL")
    on_gpu = options.target.partition(":")[0].lower() == "cuda"
    if not on_gpu and options.target != "native":
        raise OptionError(
            f"--target is '{options.target}', and a benchmark runs here: native or cuda"
        )
    console = stdout()
    run, peers, threads, about = (_on_gpu if on_gpu else _on_cpu)(options, console)
    results: list[suite.Result] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="gtco-bench-") as folder:
        for model in options.models:
            able = _able(peers, model)
            results.append(run(model, able, Path(folder)))
            failed += suite.failed_peers(results[-1], able)
            suite.show(results[-1], console)
            if options.json:
                suite.write_json(options.json, results, threads, options.rounds, about)
    if failed:
        raise GtcoError(
            f"these peers were not compared: {'; '.join(failed)}. Mend what keeps them, or name "
            "the others with --peers"
        )
    return 0 if suite.sound(results) else 1


def _able(peers: Sequence[str], model: str) -> list[str]:
    """The peers that can run this model: some need its source, which an .onnx file has not."""
    from bench.harness.peers import NEEDS_MODEL, peer_of

    read = Path(model).suffix == ".onnx"
    return [peer for peer in peers if not (read and peer_of(peer) in NEEDS_MODEL)]


def _refuse_unable(options: argparse.Namespace, peers: Sequence[str]) -> None:
    """Peers that were asked for by name must be able to run every model."""
    from bench.harness.workload import TORCH_NEEDS_SOURCE

    for model in options.models:
        unable = sorted({*peers} - {*_able(peers, model)})
        if unable and options.peers is not None:
            raise OptionError(f"{', '.join(unable)} cannot run {model}: {TORCH_NEEDS_SOURCE}")


def _on_cpu(options: argparse.Namespace, console: Console) -> Runner:
    from bench.harness import suite, workload

    precision = options.precision or "fp32"
    if precision not in PRECISIONS:
        raise OptionError(f"--precision {precision} is for GPUs: --target cuda")
    shapes = arguments.unique(options.shape, "--shape")
    peers = workload.check_peers(CPU_PEERS if options.peers is None else options.peers)
    _refuse_unable(options, peers)
    threads = options.threads or suite.available_threads()
    suite.header(console, threads)

    def run(model: str, peers: Sequence[str], folder: Path) -> Any:
        return suite.run_model(
            model,
            peers,
            folder,
            threads,
            options.rounds,
            shapes,
            console,
            options.library,
            precision,
        )

    return run, peers, threads, {}


def _on_gpu(options: argparse.Namespace, console: Console) -> Runner:
    from bench.gpu import suite as gpu_suite
    from bench.harness import suite

    if options.threads:
        raise OptionError("--threads is of CPUs, and the target is a GPU")
    shapes = arguments.unique(options.shape, "--shape")
    peers = gpu_suite.peers_of(gpu_suite.PEERS if options.peers is None else options.peers)
    _refuse_unable(options, peers)
    found = gpu_suite.gpu_here()
    target = gpu_suite.target(options.target, found)
    suite.header(console, suite.available_threads())
    console.print(f"{found}, --target {target}", markup=False, highlight=False)

    def run(model: str, peers: Sequence[str], folder: Path) -> Any:
        return gpu_suite.run_model(
            model,
            peers,
            folder,
            options.rounds,
            shapes,
            console,
            options.library,
            options.precision or "fp16",
            target,
        )

    return run, peers, suite.available_threads(), {"gpu": str(found), "target": target}

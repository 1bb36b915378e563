"""``gtco bench MODEL.onnx ...``: gtco beside ONNX Runtime, OpenVINO and PyTorch."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from gtco.cli import arguments
from gtco.cli.console import stdout
from gtco.errors import OptionError
from gtco.options import PRECISIONS


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
        default="onnxruntime,openvino,torch,torch-compile",
        metavar="A,B,...",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--rounds", type=arguments.positive, default=7, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="fp32",
        help="of gtco, and of every engine that has it (default fp32)",
    )
    parser.add_argument(
        "--threads",
        type=arguments.zero_or_more,
        default=0,
        metavar="N",
        help="of every system (default 0: every core that the process may use)",
    )
    parser.add_argument(
        "--shape", type=arguments.shape, action="append", default=[], metavar="NAME=SIZE"
    )
    parser.add_argument(
        "--library",
        type=Path,
        metavar="FILE.so",
        help="the library of the one MODEL, compiled already (default: compile it now)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write machine, versions and every timed call"
    )
    return parser


def main(options: argparse.Namespace) -> int:
    try:
        from bench import suite, workload
    except ImportError as error:
        raise OptionError(
            f"the benchmark harness is not there ({error}): run from a checkout of gtco, "
            "or install it with pip install 'gtco[bench]'"
        ) from None
    if options.library and len(options.models) != 1:
        raise OptionError("--library goes with one MODEL")
    shapes = arguments.unique(options.shape, "--shape")
    peers = workload.check_peers(options.peers)
    threads = options.threads or suite.available_threads()
    console = stdout()
    suite.header(console, threads)
    results: list[suite.Result] = []
    with tempfile.TemporaryDirectory(prefix="gtco-bench-") as folder:
        for model in options.models:
            results.append(
                suite.run_model(
                    model,
                    peers,
                    Path(folder),
                    threads,
                    options.rounds,
                    shapes,
                    console,
                    options.library,
                    options.precision,
                )
            )
            suite.show(results[-1], console)
            if options.json:
                suite.write_json(options.json, results, threads, options.rounds)
    return 0 if suite.sound(results) else 1

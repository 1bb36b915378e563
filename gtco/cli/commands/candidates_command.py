"""``gtco candidates MODEL.onnx --target cuda:... -o FILE.bundle``: what ``gtco measure`` times."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gtco.cli import arguments
from gtco.cli.console import Phases, say, size
from gtco.cli.outputs import add_force, check_ours, here
from gtco.runtime.publish import weights_beside


def add(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "candidates", help="kernels for a GPU or a CPU elsewhere to time, in one file"
    )
    parser.add_argument("model", type=Path, metavar="MODEL.onnx")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE.bundle",
        help="must end in .bundle (default: the model's name with it, in the current folder)",
    )
    add_force(parser)
    parser.add_argument(
        "--per-stage",
        type=arguments.two_or_more,
        default=8,
        metavar="N",
        help="the N most promising candidates of each heavy stage, 2 or more (default 8)",
    )
    arguments.add_compile_options(parser)
    return parser


def main(options: argparse.Namespace) -> int:
    from gtco.support.torchless import import_tvm

    import_tvm()
    from gtco.compiler import candidates_to_file
    from gtco.driver.checks import check_bundle

    output = options.output or here(options.model, ".bundle")
    check_bundle(output, options.model)
    check_ours(output, options.force, lambda first: first.startswith(b"\x7fELF"), "a bundle")
    chosen = arguments.compile_options(
        argparse.Namespace(tune="off", records=None, **vars(options))
    )
    with Phases() as progress:
        report = candidates_to_file(
            options.model, output, per_stage=options.per_stage, progress=progress, **chosen
        )
    for note in report.notes:
        say(f"note: {note}")
    # weights that are too large for a library lie beside it
    files = [f"{file} ({size(file.stat().st_size)})" for file in (output, *weights_beside(output))]
    say(
        f"{' and '.join(files)}: where they are to run, gtco measure {output.name} -o answers.jsonl"
    )
    return 0

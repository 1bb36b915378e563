"""``gtco tune MODEL.onnx --minutes M``: a compile that measures for as long as it is given, and
keeps what it measured; it may be stopped and run again at any time.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gtco.cli import arguments
from gtco.cli.compile_command import add_output, compile_model
from gtco.options import EFFORTS, Tune


def add(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "tune", help="compile a model with kernels measured on this machine"
    )
    add_output(parser)
    arguments.add_compile_options(parser)
    parser.add_argument(
        "--minutes",
        dest="seconds",
        type=arguments.minutes,
        default=EFFORTS["full"].seconds,
        metavar="M",
        help="rounds begin for so long (default 10); less where nothing is left that may gain",
    )
    parser.add_argument(
        "--records",
        type=Path,
        metavar="FILE",
        help="measurements to go on from and to add to (default: the model's name with .records)",
    )
    return parser


def main(options: argparse.Namespace) -> int:
    options.tune = Tune(seconds=options.seconds)
    options.records = options.records or options.model.with_suffix(".records")
    return compile_model(options)

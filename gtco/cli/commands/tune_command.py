"""``gtco tune MODEL.onnx ... [--trials N | --minutes M]``: a compile that measures for the time
that it is given, and keeps what it measured. It may be stopped and run again at any time. With
several models each gets its library, and stages that they share are tuned once.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from gtco.cli import arguments, tuning_tables
from gtco.cli.commands.compile_command import add_made, compile_models
from gtco.cli.console import Phases, say, show
from gtco.cli.outputs import here
from gtco.support.errors import OptionError
from gtco.support.options import EFFORTS, Tune

ENDLESS = 30 * 24 * 3600.0  # seconds: no limit in practice, because trials are counted


def add(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "tune", help="compile models with kernels measured on this machine"
    )
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL.onnx")
    add_made(parser)
    arguments.add_compile_options(parser)
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument(
        "--trials",
        type=arguments.positive,
        metavar="N",
        help="measure at most N candidates, however long that takes",
    )
    budget.add_argument(
        "--minutes",
        dest="seconds",
        type=arguments.minutes,
        default=EFFORTS["full"].seconds,
        metavar="M",
        help="how long to measure (default 10); it ends earlier if nothing promises a gain",
    )
    parser.add_argument(
        "--weights",
        type=Path,
        metavar="FILE",
        help="the weights of --policy language-model, if they are your own "
        "(python -m gtco.bench language_model)",
    )
    parser.add_argument(
        "--latency",
        type=arguments.milliseconds,
        default=0.0,
        metavar="MS",
        help="stop tuning a model once it takes no longer than this (default: never)",
    )
    parser.add_argument(
        "--records",
        type=Path,
        metavar="FILE",
        help="measurements that tuning continues from and adds to (default: the first model's name "
        "with .records, in the current folder)",
    )
    parser.add_argument(
        "--farm",
        default="",
        metavar="ray://HOST:PORT",
        help="measure on the machines of this farm (gtco farm), which are of this machine's kind",
    )
    parser.add_argument(
        "--kind",
        dest="farm_kind",
        default="",
        metavar="KIND",
        help="measure on the farm's machines of another kind, and compile for it (gtco farm check "
        "shows the kinds)",
    )
    parser.add_argument(
        "--space",
        action="store_true",
        help="show how many configs each stage has and how some of them fail; measure nothing",
    )
    return parser


def main(options: argparse.Namespace) -> int:
    if options.space:
        return show_spaces(options)
    if options.output and len(options.models) > 1:
        raise OptionError("--output is for one model; those of several take their models' names")
    if options.report and len(options.models) > 1:
        raise OptionError("--report is for one model; gtco report shows the libraries of several")
    if options.trials:
        budget = Tune(trials=options.trials, seconds=ENDLESS)
    else:
        budget = Tune(seconds=options.seconds, fusion=True)
    options.tune = replace(budget, latency=options.latency, policy=options.policy)
    options.policy = "analytic"  # what is written is measured beside the usual picks
    if options.weights:
        options.tune = replace(options.tune, weights=str(options.weights))
    options.records = options.records or here(options.models[0], ".records")
    try:
        return compile_models(options, options.models)
    except BaseException as error:
        if not isinstance(error, Exception) and options.records.exists():  # Ctrl-C, SIGTERM
            print(
                f"what was measured is kept in {options.records}; the same command goes on from it",
                file=sys.stderr,
            )
        raise


def show_spaces(options: argparse.Namespace) -> int:
    """Prints a table for each model."""
    from gtco.support.torchless import import_tvm

    import_tvm()
    from gtco.compiler import space_sizes

    chosen = arguments.compile_options(argparse.Namespace(tune="off", **vars(options)))
    chosen["records"] = None  # nothing here depends on them
    for model in options.models:
        with Phases() as progress:
            found = space_sizes(model, progress=progress, **chosen)
        show(tuning_tables.spaces(found))
        say(
            "configs are counted, those with ~ estimated from random walks down the decisions; "
            "rejections are of configs drawn at random and built"
        )
    return 0

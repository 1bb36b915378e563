"""The closed form of products, from readings to coefficients and figures (DyGen;
docs/papers/dygen.md).

``python -m bench closed_form build FOLDER [--kind KIND] [--count 60]``
``python -m bench closed_form build FOLDER --judge [--coefficients FILE ...]``
``python -m bench closed_form time FOLDER --out FILE.gz [--onednn] [--seconds 270]``
``python -m bench closed_form train --readings FILE.gz ... --out FILE.json``
``python -m bench closed_form evaluate FILE.gz ... [--json FILE]``
``python -m bench closed_form speed``

``build`` makes kernels of candidates, which may run beside other work; ``time`` measures them and
wants a quiet machine. Both go on where they stopped.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from gtco.cli.arguments import positive
from gtco.codegen.workers import Workers
from gtco.machine.target import cpu_name, cpu_target
from gtco.search.analytic import AnalyticPolicy
from gtco.search.calibration.profile import machine_table, table_json
from gtco.search.closed_form.coefficients import SHIPPED, load
from gtco.search.closed_form.policy import nearest
from gtco.search.closed_form.products import Product
from gtco.support.errors import OptionError, installing
from gtco.tuning.trial import REPEATS

from ..harness.readings import append
from ..harness.readings import load as readings_of
from ..harness.steps import run, say
from ..harness.suite import available_threads
from ..search.readings import line_of
from . import candidates, measuring, shapes

FLOPS, BYTES = 8e9, 1.2e9  # of a product that is timed, at most
LEAST_FLOPS = 2e6  # of one that is learned from
FEWEST = 3  # candidates that a product has room for
POOL = 100  # products, of which those of the right size are taken
HOUR = 3600


def main(argv: Sequence[str]) -> int:
    return run(_parser(), STEPS, argv)


def policy_here(threads: int) -> AnalyticPolicy:
    """The analytic policy of this machine. Raises :class:`OptionError` if it was not measured."""
    table = machine_table(cpu_target())
    if table.rates is None:
        raise OptionError(table.note)
    return AnalyticPolicy(replace(table.rates.target, cores=threads), table.rates)


# the steps ----------------------------------------------------------------------------------------
def building(options: argparse.Namespace) -> int:
    policy = policy_here(options.threads)

    def fitting(product: Product) -> int:
        return min(options.candidates, shapes.copies(product, BYTES) - REPEATS)

    if options.judge:
        products = shapes.held_out(options.kind, options.every, options.flops, BYTES)
        forms = {}
        for number, file in enumerate(options.coefficients or [SHIPPED]):
            trained, _ = nearest(load(file), policy.target)
            forms["closed form" if not number else file.stem] = trained.classes
        products = shapes.chosen(products, options.products)
        known = {p for p in products if measuring.file_of(options.folder, p).exists()}
        wanted = candidates.to_judge(products, policy, forms, fitting, known)
    else:
        every = shapes.training(options.kind, POOL + 4 * options.count, options.seed)
        products = [
            p
            for p in every
            if LEAST_FLOPS <= shapes.flops(p) <= options.flops and fitting(p) >= FEWEST
        ]
        products = shapes.chosen(products, options.products)[: options.count]
        products = [p for p in products if not measuring.file_of(options.folder, p).exists()]
        wanted = candidates.to_learn_from(products, policy, fitting)
    with Workers(options.workers) as workers:
        measuring.build(options.folder, wanted, workers, policy.target, say)
    return 0


def timing(options: argparse.Namespace) -> int:
    end = time.monotonic() + options.seconds
    table = machine_table(cpu_target())
    if table.rates is None:
        raise OptionError(table.note)
    if not options.out.exists():
        about = {"about": cpu_name(), "table": table_json(table.rates, cpu_target())}
        append(options.out, about)
    known = readings_of(options.out).seconds
    target = replace(table.rates.target, cores=options.threads)
    peer = measuring.onednn() if options.onednn else None
    done = 0
    try:
        for one in measuring.built(options.folder):
            name = shapes.name_of(one.product)
            if name in known:
                continue
            if time.monotonic() >= end:
                break
            read = measuring.read(one, target, peer)
            if read.timed.failed:
                say(f"{name} could not be timed: {read.timed.failed}")
                continue
            if read.others > options.quiet:
                say(f"{name}: other processes took {read.others:.0%} of the cores; left out")
                continue
            append(options.out, {"stage": name, **line_of(read.timed), **read.beside(one)})
            done += 1
    finally:
        if peer is not None:
            peer.kill()
    say(f"{done} products more in {options.out}")
    return 0


def training(options: argparse.Namespace) -> int:
    from .train import train

    try:
        return train(options, policy_here, say)
    except ModuleNotFoundError as error:
        if error.name != "xgboost":
            raise
        raise OptionError(f"training needs XGBoost: {installing('tune')}") from error


def evaluating(options: argparse.Namespace) -> int:
    from .evaluate import evaluate

    return evaluate(options.files, options.json, say)


def speed(options: argparse.Namespace) -> int:
    from .speed import report

    return report(policy_here(options.threads), options.coefficients, say)


STEPS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "build": building,
    "time": timing,
    "train": training,
    "evaluate": evaluating,
    "speed": speed,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench closed_form", description=str(__doc__).split("\n\n")[0]
    )
    steps = parser.add_subparsers(metavar="STEP", required=True, dest="step")
    step = steps.add_parser("build", help="kernels of candidates, to be timed")
    step.add_argument("folder", type=Path)
    step.add_argument("--kind", choices=shapes.KINDS, default=shapes.KINDS[0])
    step.add_argument("--count", type=positive, default=60, help="of training products")
    step.add_argument("--seed", type=int, default=0)
    step.add_argument("--judge", action="store_true", help="DeepBench's products instead")
    step.add_argument("--every", type=positive, default=2, help="so many-th of DeepBench's")
    step.add_argument("--flops", type=float, default=FLOPS, help="of a product; %(default)s")
    step.add_argument("--products", nargs="*", default=[], help="parts of their names")
    step.add_argument("--candidates", type=positive, default=14, help="of a product")
    step.add_argument("--coefficients", type=Path, nargs="*", default=[], metavar="FILE")
    step.add_argument("--workers", type=positive, default=1)
    step.add_argument("--threads", type=positive, default=available_threads())
    step = steps.add_parser("time", help="what was built")
    step.add_argument("folder", type=Path)
    step.add_argument("--out", type=Path, required=True, metavar="FILE.gz")
    step.add_argument("--onednn", action="store_true", help="and oneDNN beside it, through torch")
    step.add_argument("--seconds", type=positive, default=HOUR, help="no product begins later")
    step.add_argument(
        "--quiet",
        type=float,
        default=measuring.QUIET,
        help="share of the cores that other processes may take; %(default)s. What they took stands "
        "in the file",
    )
    step.add_argument("--threads", type=positive, default=available_threads())
    step = steps.add_parser("train", help="coefficients for this machine")
    step.add_argument("--readings", type=Path, nargs="*", default=[], metavar="FILE.gz")
    step.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    step.add_argument(
        "--by-price", type=Path, metavar="FILE.json", help="and those that prices alone give"
    )
    step.add_argument("--about", required=True, help="the machine in words, for the file")
    step.add_argument(
        "--count",
        type=positive,
        default=130,
        help="products of a class with weights, and half as many of others",
    )
    step.add_argument("--seed", type=int, default=0)
    step.add_argument("--threads", type=positive, default=available_threads())
    step = steps.add_parser("evaluate", help="the table of what was timed with --judge")
    step.add_argument("files", type=Path, nargs="+", metavar="FILE.gz")
    step.add_argument("--json", type=Path, metavar="FILE")
    step = steps.add_parser("speed", help="microseconds of a prediction, in Python and in C")
    step.add_argument("--coefficients", type=Path, default=SHIPPED, metavar="FILE")
    step.add_argument("--threads", type=positive, default=available_threads())
    return parser

"""``gtco compile MODEL.onnx -o MODEL.so``: a progress line a phase, then a summary."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gtco.cli import arguments
from gtco.cli.console import Phases, milliseconds, size, stdout, text
from gtco.errors import OptionError, VerificationError
from gtco.runtime.publish import weights_beside


def add(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "compile", help="an ONNX model to a shared library"
    )
    add_output(parser)
    arguments.add_compile_options(parser)
    arguments.add_tuning(parser)
    return parser


def add_output(parser: argparse.ArgumentParser) -> None:
    """The model, and what is made of it."""
    parser.add_argument("model", type=Path, metavar="MODEL.onnx")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE.so", help="default: the model's name with .so"
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare with ONNX Runtime on random and adversarial inputs",
    )
    parser.add_argument(
        "--dump", type=Path, metavar="DIR", help="write what each phase made, one file a phase"
    )


def main(options: argparse.Namespace) -> int:
    return compile_model(options)


def compile_model(options: argparse.Namespace) -> int:
    """Compile what :func:`add_output` was given; a summary on standard output."""
    from gtco.torchless import import_tvm

    import_tvm()
    from gtco.compiler import compile_to_file

    output = options.output or options.model.with_suffix(".so")
    if output.suffix != ".so":
        raise OptionError(f"--output {output}: the library's name must end in .so")
    try:
        with Phases() as progress:
            report = compile_to_file(
                options.model,
                output,
                verify=options.verify,
                dump=options.dump,
                **arguments.compile_options(options),
                progress=progress,
            )
    except VerificationError as error:
        if error.report is not None:
            show_verification(error.report, stdout())
        raise
    summary(output, report, stdout())
    return 0


def summary(output: Path, report: Any, console: Console) -> None:
    """Where the library is and what it took; the verification's errors; the notes."""
    table = Table(show_header=False, title=escape(str(output)), title_justify="left")
    files = [file for file in (output, *weights_beside(output)) if file.exists()]
    rows = {
        "size": " + ".join(size(file.stat().st_size) for file in files),
        "weights": size(report.weights_bytes),
        "stages": f"{len(report.stages)}",
        "predicted": f"{milliseconds(report.predicted_seconds)} ms",
        "compiled in": f"{sum(seconds for _, seconds in report.phases):.1f} s",
        "peak memory": size(report.peak_memory_bytes),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    if report.verification is not None:
        show_verification(report.verification, console)
    if changed := [stage for stage in report.tuning if stage["first"] != stage["last"]]:
        show_tuning(changed, console)
    for note in report.notes:
        console.print(f"note: {note}", markup=False)


def show_tuning(stages: list[dict[str, Any]], console: Console) -> None:
    """What tuning changed: the schedules before and after, and the seconds of each."""
    table = Table(title="changed by measuring", title_justify="left")
    table.add_column("stage", max_width=40)
    table.add_column("runs", justify="right")
    for title in ("before", "after"):
        table.add_column(f"{title}, us", justify="right")
        table.add_column(f"schedule {title}")
    for stage in stages:
        row = [escape(stage["stage"]), str(stage["occurrences"])]
        for seconds, config in (("first_seconds", "first"), ("seconds", "last")):
            row += [f"{stage[seconds] * 1e6:.1f}", escape(text(stage[config]))]
        table.add_row(*row)
    console.print(table)


def show_verification(report: Any, console: Console) -> None:
    """Maximum absolute and relative error of each output in each case, and what is wrong."""
    verdict = "agrees with" if report.passed else "DIFFERS FROM"
    console.print(
        f"{verdict} {report.reference} (tolerance {report.tolerance:g} of the magnitudes around)",
        highlight=False,
    )
    if report.top1 is not None:
        console.print(str(report.top1), highlight=False)
    table = Table()
    table.add_column("output")
    table.add_column("inputs")
    table.add_column("max absolute", justify="right")
    table.add_column("max relative", justify="right")
    table.add_column("verdict")
    for d in sorted(report.differences, key=lambda d: d.output):
        word = "wrong" if d.failure else "unstable" if d.unstable else "agrees"
        table.add_row(escape(d.output), d.case, f"{d.absolute:.2e}", f"{d.relative:.2e}", word)
    console.print(table)

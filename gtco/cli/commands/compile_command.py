"""``gtco compile MODEL.onnx -o MODEL.so``: prints a line for each phase, then a summary."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gtco.cli import arguments, tuning_tables
from gtco.cli.commands.quantize_command import show_quantization
from gtco.cli.commands.report_command import check_report, is_report, write_report
from gtco.cli.console import Phases, milliseconds, say, show, size, text
from gtco.cli.outputs import check_free, check_ours, libraries
from gtco.cli.tables import Table
from gtco.report.text import error_text
from gtco.runtime.publish import weights_beside
from gtco.support.errors import VerificationError
from gtco.support.options import check_apart
from gtco.support.sizes import EXPORT_OPEN

MOST_LOSSES = 10  # stages that are shown
MOST_TABLES = 3  # variants whose stages are shown; of more there is a line each
MOST_NAMED = 6  # variants whose stages and predicted times are named; of more some are


def add(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "compile", help="an ONNX model to a shared library"
    )
    add_output(parser)
    arguments.add_compile_options(parser)
    arguments.add_tuning(parser, default=None)
    arguments.add_cache(parser)
    return parser


def add_output(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the model and for the files that are made from it."""
    parser.add_argument(
        "model",
        type=Path,
        metavar="MODEL.onnx",
        help="an ONNX model, or a program that torch.export.save wrote (.pt2)",
    )
    add_made(parser)


def add_made(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the files that are made from models."""
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE.so",
        help="the library (default: the model's name with .so, in the current folder)",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="also overwrite the library of another model, or another file",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare with ONNX Runtime on random and adversarial inputs; float64 decides where "
        "they differ",
    )
    parser.add_argument(
        "--verify-layers",
        action="store_true",
        help="compare the output of every stage with the graph in float32, and show what each "
        "stage loses (for CPUs; with --report as a heat map)",
    )
    parser.add_argument(
        "--report",
        type=arguments.new_file,
        metavar="FILE.html",
        help="write a page about the library: its graph, times, memory, errors and tuning",
    )
    parser.add_argument(
        "--dump", type=Path, metavar="DIR", help="write the result of each phase to a file"
    )


def main(options: argparse.Namespace) -> int:
    if None in options.dim:
        return list_dimensions(options.model)
    if options.tune is None:  # only this machine can be measured
        options.tune = "quick" if options.target == "native" else "off"
    return compile_models(options, [options.model])


def list_dimensions(model: Path) -> int:
    """Prints the dimensions of the model's inputs that have no size, as --shape and --dim name
    them.
    """
    from gtco.support.torchless import import_tvm

    import_tvm()
    from gtco.driver.sizes.dimensions import open_dimensions

    found = open_dimensions(model)
    if not found:
        say(f"{model}: every input has a size on every axis; to leave one open, {EXPORT_OPEN}")
        return 0
    table = Table(str(model))
    table.column("dimension", least=12)
    table.column("where", least=20)
    for name, places in found.items():
        table.row(name, ", ".join(f"{tensor} axis {axis}" for tensor, axis in places))
    show(table)
    name = next(iter(found))
    say(
        f"give each a size (--shape {name}=1), a range of batches (--dim {name}=1..64) or a list "
        f"of sizes (--dim {name}=1,4,16)"
    )
    return 0


def compile_models(options: argparse.Namespace, models: Sequence[Path]) -> int:
    """Compiles ``models`` with the options of :func:`add_made`; prints summaries on standard
    output.
    """
    from gtco.codegen.processes import early
    from gtco.support.torchless import import_tvm, uninterrupted

    outputs = libraries(models, options.output)
    check_report(options.report)
    _check_apart(options, models, outputs)
    check_ours(options.report, options.force, is_report, "a report")
    try:
        with early(), Phases() as progress:
            with uninterrupted():
                import_tvm()
                from gtco.compiler import compile_to_files
            if not options.force:
                for model, output in zip(models, outputs, strict=True):
                    check_free(model, output)

            reports = compile_to_files(
                [(model, output, None) for model, output in zip(models, outputs, strict=True)],
                verify=options.verify,
                verify_layers=options.verify_layers,
                dump=options.dump,
                **arguments.compile_options(options),
                progress=progress,
            )
    except VerificationError as error:
        if error.report is not None:
            show_verification(error.report)
        raise
    for output, report in zip(outputs, reports, strict=True):
        summary(output, report)
    for output, report in zip(outputs, reports, strict=True):
        if report.quantization is not None:
            show_quantization(report.quantization, f"{output}, quantized")
    if reports[0].tuned is not None:
        for line in reports[0].tuned.outlook:
            say(line)
    if options.report:
        write_report(options.report, outputs[0], reports[0])
    return 0


def _check_apart(
    options: argparse.Namespace, models: Sequence[Path], outputs: Sequence[Path]
) -> None:
    """Raises :class:`OptionError` if one of the files that are written would replace another one of
    them, or one that is read.
    """
    headers = [output.with_suffix(".h") for output in outputs]
    check_apart(options.report, *outputs, *headers, what="the library or its header")
    for path in (options.report, *outputs):
        check_apart(path, *models)
        check_apart(path, options.records, what="the file of records")
        check_apart(path, options.data, what="the data itself")


def summary(output: Path, report: Any) -> None:
    """Prints where the library is, what compiling took, the errors that the verification found, and
    the notes.
    """
    table = Table(str(output))
    table.column("")
    table.column("", least=30)
    files = [file for file in (output, *weights_beside(output)) if file.exists()]
    how = "as one persistent kernel, " if report.launches == "persistent" else ""
    predicted = f"{milliseconds(report.predicted_seconds)} ms, {how}by the model of the machine"
    if variants := report.variants:
        counts = [len(one.stages) for one in variants.values()]
        named = sorted(variants.items(), key=lambda one: one[1].predicted_seconds)
        stages, more = ", ".join(map(str, counts)), ""
        if len(counts) > MOST_NAMED:
            stages = f"{min(counts)} to {max(counts)}" if len({*counts}) > 1 else f"{counts[0]}"
            stages, more = f"{stages} of each", f" (and {len(named) - MOST_NAMED} more)"
            last = len(named) - 1
            named = [named[round(n * last / (MOST_NAMED - 1))] for n in range(MOST_NAMED)]
        else:
            named = [*variants.items()]
        predicted = "; ".join(
            f"{name}: {milliseconds(one.predicted_seconds)} ms" for name, one in named
        )
        predicted += more
    rows = {
        "size": " + ".join(size(file.stat().st_size) for file in files),
        "weights": size(report.weights_bytes),
        **({"variants": f"{len(variants)}"} if variants else {}),
        "stages": stages if variants else f"{len(report.stages)}",
        "predicted": predicted,
        **({"from the cache": f"made {report.cached}"} if report.cached else {}),
        "compiled in": f"{sum(seconds for _, seconds in report.phases):.1f} s",
        "peak memory": size(report.peak_memory_bytes),
    }
    if report.tuned is not None:
        rows["measured"] = f"{report.tuned.elapsed:.1f} s of it: {report.tuned}"
    for name, one in variants.items() if variants else [("", report)]:
        if one.fusion:
            rows[f"partition {name}".rstrip()] = one.fusion
        if one.settled is not None:
            rows[f"in the model {name}".rstrip()] = str(one.settled)
    for name, value in rows.items():
        table.row(name, value)
    show(table)
    for name, one in variants.items() if variants else [("", report)]:
        if one.verification is None:
            continue
        if len(variants) > MOST_NAMED and one.verification.passed:
            say(f"{name}: {str(one.verification).splitlines()[0]}")
            continue
        if name:
            say(f"{name}:")
        show_verification(one.verification)
    for name, one in variants.items() if variants else [("", report)]:
        if one.losses is None:
            continue
        if len(variants) > MOST_TABLES:
            say(f"{name}: {one.losses}")
        else:
            show_losses(one.losses, one.stages, name)
    if changed := [stage for stage in report.tuning if stage["first"] != stage["last"]]:
        show(tuning_tables.changed(changed))
    for note in report.notes:
        say(f"note: {note}")


def show_losses(losses: Any, stages: Sequence[Any], variant: str = "") -> None:
    """Prints the stages that lose most by themselves. ``variant``: the sizes of the library's
    variant, if it has several.
    """
    worst = sorted(losses.stages, key=lambda s: -(s.own or 0.0))[:MOST_LOSSES]
    whose = f"{variant}: " if variant else ""
    table = Table(f"{whose}what stages lose, of {losses.reference}; the most by itself first")
    table.column("stage", right=True)
    table.column("", least=12)
    table.column("operators", least=16)
    table.column("by itself", right=True)
    table.column("with all before it", right=True)
    for loss in worst:
        stage = stages[loss.stage]
        own, accumulated = error_text(loss.own), error_text(loss.accumulated)
        operators = text(stage["operators"], "+")
        table.row(str(loss.stage), stage["name"], operators, own, accumulated)
    show(table)
    for why in losses.left_out:
        say(why)


def show_verification(report: Any) -> None:
    """Prints the maximum absolute and relative error of each output in each case, and what is
    wrong.
    """
    verdict = "agrees with" if report.passed else "DIFFERS FROM"
    say(f"{verdict} {report.reference} (tolerance {report.tolerance:g} of the magnitudes around)")
    if report.top1 is not None:
        say(str(report.top1))
    table = Table()
    table.column("output", least=12)
    table.column("inputs", least=8)
    table.column("max absolute", right=True)
    table.column("max relative", right=True)
    table.column("verdict")
    for d in sorted(report.differences, key=lambda d: d.output):
        table.row(d.output, d.case, f"{d.absolute:.2e}", f"{d.relative:.2e}", d.verdict)
    show(table)
    for line in report.decided:
        say(line)

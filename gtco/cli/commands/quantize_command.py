"""``gtco quantize MODEL.onnx --data images.npz -o MODEL.int8.onnx``: a quantized ONNX file, and
what it loses. With ``--weights-only`` and no data, one whose weights alone are quantized.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gtco.cli import arguments
from gtco.cli.console import Phases, say, show, size
from gtco.cli.outputs import add_force, check_ours, here
from gtco.cli.tables import Table
from gtco.runtime.publish import staging
from gtco.support.counting import counted
from gtco.support.errors import OptionError
from gtco.support.options import check_apart, check_place

PRODUCED = b"\x12\x04gtco"  # a ModelProto's producer_name
SHOWN = 12  # layers of the table, those that lose most


def add(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "quantize", help="a float32 model to an int8 ONNX file, by samples"
    )
    parser.add_argument(
        "model",
        type=Path,
        metavar="MODEL.onnx",
        help="an ONNX model in float32, or a program that torch.export.save wrote (.pt2)",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE.onnx",
        help="the quantized model (default: the model's name with .int8.onnx, in the current "
        "folder)",
    )
    add_force(parser)
    parser.add_argument(
        "--report",
        type=arguments.new_file,
        metavar="FILE.json",
        help="also write the verdict, every layer and every range as JSON",
    )
    parser.add_argument(
        "--weights-only",
        action="store_true",
        help="quantize the weights alone: a smaller model that computes in float32; needs no "
        "--data",
    )
    parser.add_argument(
        "--bits",
        type=int,
        choices=(8, 4),
        help="with --weights-only: the bits of a weight; those of convolutions always have 8 "
        "(default 8)",
    )
    parser.add_argument(
        "--block-size",
        type=int,
        choices=(16, 32, 64, 128, 256),
        help="with --weights-only: how many weights of a matrix along k share a scale (default: "
        "all of an output channel with --bits 8, 32 with --bits 4)",
    )
    arguments.add_quantization(parser, alone=True)
    parser.add_argument(
        "--all", action="store_true", help=f"show every layer, not only the {SHOWN} that lose most"
    )
    return parser


def main(options: argparse.Namespace) -> int:
    from gtco.codegen.processes import early
    from gtco.support.torchless import import_tvm, uninterrupted

    output = options.output or here(options.model, ".int8.onnx")
    check_output(options.model, output)
    check_ours(output, options.force, lambda first: PRODUCED in first[:32], "a quantized model")
    if options.weights_only:
        return weights_only(options, output)
    if options.bits or options.block_size:
        raise OptionError("--bits and --block-size are of --weights-only")
    if options.data is None:
        raise OptionError(
            "quantizing activations needs samples: give --data images.npz, or --weights-only"
        )
    check_apart(options.report, options.model)
    check_apart(options.report, options.data, what="the data itself")
    check_apart(options.report, output, what="the quantized model")
    check_ours(options.report, options.force, _is_report, "a report")
    with early(), Phases() as progress:
        with uninterrupted():
            import_tvm()
            from gtco.compiler import quantize
        made = quantize(options.model, progress=progress, **arguments.quantization(options))
    made.save(output)
    if options.report:
        made.report.save(options.report)
    show_quantization(made.report, f"{output} ({size(output.stat().st_size)})", options.all)
    for note in made.report.notes:
        say(f"note: {note}")
    say(f"gtco compile {output} compiles it")
    return 0


def _is_report(first: bytes) -> bool:
    return first.startswith(b'{\n "version": ') and b'\n "gtco": ' in first


def weights_only(options: argparse.Namespace, output: Path) -> int:
    """The command with ``--weights-only``."""
    given = arguments.quantization(options)
    names = [f"--{name.replace('_', '-')}" for name in given if name != "exclude"]
    if names or options.report or options.all:
        names += ["--report"] * bool(options.report) + ["--all"] * options.all
        raise OptionError(
            f"--weights-only quantizes no activations and measures nothing: leave out "
            f"{', '.join(names)}"
        )
    from gtco.support.torchless import import_tvm, uninterrupted

    with uninterrupted():
        import_tvm()
        from gtco.compiler import quantize_weights
    bits = options.bits or 8
    made = quantize_weights(
        options.model, exclude=options.exclude, bits=bits, block_size=options.block_size
    )
    made.save(output)
    wide = sum(product.kind == "Conv" for product in made.quantized) if bits == 4 else 0
    beside = f", and of {counted(wide, 'convolution')} in int8" if wide else ""
    say(
        f"{output} ({size(output.stat().st_size)}): the weights of {len(made.quantized) - wide} of "
        f"{counted(len(made.products), 'product')} in int{bits}{beside}"
    )
    say(f"gtco compile {output} compiles it")
    return 0


def check_output(model: Path, output: Path) -> None:
    """Raises :class:`OptionError` for a place that the quantized model cannot have, and
    :class:`BuildError` for one that cannot be written.
    """
    if output.suffix != ".onnx":
        raise OptionError(f"--output {output}: the quantized model's name must end in .onnx")
    check_apart(output, model)
    check_place(output)
    with staging(output):  # raises where no file can be made
        pass
    if model.suffix == ".onnx" and output.with_name(f"{output.name}.data").exists():
        from gtco.frontend.onnx import read_onnx
        from gtco.quantization.writing import check_data_place

        check_data_place(output, read_onnx(model))


def show_quantization(report: Any, title: str, every: bool = False) -> None:
    """Prints the verdict on each output, and what the layers lose alone."""
    smooth = f", smoothed by {report.smooth:g}" if report.smooth else ""
    say(
        f"{title}: {len(report.quantized)} of {len(report.layers)} products in int8, "
        f"{100 * report.share:.1f} % of their operations; ranges by {report.observer}{smooth}"
    )
    say(f"compared with the float model, on {report.held_out} held-out samples:")
    show(outputs_table(report.outputs))
    say("the error of the outputs if one product alone is quantized:")
    layers = sorted(report.layers, key=lambda layer: -(layer.sensitivity or 0.0))
    shown = layers if every else layers[:SHOWN]
    shown = [layer for layer in report.layers if layer in shown or layer.float_because]
    table = Table()
    table.column("product", least=16, shorten=True)
    table.column("kind", rank=1)
    table.column("Mops", right=True)
    table.column("alone", right=True)
    table.column("precision")
    for layer in sorted(shown, key=lambda layer: -(layer.sensitivity or 0.0)):
        alone = "-" if layer.sensitivity is None else f"{100 * layer.sensitivity:.2f} %"
        kept = f"float32: {layer.float_because}" if layer.float_because else "int8"
        table.row(layer.label, layer.kind, f"{layer.operations / 1e6:.1f}", alone, kept)
    show(table)
    if left := len(report.layers) - len(shown):
        say(f"{left} more products lose less (gtco quantize --all shows them)")
    if len(report.tried) > 1:
        show_tried(report)


def outputs_table(outputs: Sequence[Any]) -> Table:
    """The verdict on each output. What no output is judged by has no column."""
    table = Table()
    table.column("output", least=8)
    table.column("relative error", right=True)
    table.column("cosine", right=True)
    table.column("same first class", right=True)
    maps = any(output.maps for output in outputs)
    boxes = any(output.boxes for output in outputs)
    if maps:
        table.column("mean IoU", right=True)
    if boxes:
        table.column("box shift", right=True)
        table.column("box IoU", right=True)
        table.column("same class", right=True)
    for output in outputs:
        cells = [
            output.name,
            f"{100 * output.error:.2f} %",
            "-" if output.cosine is None else f"{output.cosine:.6f}",
            "-" if output.top1 is None else f"{100 * output.top1:.1f} % of {output.rows}",
        ]
        if maps:
            m = output.maps
            cells.append(f"{100 * m.mean_iou:.1f} % of {m.classes} classes" if m else "-")
        if boxes:
            b = output.boxes
            none = b is None or not b.queries
            cells.append("-" if none else f"{100 * b.shift:.2f} %")
            cells.append("-" if none else f"{100 * b.mean_iou:.1f} %")
            cells.append("-" if none else f"{100 * b.same_class:.1f} % of {b.queries}")
        table.row(*cells)
    return table


def show_tried(report: Any) -> None:
    """Prints the error of each observer, by strength of smoothing."""
    say(f"all of them in int8, on the {report.samples} samples that chose:")
    table = Table()
    observers = list(dict.fromkeys(one.observer for one in report.tried))
    table.column("smoothed by")
    for name in observers:
        table.column(name, right=True)
    for strength in dict.fromkeys(one.smooth for one in report.tried):
        errors = {one.observer: one.error for one in report.tried if one.smooth == strength}
        cells = [f"{100 * errors[name]:.2f} %" for name in observers]
        table.row(f"{strength:g}" if strength else "-", *cells)
    show(table)

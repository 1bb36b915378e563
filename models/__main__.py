"""``python -m models list`` and ``python -m models export NAME -o FILE.onnx``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from gtco.support.errors import GtcoError, OptionError
from gtco.support.pipes import until_closed

from . import MODELS, create, example_inputs, export_onnx, find
from .export import EXPORTERS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 on success, 1 with a message on stderr when the user can fix it."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "list":
            _list()
        else:
            _export(options)
    except BrokenPipeError:
        raise
    except (GtcoError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _list() -> None:
    row = "{:<18} {:<16} {:>9} {:>9}  {}"
    print(row.format("name", "input", "params M", "Table I M", "source"))
    for spec in MODELS.values():
        with torch.device("meta"):
            model = spec.constructor()
        params = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        table = "" if spec.params_millions is None else f"{spec.params_millions:.2f}"
        shape = "x".join(str(extent) for extent in spec.input_shape)
        print(row.format(spec.name, shape, f"{params:.2f}", table, spec.source))


def _export(options: argparse.Namespace) -> None:
    if options.batch < 1:
        raise OptionError(f"--batch {options.batch}: give a batch of 1 or more")
    size = tuple(options.image_size) if options.image_size else None
    if size and min(size) < 1:
        raise OptionError(f"--image-size {size[0]} {size[1]}: give a positive height and width")
    model = create(options.name, options.seed, options.checkpoint, size)
    open_axes = _open_axes(options.name, options.open)
    # a batch of 1 is not left open by torch
    batch = max(2, options.batch) if 0 in open_axes else options.batch
    inputs = example_inputs(options.name, batch, size)
    path = export_onnx(
        model,
        inputs,
        options.output,
        opset=options.opset,
        exporter=options.exporter,
        simplify=options.simplify,
        open_axes=open_axes,
    )
    shape = "x".join(open_axes.get(at, str(extent)) for at, extent in enumerate(inputs[0].shape))
    print(f"{path}: {options.name}, input image {shape}, opset {options.opset}, {options.exporter}")


def _open_axes(name: str, wanted: str) -> dict[int, str]:
    """The axes that ``--open`` names."""
    known = {axis_name: axis for axis, axis_name in find(name).open.items()}
    names = [part for part in wanted.split(",") if part]
    if unknown := [part for part in names if part not in known]:
        raise OptionError(
            f"--open {unknown[0]}: the sizes of {name} that can stay open are {', '.join(known)}"
        )
    return {known[part]: part for part in names}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the models, their inputs and parameter counts")
    export = commands.add_parser("export", help="write a model as ONNX")
    export.add_argument("name", metavar="NAME", help="a name from the list")
    export.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.onnx")
    export.add_argument("--batch", type=int, default=1, metavar="N")
    export.add_argument(
        "--open", default="", metavar="NAMES", help="sizes to leave open, such as batch,width"
    )
    export.add_argument("--image-size", type=int, nargs=2, metavar=("H", "W"))
    export.add_argument("--opset", type=int, default=20)
    export.add_argument("--exporter", choices=EXPORTERS, default="dynamo")
    export.add_argument("--seed", type=int, default=0, help="of the weights, without --checkpoint")
    export.add_argument("--checkpoint", type=Path, metavar="FILE", help=".pt, .pth or .safetensors")
    export.add_argument("--simplify", action="store_true", help="run onnxsim on the result")
    return parser


if __name__ == "__main__":
    sys.exit(until_closed(main))

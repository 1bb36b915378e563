"""``gtco run MODEL.so``: runs a compiled model on files or seeded random inputs, and times it."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from gtco.cli import arguments
from gtco.cli.console import say, show
from gtco.cli.tables import Table
from gtco.support.counting import counted
from gtco.support.dtypes import numpy_dtype
from gtco.support.errors import BuildError, InputError, OptionError
from gtco.support.sizes import flags

NPY, ZIP = b"\x93NUMPY", b"PK\x03\x04"  # the first bytes of an .npy and an .npz file


def add(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser("run", help="run a compiled model")
    parser.add_argument("library", type=Path, metavar="MODEL.so")
    parser.add_argument(
        "--input",
        type=arguments.input_file,
        action="append",
        default=[],
        metavar="NAME=FILE.npy",
        help="an input's value; may be repeated; those not given are random",
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="save every output as DIR/NAME.npy"
    )
    parser.add_argument(
        "--repeat",
        type=arguments.positive,
        metavar="N",
        help="time N calls: median, least, 90th percentile",
    )
    arguments.add_dim(parser)
    add_threads(parser)
    parser.add_argument(
        "--device",
        type=arguments.zero_or_more,
        metavar="N",
        help="the number of the GPU, for a model for GPUs (default: the first)",
    )
    parser.add_argument(
        "--seed", type=arguments.zero_or_more, default=0, help="of the random inputs (default 0)"
    )
    return parser


def add_threads(parser: argparse.ArgumentParser) -> None:
    """Adds the number of threads that a library is opened with."""
    parser.add_argument(
        "--threads",
        type=arguments.threads,
        default=0,
        metavar="N",
        help="for a model for CPUs (default 0: as it was compiled)",
    )


def main(options: argparse.Namespace) -> int:
    from gtco.runtime.module import load
    from gtco.runtime.tensors import random_inputs

    files = arguments.unique(options.input, "--input")
    if options.output and options.output.exists() and not options.output.is_dir():
        raise OptionError(f"--output {options.output} is a file: give a folder")
    dims = arguments.one_size_each(options.dim)
    model = load(options.library, threads=options.threads, device=options.device, dims=dims)
    given = read_inputs(model, files)
    specs = specs_for(model, given) if model.dims else model.inputs
    inputs = {**random_inputs(specs, options.seed), **given}
    outputs = model.run(inputs)
    table = Table(str(options.library))
    table.column("output", least=12)
    table.column("dtype")
    table.column("shape")
    for heading in ("min", "mean", "max"):
        table.column(heading, right=True)
    for name, value in outputs.items():
        table.row(name, str(value.dtype), "x".join(map(str, value.shape)), *statistics(value))
    show(table)
    if options.output:
        save(outputs, options.output)
        say(f"saved {counted(len(outputs), 'output')} in {options.output}")
    if options.repeat:
        seconds = time_calls(lambda: model.run(inputs), options.repeat)
        median, least, p90 = np.median(seconds), np.min(seconds), np.percentile(seconds, 90)
        say(
            f"{options.repeat} calls: median {median * 1e3:.3f} ms, least {least * 1e3:.3f} ms, "
            f"90th percentile {p90 * 1e3:.3f} ms"
        )
    return 0


def read_inputs(model: Any, files: Mapping[str, Path]) -> dict[str, np.ndarray]:
    """The files' arrays, by the input's name. Raises :class:`InputError`."""
    names = [spec.name for spec in model.inputs]
    unknown = [name for name in files if name not in names]
    if unknown:
        raise InputError(f"the model has no input {', '.join(unknown)}; it has: {', '.join(names)}")
    kinds = {spec.name: numpy_dtype(spec.dtype) for spec in model.inputs}
    return {name: _as(read(file), kinds[name]) for name, file in files.items()}


def _as(array: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """numpy writes a bfloat16, which it does not know, as two bytes without a type."""
    unknown = array.dtype.kind == dtype.kind == "V" and array.dtype.itemsize == dtype.itemsize
    return array.view(dtype) if unknown else array


def specs_for(model: Any, given: Mapping[str, np.ndarray]) -> Any:
    """The inputs of the model's shapes that these arrays fit. If none fits, those of any: the run
    then says what is wrong. Raises :class:`OptionError` if several fit.
    """
    shapes = {name: value.shape for name, value in given.items()}
    every = [one.inputs for one in model.variants]
    if symbol := model.parted:
        found = [
            size
            for spec in model.inputs
            for size, name in zip(shapes.get(spec.name, ()), spec.shape, strict=False)
            if name == symbol
        ]
        sizes = model.dims[symbol]
        if not found:
            raise OptionError(
                f"the model runs {symbol} of {sizes}: choose its size: {flags(model.dims)}"
            )
        every = model.sized_inputs(found[0] if found[0] in sizes else sizes.low)
    fitting = [
        specs
        for specs in every
        if all(shapes.get(spec.name, spec.shape) == spec.shape for spec in specs)
    ]
    if len(fitting) > 1:
        raise OptionError(
            f"the model was compiled for {len(every)} shapes, and the given inputs fit "
            f"{len(fitting)} of them: choose the size of each dimension: {flags(model.dims)}"
        )
    return (fitting or every)[0]


def read(file: Path) -> np.ndarray:
    try:
        with file.open("rb") as opened:
            source = opened if opened.seekable() else BytesIO(opened.read())  # a pipe
            known = source.read(len(NPY)).startswith((NPY, ZIP))
            source.seek(0)
            value = np.load(source, allow_pickle=False) if known else None
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror or error}") from None
    except MemoryError:
        raise InputError(f"cannot read {file}: its array is larger than memory") from None
    except Exception as error:  # numpy raises whatever its parsers do
        raise InputError(
            f"cannot read {file}, which is damaged or holds objects ({error}); give a file of "
            "numbers that numpy.save wrote"
        ) from None
    if value is None:
        raise InputError(
            f"cannot read {file}: it is not an .npy file; give one that numpy.save wrote"
        )
    if not isinstance(value, np.ndarray):
        raise InputError(f"{file} holds several arrays (.npz); give one .npy file an input")
    return value


def save(outputs: Mapping[str, np.ndarray], folder: Path) -> None:
    """Writes one .npy file for each output, all of them or none; characters that a file name cannot
    have become underscores. Where two would have one name, the number of the output follows.
    """
    from gtco.runtime.publish import staging

    taken: set[str] = set()
    try:
        with staging(folder / "outputs") as made:
            for number, (name, value) in enumerate(outputs.items()):
                file = re.sub(r"[^\w.-]", "_", name)
                if file in taken or (file != name and file in outputs):
                    file = f"{file}.{number}"
                taken.add(file)
                np.save(made / f"{file}.npy", value)
            for path in made.iterdir():
                path.replace(folder / path.name)
    except OSError as error:
        raise BuildError(f"cannot save outputs in {folder}: {error.strerror or error}") from None


def statistics(value: np.ndarray) -> tuple[str, str, str]:
    """Least, mean and largest element as text."""
    if value.size == 0:
        return "-", "-", "-"
    wide = value.astype(np.float64)
    return f"{wide.min():.5g}", f"{wide.mean():.5g}", f"{wide.max():.5g}"


def time_calls(call: Any, repeat: int) -> list[float]:
    """Seconds of ``repeat`` calls, after one call that does not count."""
    call()
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds

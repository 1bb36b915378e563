"""Types of command-line arguments. Each converts a text into a value, or says what the text should
have been.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from math import inf
from pathlib import Path
from typing import Any, TypeVar

from gtco.support.errors import OptionError
from gtco.support.options import (
    ALL_PRECISIONS,
    EFFORTS,
    LAUNCHES,
    MOST_THREADS,
    OBSERVERS,
    POLICIES,
    check_place,
    whole_number,
)
from gtco.support.sizes import Range, names_of, sizes_in

T = TypeVar("T")
_LIKE_A_RANGE = re.compile(r"\d+(\.\.\.?|:|-)\d.*")  # 1-64, 1:64; 1..64 is one


def shape(text: str) -> tuple[str, int | tuple[int, ...]]:
    """``batch=4`` as ("batch", 4), ``image=1x3x96x96`` as ("image", (1, 3, 96, 96))."""
    name, _, value = text.rpartition("=")
    sizes = value.replace(",", "x").split("x")
    if not name or not all(size.isdecimal() and int(size) >= 1 for size in sizes):
        raise argparse.ArgumentTypeError(
            f"'{text}' is not NAME=SIZE with a size of 1 or more, such as batch=1, and no input's "
            "whole shape, such as image=1x3x224x224"
        )
    return name, int(value) if value.isdecimal() else tuple(map(int, sizes))


def dim(text: str) -> tuple[str, list[int] | Range]:
    """``batch=1,4,16`` as ("batch", [1, 4, 16]), ``batch=1..64`` as ("batch", Range(1, 64))."""
    name, _, value = text.rpartition("=")
    try:
        if name and (found := Range.parse(value)):
            return name, found
    except OptionError as error:
        raise argparse.ArgumentTypeError(f"'{text}': {error}") from None
    if name and _LIKE_A_RANGE.fullmatch(value):
        raise argparse.ArgumentTypeError(
            f"'{text}': a range is NAME=LOW..HIGH or NAME=LOW..HIGH:STEP, such as {name}=1..64, "
            f"and sizes that matter most come behind an @, such as {name}=1..64@1,8"
        )
    sizes = sizes_in(value)
    if not name or sizes is None:
        raise argparse.ArgumentTypeError(
            f"'{text}' is not NAME=SIZE,SIZE,... with sizes of 1 or more, such as batch=1,4,16, "
            "and no range NAME=LOW..HIGH, such as batch=1..64"
        )
    return name, sizes


def input_file(text: str) -> tuple[str, Path]:
    """``x=x.npy`` as ("x", Path("x.npy"))."""
    name, _, file = text.partition("=")
    if not name or not file:
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=FILE.npy, such as x=image.npy")
    return name, Path(file)


def new_file(text: str) -> Path:
    """The path of a file that can be written. It is checked at the start, so that a long run does
    not fail at its end.
    """
    path = Path(text)
    try:
        check_place(path)
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path


def positive(text: str) -> int:
    return _integer(text, 1)


def two_or_more(text: str) -> int:
    return _integer(text, 2)


def zero_or_more(text: str) -> int:
    return _integer(text, 0)


def threads(text: str) -> int:
    return _integer(text, 0, MOST_THREADS)


def minutes(text: str) -> float:
    """A time in minutes above 0, converted to seconds."""
    return _time(text, 60.0, "minutes", 30)


def milliseconds(text: str) -> float:
    """A time in milliseconds above 0, converted to seconds."""
    return _time(text, 1e-3, "milliseconds", 12.5)


def percent(text: str) -> float:
    """A percentage above 0."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not a percentage above 0, such as 5")
    return found


def strength(text: str) -> str | float:
    """The strength of smoothing: off, auto, or a number between 0 and 1."""
    if text in ("off", "auto"):
        return text
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < 1:
        raise argparse.ArgumentTypeError(
            f"'{text}' is not a strength of smoothing: give a number between 0 and 1, auto or off"
        )
    return found


def _time(text: str, unit: float, name: str, example: float) -> float:
    try:
        seconds = unit * float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < inf:
        raise argparse.ArgumentTypeError(
            f"'{text}' is not a number of {name} above 0, such as {example:g}"
        )
    return seconds


def _integer(text: str, least: int, most: int | None = None) -> int:
    if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
        raise argparse.ArgumentTypeError(f"'{text}' is not {whole_number(least, most)}")
    return int(text)


def unique(pairs: Iterable[tuple[str, T]], option: str) -> dict[str, T]:
    """Repeated ``--option name=value`` as a dictionary; a name given twice is wrong usage."""
    found: dict[str, T] = {}
    for name, value in pairs:
        if name in found:
            raise SystemExit(_usage(f"{option} {name} is given twice"))
        found[name] = value
    return found


def _usage(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def add_shape(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape",
        type=shape,
        action="append",
        default=[],
        metavar="NAME=SIZE",
        help="the size of a symbolic dimension (batch=1, or by input and axis x.0=1), or an "
        "input's whole shape (x=1x3x224x224); may be repeated",
    )


def add_dim(parser: argparse.ArgumentParser) -> None:
    """Adds ``--dim`` for a command that opens one variant of a library."""
    parser.add_argument(
        "--dim",
        type=dim,
        action="append",
        default=[],
        metavar="NAME=SIZE",
        help="of a library of several shapes or a range: the size of a dimension (batch=4, or "
        "x.0=4); may be repeated",
    )


def one_size_each(dims: Iterable[tuple[str, list[int] | Range]]) -> dict[str, int]:
    """The sizes of ``--dim`` of such a command, by name."""
    found: dict[str, int] = {}
    for name, sizes in unique(dims, "--dim").items():
        first, *others = sizes
        if others:
            said = str(sizes) if isinstance(sizes, Range) else ",".join(map(str, sizes))
            raise OptionError(
                f"--dim {name}={said}: this command takes one size of each dimension, such as "
                f"{name}={first}"
            )
        found |= dict.fromkeys(names_of(name), first)
    return found


def add_compile_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that ``compile`` and ``inspect`` of an .onnx file share."""
    parser.add_argument(
        "--target",
        default="native",
        metavar="NAME",
        help="native (default), x86-64-v3, x86-64-v4, znver4, ..., aarch64, cortex-a76, "
        "neoverse-v1, ...; for GPUs cuda:sm_80, "
        "cuda:sm_80,sm_90a, cuda:h100, ...",
    )
    parser.add_argument(
        "--precision",
        choices=ALL_PRECISIONS,
        default="fp32",
        help="the format of the operands of products, convolutions and attention: bf16, on GPUs "
        "also fp16, on CPUs also int8, which quantizes the model by the samples of --data; sums "
        "and everything else stay fp32 (default fp32)",
    )
    parser.add_argument(
        "--launches",
        choices=LAUNCHES,
        default="graph",
        help="for GPUs: a CUDA graph with one kernel for each stage (default), one persistent "
        "kernel for the whole model, or whichever is predicted to be faster",
    )
    parser.add_argument(
        "--no-ptx",
        dest="ptx",
        action="store_false",
        help="for GPUs: leave out the code that GPUs newer than the target run (0.5 MB for "
        "ViT-Ti, 1.5 for Swin-T)",
    )
    parser.add_argument(
        "--policy",
        choices=POLICIES,
        default="analytic",
        help="who picks kernels, and proposes those that gtco tune measures: the prices of a model "
        "of the machine, a language model that was trained on measurements, or polynomials that "
        "give the config of a product in constant time (default analytic)",
    )
    parser.add_argument(
        "--threads",
        type=threads,
        default=0,
        metavar="N",
        help="for CPUs: threads at run time (default 0: every core that the process may use)",
    )
    parser.add_argument(
        "--no-fast-algorithms",
        dest="fast_algorithms",
        action="store_false",
        help="for CPUs: leave out the kernels that multiply less than the definition does "
        "(Winograd's, Strassen's): less memory for weights, and a plain sum's rounding",
    )
    add_shape(parser)
    parser.add_argument(
        "--dim",
        type=dim,
        nargs="?",
        action="append",
        default=[],
        metavar="NAME=SIZES",
        help="sizes of a symbolic dimension, named as in --shape: a range (batch=1..64, "
        "width=32..320:32 with a step, batch=1..64@1,8 with the sizes that matter most), or a list "
        "(batch=1,4,16). A run takes the sizes that its inputs have. Batches of a range run as "
        "sums of a few; of a range of another dimension, as of a list, each size is compiled, 4096 "
        "at most. May be repeated, for every combination. --dim alone, with compile, lists the "
        "dimensions of the model",
    )
    parser.add_argument(
        "--no-simplify",
        dest="simplify",
        action="store_false",
        help="compile the graph as it is, without onnxsim",
    )
    parser.add_argument(
        "--simplify-timeout",
        type=positive,
        default=120,
        metavar="SECONDS",
        help="how long onnxsim may take; after that the graph is compiled as it is (default 120)",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="a failure inside gtco is an error; without it, a note says why the library is slower",
    )
    parser.add_argument(
        "--workers",
        type=positive,
        metavar="N",
        help="processes that build kernels (default: one for each core)",
    )
    add_quantization(parser)


def add_quantization(parser: argparse.ArgumentParser, alone: bool = False) -> None:
    """Adds the options of ``gtco quantize`` that a compile has too, with ``--precision int8``;
    ``alone``: for a command that does nothing else.
    """
    of_int8 = "" if alone else "with --precision int8: "
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE.npz",
        help=f"{of_int8}32 to 256 samples of what the model will see: a .npz with an array by "
        "input, a .npy for a model of one input, or a folder of these; the first axis counts "
        "samples",
    )
    parser.add_argument(
        "--max-drop",
        type=percent,
        metavar="PERCENT",
        help=f"{of_int8}how far the outputs may be from the float model's on the samples held out, "
        "as root mean squares; the most sensitive products stay in float until it holds (default: "
        "no limit)",
    )
    parser.add_argument(
        "--exclude",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help=f"{of_int8}products that stay in float, by the name of the node, its output or its "
        "weights, by a part of it (head, blocks.0) or by a pattern (blocks.*.fc1)",
    )
    parser.add_argument(
        "--observer",
        choices=OBSERVERS,
        default="auto",
        help=f"{of_int8}how ranges of activations are found; auto takes the one with the least "
        "error on the samples (default auto)",
    )
    parser.add_argument(
        "--smooth",
        type=strength,
        default="off",
        metavar="STRENGTH",
        help=f"{of_int8}move the size of activations into the weights (SmoothQuant): a number "
        "between 0 and 1 such as 0.5, auto, which tries some, or off (default off)",
    )


def quantization(options: argparse.Namespace) -> dict[str, Any]:
    """The values of :func:`add_quantization` that are given, as fields of ``CompileOptions``."""
    defaults = argparse.ArgumentParser()
    add_quantization(defaults)
    return {
        name: getattr(options, name)
        for name, default in vars(defaults.parse_args([])).items()
        if getattr(options, name) != default
    }


def add_cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-cache",
        dest="cache",
        action="store_false",
        help="compile even if the cache has the library of the same compile, and do not keep it",
    )


def add_tuning(parser: argparse.ArgumentParser, default: str | None = "off") -> None:
    """Adds the options for how much is measured and where the results are kept. With ``default``
    None, ``--tune`` is quick if the target is this machine.
    """
    said = "off: nothing is measured" if default else "quick for the native target, else off"
    parser.add_argument(
        "--tune",
        choices=("off", *EFFORTS),
        default=default,
        help="time candidates of the heaviest stages on this machine: quick takes 10 seconds, full "
        f"minutes (default {said})",
    )
    parser.add_argument(
        "--records",
        type=Path,
        metavar="FILE",
        help="measurements: configs that stood on this machine are used, and --tune adds its own",
    )


def compile_options_given(options: argparse.Namespace) -> list[str]:
    """The options of a compile that differ from their defaults, as they are written. ``--threads``
    and ``--dim`` are not among them, because a run has them too.
    """
    defaults = argparse.ArgumentParser()
    add_compile_options(defaults)
    add_tuning(defaults)
    return [
        f"--{'no-' if default is True else ''}{name.replace('_', '-')}"
        for name, default in vars(defaults.parse_args([])).items()
        if name not in ("threads", "dim") and getattr(options, name) != default
    ]


def compile_options(options: argparse.Namespace) -> dict[str, Any]:
    """The values of the options of :func:`add_compile_options`, as fields of ``CompileOptions``."""
    names: list[str] = (
        "target precision launches ptx policy threads fast_algorithms simplify simplify_timeout "
        "workers strict tune records"
    ).split()
    if None in options.dim:
        raise OptionError(
            "--dim alone lists the dimensions of a model, as gtco compile MODEL.onnx --dim does; "
            "here give sizes: --dim batch=1,4,16"
        )
    shapes = unique(options.shape, "--shape") or None
    dims = unique(options.dim, "--dim") or None
    names += [n for n in ("cache", "farm", "farm_kind") if hasattr(options, n)]  # of some commands
    found = {"shapes": shapes, "dims": dims} | {name: getattr(options, name) for name in names}
    return found | quantization(options)

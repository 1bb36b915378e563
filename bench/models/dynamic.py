"""A library of open sizes beside libraries of one shape each, and beside peers that run the dynamic
file.

    python -m bench dynamic                            # the suite: eight models, drawn shapes
    python -m bench dynamic vit-ti-16 --dim batch=1..64 --at batch=1 batch=3 batch=32
    python -m bench dynamic FILE.onnx --dim width=64..320:64 --dim batch=1..16 --count 8
                            [--threads N] [--rounds 5] [--peers onnxruntime openvino] [--json FILE]

``MODEL``: an .onnx file with symbolic dimensions, or a model's name, which is exported with those
that it can have open. At each shape all systems are timed in interleaved rounds, each in a process
of its own. "static" is gtco's library of that shape alone. The peers load the file once, with its
open dimensions: OpenVINO by its PartialShape. The table has their times over the open library's:
above 1 that library is faster. Shapes are those of ``--at``, or ``--count`` that are drawn from the
sizes of ``--dim``, the smallest and the largest among them.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gtco.cli.arguments import dim, new_file
from gtco.cli.console import say, show
from gtco.cli.tables import Table
from gtco.support.errors import GtcoError, ModelError, OptionError
from gtco.support.sizes import Range, dim_text
from gtco.verification.outputs import OutputJudge

from ..harness import machine
from ..harness.build import Build, build
from ..harness.peers import load_inputs
from ..harness.rounds import Comparison, Contender, compare
from ..harness.suite import write_report
from ..harness.workload import make_inputs

STATIC, OPEN = "static", "open"
Sizes = Mapping[str, int]  # of the open dimensions, by name
Dims = Mapping[str, list[int] | Range]

BATCHES = {"batch": "1..64"}
SUITE: dict[str, dict[str, str]] = {
    "vit-ti-16": BATCHES,
    "vit-base-16": {"batch": "1..16"},
    "swin-t": {"batch": "1..32"},
    "dinov2-s-14": {"batch": "1..4"},
    "segformer-b0": {"batch": "1..16"},
    "detr-resnet50-e6": {"batch": "1..4"},
    "text-detector": {"batch": "1..4", "height": "320,480,640", "width": "320,480,640"},
    "text-recognizer": {"batch": "1..32", "width": "64..320:64"},
}


def exported(name: str, dims: Dims, folder: Path) -> Path:
    """The ONNX file of a named model, with these dimensions open."""
    from gtco.models import create, example_inputs, export_onnx, find

    axes = {axis: known for axis, known in find(name).open.items() if known in dims}
    if unknown := dims.keys() - set(axes.values()):
        raise OptionError(
            f"--dim {min(unknown)}=...: the sizes of {name} that can be open are "
            f"{', '.join(find(name).open.values())}"
        )
    model, inputs = create(name), example_inputs(name, 2 if 0 in axes else 1)
    return export_onnx(model, inputs, folder / f"{name}.onnx", open_axes=axes)


def drawn(dims: Dims, count: int, seed: int = 0) -> list[Sizes]:
    """``count`` different shapes, or all if there are no more: the smallest, the largest, and
    others at random.
    """
    sizes = {name: list(values) for name, values in dims.items()}
    every = list(itertools.product(*sizes.values()))
    found = [every[0], every[-1]]
    rest = [every[at] for at in np.random.default_rng(seed).permutation(len(every))]
    found += [shape for shape in rest if shape not in found]
    return [dict(zip(sizes, shape, strict=True)) for shape in dict.fromkeys(found[:count])]


def words(sizes: Sizes) -> str:
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def at(text: str) -> Sizes:
    """``batch=3,width=64`` as {"batch": 3, "width": 64}."""
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.rpartition("=")
        if not name or not size.isdecimal():
            raise argparse.ArgumentTypeError(f"'{text}' is not NAME=SIZE or NAME=SIZE,NAME=SIZE")
        found[name] = int(size)
    return found


def geometric_mean(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


def timed(model: Path, inputs: Path, libraries: Mapping[str, str], options: Any) -> Comparison:
    """All systems on these inputs."""
    job = {"threads": options.threads, "onnx": str(model), "inputs": str(inputs), "dynamic": True}
    job |= {"model": None, "precision": "fp32"}
    chosen = [
        Contender(name, {**job, "system": "gtco", "library": library})
        for name, library in libraries.items()
    ]
    chosen += [Contender(peer, {**job, "system": peer}) for peer in options.peers]
    return compare(chosen, options.rounds, judge=OutputJudge(model, load_inputs(job)))


def compiled(model: Path, library: Path, threads: int, **sizes: Any) -> Build:
    found = build(model, library, threads, **sizes)
    if found.error:
        raise GtcoError(f"{library.name}: {found.error}")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench dynamic", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("model", nargs="?", help="a file or a name; the suite without one")
    parser.add_argument("--dim", type=dim, action="append", default=[], metavar="NAME=SIZES")
    parser.add_argument("--at", type=at, nargs="+", default=[], metavar="NAME=SIZE,...")
    parser.add_argument("--count", type=int, default=5, help="shapes that are drawn")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", nargs="*", default=["onnxruntime", "openvino"])
    parser.add_argument("--json", type=new_file)
    options = parser.parse_args(arguments)
    reports: list[dict[str, Any]] = []
    for name, dims in _models(options):
        shapes = options.at or drawn(dims, options.count)
        for shape in shapes:
            if shape.keys() != dims.keys() or any(shape[d] not in dims[d] for d in dims):
                raise OptionError(
                    f"--at {words(shape)}: give a size of each --dim, one that it has"
                )
        with tempfile.TemporaryDirectory(prefix="gtco-bench-") as place:
            folder = Path(place)
            model = Path(name)
            if model.suffix != ".onnx":
                model = exported(name, dims, folder)
            elif not model.is_file():
                raise ModelError(f"no such file: {model}")
            reports.append(measure(model, folder, dims, shapes, options))
        if options.json:  # what a later model's failure leaves
            write_report(options.json, options.threads, options.rounds, {"models": reports})
    if len(reports) > 1:
        show(summary(reports, options.peers))
    return 0 if all(report["sound"] for report in reports) else 1


def _models(options: argparse.Namespace) -> list[tuple[str, Dims]]:
    """The models to measure, with their open sizes."""
    if options.model is None:
        if options.dim or options.at:
            raise OptionError("--dim and --at belong to a model: name it")
        return [
            (name, dict(dim(f"{d}={sizes}") for d, sizes in dims.items()))
            for name, dims in SUITE.items()
        ]
    return [(options.model, dict(options.dim or [dim("batch=1..64")]))]


def measure(
    model: Path, folder: Path, dims: Dims, shapes: Sequence[Sizes], options: Any
) -> dict[str, Any]:
    """Compiles, times and prints; what was found as JSON."""
    threads = options.threads
    given = {name: dim_text(sizes) for name, sizes in dims.items()}
    sizes = {name: given[name] if isinstance(s, Range) else s for name, s in dims.items()}
    opened = compiled(model, folder / "open.so", threads, dims=sizes)
    title = ", ".join(f"{name}={text}" for name, text in given.items())
    table = Table(f"{model.stem}, {title}, {threads} threads, {machine.cpu_model()}")
    table.column("at")
    table.column("open ms", right=True)
    systems = [STATIC, *options.peers]
    for system in systems:
        table.column(f"{system} / open", right=True)
    rows: list[dict[str, Any]] = []
    static: list[Build] = []
    for number, shape in enumerate(shapes):
        made = compiled(model, folder / f"{number}.so", threads, shapes=shape)
        static.append(made)
        inputs = folder / f"{number}.npz"
        np.savez(inputs, **make_inputs(model, shape))  # type: ignore[arg-type]
        libraries = {OPEN: opened.library, STATIC: made.library}
        found = timed(model, inputs, libraries, options)
        rows.append({"at": dict(shape), "systems": [m.to_json() for m in found.measurements]})
        mine = found[OPEN].median
        ratios = [found[system].median / mine for system in systems]
        table.row(words(shape), f"{mine * 1e3:.2f}", *(f"{ratio:.3f}" for ratio in ratios))
        for one in found.measurements:
            if one.error or one.disagrees:
                say(f"{model.stem} {words(shape)}: {one.system}: {one.error or one.disagrees}")
    table.rule()
    every = [ratios_of(rows, system) for system in systems]
    for what, summarized in (("mean", geometric_mean), ("worst", min)):
        table.row(what, "", *(f"{summarized(found):.3f}" if found else "-" for found in every))
    show(table)
    bytes_of = {b.library: Path(b.library).stat().st_size for b in (opened, *static)}
    largest = max(static, key=lambda one: bytes_of[one.library])
    mine, alone = bytes_of[opened.library], bytes_of[largest.library]
    slowest = max(one.seconds for one in static)
    say(
        f"compiled in {opened.seconds:.1f} s, {opened.seconds / slowest:.2f} of the longest of the "
        f"others; the library has {mine / 1e6:.1f} MB, {mine / alone:.2f} of the largest of them"
    )
    return {
        "model": model.stem,
        "dims": given,
        "rows": rows,
        "compile": opened.to_json(),
        "static": [one.to_json() for one in static],
        "bytes": list(bytes_of.values()),
        "seconds_ratio": opened.seconds / slowest,
        "bytes_ratio": mine / alone,
        "sound": not any(s["error"] or s["disagrees"] for row in rows for s in row["systems"]),
    }


def summary(reports: Sequence[Mapping[str, Any]], peers: Sequence[str]) -> Table:
    """A row for each model: means and worst shapes."""
    table = Table("geometric mean, worst shape")
    table.column("model")
    table.column("open sizes")
    for name in (*(f"{system} / open" for system in (STATIC, *peers)), "compile", "bytes"):
        table.column(name, right=True)
    for report in reports:
        cells = [
            f"{geometric_mean(found):.2f}, {min(found):.2f}" if found else "-"
            for found in (ratios_of(report["rows"], system) for system in (STATIC, *peers))
        ]
        sizes = " ".join(f"{name}={text}" for name, text in report["dims"].items())
        table.row(
            report["model"],
            sizes,
            *cells,
            f"{report['seconds_ratio']:.2f}",
            f"{report['bytes_ratio']:.2f}",
        )
    best = [
        min(ratios)
        for report in reports
        for row in report["rows"]
        if (ratios := [x for peer in peers for x in ratios_of([row], peer)])
    ]
    table.rule()
    if best:
        table.row("best peer", "", "", f"{geometric_mean(best):.2f}, {min(best):.2f}")
    return table


def ratios_of(rows: Sequence[Mapping[str, Any]], system: str) -> list[float]:
    """The system's times over the open library's, where it ran."""
    return [
        _median(row, system) / _median(row, OPEN)
        for row in rows
        if _median(row, system) and _median(row, OPEN)
    ]


def _median(row: Mapping[str, Any], system: str) -> float:
    """Seconds; 0 for a system that failed."""
    found = next(s for s in row["systems"] if s["system"] == system)
    return float(found.get("median_s", 0.0))

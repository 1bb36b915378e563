"""A library of a range of batches beside libraries of one batch each, and beside peers that run the
dynamic file.

    python -m bench dynamic MODEL [--range batch=1..64] [--sizes 1,3,8,32] [--threads N]
                            [--rounds 5] [--peers onnxruntime openvino] [--json FILE]

``MODEL``: an .onnx file with a symbolic batch, or a model's name, which is exported with one. For
each size all systems are timed in interleaved rounds, each in a process of its own. "static" is
gtco's library of that size alone. The peers load the file once, with its open dimension: OpenVINO
by its PartialShape. The table has their times over the range's, so above 1 the range is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import machine
from bench.harness.build import Build, build
from bench.harness.rounds import Comparison, Contender, compare
from bench.harness.workload import make_inputs
from gtco.cli.arguments import dim, new_file
from gtco.cli.console import say, show
from gtco.cli.tables import Table
from gtco.support.errors import GtcoError, ModelError, OptionError
from gtco.support.sizes import Range

STATIC, RANGE = "static", "range"


def exported(name: str, folder: Path) -> Path:
    """The ONNX file of a named model, of any batch."""
    from gtco.models import create, example_inputs, export_onnx

    return export_onnx(
        create(name), example_inputs(name, 2), folder / f"{name}.onnx", dynamic_batch=True
    )


def geometric_mean(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


def timed(
    model: Path,
    inputs: Path,
    libraries: Mapping[str, str],
    peers: Sequence[str],
    threads: int,
    rounds: int,
) -> Comparison:
    """All systems on these inputs."""
    job = {"threads": threads, "onnx": str(model), "inputs": str(inputs), "dynamic": True}
    job |= {"model": None, "precision": "fp32"}
    chosen = [
        Contender(name, {**job, "system": "gtco", "library": library})
        for name, library in libraries.items()
    ]
    chosen += [Contender(peer, {**job, "system": peer}) for peer in peers]
    return compare(chosen, rounds)


def compiled(model: Path, library: Path, threads: int, **sizes: Any) -> Build:
    found = build(model, library, threads, **sizes)
    if found.error:
        raise GtcoError(f"{library.name}: {found.error}")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench dynamic", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("model")
    parser.add_argument("--range", type=dim, default=("batch", Range(1, 64)), metavar="NAME=L..H")
    parser.add_argument("--sizes", default="1,3,8,32", help="at which all are timed")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", nargs="*", default=["onnxruntime", "openvino"])
    parser.add_argument("--json", type=new_file)
    options = parser.parse_args(arguments)
    name, sizes = options.range
    batches = list(map(int, options.sizes.split(",")))
    if not isinstance(sizes, Range) or any(batch not in sizes for batch in batches):
        raise OptionError(f"--range {name}={sizes}: give a range that has the --sizes {batches}")
    with tempfile.TemporaryDirectory(prefix="gtco-bench-") as place:
        folder = Path(place)
        model = Path(options.model)
        if model.suffix != ".onnx":
            model = exported(options.model, folder)
        elif not model.is_file():
            raise ModelError(f"no such file: {model}")
        report = measure(model, folder, name, sizes, batches, options)
    report["machine"] = machine.describe(options.threads)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    return 0 if report["sound"] else 1


def measure(
    model: Path, folder: Path, name: str, sizes: Range, batches: Sequence[int], options: Any
) -> dict[str, Any]:
    """Compiles, times and prints; what was found as JSON."""
    threads = options.threads
    ranged = compiled(model, folder / "range.so", threads, dims={name: str(sizes)})
    table = Table(f"{model.stem}, {name}={sizes}, {threads} threads, {machine.cpu_model()}")
    table.column(name, right=True)
    table.column("range ms", right=True)
    systems = [STATIC, *options.peers]
    for system in systems:
        table.column(f"{system} / range", right=True)
    rows: list[dict[str, Any]] = []
    static: list[Build] = []
    for batch in batches:
        made = compiled(model, folder / f"{batch}.so", threads, shapes={name: batch})
        static.append(made)
        inputs = folder / f"{batch}.npz"
        np.savez(inputs, **make_inputs(model, {name: batch}))  # type: ignore[arg-type]
        libraries = {RANGE: ranged.library, STATIC: made.library}
        found = timed(model, inputs, libraries, options.peers, threads, options.rounds)
        rows.append({"size": batch, "systems": [m.to_json() for m in found.measurements]})
        mine = found[RANGE].median
        ratios = [found[system].median / mine for system in systems]
        table.row(str(batch), f"{mine * 1e3:.2f}", *(f"{ratio:.3f}" for ratio in ratios))
        for one in found.measurements:
            if one.error or one.disagrees:
                say(f"{name}={batch}: {one.system}: {one.error or one.disagrees}")
    table.rule()
    every = [
        [_median(row, system) / _median(row, RANGE) for row in rows if _median(row, system)]
        for system in systems
    ]
    for what, summary in (("mean", geometric_mean), ("worst", min)):
        table.row(what, "", *(f"{summary(found):.3f}" if found else "-" for found in every))
    show(table)
    bytes_of = {b.library: Path(b.library).stat().st_size for b in (ranged, *static)}
    mine, alone = bytes_of[ranged.library], bytes_of[static[0].library]
    say(
        f"compiled in {ranged.seconds:.1f} s, {ranged.seconds / static[0].seconds:.2f} of what "
        f"{name}={batches[0]} alone takes; the library has {mine / 1e6:.1f} MB, {mine / alone:.2f} "
        "of its"
    )
    sound = not any(s["error"] or s["disagrees"] for row in rows for s in row["systems"])
    return {
        "model": model.stem,
        "range": f"{name}={sizes}",
        "rows": rows,
        "compile": ranged.to_json(),
        "static": [one.to_json() for one in static],
        "bytes": list(bytes_of.values()),
        "sound": sound,
    }


def _median(row: Mapping[str, Any], system: str) -> float:
    """Seconds; 0 for a system that failed."""
    found = next(s for s in row["systems"] if s["system"] == system)
    return float(found.get("median_s", 0.0))

"""Stages that memory bounds, each beside its limit on this machine and beside ONNX Runtime.

    python -m bench memory_bound [--cases TEXT ...] [--threads N] [--rounds N] [--json FILE]
        [--reuse]

Each case is a small graph of a vision transformer (``memory_cases.py``). Its limit is the barrier
behind a stage and the longest of these: its inputs and outputs read and written once, in the memory
that holds them all ("by" names it); its vector instructions; its divisions; for a softmax or a
normalisation, what plain C of the fewest passes takes for rows of 256 of as many bytes. A count of
instructions at the rate of FMAs is no limit of these: written by hand with intrinsics they take
longer too, for their passes wait for memory and for the vector units in turn. Each thread has its
own half of all that, always the same; where halves change cores, a copy in L2 takes four times as
long. All are measured in the same run (``limits.py``), in rounds, each with fresh memory and
threads, and the fastest counts, of limits too: another tenant on one of two cores doubles a stage's
time for longer than a reading takes. "of limit" is the limit over gtco's time, so 1 is as fast as
can be; "predicted" is what the fusion search reckoned with, in microseconds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path

import numpy as np
import onnx

import gtco
from gtco.cli.arguments import new_file, positive
from gtco.compiler import compile_to_file
from gtco.runtime.tensors import aligned_empty, random_inputs
from gtco.support.errors import GtcoError

from ..harness.single import Stages, model, onnxruntime_seconds, profiled
from ..harness.suite import available_threads, header, write_report
from . import limits
from .limits import Limits
from .memory_cases import CASES

WANTED = 0.8  # of the limit
PRICE = 2.0  # times that a prediction may be off
AGREES = 1e-4  # of the largest magnitude, the largest difference from ONNX Runtime

# Vector instructions of an operator on one vector of its largest tensor beyond loads and stores, in
# the shortest form that is known: exp 10, erf 16, tanh 14; the place of an extreme two comparisons
# (one for NaN) and two masked moves. Others but movement take one; movement takes none.
# Divisions are counted apart.
INSTRUCTIONS = {
    "Gelu": 19, "Sigmoid": 11, "Erf": 16, "Tanh": 14, "Exp": 10, "Div": 0, "BatchNormalization": 1,
    "Resize": 3, "MaxPool": 2, "AveragePool": 1, "ArgMax": 4,
}  # fmt: skip
MOVEMENT = frozenset(
    "Constant Reshape Transpose Slice Concat Split Gather Unsqueeze Pad "
    "DepthToSpace SpaceToDepth GatherElements".split()
)
# operators whose limit is measured as a whole: what limits.py has of them
ROWS = {
    "Softmax": "softmax", "LayerNormalization": "normalise", "GroupNormalization": "normalise",
    "InstanceNormalization": "normalise",
}  # fmt: skip
DIVIDES = frozenset({"Div", "Sigmoid"})


@dataclass(frozen=True)
class Row:
    """One case, in seconds and bytes; ``by`` names what bounds it.
    """

    name: str
    nbytes: int
    by: str
    limit: float
    seconds: float
    onnxruntime: float
    difference: float
    stages: Stages

    @property
    def share(self) -> float:
        return self.limit / self.seconds

    @property
    def predicted(self) -> float:
        return sum(stage[1] for stage in self.stages)

    @property
    def mispriced(self) -> bool:
        return not 1 / PRICE <= self.predicted / self.seconds <= PRICE

    def best(self, other: Row) -> Row:
        """The faster of two readings of one case, separately for each time and for the limit."""
        limit = min(self, other, key=lambda r: r.limit)
        return replace(
            min(self, other, key=lambda r: r.seconds),
            by=limit.by,
            limit=limit.limit,
            onnxruntime=min(self.onnxruntime, other.onnxruntime),
            difference=max(self.difference, other.difference),
        )

    def __str__(self) -> str:
        kernels = ", ".join(f"{label[:40]} {t * 1e6:.0f}" for label, _, t in self.stages)
        return (
            f"{self.name:36}{self.nbytes / 1e6:6.1f} {self.by:13}{self.limit * 1e6:8.1f}"
            f"{self.seconds * 1e6:8.1f}{self.share:9.2f}{self.predicted * 1e6:10.1f}"
            f"{self.onnxruntime * 1e6:9.1f}{self.onnxruntime / self.seconds:7.2f}  {kernels}"
            + (f"  DIFFERS by {self.difference:.1e}" if self.difference > AGREES else "")
        )


NOTHING = ("float[1] x", "y = Relu(x)", "float[1] y")
HEADING = (
    f"{'case':36}{'MB':>6} {'by':13}{'limit us':>8}{'us':>8}{'of limit':>9}{'predicted':>10}"
    f"{'ORT us':>9}{'ratio':>7}  kernels"
)


def arithmetic(made: onnx.ModelProto, lanes: int) -> tuple[float, float]:
    """Vector instructions and divisions of the case."""
    graph = onnx.shape_inference.infer_shapes(made, data_prop=True).graph
    sizes = {
        v.name: prod(max(d.dim_value, 1) for d in v.type.tensor_type.shape.dim)
        for v in (*graph.input, *graph.value_info, *graph.output)
    }
    instructions = divisions = 0.0
    for node in graph.node:
        if node.op_type not in MOVEMENT and node.op_type not in ROWS:
            size = max(sizes.get(name, 1) for name in (*node.input, *node.output)) / lanes
            instructions += INSTRUCTIONS.get(node.op_type, 1) * size
        if node.op_type in DIVIDES:  # by a narrow divisor: a product with its reciprocal
            divisions += sizes.get(node.input[-1], 1) / lanes
    return instructions, divisions


def library(name: str, made: onnx.ModelProto, options: argparse.Namespace) -> Path:
    """The case, compiled in ``options.folder``. With ``options.reuse`` an existing library is used.
    """
    stem = "".join(c if c.isalnum() else "_" for c in name)
    path: Path = options.folder / f"{stem}_{options.threads}.so"
    if not (options.reuse and path.exists()):
        compile_to_file(made, path, threads=options.threads)
    return path


def measure(name: str, made: onnx.ModelProto, built: Path, found: Limits, barrier: float) -> Row:
    """Times one case, compares its result, and relates it to its limit."""
    with gtco.load(built, threads=found.threads) as runtime:
        made_up = random_inputs(runtime.inputs)
        # on cache lines, as the limit's operands and whatever lies inside a model: numpy puts them
        # where it likes, and loads that span two lines take up to 1.7 times as long
        arrays = {spec.name: aligned_empty(spec) for spec in runtime.inputs}
        for x, array in arrays.items():
            array[...] = made_up[x]
        stages = profiled(runtime, arrays)
        got = runtime.run(arrays)["y"]
    peer, wanted = onnxruntime_seconds(made, arrays, found.threads)
    scale = max(float(np.abs(wanted).max()), 1e-30)
    read = sum(a.nbytes for a in arrays.values())
    nbytes = read + got.nbytes
    memory = found.memory(read, got.nbytes)
    instructions, divisions = arithmetic(made, found.lanes)
    units = found.arithmetic(instructions, divisions)
    by = found.level(nbytes)
    if units > memory:
        slow = divisions / found.divisions >= instructions / found.instructions
        by = "divisions" if slow else "instructions"
    rows = {ROWS[node.op_type] for node in made.graph.node if node.op_type in ROWS}
    passes = {kind: found.rows(kind, nbytes) for kind in rows}
    if max(passes.values(), default=0.0) > max(memory, units):
        by = max(passes, key=lambda kind: passes[kind])
    return Row(
        name,
        nbytes,
        by,
        barrier + max(memory, units, *passes.values()),
        sum(stage[2] for stage in stages),
        peer,
        float(np.abs(got.astype(np.float64) - wanted).max()) / scale,
        stages,
    )


def barrier_seconds(built: Path, threads: int) -> float:
    """The cost of a stage that does almost nothing."""
    with gtco.load(built, threads=threads) as runtime:
        return profiled(runtime, {"x": np.ones(1, np.float32)})[0][2]


def summary(rows: Sequence[Row]) -> list[str]:
    """The cases that do not reach their limit, in lines of text."""
    below = sorted((r for r in rows if r.share < WANTED), key=lambda r: r.share)
    dear = sorted((r for r in rows if r.mispriced), key=lambda r: r.predicted / r.seconds)
    behind = [r for r in rows if r.onnxruntime < r.seconds]
    return [
        f"{len(rows) - len(below)} of {len(rows)} cases reach {WANTED:.0%} of their limit; "
        f"below: {'; '.join(f'{r.name} {r.share:.2f}' for r in below) or 'none'}",
        f"predicted over measured off by more than {PRICE:g} times: "
        + ("; ".join(f"{r.name} {r.predicted / r.seconds:.2f}" for r in dear) or "none"),
        "slower than ONNX Runtime: "
        + ("; ".join(f"{r.name} {r.onnxruntime / r.seconds:.2f}" for r in behind) or "none"),
    ]


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    wanted = options.cases
    chosen = {
        name: model(*case)
        for name, case in CASES.items()
        if not wanted or any(part in name for part in wanted)
    }
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
        nothing = library("nothing", model(*NOTHING), options)
        libraries = {name: library(name, made, options) for name, made in chosen.items()}
        header(options.threads)
        rows: dict[str, Row] = {}
        for turn in range(options.rounds):
            last = turn + 1 == options.rounds
            found = limits.measure(options.threads)
            barrier = barrier_seconds(nothing, options.threads)
            if last:
                print(HEADING)
            for name, made in chosen.items():
                row = measure(name, made, libraries[name], found, barrier)
                rows[name] = rows[name].best(row) if name in rows else row
                if last:
                    print(rows[name], flush=True)
                if options.json:  # after each: a long run keeps what it has
                    report = {"limits": found.to_json(), "barrier": barrier}
                    report["cases"] = [asdict(r) | {"of_limit": r.share} for r in rows.values()]
                    write_report(options.json, options.threads, options.rounds, report)
    except GtcoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(summary([*rows.values()])))
    return 0 if all(r.difference <= AGREES for r in rows.values()) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench memory_bound", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("--cases", nargs="*", default=[], help="parts of the names to run")
    parser.add_argument("--threads", type=positive, default=available_threads())
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--json", type=new_file, metavar="FILE")
    parser.add_argument(
        "--folder", type=Path, default=Path("build/bench/memory"), help="libraries are kept here"
    )
    parser.add_argument("--reuse", action="store_true", help="time the libraries that are there")
    return parser

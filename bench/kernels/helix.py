"""Products and convolutions of any size from one library, beside oneDNN and ONNX Runtime (Helix,
Table 7).

    python -m bench helix [products|convolutions] [--group G ...] [--sample N] [--rounds R] ...
    python -m bench helix --picks [--group G ...] [--sample N] [--seconds S]

The cases are the public ones of the paper's evaluation (Creative Commons Attribution 4.0): 1213
products (Tables 5 and 11; helix-gemm.csv) and 1318 convolutions (helix-conv.csv). gtco compiles one
library before the first case, and picks a kernel of it for each. Every system is a process of its
own, its weights are packed beforehand, images have their channels innermost, and rounds are
interleaved. FLOPs are those of the multiplications, padding's included.

Beside the tables stands what a choice takes that is not remembered. ``--picks`` times every
candidate of cases of at most 0.4 GFLOP instead (:mod:`bench.kernels.helix_picks`). ``--out`` keeps
a line of JSON for each case. A run goes on where the file ends, and its tables are those of the
whole file.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, log
from pathlib import Path
from random import Random
from statistics import geometric_mean, median
from typing import Any

from gtco.cli.arguments import positive
from gtco.codegen.processes import python
from gtco.driver.products import compile_products
from gtco.runtime.convolutions import Convolution, Convolutions
from gtco.runtime.products import Products

from ..harness import lines
from ..harness.machine import describe
from ..harness.process import Worker, WorkerError
from ..harness.steps import say
from ..harness.suite import available_threads
from . import helix_picks
from .helix_systems import convolution_of, problem_of

SHAPES = {"products": "helix-gemm.csv", "convolutions": "helix-conv.csv"}
GROUPS = ("transformer", "cnn", "gnn", "deepbench")
SYSTEMS = ("gtco", "onednn", "onnxruntime")
PEERS = SYSTEMS[1:]
COMMAND = python("gtco.bench.kernels.helix_systems")
LARGE, EVERY = 1e10, 40  # FLOPs of large cases, and which of them are timed
WEIGHTS = 64e6  # bytes of the copies of the weights together, where there are several
MOST_COPIES = 8
WARM, CALLS = 0.03, 0.02  # seconds of calls that do not count, and of a round


@dataclass(frozen=True)
class Case:
    """A product or a convolution of a group. ``sizes``: (m, n, k), or (batch, channels, height,
    width, output channels, kernel height, kernel width, stride, padding).
    """

    sizes: tuple[int, ...]
    group: str

    @property
    def product(self) -> tuple[int, int, int]:
        """m, n and k; of a convolution those of the product that it is."""
        if len(self.sizes) == 3:
            m, n, k = self.sizes
            return m, n, k
        batch, channels, _, _, n, kernel_h, kernel_w, *_ = self.sizes
        out_h, out_w = self.convolution.output
        return batch * out_h * out_w, n, kernel_h * kernel_w * channels

    @property
    def convolution(self) -> Convolution:
        return convolution_of(self.sizes)

    @property
    def flops(self) -> float:
        m, n, k = self.product
        return 2.0 * m * n * k

    @property
    def name(self) -> str:
        return f"{self.group} {'x'.join(map(str, self.sizes))}"

    @property
    def copies(self) -> int:
        _, n, k = self.product
        return max(1, min(MOST_COPIES, round(WEIGHTS / (4.0 * n * k))))


def cases(
    kind: str = "products", groups: Sequence[str] = GROUPS, sample: int | None = None
) -> list[Case]:
    """The cases in a drawn order that is always the same, so that the first ones stand for all. Of
    those of more than :data:`LARGE` FLOPs there is every :data:`EVERY`-th.
    """
    with Path(__file__).with_name(SHAPES[kind]).open(newline="") as file:
        _, *rows = csv.reader(file)
    every = [Case(tuple(map(int, sizes)), group) for *sizes, group in rows]
    large = [case for case in every if case.flops > LARGE]
    left_out = set(large) - set(large[::EVERY])
    found = [case for case in every if case.group in groups and case not in left_out]
    Random(0).shuffle(found)
    return found[:sample]


@dataclass(frozen=True)
class Reading:
    """The median seconds of a call over the rounds' medians, by system; and those of a choice of
    gtco's kernel.
    """

    case: Case
    seconds: dict[str, float]
    choice: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self.case), "seconds": self.seconds, "choice": self.choice}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Reading:
        case = Case(tuple(value["sizes"]), value["group"])
        return Reading(case, value["seconds"], value["choice"])


def read(
    case: Case, workers: dict[str, Worker], library: Path, rounds: int, threads: int
) -> Reading:
    """Times a case in all systems. Raises :class:`WorkerError` if one fails."""
    calls, found = {}, {name: [] for name in workers}  # type: ignore[var-annotated]
    for name, worker in workers.items():
        job = {
            "system": name,
            "sizes": case.sizes,
            "copies": case.copies,
            "threads": threads,
            "library": str(library),
        }
        worker.ask(do="open", job=job)
        seconds = float(worker.ask(do="warm", seconds=WARM)["seconds"])
        calls[name] = max(1, min(200, round(CALLS / seconds)))
        worker.stop()
    for turn in range(rounds):
        for name in sorted(workers, key=lambda x: (SYSTEMS.index(x) + turn) % len(SYSTEMS)):
            answer = workers[name].ask(do="time", calls=calls[name])
            found[name].append(median(answer["seconds"]))
            workers[name].stop()
    return Reading(case, {name: median(times) for name, times in found.items()})


# tables -------------------------------------------------------------------------------------------
def table(readings: Iterable[Reading]) -> str:
    """Speed-up (geometric mean) and the share of cases ahead, by group and peer, in Markdown."""
    kept = list(readings)
    rows = [
        "| group | cases | " + " | ".join(f"{p}: speed-up | ahead" for p in PEERS) + " |",
        "|---|---:|" + "---:|---:|" * len(PEERS),
    ]
    parts = [
        (
            f"{g}{', large' if large else ''}",
            [r for r in kept if r.case.group == g and (r.case.flops > LARGE) == large],
        )
        for g in GROUPS
        for large in (False, True)
    ]
    for name, mine in (*parts, ("all", kept)):
        if not mine:
            continue
        cells = []
        for peer in PEERS:
            logs = [log(r.seconds[peer] / r.seconds["gtco"]) for r in mine]
            # a large case stands for those that were left out
            weights = [EVERY if r.case.flops > LARGE else 1 for r in mine]
            mean = sum(w * x for w, x in zip(weights, logs, strict=True)) / sum(weights)
            ahead = sum(w for w, x in zip(weights, logs, strict=True) if x > 0) / sum(weights)
            cells += [f"{exp(mean):.2f}", f"{ahead:.0%}"]
        rows.append(f"| {name} | {len(mine)} | {' | '.join(cells)} |")
    return "\n".join(rows)


def choices(readings: Sequence[Reading]) -> str:
    """What choosing takes beside running, in the geometric mean, in words."""
    shares = [r.choice / r.seconds["gtco"] for r in readings if r.choice]
    if not shares:
        return ""
    return (
        f"A choice of a kernel that is not remembered takes {geometric_mean(shares):.2%} of a run "
        "(geometric mean; from Python)"
    )


def load(file: Path) -> list[Reading]:
    """The readings of a file; none if it does not exist. Its first line is the machine."""
    return [Reading.from_json(value) for value in lines.read(file) if "sizes" in value]


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    end = time.monotonic() + options.seconds
    wanted = cases(options.kind, options.group or GROUPS, options.sample)
    readings = load(options.out) if options.out else []
    if options.out and not options.picks and not options.out.exists():
        lines.append(options.out, describe(options.threads))
    if options.picks:
        return _picks(wanted, options.threads, end)
    known = {reading.case for reading in readings}
    workers = {name: Worker(COMMAND) for name in SYSTEMS}
    with tempfile.TemporaryDirectory(prefix="gtco-helix-") as folder:
        begin = time.monotonic()
        library = compile_products(Path(folder, "products.so"))
        say(
            f"one library for all sizes: {library.stat().st_size / 1e3:.0f} kB, compiled in "
            f"{time.monotonic() - begin:.1f} s"
        )
        opened = (Products if options.kind == "products" else Convolutions)(
            library, options.threads
        )
        try:
            for case in wanted:
                if case in known:
                    continue
                if time.monotonic() > end:
                    break
                try:
                    reading = read(case, workers, library, options.rounds, options.threads)
                    choice = helix_picks.choosing(opened, problem_of(case.sizes))
                    reading = replace(reading, choice=choice)
                except WorkerError as error:
                    say(f"{case.name}: {error}")
                    # one may have ended, or may still answer this case when it is asked the next
                    for worker in workers.values():
                        worker.kill()
                    workers = {name: Worker(COMMAND) for name in SYSTEMS}
                    continue
                readings.append(reading)
                ours = reading.seconds["gtco"]
                ratios = ", ".join(f"{p} {reading.seconds[p] / ours:.2f}" for p in PEERS)
                say(
                    f"{case.name}: {ours * 1e6:.1f} us, {case.flops / ours / 1e9:.0f} GFLOP/s; "
                    f"times gtco's: {ratios}"
                )
                if options.out:
                    lines.append(options.out, reading.to_json())
        finally:
            opened.close()
            for worker in workers.values():
                worker.kill()
    say(f"\n{len(readings)} of {len(wanted)} {options.kind}\n")
    say(table(readings))
    say(choices(readings))
    return 0


def _picks(wanted: Sequence[Case], threads: int, end: float) -> int:
    small = [case for case in wanted if case.flops <= helix_picks.MOST_FLOPS]
    with tempfile.TemporaryDirectory(prefix="gtco-helix-") as folder:
        library = compile_products(Path(folder, "products.so"))
        named = [(case.name, case.sizes, case.copies) for case in small]
        helix_picks.report(library, named, threads, end, say)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench helix", description=str(__doc__).split("\n\n")[0]
    )
    parser.add_argument(
        "kind", nargs="?", choices=tuple(SHAPES), default="products", help="%(default)s"
    )
    parser.add_argument("--group", nargs="*", choices=GROUPS, help="of cases; all of them")
    parser.add_argument("--sample", type=positive, help="the first so many of the drawn order")
    parser.add_argument("--rounds", type=positive, default=3, help="of each case; %(default)s")
    parser.add_argument("--seconds", type=positive, default=3600, help="no case begins later")
    parser.add_argument("--out", type=Path, metavar="FILE", help="readings, a line a case")
    parser.add_argument("--picks", action="store_true", help="all candidates of each case")
    parser.add_argument("--threads", type=positive, default=available_threads())
    return parser

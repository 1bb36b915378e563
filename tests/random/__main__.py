"""``python -m tests.random``: any number of random graphs; each failure is shrunk to a small model.
Beside some of them, graphs with an open batch are drawn and compared at several batches
(:mod:`tests.random.batches`), and graphs with an open height and width at many sizes
(:mod:`tests.random.sizes`); their failures are saved as they are.

Every batch runs in a child process, which serves many batches. If it dies or hangs, the graphs of
the batch are tried one by one, and the one that kills it is reported.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import secrets
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from threading import Timer
from typing import IO

import numpy as np
import onnx

from tests.garbage import seldom_collected
from tests.random import batches, sizes
from tests.random.builder import Drawn, model_of
from tests.random.draw import OPSETS, draw
from tests.random.engine import Found, Tally, check, difference, in_process, run, wanted
from tests.random.shrink import Case, shrink

BATCH = 20  # graphs in one compile
RANGED = 5  # compiles until graphs with an open batch are drawn again; it meets every opset
SIZED = 7  # the same for graphs with an open height and width
SIZED_GRAPHS = 6  # in one compile
PATIENCE = (
    30.0  # seconds for a graph, of which one in a hundred is usual: then it counts as a crash
)


def graphs_of(first: int, count: int) -> list[Drawn]:
    """A batch: ``count`` seeds from ``first`` on, all of the same opset."""
    return [draw(seed, opset_of(seed)) for seed in range(first, first + count)]


def opset_of(seed: int) -> int:
    return OPSETS[seed // BATCH % len(OPSETS)]


def precision_of(seed: int) -> str:
    """The precision of the batch's compile: bf16 for every third batch, in each opset."""
    return "bf16" if seed // BATCH % 3 == 2 else "fp32"


def serve(folder: Path, small: bool) -> None:
    """A child process: it reads a line "FIRST COUNT" and writes the outcome of this batch as a line
    of JSON.
    """
    faulthandler.enable()
    with in_process():
        seldom_collected()
        for line in sys.stdin:
            tally = Tally()
            first, count = map(int, line.split())
            precision = precision_of(first)
            check(graphs_of(first, count), tally, precision)
            if first // BATCH % RANGED == 0:
                batches.check(batches.graphs_of(first, count, opset_of(first)), tally, precision)
            if first // BATCH % SIZED == 0:
                graphs = sizes.graphs_of(first, min(count, SIZED_GRAPHS), opset_of(first))
                sizes.check(graphs, tally, precision, first)
            for found in tally.found:
                save(found, folder, small)
            print(json.dumps(vars(tally) | {"found": [vars(f) for f in tally.found]}), flush=True)


def save(found: Found, folder: Path, small: bool) -> None:
    """Saves the graph as ``SEED.onnx`` with its inputs, shrunk if ``small``."""
    if found.kind in ("range", "sizes"):
        (batches if found.kind == "range" else sizes).save(found, folder)
        return
    graph, precision = draw(found.seed, found.opset), precision_of(found.seed)
    case: Case = (model_of([graph]), dict(graph.feeds))
    if small and found.kind != "refused":
        case = shrink(*case, lambda c: outcome(c, graph.smooth, precision) == found.kind)
    onnx.save(case[0], folder / f"{found.seed}.onnx")
    np.savez(folder / f"{found.seed}.npz", **case[1])


def outcome(case: Case, smooth: bool, precision: str) -> str:
    """The kind of failure of this model by :func:`tests.random.engine.check`; "" if it is right."""
    model, feeds = case
    want = wanted(model, feeds, precision)
    try:
        got = run(model, feeds, precision)
    except Exception:
        return "error"
    return "wrong" if any(difference(got[n], w, smooth) for n, w in want.items()) else ""


class Child:
    """The process that compiles; it is started again if it died."""

    def __init__(self, folder: Path, small: bool) -> None:
        self.command = [sys.executable, "-m", "tests.torchless", "tests.random"]
        self.command += ["--serve", "--folder", str(folder)]
        self.command += [] if small else ["--no-shrink"]
        self.process: subprocess.Popen[str] | None = None

    def ask(self, first: int, count: int) -> Tally | None:
        """The batch's outcome; None if the process died of it."""
        if self.process is None:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        _pipe(self.process.stdin).write(f"{first} {count}\n")
        _pipe(self.process.stdin).flush()
        timer = Timer(PATIENCE * count + 60, self.process.kill)
        timer.start()
        try:
            return self._answer()
        finally:
            timer.cancel()

    def _answer(self) -> Tally | None:
        assert self.process is not None
        while line := _pipe(self.process.stdout).readline():
            if line.startswith('{"drawn"'):
                answer = json.loads(line)
                answer["found"] = [Found(**f) for f in answer["found"]]
                answer["kinds"] = Counter(answer["kinds"])
                return Tally(**answer)
        self.close()
        return None

    def close(self) -> None:
        if self.process is not None:
            _pipe(self.process.stdin).close()
            self.process.wait()
            self.process = None


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def search(
    first: int, count: int, seconds: float, folder: Path, small: bool = True, loud: bool = True
) -> Tally:
    """Runs batches from seed ``first`` on, until ``count`` graphs or ``seconds`` are used up."""
    folder.mkdir(parents=True, exist_ok=True)
    child, total, start = Child(folder, small), Tally(), time.monotonic()
    cuts = [first, *range((first // BATCH + 1) * BATCH, first + count, BATCH), first + count]
    todo = [(a, b - a) for a, b in pairwise(cuts)]
    while todo and time.monotonic() - start < seconds:
        seed, size = todo.pop(0)
        tally = child.ask(seed, size)
        if tally is None and size > 1:
            todo[:0] = [(s, 1) for s in range(seed, seed + size)]
            continue
        if tally is None:
            tally = Tally(found=[Found(seed, opset_of(seed), "crash", "the process died or hung")])
            save(tally.found[0], folder, False)
        total.drawn += size
        total.compared += tally.compared
        total.invalid += tally.invalid
        total.ranged += tally.ranged
        total.sized += tally.sized
        total.kinds.update(tally.kinds)
        total.found += tally.found
        for f in tally.found if loud else ():
            where = f"seed {f.seed}, opset {f.opset}, {precision_of(f.seed)}"
            print(f"{f.kind}: {where}, {folder}/{f.seed}.onnx: {f.reason}")
        if loud:
            sys.stdout.flush()
    child.close()
    return total


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.random", description=__doc__)
    parser.add_argument("--count", type=int, default=20000, help="graphs to draw")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this time")
    parser.add_argument("--seed", type=int, help="the first graph's seed; random where not given")
    parser.add_argument("--folder", type=Path, default=Path("build/random"), help="for failures")
    parser.add_argument("--no-shrink", action="store_true", help="save failures as they were drawn")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.folder, not given.no_shrink)
        return 0
    seed = secrets.randbelow(1 << 30) // BATCH * BATCH if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    total = search(seed, given.count, given.seconds, given.folder, not given.no_shrink)
    kinds = Counter(f.kind for f in total.found)
    print(
        f"{total.drawn} graphs drawn, {total.compared} compared, {total.invalid} refused by ONNX "
        f"Runtime; {total.ranged} more at several batches, {total.sized} at many sizes; "
        + (", ".join(f"{n} {k}" for k, n in kinds.items()) or "no failure")
    )
    return int(bool(total.found))


if __name__ == "__main__":
    sys.exit(main())

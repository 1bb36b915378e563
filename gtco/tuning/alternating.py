"""The process that runs whole models alternately: ``python -m gtco.tuning.alternating SECONDS
FIRST.so TUNED.so ...`` prints for each library a list of rounds, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from gtco.codegen.processes import die_with_parent
from gtco.runtime.module import load
from gtco.runtime.tensors import aligned_empty
from gtco.tuning.timing import array

LEAST_ROUNDS, MOST_ROUNDS = 5, 40
TURN_SECONDS = 0.02  # a model runs for so long in a round, after a run that loads its weights


def main(seconds: float, libraries: Sequence[str]) -> None:
    """Prints for each library a list of rounds; a round is the seconds of every stage. Rounds go on
    for so many ``seconds``.
    """
    die_with_parent()
    random = np.random.default_rng(0)
    with ExitStack() as stack:
        models = [stack.enter_context(load(library)) for library in libraries]
        given = [array(random, spec) for spec in models[0].inputs]
        outputs = [aligned_empty(spec) for spec in models[0].outputs]
        found: list[list[list[float]]] = [[] for _ in models]
        begin = time.perf_counter()
        while len(found[0]) < LEAST_ROUNDS or (
            len(found[0]) < MOST_ROUNDS and time.perf_counter() - begin < seconds
        ):
            order = range(len(models)) if len(found[0]) % 2 else reversed(range(len(models)))
            for n in list(order):
                once = sum(models[n].timed(given, outputs))
                runs = max(int(TURN_SECONDS / max(once, 1e-9)), 1)
                times = [models[n].timed(given, outputs) for _ in range(runs)]
                found[n].append(list(np.median(times, axis=0)))
    print(json.dumps(found))


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])

"""The process that times candidates: ``python -m gtco.tuning.timing LIBRARY SECONDS MOST`` runs
every step of the library that :mod:`gtco.tuning.trial` describes, round after round for SECONDS,
and prints the readings as JSON. What is slower than was reckoned ends after MOST seconds, with as
few readings as there are then. A candidate that crashes, hangs or writes where it must not takes
this process along, and not the compile; a compile that is killed takes this process along.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping

import numpy as np

from gtco.codegen.processes import die_with_parent
from gtco.runtime.module import load
from gtco.runtime.plan import TensorSpec
from gtco.runtime.tensors import aligned_empty
from gtco.support.dtypes import numpy_dtype
from gtco.tensor.stage import INT4, TensorType

WARM_ROUNDS = 2
# Eight rounds are the fewest by which a rival of eight can win by more than luck (verdict.CHANCE).
LEAST_ROUNDS, MOST_ROUNDS = WARM_ROUNDS + 8, 200
LARGEST = 2**20  # magnitude of drawn integers of more than 8 bits
DRAWN = 1048573  # values, a prime; a larger tensor repeats them, since drawing takes long
# How far results of one stage may be apart, of the largest magnitude: they differ by the order of
# their sums, and where something is rounded to a short format on the way, another order may round
# it to a neighbour.
TOLERANCE: Mapping[str, float] = {"float32": 1e-3, "float16": 4e-3, "bfloat16": 2e-2}


def main(library: str, seconds: float, most: float) -> None:
    """Prints ``seconds``, a list of rounds, each the seconds of every step; ``trials``, the numbers
    of each trial's steps; and ``wrong``, those whose results are not their first rival's.
    """
    die_with_parent()
    random, begin = np.random.default_rng(0), time.perf_counter()
    with load(library) as model:
        numbers = model.metadata["numbers"]
        inputs = [array(random, spec, n in numbers) for n, spec in enumerate(model.inputs)]
        outputs = [aligned_empty(spec) for spec in model.outputs]
        rounds: list[list[float]] = []
        start = time.perf_counter()
        while len(rounds) < LEAST_ROUNDS or (
            len(rounds) < MOST_ROUNDS and time.perf_counter() - start < seconds
        ):
            if len(rounds) > WARM_ROUNDS and time.perf_counter() - begin > most:
                break
            rounds.append(model.timed(inputs, outputs))
        trials = model.metadata["trials"]
        wrong = [
            step
            for (first, *others), rounded, quantized in zip(
                trials, model.metadata["rounded"], model.metadata["quantized"], strict=True
            )
            for step in others
            if not agree(
                outputs[first],
                outputs[step],
                TOLERANCE["bfloat16" if rounded else "float32"],
                int(quantized),
            )
        ]
    print(json.dumps({"seconds": rounds[WARM_ROUNDS:], "wrong": wrong, "trials": trials}))


def array(random: np.random.Generator, spec: TensorSpec, numbers: bool = False) -> np.ndarray:
    """An input with :func:`values`."""
    made = aligned_empty(spec)
    made[...] = values(random, TensorType(spec.shape, spec.dtype), numbers)
    return made


def values(
    random: np.random.Generator, type_: TensorType, numbers: bool = False
) -> np.ndarray:
    """Values of order one and of both signs, so that a kernel that leaves something out is seen.
    Integers are 0, which is an index into anything. If they are ``numbers`` with which something is
    computed, they are drawn from all of 8 bits, or up to LARGEST.
    """
    shape, dtype = type_.sizes, numpy_dtype(type_.dtype)
    count = min(type_.size, DRAWN)
    match dtype.kind:
        case "b":
            return random.random(shape) < 0.5
        case "i" | "u":
            if not numbers:
                return np.zeros(shape, dtype)
            bounds = np.iinfo(dtype)
            low, high = max(bounds.min, -LARGEST), min(bounds.max, LARGEST)
            drawn = random.integers(low, high + 1, count).astype(dtype)
        case _ if type_.dtype == INT4:
            drawn = random.integers(-8, 8, count).astype(dtype)
        case _:
            drawn = random.standard_normal(count).astype(dtype)
    return drawn.reshape(shape) if drawn.size == type_.size else np.resize(drawn, shape)


def agree(
    first: np.ndarray,
    other: np.ndarray,
    tolerance: float = TOLERANCE["float32"],
    steps: int = 0,
) -> bool:
    """True if two results of one stage are the same, except for the order of sums. Integers may
    differ by ``steps``: where floats are rounded to them, another order may round to a neighbour.
    """
    if first.dtype.kind in "biu":
        if not steps:
            return bool(np.array_equal(first, other))
        return bool((np.abs(first.astype(np.int64) - other) <= steps).all())
    if first.dtype == np.float32 and first.size:  # the test below, in a fraction of its time
        with np.errstate(invalid="ignore", over="ignore"):
            apart = float(np.abs(first - other).max())
            scale = float(np.abs(first).max())
        if np.isfinite(apart) and np.isfinite(scale):
            return apart <= tolerance * scale
    wanted, got = first.astype(np.float64), other.astype(np.float64)
    finite = np.isfinite(wanted)
    if not np.array_equal(finite, np.isfinite(got)):
        return False
    scale = np.abs(wanted[finite]).max(initial=0.0)
    return bool(np.abs(wanted - got)[finite].max(initial=0.0) <= tolerance * scale)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]))

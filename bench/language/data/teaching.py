"""Rankings of drawn configs by the analytic price, for every stage that is trained on: as many
lessons as one likes, because nothing is built. A file for each workload, which is made once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random

from gtco.machine.target import Machine
from gtco.search.language.sentence import Grammar
from gtco.search.policy import Policy
from gtco.tensor.operators import is_anchor
from gtco.tensor.stage import Stage

from .demonstrations import policy_of
from .rankings import Rankings, joined, rankings_of, read_file, taught, write_file
from .sample import drawn_places
from .workloads import CPU, Workload

# Machines of a stage: most for products, convolutions and attention, whose spaces are large.
PLACES = {True: 4, False: 1}
GPU_PLACES = 1


def of_prices(
    training: Mapping[Workload, Sequence[Stage]],
    grammar: Grammar,
    folder: Path,
    seconds: float,
    say: Callable[[str], None],
) -> Rankings:
    """All rankings of the analytic price, after making missing ones for at most so many seconds."""
    end = time.monotonic() + seconds
    policies: dict[Machine, Policy] = {}
    found = []
    for workload, stages in training.items():
        file = folder / "ranked" / f"{workload.name}.npz"
        part = read_file(file, grammar.vocabulary)
        if part is None:
            if time.monotonic() > end:
                continue
            every = []
            for stage in stages:
                for place in drawn_places(stage, workload.machine, _count(workload, stage), "rank"):
                    policy = policies.setdefault(place.machine, policy_of(place))
                    one = taught(grammar, stage, place, policy, Random(stage.key))
                    every += [one] if one else []
            part = rankings_of(every)
            write_file(part, grammar.vocabulary, file)
            say(f"{workload.name}: {len(part)} rankings about {len(stages)} stages")
        found.append(part)
    return joined([part for part in found if len(part)])


def _count(workload: Workload, stage: Stage) -> int:
    if workload.machine != CPU:
        return GPU_PLACES
    return PLACES[any(is_anchor(op.kind) for op in stage.operators)]

"""Stages drawn with their surroundings, as for CPUs: GPU sketches of memory-bound stages with one
config each, emulated. ``pytest -m scheduled -s`` of this file makes a long run with a new seed.
"""

from __future__ import annotations

import time
from collections import Counter
from random import Random

import pytest

from gtco.machine.gpu import ARCHITECTURES, gpu_target
from gtco.tensor.sketch.depthwise import cuda as depthwise
from gtco.tensor.sketch.grid_sample import cuda as grid_sample
from gtco.tensor.sketch.moments import cuda as moments
from gtco.tensor.sketch.pool import cuda as pool
from gtco.tensor.sketch.resize import cuda as resize
from gtco.tensor.sketch.rows import cuda as rows
from gtco.tensor.space import configs
from tests import stages
from tests.cuda.emulate import run_reported
from tests.kernels import assert_close, fresh_seed, random_inputs, reference

RULES = (depthwise.match, rows.match, moments.match, pool.match, resize.match, grid_sample.match)
CORES = (
    stages.depthwise,
    stages.reduction,
    stages.softmax,
    stages.norm,
    stages.moments,
    stages.merged_moments,
    stages.pool,
    stages.resize,
    stages.grid_sample,
)
LARGEST = 10_000  # elements of a tensor: a block is emulated thread by thread
TOLERANCE = 3e-5  # of the largest value, after three more operators


def trial(number: int) -> str:
    """Tests one stage and one config of it. Gives the sketch's name; empty if no sketch is
    asked.
    """
    random = Random(number)
    core = CORES[number % len(CORES)]
    stage = stages.drawn(core, Random(random.random()), Random(random.random()))
    if max(t.size for t in stage.types.values()) > LARGEST:
        return ""
    target = gpu_target(f"cuda:{random.choice(ARCHITECTURES)}")
    sketch = next((s for s in (rule(stage, target) for rule in RULES) if s is not None), None)
    if sketch is None:  # a convolution of one group, moments with an epilogue
        assert core in (stages.depthwise, stages.moments, stages.merged_moments), stage.label
        return ""
    config = random.choice(list(configs(sketch)))
    print(f"trial {number}: {stage.label}: {config.to_json()}")
    arrays = random_inputs(stage, number)
    # points are found in float32; in float64 the nearest pixel may be another one
    wanted = reference(stage, arrays, precise=core is not stages.grid_sample)
    got, report = run_reported(sketch, config, arrays)
    assert_close(got, wanted, TOLERANCE)
    assert report.bank_conflicts == 0, report.conflicts
    assert sketch.workload(config).shared <= target.shared
    return str(sketch.name)


@pytest.mark.parametrize("first", [0, 9])
def test_drawn_stages(first: int) -> None:
    assert len({trial(first + n) for n in range(9)}) > 3  # sketches


@pytest.mark.scheduled
def test_many_drawn_stages() -> None:
    number, until, found = fresh_seed(), time.monotonic() + 300, Counter[str]()
    while time.monotonic() < until:
        found[trial(number)] += 1
        number += 1
    print(dict(found))

"""A graph of kernels or one persistent kernel: what is predicted of both follows from the machine."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from gtco.gpu import GPUS
from gtco.search.gpu_launches import BARRIER, LaunchPrices, launch_prices
from gtco.search.gpu_policy import LAUNCH, GpuPolicy
from gtco.tensor.cuda.program import Launch

H100 = GpuPolicy(GPUS["cuda:h100"])
WEIGHTS = 8e6  # bytes, which take longer than the loops
# A product of a block a multiprocessor that reads its weights once, as at batch 1.
SMALL = Launch(
    blocks=132,
    threads=256,
    shared=48 << 10,
    registers=96,
    unit="mma:float16",
    work=3e8,
    vector=1e5,
    read=WEIGHTS + 3e5,
    written=3e5,
    traffic=4e6,
    flops=3e8,
    steps=12,
)


def test_weights_that_come_while_blocks_wait_are_not_waited_for():
    without = launch_prices(H100, [(SMALL, 0.0)] * 90)
    weights = launch_prices(H100, [(SMALL, WEIGHTS)] * 90)
    assert weights.graph > without.graph
    assert weights.persistent - without.persistent < 0.5 * (weights.graph - without.graph)
    assert weights.persistent < weights.graph


def test_a_step_of_one_kernel_costs_its_barrier_at_least():
    one, two = (launch_prices(H100, [(SMALL, WEIGHTS)] * n).persistent for n in (1, 2))
    assert one > LAUNCH and two - one > BARRIER


def test_a_kernel_with_few_threads_pays_for_the_one_with_many():
    """Blocks of all steps are resident as those of the greediest: fewer of the others at once."""
    many = replace(SMALL, blocks=8 * 132, threads=64, shared=8 << 10, registers=64)
    found = [
        launch_prices(H100, [(many, 0.0), (replace(SMALL, shared=shared << 10), 0.0)])
        for shared in (48, 200)
    ]
    assert found[0].persistent < found[1].persistent and found[0].graph == found[1].graph


def test_the_compiler_makes_do_where_threads_leave_few_registers():
    wide = replace(SMALL, threads=512, registers=64)
    assert launch_prices(H100, [(wide, 0.0), (replace(SMALL, registers=248), 0.0)]).persistent < inf


def test_what_holds_no_block_is_never_taken():
    large = replace(SMALL, shared=227 << 10)  # the walk needs some too
    prices = launch_prices(H100, [(large, WEIGHTS)] * 3)
    assert prices.graph < prices.persistent == inf and prices.cheaper == "graph"
    assert prices.to_json() == {"graph": prices.graph, "persistent": None}
    assert launch_prices(H100, []).cheaper == "graph"


@pytest.mark.parametrize(("persistent", "taken"), [(0.9, "persistent"), (0.99, "graph")])
def test_a_gain_within_the_error_of_predictions_is_not_taken(persistent, taken):
    assert LaunchPrices(1.0, persistent).cheaper == taken

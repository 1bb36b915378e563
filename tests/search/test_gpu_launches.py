"""A graph of kernels or one persistent kernel: the predictions of both follow from the machine."""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from gtco.cli.stage_tables import launches
from gtco.codegen.generate import Generated
from gtco.driver.backend import backend_of
from gtco.driver.linking import launching
from gtco.driver.linking.launching import Launching
from gtco.machine.gpu import GPUS
from gtco.machine.target import target
from gtco.runtime.gpu.plan import PersistentKernel
from gtco.search.gpu.launches import BARRIER, LaunchPrices, launch_prices
from gtco.search.gpu.policy import LAUNCH, GpuPolicy
from gtco.support.errors import BuildError, OptionError
from gtco.support.options import CompileOptions
from gtco.tensor.cuda.program import Launch
from gtco.tensor.space import Rejection

H100 = GpuPolicy(GPUS["cuda:h100"])
WEIGHTS = 40e6  # bytes, which take longer than the loops
# A product with one block for each multiprocessor that reads its weights once, as at batch 1.
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
    """As many blocks are resident as fit of the greediest step, so the other steps have fewer at
    once.
    """
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


KERNEL = PersistentKernel("gtco_model", 256, 9000, (), {}, (), ())
SPILLS = {"sm_80": 12, "sm_90a": 0}
ELSEWHERE = {"sm_80": 0, "sm_90a": 7}
EVERYWHERE = {"sm_80": 12, "sm_90a": 7}
NONE = {"sm_80": 0, "sm_90a": 0}


@pytest.mark.parametrize(
    ("wanted", "made", "prices", "taken", "note"),
    [
        ("graph", NONE, (1.0, 0.5), False, None),
        ("auto", NONE, (1.0, 0.5), True, None),
        ("auto", NONE, (1.0, 1.5), False, None),
        ("auto", SPILLS, (1.0, 0.5), False, "spill 12 bytes on sm_80.*is launched as a graph$"),
        ("auto", ELSEWHERE, (1.0, 0.5), True, "spill 7 bytes on sm_90a.*as a graph there$"),
        ("auto", Rejection("tensors", "70 of them"), (1.0, 0.5), False, "70 of them; it is launch"),
        ("persistent", NONE, (1.0, inf), True, None),
        ("persistent", SPILLS, (1.0, 1.5), True, "spill 12 bytes on sm_80,.*as a graph there$"),
        ("persistent", EVERYWHERE, (1.0, 1.5), False, "on sm_80, 7 bytes on sm_90a.*as a graph$"),
    ],
)
def test_what_is_asked_for_and_what_is_cheaper(
    monkeypatch: pytest.MonkeyPatch,
    wanted: str,
    made: Any,
    prices: tuple[float, float],
    taken: bool,
    note: str | None,
) -> None:
    found = launched(monkeypatch, wanted, made, prices)
    assert (found.persistent is not None) == taken
    if isinstance(made, dict) and wanted != "graph" and prices[1] < prices[0]:
        assert found.spilled == {arch: n for arch, n in made.items() if n}
    assert len(found.notes) == (note is not None)
    assert note is None or re.search(note, found.notes[0])


def test_what_was_asked_for_by_name_and_cannot_be_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Rejection("tensors", "70 inputs and outputs")
    with pytest.raises(BuildError, match="70 inputs and outputs; leave launches=persistent out"):
        launched(monkeypatch, "persistent", made, (1.0, 0.5))


def launched(
    monkeypatch: pytest.MonkeyPatch, wanted: str, made: Any, prices: tuple[float, float]
) -> Launching:
    """The launching of a model whose persistent kernel is ``made``."""
    found = made if isinstance(made, Rejection) else (_kernel(made), "")
    monkeypatch.setattr(launching, "persistent", lambda *_, **__: found)
    monkeypatch.setattr(launching, "launch_prices", lambda *_: LaunchPrices(*prices))
    graph: Any = SimpleNamespace(inputs=["x"], outputs=["y"])
    options = CompileOptions(target="cuda:sm_80", launches=wanted)
    workers: Any = None
    return launching.launching(Generated([]), graph, GPUS["cuda:a100"], options, workers)


def _kernel(spilled: dict[str, int]) -> PersistentKernel:
    images = {arch: b"" if n else b"code" for arch, n in spilled.items()}
    return replace(KERNEL, images=images, info={"spilled_bytes": spilled})


def test_cpus_have_no_launches() -> None:
    with pytest.raises(OptionError, match=r"launches=auto is for GPUs.*'x86-64-v3' is a CPU"):
        backend_of(target("x86-64-v3")).check(CompileOptions(launches="auto"))
    with pytest.raises(OptionError, match=r"--no-ptx \(ptx=False\) is for GPUs.*is a CPU"):
        backend_of(target("x86-64-v3")).check(CompileOptions(ptx=False))
    with pytest.raises(OptionError, match="unknown launches 'fast': choose from graph"):
        CompileOptions(launches="fast")


def test_inspect_says_where_the_one_kernel_would_spill() -> None:
    metadata = {"launches": "persistent", "persistent_would_spill": {"sm_80": 12, "sm_90a": 8}}
    assert launches(metadata) == (
        "; launched as persistent; as graph where one kernel would spill: 12 bytes on sm_80, "
        "8 bytes on sm_90a"
    )
    assert launches({"launches": "graph"}) == "; launched as graph"

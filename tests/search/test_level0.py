"""The kernels of level 0 do the work that is counted for them."""

from __future__ import annotations

from math import ceil

import numpy as np
import pytest

from gtco.codegen.load import load
from gtco.machine.target import Target, detect, target
from gtco.search.calibration import level0
from gtco.search.calibration.level0 import DEPTH, ELEMENTS, ROWS, TimedKernel, probes, repeated
from gtco.search.calibration.rates import WORK
from gtco.search.calibration.timing import aligned, call
from gtco.tensor.cost import instructions
from gtco.tensor.emit.emitter import Emitter, KernelArguments, kernel
from gtco.tensor.intrinsics.table import MicroKernel, micro_kernels
from gtco.tensor.stage import Operator, TensorType
from gtco.tensor.workload import Extra, Layer, Workload


def tile_of(machine: Target) -> MicroKernel:
    return max(micro_kernels(machine), key=lambda t: t.rows * t.vectors)


def run(probe: TimedKernel, machine: Target) -> list[np.ndarray]:
    """The probe's operands, which are drawn, and its results."""
    library = load([probe.function], machine)
    rng = np.random.default_rng(1)
    buffers = []
    for type_ in probe.types:
        buffer = aligned(ceil(type_.nbytes / 4))
        buffer[:] = rng.standard_normal(buffer.size)
        buffers.append(buffer[: type_.size])
    workspace = aligned(ceil(probe.workspace / 4) + 1)
    call(getattr(library, f"probe_{probe.work}"), *buffers, workspace=workspace)()
    return [b.reshape(t.shape) for b, t in zip(buffers, probe.types, strict=True)]


@pytest.fixture(autouse=True)
def few_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(level0, "STAGE_REPEATS", 3)


def test_every_kind_of_work_has_its_probe() -> None:
    for name in ("x86-64-v3", "x86-64-v4", "skylake-avx512", "znver5"):
        machine = target(name)
        tile = tile_of(machine)
        known = {tile.kernel}
        found = list(probes(machine, tile))
        assert tuple(p.work for p in found) == WORK
        for probe in found:
            assert probe.units.keys() <= known | {probe.work}, "by rates that are known by then"
            known.add(probe.work)
            held = sum(t.nbytes for t in probe.types) + probe.workspace
            assert held <= 0.75 * machine.memory[0].capacity, "operands are in L1"


def test_probes_compute_what_they_say() -> None:
    machine = detect()
    made = {p.work: run(p, machine) for p in probes(machine, tile_of(machine))}
    x, z, g, y = made["vector"]
    np.testing.assert_allclose(y, np.maximum(x + z, 0) * g, rtol=1e-6)
    x, y = made["exp"]
    np.testing.assert_allclose(y, np.exp(x), rtol=1e-5)
    x, g, b, y = made["reduce"]
    centred = x - x.mean(1, keepdims=True)
    normal = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(y, normal * g + b, rtol=1e-4, atol=1e-5)
    x, y = made["shuffle"]
    np.testing.assert_array_equal(y, x.T)
    x, y = made["pack"]
    np.testing.assert_array_equal(y, x[:, :DEPTH])
    a, b, c = made["store"]
    wanted = a @ b.reshape(4, 2, -1).transpose(1, 0, 2).reshape(2, -1)  # of panels
    np.testing.assert_allclose(c, wanted, rtol=1e-5, atol=1e-6)


def test_units_are_those_that_sketches_count() -> None:
    machine = target("x86-64-v4")
    tile = tile_of(machine)
    found = {p.work: dict(p.units) for p in probes(machine, tile)}
    vectors = ELEMENTS / 16
    exp = Operator("exp", ("x",), "y", TensorType((ELEMENTS,)))
    assert found["exp"]["exp"] == pytest.approx(vectors * instructions(exp, ["float32"], 16))
    assert found["pack"] == {"pack": 2 * ROWS * DEPTH / 16}
    c = 4 * tile.rows * tile.vectors
    assert found["store"] == {tile.kernel: pytest.approx(2 * c), "store": pytest.approx(4 * c)}
    # add, relu and multiply, second operands of two of them, a load for the chain, and a store
    assert found["vector"] == {"vector": pytest.approx(vectors * (3 + 2 + 1 + 1))}


def test_units_of_a_workload_count_every_iteration() -> None:
    work = Workload(
        "a",
        2.0,
        (Layer(3), Layer(5, parallel=2)),
        0.0,
        (Extra("b", 7.0, 2.0),),
        (Extra("a", 1.0, 4.0),),
        (Extra("b", 1.0, 0.5), Extra("c", 1.0, 0.0)),
    )
    assert level0.units_of(work) == {"a": 2.0 * 30 + 4.0, "b": 14.0 + 0.5 * 30}


def test_repeated_runs_the_body_so_often() -> None:
    machine = detect()

    def body(em: Emitter, args: KernelArguments) -> None:
        em.store(args.output, [0], em.load(args.output, [0]) + em.load(args.inputs["x"], [0]))

    one = TensorType((1,))
    function = repeated(kernel("again", {"x": one}, one, 0, machine.lanes, body), 7)
    library = load([function], machine)
    x, y = aligned(1), aligned(1)
    x[0] = 2.0
    call(library.again, x, y)()
    assert y[0] == 14.0

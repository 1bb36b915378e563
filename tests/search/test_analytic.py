"""The analytic policy: Helix's equations on numbers computed by hand, and what the policy picks."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, inf, prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtco.machine.target import CACHE_LINE, MemoryLevel, Target, target
from gtco.search.analytic import FILL, HIDDEN, TILES_KEPT, UNEVEN, AnalyticPolicy
from gtco.search.calibration.rates import LAUNCH, WORK, RateTable, default_rate
from gtco.tensor.sketch import sketches
from gtco.tensor.space import Config, configs
from gtco.tensor.stage import Operator, Stage, TensorType, make_attrs, make_stage
from gtco.tensor.workload import Extra, Layer, Stream, Workload

MEMORY = (
    MemoryLevel("L1", 1_000, 100.0, 0.5),
    MemoryLevel("L2", 10_000, 50.0, 2.0),
    MemoryLevel("L3", 100_000, 20.0, 5.0, shared=True),
    MemoryLevel("DRAM", 1 << 40, 10.0, 20.0, shared=True),
)
TOY = Target("toy", "haswell", ("avx2", "fma"), 8, 16, 2, 1.0, 4, MEMORY)
L1, L2, DRAM = Stream(50, 100), Stream(50, 0, "L2"), Stream(50, 0, "DRAM")


def policy(threads: int = 1) -> AnalyticPolicy:
    """A policy whose ``unit`` runs 2 operations a second."""
    return AnalyticPolicy(replace(TOY, cores=threads), RateTable(TOY, (("unit", 2.0),)))


def on_cores(name: str, cores: int) -> AnalyticPolicy:
    return AnalyticPolicy(replace(target(name), cores=cores))


def seconds(*layers: Layer, work: float = 6.0, threads: int = 1, **more: object) -> float:
    """The seconds of the workload, without the launch."""
    given = Workload("unit", work, layers, 0.0, **more)  # type: ignore[arg-type]
    return policy(threads).seconds(given) - LAUNCH


# the equations --------------------------------------------------------------------------------
def test_level_0_is_the_tables() -> None:
    assert seconds() == pytest.approx(3.0)  # eq. 3: 6 operations at 2 a second


def test_a_working_set_lies_in_the_first_level_that_holds_it() -> None:
    """Eq. 1; half of each cache is left to other data."""
    sizes = {500: "L1", 501: "L2", 5_000: "L2", 50_000: "L3", 50_001: "DRAM"}
    assert {s: policy().source(Stream(1, s)).name for s in sizes} == sizes
    assert policy().source(Stream(1, 10, memory="DRAM")).name == "DRAM"


def test_each_core_keeps_its_share_in_its_own_cache() -> None:
    """A cache that all cores share holds the whole working set, because the shares of all cores lie
    in it.
    """
    own = MemoryLevel("L1", 1000, 1.0, 1.0), MemoryLevel("L2", 9000, 1.0, 1.0)
    shared = MemoryLevel("L3", 20_000, 1.0, 1.0, shared=True)
    memory = (*own, shared, MemoryLevel("DRAM", 1 << 40, 1.0, 1.0, shared=True))
    table = AnalyticPolicy(replace(target("x86-64-v4"), memory=memory, cores=4))

    def level(nbytes: float, cores: int) -> str:
        return table.source(Stream(1, nbytes, cores=cores)).name

    assert [level(8_000, n) for n in (1, 2, 4)] == ["L3", "L2", "L2"]
    assert [level(1_900, n) for n in (1, 2, 4)] == ["L2", "L2", "L1"]
    assert [level(16_000, n) for n in (1, 4)] == ["DRAM", "L2"] and level(40_000, 4) == "DRAM"


def test_bytes_at_the_levels_bandwidth() -> None:
    """Eq. 2; cores share the memory, but not the caches. Level 0 has the loads from L1."""
    assert policy().transfer(L1, 1) == 0.0
    assert policy().transfer(L2, 3) == pytest.approx(1.0)
    assert policy().transfer(DRAM, 1) == pytest.approx(5.0)
    assert policy().transfer(DRAM, 3) == pytest.approx(15.0)
    assert policy().transfer(Stream(0, 1 << 30), 3) == 0.0


def test_a_cache_that_is_too_small_holds_a_part() -> None:
    """Eq. 1, by shares: L1 holds 500 bytes of the working set, and L2 the rest."""
    assert policy().transfer(Stream(50, 2_000), 1) == pytest.approx(50 * 0.75 / 50)
    shared = 50 * (0.045 / 50 + 0.45 / 20 + 0.5 * 3 / 10)
    assert policy().transfer(Stream(50, 100_000), 3) == pytest.approx(shared)


def test_what_passes_between_cores() -> None:
    """Such bytes come at their own rate. If the working set is in the cache that all cores share,
    the part that fits in the cores' own caches comes from those. A single core hands nothing over.
    """
    given = (("L2", 10.0), ("L3", 16.0), ("DRAM", 8.0))

    def price(resident: float, cores: int, threads: int = 4) -> float:
        table = RateTable(TOY, (("unit", 2.0),), handed=given)
        chooser = AnalyticPolicy(replace(TOY, cores=threads), table)
        return chooser.transfer(Stream(400, resident, handed=0.75), cores)

    assert price(100, 4) == price(5_000, 4) == pytest.approx(400 / 10)
    held = 4 * 10_000 / 50_000  # the part of L3's bytes that lies in four caches of 10 KB
    assert price(50_000, 4) == pytest.approx(400 * (held / 10 + (1 - held) / 16))
    far = 4 * 10_000 / 100_000
    assert price(100_000, 3) == pytest.approx(400 * (far / 10 + (1 - far) * 3 / 8))
    assert price(20_000, 4) == pytest.approx(400 / 10), "all of it is in their own caches"
    alone = 400 * 0.9 / 50
    assert price(5_000, 1, threads=1) == pytest.approx(alone)
    assert policy(4).transfer(Stream(400, 5_000), 4) == pytest.approx(alone)


def test_what_a_core_keeps_comes_at_its_own_rate() -> None:
    """A share above 1 is handed over more than once. A table without ``kept`` has the mean of both
    rates, whatever the share.
    """
    given, kept = (("L2", 10.0), ("DRAM", 8.0)), (("L2", 40.0), ("DRAM", 8.0))

    def price(share: float, kept: tuple[tuple[str, float], ...]) -> float:
        table = RateTable(TOY, (("unit", 2.0),), handed=given, kept=kept)
        chooser = AnalyticPolicy(replace(TOY, cores=4), table)
        return chooser.transfer(Stream(400, 100, handed=share), 4)

    for share in (0.0, 0.5, 0.75, 1.5):
        assert price(share, kept) == pytest.approx(400 * (share / 10 + (1 - share) / 40))
        assert price(share, ()) == pytest.approx(400 / 10)
    assert price(0.0, (("L2", 5.0),)) == pytest.approx(400 / 10), "keeping is never slower"


def test_between_cores_where_nothing_was_measured() -> None:
    """The rate is that of the innermost level that the cores share, or of a slower cache."""
    rates = RateTable(TOY)
    assert [rates.handover(level) for level in MEMORY] == [20.0, 20.0, 20.0, 10.0]


def test_short_runs_wait_for_each_line() -> None:
    scattered = Stream(10 * CACHE_LINE, 0, "DRAM", chains=2)  # ten lines, two at a time, 20 s each
    assert policy().transfer(scattered, 1) == pytest.approx(max(10 * CACHE_LINE / 10, 10 * 20 / 2))


SEEN = 1 - HIDDEN  # the share of the shorter of loading and computing that delays


def hiding(times: int, computing: float, loading: float) -> float:
    """Seconds of a loop whose loads take less time than its work."""
    return times * computing + FILL * loading + SEEN * (times - FILL) * loading


def test_loads_hide_behind_computing() -> None:
    """Eq. 5: one latency, then the longer of loading and computing, and a store each time. Nothing
    hides a part of the first load.
    """
    store = Stream(20, 0, "L2")
    wanted = 2.0 + hiding(5, 3.0, 1.0) + 5 * 0.4
    assert seconds(Layer(5, (L2,), (store,))) == pytest.approx(wanted)
    slow = 20.0 + 5 * 5.0 + SEEN * 5 * 3.0  # memory takes longer
    assert seconds(Layer(5, (DRAM,))) == pytest.approx(slow)


def test_the_barrier_is_the_tables() -> None:
    """The barrier counts in every stage and in every floor."""
    table = RateTable(TOY, (("unit", 2.0),), launch=0.25)
    chooser = AnalyticPolicy(replace(TOY, cores=1), table)
    work = Workload("unit", 6.0, (Layer(5, (L2,)),), 0.0)
    assert chooser.seconds(work) == pytest.approx(0.25 + 2.0 + hiding(5, 3.0, 1.0))
    shape = TensorType((4, 4))
    assert chooser.floor(Operator("relu", ("x",), "y", shape), {"x": shape, "y": shape}) == 0.25
    assert AnalyticPolicy(TOY).rates.launch == LAUNCH


def test_work_beside_belongs_to_every_iteration() -> None:
    """It hides loads as the other work does, and has its own rate."""
    table = RateTable(TOY, (("unit", 2.0), ("other", 4.0)))
    chooser = AnalyticPolicy(replace(TOY, cores=1), table)
    beside = (Extra("other", 2.0, 4.0),)  # 2 seconds an iteration
    work = Workload("unit", 6.0, (Layer(5, (L2,)),), 0.0, beside=beside)
    assert chooser.seconds(work) == pytest.approx(LAUNCH + 2.0 + hiding(5, 5.0, 1.0))


def test_without_overlap_nothing_hides() -> None:
    assert seconds(Layer(5, (L2,), overlapped=False)) == pytest.approx(2.0 + 5 * (1.0 + 3.0))


def test_layers_nest() -> None:
    """Loads of all layers that overlap go on beside the work, and their times add up. Each level's
    latency counts once for a task.
    """
    inner, waiting = Layer(2, (L2,)), Layer(3, (L2,), overlapped=False)
    wanted = 2.0 + 2.0 + 3 * 1.0 + hiding(6, 3.0, 1.0)
    assert seconds(inner, waiting) == pytest.approx(wanted)
    # 2 * 1 s out of L2 and 5 s of memory, beside 2 * 3 s; both first loads wait
    shown = FILL * (1.0 + 5.0)
    computing, loading = 3 * 2 * 3.0, 3 * (2 * 1.0 + 5.0) - shown
    long = 22.0 + shown + max(computing, loading) + SEEN * min(computing, loading)
    assert seconds(inner, Layer(3, (DRAM,))) == pytest.approx(long)
    tasks = Layer(1, parallel=4)  # two waves on two cores
    assert seconds(inner, tasks, threads=2) == pytest.approx(
        (2 + UNEVEN) * (2.0 + hiding(2, 3.0, 1.0))
    )


@pytest.mark.parametrize(
    ("tasks", "threads", "waves"), [(1, 4, 1), (4, 4, 1), (5, 4, 2), (8, 4, 2), (9, 2, 5)]
)
def test_a_partial_wave_takes_as_long_as_a_whole_one(tasks: int, threads: int, waves: int) -> None:
    """Eq. 6 and 7, rounded up. Threads end apart by a share of a task."""
    expected = pytest.approx(3.0 * (waves + (UNEVEN if tasks > 1 else 0)))
    assert seconds(Layer(1, parallel=tasks), threads=threads) == expected


def test_extra_work_is_spread_over_the_cores() -> None:
    more = (Extra("unit", 10.0, 4.0),)  # 20 seconds of one core
    tasks = 3.0 * (1 + UNEVEN)
    assert seconds(Layer(1, parallel=4), threads=4, extra=more) == pytest.approx(tasks + 20 / 4)
    # five tasks on four cores: two waves, in which one core has 2 / 5 of the work
    uneven = seconds(Layer(1, parallel=5), threads=4, extra=more)
    assert uneven == pytest.approx(tasks + 3.0 + 20 * 2 / 5)
    assert seconds(Layer(1), threads=4, extra=more) == pytest.approx(3.0 + 20)  # one task


streams = st.builds(
    Stream,
    st.floats(0, 1e6),
    st.floats(1, 1e9),
    st.just(""),
    st.integers(0, 3),
    st.integers(1, 4),
    st.one_of(st.none(), st.just(True), st.floats(0, 2)),
)
layers = st.builds(
    Layer,
    st.integers(1, 50),
    st.lists(streams, max_size=2).map(tuple),
    st.lists(streams, max_size=2).map(tuple),
    st.integers(1, 9),
)


@given(st.lists(layers, max_size=3), st.floats(0, 1e6), st.integers(1, 8), st.data())
def test_more_work_never_takes_less_time(
    loops: list[Layer], work: float, threads: int, data: st.DataObject
) -> None:
    given_time = seconds(*loops, work=work, threads=threads)
    assert given_time >= 0
    assert seconds(*loops, work=2 * work, threads=threads) >= given_time
    if not loops:
        return
    at = data.draw(st.integers(0, len(loops) - 1))
    for changed in (
        loops[at]._replace(iterations=loops[at].iterations + 1),
        loops[at]._replace(loads=(*loops[at].loads, data.draw(streams))),
        loops[at]._replace(stores=(*loops[at].stores, data.draw(streams))),
    ):
        others = [*loops[:at], changed, *loops[at + 1 :]]
        assert seconds(*others, work=work, threads=threads) >= given_time * (1 - 1e-12)


# level 0 --------------------------------------------------------------------------------------
def test_loads_bound_a_measured_rate() -> None:
    """With its prefetches, a step of 14 rows and one vector loads 17 times. One of 7 rows and two
    vectors does as much with 11 loads.
    """
    names = ("fma:14x1", "fma:7x2", "fma:2x2", "store")
    table = RateTable(replace(TOY, frequency=1e9), tuple((name, 3e9) for name in names))
    rates = [table.rate(name) / 1e9 for name in names]
    assert rates == pytest.approx([14 * 2 / 17, 14 * 2 / 11, 4 * 2 / 6, 3.0])
    assert table.measured == tuple((name, 3e9) for name in names)


def test_default_rates() -> None:
    machine = target("x86-64-v4")
    ports, hertz = machine.fma_ports, machine.frequency
    full = 0.98 * ports * hertz
    assert default_rate(machine, "fma:12x2") == pytest.approx(full)
    # one accumulator waits four cycles for its own result
    assert default_rate(machine, "fma:1x1") == pytest.approx(0.98 * hertz / 4)
    assert {default_rate(machine, name) for name in ("fma", *WORK)} == {ports * hertz}
    table = RateTable(machine, (("fma:1x1", 5.0),))
    assert table.rate("fma:1x1") == 5.0 and table.rate("fma:12x2") == pytest.approx(full)


# choices --------------------------------------------------------------------------------------
def dense(m: int, k: int, n: int) -> Stage:
    types = {"x": TensorType((m, k)), "w": TensorType((k, n))}
    return make_stage([Operator("matmul", ("x", "w"), "y", TensorType((m, n)))], types, ["w"])


@pytest.mark.parametrize("threads", [1, 2, 16])
@pytest.mark.parametrize(("m", "k", "n"), [(197, 768, 3072), (1, 768, 1000), (197, 64, 64)])
def test_the_choice_is_the_cheapest_candidate(m: int, k: int, n: int, threads: int) -> None:
    chooser, stage = on_cores("x86-64-v4", threads), dense(m, k, n)
    best = chooser.choose(stage)
    assert best is not None and best.sketch.name == "gemm"
    found = list(chooser.candidates(best.sketch))
    prices = [chooser.seconds(best.sketch.workload(c)) for c in found]
    assert best.config in found and best.seconds == min(prices)
    assert best.seconds == chooser.predict(stage) and len(set(found)) == len(found)
    assert set(found) <= set(configs(best.sketch)), "the policy stays inside the space"
    assert len({c["tile"] for c in found}) <= TILES_KEPT
    for c in found:
        chunks = [int(v) for name, v in c.choices if name.startswith("chunks")]
        assert prod(chunks) <= max(16 * threads, 1)
    proposed = chooser.propose(stage, 5)
    assert len(set(proposed)) == 5 and proposed[0] == best.config
    by_name = {sketch.name: sketch for sketch in sketches(stage, chooser.target)}
    ordered = [chooser.seconds(by_name[c.sketch].workload(c)) for c in proposed]
    assert ordered == sorted(ordered)
    everything = chooser.propose(stage, 1_000_000)
    assert set(found) < set(everything) and everything[:5] == proposed
    assert {c.sketch for c in everything} == by_name.keys() > {"gemm"}


# Operators before A and after C, by kind; "concat" and "slice" read A in other ways.
PROLOGUES = ((), ("relu",), ("gelu",), ("exp", "relu"), ("layer_norm",), ("concat",), ("slice",))
EPILOGUES = ((), ("relu",), ("gelu", "exp"))


def around(m: int, k: int, n: int, before: tuple[str, ...], behind: tuple[str, ...]) -> Stage:
    """A product of m x k and k x n between other operators; B is constant."""
    types = {"w": TensorType((k, n)), "g": TensorType((k,)), "h": TensorType((k,))}
    ops: list[Operator] = []

    def then(kind: str, inputs: tuple[str, ...], shape: tuple[int, ...], **attrs: object) -> str:
        ops.append(Operator(kind, inputs, f"t{len(ops)}", TensorType(shape), make_attrs(**attrs)))
        return ops[-1].output

    last = "x"
    types["x"] = TensorType((m, k))
    for kind in before:
        if kind == "layer_norm":
            last = then(kind, (last, "g", "h"), (m, k), epsilon=1e-5)
        elif kind == "concat":
            types["x"], types["y"] = TensorType((m, k // 2)), TensorType((m, k - k // 2))
            last = then(kind, (last, "y"), (m, k), axis=1)
        elif kind == "slice":
            types["x"] = TensorType((m, 2 * k))
            last = then(kind, (last,), (m, k), begin=(0, k), strides=(1, 1))
        else:
            last = then(kind, (last,), (m, k))
    last = then("matmul", (last, "w"), (m, n))
    for kind in behind:
        last = then(kind, (last,), (m, n))
    return make_stage(ops, types, ["w"])


@settings(deadline=None, max_examples=12)
@given(
    sizes=st.tuples(st.integers(1, 300), st.integers(2, 700), st.integers(1, 200)),
    threads=st.sampled_from([1, 2, 6]),
    asked=st.lists(
        st.tuples(st.sampled_from(PROLOGUES), st.sampled_from(EPILOGUES)), min_size=2, max_size=3
    ),
)
def test_what_stages_share_of_a_ranking_changes_no_price(
    sizes: tuple[int, int, int], threads: int, asked: list[tuple[tuple[str, ...], tuple[str, ...]]]
) -> None:
    """One policy ranks several stages around the same product. Each gets the config that has the
    best full price among all candidates (epilogue apart), whichever stage came before.
    """
    chooser = on_cores("x86-64-v4", threads)
    for before, behind in asked:
        stage = around(*sizes, before, behind)
        for sketch in sketches(stage, chooser.target):
            found, compared = chooser.compared(sketch)
            alone = [
                chooser.seconds(sketch.workload(c)._replace(fixed=()))
                for c in chooser.candidates(sketch)
            ]
            assert list(found) == list(chooser.candidates(sketch)) and list(compared) == alone
            assert set(found) <= set(configs(sketch))
        best = chooser.choose(stage)
        assert best is not None
        assert best.seconds == chooser.seconds(best.sketch.workload(best.config))
        assert chooser.propose(stage, 1) == [best.config]


@pytest.mark.parametrize("before", PROLOGUES)
@pytest.mark.parametrize(("m", "k", "n"), [(197, 768, 64), (49, 1500, 33), (1, 64, 7)])
def test_overlapping_never_costs(m: int, k: int, n: int, before: tuple[str, ...]) -> None:
    """This follows from equation 5, so the policy looks at no other option."""
    chooser = on_cores("x86-64-v4", 2)
    for sketch in sketches(around(m, k, n, before, ()), chooser.target):
        price = {c: chooser.seconds(sketch.workload(c)) for c in configs(sketch)}
        for config, seconds in price.items():
            chosen: dict[str, int | str] = {}
            while decision := sketch.next_decision(chosen):
                first = decision.options[0] if decision.role == "overlap" else None
                chosen[decision.name] = first or config[decision.name]
            overlapped = price[Config(sketch.name, tuple(chosen.items()))]
            assert overlapped <= seconds * (1 + 1e-12)  # sums of floats


def test_a_large_product_uses_every_thread() -> None:
    stage = dense(512, 768, 3072)
    times = [on_cores("x86-64-v4", threads).predict(stage) for threads in (1, 2, 4)]
    assert times[0] > 1.7 * times[1] > 2.9 * times[2]
    best = on_cores("x86-64-v4", 4).choose(stage)
    assert best is not None
    tasks = prod(layer.parallel for layer in best.sketch.workload(best.config).layers)
    assert tasks >= 4 and tasks / (4 * ceil(tasks / 4)) > 0.8  # no core is idle


def test_predictions_grow_with_the_problem() -> None:
    chooser = on_cores("x86-64-v3", 2)
    for small, large in [((64, 64, 64), (128, 64, 64)), ((197, 768, 768), (197, 768, 3072))]:
        assert chooser.predict(dense(*small)) < chooser.predict(dense(*large))
    flops = 2 * 512 * 768 * 3072
    assert chooser.predict(dense(512, 768, 3072)) >= flops / (2 * chooser.target.peak)


def test_no_sketch_no_time() -> None:
    """Two softmaxes in a row have no kernel as one stage; each of them alone has one."""
    shape = TensorType((4, 8))
    axis = make_attrs(axis=1)
    first = Operator("softmax", ("x",), "a", shape, axis)
    second = Operator("softmax", ("a",), "b", shape, axis)
    stage = make_stage([first, second], {"x": shape}, [])
    chooser = on_cores("x86-64-v3", 1)
    assert not sketches(stage, chooser.target)
    assert chooser.predict(stage) == inf and chooser.choose(stage) is None
    alone = make_stage([first], {"x": shape}, [])
    slow = chooser.choose(alone, ["rows"])
    assert slow is not None and chooser.predict(alone) < slow.seconds < inf
    assert isinstance(slow.config, Config) and slow.sketch.name == "fallback"
    assert chooser.choose(alone, ["rows", "fallback"]) is None and not chooser.failures


@pytest.mark.parametrize("name", ["x86-64-v3", "x86-64-v4"])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_no_stage_is_cheaper_than_the_floor_of_its_operators(name: str, threads: int) -> None:
    """Because of this the fusion search may leave a stage unpriced."""
    chooser = on_cores(name, threads)

    def check(stage: Stage) -> None:
        floor = max(chooser.floor(op, stage.types) for op in stage.operators)
        assert LAUNCH <= floor <= chooser.predict(stage), stage.label

    for m, k, n in [(1, 1, 1), (197, 768, 3072), (7, 33, 5), (1024, 1024, 1024), (3, 4096, 3)]:
        check(dense(m, k, n))
        check(
            make_stage(
                [Operator("relu", ("x",), "y", TensorType((m, k)))], {"x": TensorType((m, k))}, []
            )
        )
    for heads, n, d in [(6, 197, 64), (3, 49, 32), (1, 5, 7), (16, 1024, 80)]:
        shape = TensorType((heads, n, d))
        scale = make_attrs(scale=0.1)
        op = Operator("attention", ("q", "k", "v"), "y", shape, scale)
        check(make_stage([op], dict.fromkeys("qkv", shape), []))
    for channels, size, kernel, groups in [(3, 32, 3, 1), (64, 14, 1, 1), (32, 9, 3, 32)]:
        image = TensorType((1, size, size, channels))
        weight = TensorType((channels, channels // groups, kernel, kernel))
        window = {"strides": (1, 1), "padding": (kernel // 2,) * 4, "dilation": (1, 1)}
        attrs = make_attrs(layout="NHWC", groups=groups, **window)
        op = Operator("conv2d", ("x", "w"), "y", image, attrs)
        check(make_stage([op], {"x": image, "w": weight}, ["w"]))

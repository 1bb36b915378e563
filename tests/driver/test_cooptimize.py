"""Fusion and tuning by turns, and how measured costs compare with predicted ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

import gtco
from gtco.codegen.generate import Generated
from gtco.driver.compilation import Compilation, silent
from gtco.driver.cooptimize import Measured, cooptimize, part, rest
from gtco.driver.phases import CutModel, Facts, Whole
from gtco.graph.fusion.stages import Partition, fuse, rivals
from gtco.graph.graph import Graph
from gtco.machine.target import target
from gtco.search.analytic import AnalyticPolicy
from gtco.search.recorded import DOUBT, RecordedPolicy, by_stage, calibrated, measured_seconds
from gtco.search.records.records import Record, Records, circumstances
from gtco.support.errors import BuildError
from gtco.support.options import CompileOptions, Tune
from gtco.tensor.stage import Stage, TensorType
from gtco.tuning import whole
from gtco.tuning.race import RaceReadings, saved
from gtco.tuning.timing import agree
from tests.tuning.small import small_model


def block(width: int = 64) -> Graph:
    """gelu(x w1) w2 + x, after a layer norm."""
    graph = Graph(("x",), (), {"x": TensorType((50, width))})
    one = graph.add_constant(np.ones(width, "float32"), "one")
    w1 = graph.add_constant(np.ones((width, 4 * width), "float32"), "w1")
    w2 = graph.add_constant(np.ones((4 * width, width), "float32"), "w2")
    norm = graph.add("layer_norm", ("x", one, one), epsilon=1e-5)
    hidden = graph.add("gelu", [graph.add("matmul", [norm, w1])])
    graph.outputs = (graph.add("add", [graph.add("matmul", [hidden, w2]), "x"], output="y"),)
    return graph.prune().check()


# prices ---------------------------------------------------------------------------------------
def record(policy: AnalyticPolicy, stage: Stage, seconds: float, **changed: object) -> Record:
    pick = policy.choose(stage)
    assert pick is not None
    known = circumstances(policy.target)
    config = json.dumps(pick.config.to_json())
    made = Record(stage.key, stage.label, known, config, "kept", pick.seconds, seconds)
    return Record(**{**made.__dict__, **changed})  # type: ignore[arg-type]


def test_calibration_is_by_sketch_and_by_the_first_choice() -> None:
    config = {name: json.dumps({"sketch": name}) for name in ("gemm", "rows")}

    def of(sketch: str, predicted: float, seconds: float | None, outcome: str = "kept") -> Record:
        return Record("s", "l", "c", config[sketch], outcome, predicted, seconds)  # type: ignore[arg-type]

    found = calibrated(
        [
            [of("gemm", 2.0, 3.0)],
            [of("gemm", 1.0, 3.0, "beaten"), of("gemm", 1.5, 2.0, "taken")],  # of the choice's 1.0
            [of("gemm", 4.0, 4.0)],
            [of("rows", 1.0, 0.5)],
            [of("rows", 1.0, None, "failed")],  # says nothing
        ]
    )
    assert found.bias("gemm") == 1.5 and found.bias("rows") == 0.5
    assert found.bias("attention") == 1.25  # the median of 0.5, 1, 1.5 and 2
    assert found.least == 0.5
    assert calibrated([]).bias("gemm") == calibrated([]).least == 1.0


def test_the_last_reading_of_what_stands_counts() -> None:
    def of(seconds: float | None, outcome: str) -> Record:
        return Record("s", "l", "c", "{}", outcome, 1.0, seconds)  # type: ignore[arg-type]

    readings = [of(5.0, "kept"), of(4.0, "taken"), of(1.0, "slower"), of(None, "failed")]
    assert measured_seconds(readings) == 4.0
    assert measured_seconds([of(1.0, "slower")]) is None


def test_predictions_beside_readings_are_put_on_their_scale(tmp_path: Path) -> None:
    analytic = AnalyticPolicy(target("x86-64-v3"))
    graph = block()
    stages = fuse(graph, analytic.predict, analytic.floor, analytic.possible)[1].stages
    first, other = [s for s in stages if "matmul" in s.label]
    with Records(tmp_path / "r") as records:
        policy = RecordedPolicy(analytic, records)
        assert policy.predict(first) == analytic.predict(first) and not policy.measured
        records.add([record(analytic, first, 3.0 * analytic.predict(first))])
        policy.observe()
        assert policy.measured
        assert policy.predict(first) == 3.0 * analytic.predict(first)
        assert policy.predict(other) == pytest.approx(DOUBT * 3.0 * analytic.predict(other))


def test_a_slow_machine_alone_changes_no_partition(tmp_path: Path) -> None:
    """Every stage takes three times its prediction, so the stages that were not measured are
    expected to as well.
    """
    analytic = AnalyticPolicy(target("x86-64-v3"))
    _, before = fuse(block(), analytic.predict, analytic.floor, analytic.possible)
    with Records(tmp_path / "r") as records:
        records.add([record(analytic, s, 3.0 * analytic.predict(s)) for s in before.stages])
        policy = RecordedPolicy(analytic, records)
        _, after = fuse(block(), policy.predict, policy.floor, policy.possible)
    assert after.weights() == before.weights()
    assert after.seconds == pytest.approx(3.0 * before.seconds)


def test_a_stage_that_measures_badly_is_cut(tmp_path: Path) -> None:
    analytic = AnalyticPolicy(target("x86-64-v3"))
    _, before = fuse(block(), analytic.predict, analytic.floor, analytic.possible)
    slow = next(s for s in before.stages if "gelu" in s.label)
    with Records(tmp_path / "r") as records:
        records.add(
            record(analytic, s, (9.0 if s is slow else 1.0) * analytic.predict(s))
            for s in before.stages
        )
        policy = RecordedPolicy(analytic, records)
        _, after = fuse(block(), policy.predict, policy.floor, policy.possible)
    assert slow.key not in after.weights()
    assert sorted(o.output for s in after.stages for o in s.operators) == sorted(
        o.output for s in before.stages for o in s.operators
    )


@contextmanager
def recorded(
    folder: Path,
) -> Iterator[tuple[Compilation, Records, RecordedPolicy, AnalyticPolicy]]:
    """A compilation for this machine, empty records, and the policies that use them."""
    compilation = Compilation(b"", folder / "m.so", None, CompileOptions(), silent)
    with Records(folder / "r") as records:
        policy = compilation.policy_for(target("native"), records)
        assert isinstance(policy.policy, AnalyticPolicy)
        yield compilation, records, policy, policy.policy


def cut(compilation: Compilation, graph: Graph, policy: RecordedPolicy) -> Partition:
    return compilation.partitioned(Whole(graph, Facts(), policy)).partition


@pytest.mark.parametrize("named", [True, False])
def test_records_cut_a_model_as_its_tuning_did(tmp_path: Path, named: bool) -> None:
    """The partition is not the cheapest by readings from many different times. One stage reads
    slow; its replacement is taken only after a tuning ended with it. That partition stays until
    another tuning of the model ends. If the records do not name their model, it goes as soon as one
    of its stages is measured again.
    """
    graph = block()
    with recorded(tmp_path) as (compilation, records, policy, analytic):
        before = cut(compilation, graph, policy)
        slow = next(s for s in before.stages if "gelu" in s.label)

        def read(stages: Sequence[Stage], outcome: str) -> dict[str, int]:
            """The partition if these stages are in the records too."""
            records.add(
                record(analytic, s, (99.0 if s is slow else 1.0) * analytic.predict(s))
                for s in stages
            )
            if outcome == "chosen":
                of = {"reason": graph.key if named else "", "time": f"{len(records.all()):03}"}
                ended = [(s, analytic.predict(s)) for s in stages]
                records.add(record(analytic, s, t, outcome=outcome, **of) for s, t in ended)
            policy.observe()
            return cut(compilation, graph, policy).weights()

        assert read(before.stages, "kept") == before.weights()
        price, floor, possible = policy.predict, policy.floor, policy.possible
        (_, other) = fuse(graph, price, floor, possible)
        assert slow.key not in other.weights()
        assert read(other.stages, "kept") == before.weights()
        assert read(other.stages, "chosen") == other.weights()
        tuned_since = read(other.stages[:1], "kept")
        assert tuned_since == (other if named else before).weights()
        assert read(before.stages, "chosen") == before.weights()


def test_a_partition_that_the_whole_model_refuted_is_not_searched_for_again(tmp_path: Path) -> None:
    """Its stages are cheaper when measured alone. A tuning that continues from the records would
    measure the partition again, but the records say what it takes in the model. A compile by the
    records does not need this: it uses the partition that was chosen.
    """
    graph = block()
    with recorded(tmp_path) as (compilation, records, policy, analytic):
        first = cut(compilation, graph, policy)
        heavy = next(s for s in first.stages if "gelu" in s.label)
        price = analytic.predict

        def dear(stage: Stage) -> float:
            return price(stage) * (99.0 if stage.key == heavy.key else 1.0)

        rival = fuse(graph, dear, analytic.floor, analytic.possible)[1]
        gone = [s for s in rival.stages if s.key not in first.weights()]
        back = [s for s in first.stages if s.key not in rival.weights()]
        assert gone and back
        cheap = 0.5 * sum(map(price, back)) / sum(map(price, gone))

        def alone(stage: Stage) -> float:
            return price(stage) * (cheap if stage in gone else 1.0)

        records.add(record(analytic, s, alone(s)) for s in {*first.stages, *rival.stages})
        records.add(record(analytic, s, alone(s), outcome="chosen") for s in first.stages)
        steps = Measured(graph, policy, None, 1, lambda stages: None, lambda models, some: None)  # type: ignore[arg-type, return-value]

        def found() -> dict[str, int]:
            policy.observe()
            return steps.search()[1].weights()

        assert found() == rival.weights()
        assert cut(compilation, graph, policy).weights() == first.weights()

        def made(partition: Partition) -> Generated:
            stages = list(partition.stages)
            picks = {s.key: analytic.choose(s) for s in stages}
            return Generated(stages, {}, picks)  # type: ignore[arg-type]

        def inside(partition: Partition, seconds: float) -> np.ndarray:
            return np.full((ROUNDS, len(partition.stages)), seconds)

        readings = whole.ModelReadings(inside(first, 1.0), inside(rival, 1.2))
        known = by_stage(records.all())
        here = circumstances(policy.target)
        records.add(whole.refuted(made(first), made(rival), readings, known, here))
        assert found() == first.weights()
        assert cut(compilation, graph, policy).weights() == first.weights()


def test_what_tuning_ended_with_is_compiled_from_its_records(tmp_path: Path) -> None:
    """The whole way: the compile gives the same stages and kernels, and measures nothing."""
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(
        torch.nn.LayerNorm(64), torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)
    ).eval()
    x, path = torch.randn(50, 64), tmp_path / "r"
    effort = Tune(trials=24, seconds=20.0, fusion=True)
    tuned = gtco.compile_model(model, x, tune=effort, records=path)
    with Records(path) as records:
        kept = [r for r in records.all() if r.outcome == "chosen"]
    assert {(r.stage, r.config) for r in kept} == {
        (s["key"], json.dumps(s["schedule"])) for s in tuned.stages
    }
    assert len({(r.reason, r.time) for r in kept}) == 1 and kept[0].reason
    with Records(path) as records:  # as another tuning would that did not end
        records.add(replace(r, outcome="kept", reason="") for r in kept)
    again = gtco.compile_model(model, x, records=path)
    assert [(s["key"], s["schedule"]) for s in again.stages] == [
        (s["key"], s["schedule"]) for s in tuned.stages
    ]


# rivals ---------------------------------------------------------------------------------------
def test_rivals_are_other_partitions_near_the_best() -> None:
    policy = AnalyticPolicy(target("x86-64-v3"))
    graph = block(256)
    found, best = fuse(graph, policy.predict, policy.floor, policy.possible)
    others = rivals(graph, best, policy.predict, policy.floor, policy.possible, most=3)
    assert 0 < len(others) <= 3
    for cut, other in others:
        assert other.weights() != best.weights()
        assert best.seconds <= other.seconds <= 1.1 * best.seconds
        inside = sorted(o.output for s in other.stages for o in s.operators)
        assert inside == sorted(cut.operators)
    assert found.outputs == graph.outputs


# turns ----------------------------------------------------------------------------------------
ROUNDS = 20


@dataclass
class Machine:
    """Steps over synthetic partitions. Each is a list of stages; ``truth`` has their true seconds.
    A stage that was not raced yet is expected to take ``thought``.
    """

    truth: dict[str, float]
    thought: dict[str, float]
    partitions: list[Partition]
    others: list[Partition] = field(default_factory=list)
    broken: tuple[str, ...] = ()
    known: dict[str, float] = field(default_factory=dict)
    tuned: list[int] = field(default_factory=list)

    def seconds(self, partition: Partition) -> float:
        return sum(self.known.get(s.key, self.thought[s.label]) for s in partition.stages)

    def search(self) -> tuple[Graph, Partition]:
        return GRAPH, min(self.partitions, key=self.seconds)

    def rivals(self, graph: Graph, best: Partition) -> list[tuple[Graph, Partition]]:
        return [(GRAPH, other) for other in self.others]

    def generate(self, partition: Partition) -> Generated:
        if any(stage.label in self.broken for stage in partition.stages):
            raise BuildError("no")
        return Generated(list(partition.stages))

    def tune(self, models: Sequence[Generated], effort: Tune) -> None:
        self.tuned.append(len(models))

    def race(self, models: Sequence[Generated]) -> RaceReadings:
        random = np.random.default_rng(0)
        found = {}
        for stage in (s for m in models for s in m.stages):
            self.known[stage.key] = self.truth[stage.label]
            noise = 1 + 0.01 * random.standard_normal((ROUNDS, 2))
            found[stage.key] = self.truth[stage.label] * noise
        return RaceReadings(found, ())


GRAPH = Graph((), (), {})


def chain(*kinds: str) -> Partition:
    """A partition with a stage of each of these chains of operators."""
    stages = []
    for kind in kinds:
        graph = Graph(("x",), (), {"x": TensorType((4, 4))})
        y = "x"
        for name in kind.split("+"):
            y = graph.add(name, [y], **({"axis": 1} if name == "softmax" else {}))
        graph.outputs = (y,)
        stages += fuse(graph.prune(), lambda stage: 1.0 / len(stage.operators))[1].stages
    return Partition(tuple(stages), 0.0, (0.0,) * len(stages))


ONE, TWO, THREE = chain("relu+softmax"), chain("relu", "softmax"), chain("gelu", "softmax")
THOUGHT = {"relu+softmax": 1.0, "relu": 0.6, "softmax": 0.6, "gelu": 0.7}


def run(machine: Machine, seconds: float = 60.0) -> tuple[CutModel, str]:
    first = CutModel(GRAPH, ONE, machine.generate(ONE))
    return cooptimize(first, machine, Tune(seconds=seconds))


def test_a_rival_that_measures_better_takes_its_place() -> None:
    truth = THOUGHT | {"relu": 0.3}
    chosen, news = run(Machine(truth, THOUGHT, [ONE, TWO], [TWO]))
    assert chosen.partition is TWO
    assert news.startswith("2 partitions measured, the predicted one gave way: 1 x relu+softmax")
    before, after = (float(x) for x in news.split()[-4:-1:2])
    assert before == 1000.0 and after == pytest.approx(900.0, rel=0.01)


def test_one_that_measures_the_same_does_not() -> None:
    truth = THOUGHT | {"relu": 0.4}
    machine = Machine(truth, THOUGHT, [ONE], [TWO])
    chosen, news = run(machine)
    assert chosen.partition is ONE and "the predicted one stands" in news
    assert machine.tuned == [2]


def test_the_search_goes_on_with_what_was_measured() -> None:
    """The first partition is slower than expected. The next one that the search finds is measured
    too, and then the third. The search ends when no partition promises more.
    """
    truth = {"relu+softmax": 2.0, "relu": 1.0, "softmax": 0.6, "gelu": 0.5}
    machine = Machine(truth, THOUGHT, [ONE, TWO, THREE])
    chosen, _ = run(machine)
    assert chosen.partition is THREE
    assert machine.tuned == [1, 2, 3]


def test_what_cannot_be_built_is_no_rival() -> None:
    machine = Machine(THOUGHT | {"relu": 0.1}, THOUGHT, [ONE, TWO], [TWO], broken=("relu",))
    chosen, news = run(machine)
    assert chosen.partition is ONE and news.startswith("1 partitions measured")


def test_no_time_to_measure_partitions_is_said() -> None:
    machine = Machine(THOUGHT | {"relu": 0.1}, THOUGHT, [ONE, TWO], [TWO])
    chosen, news = run(machine, seconds=1e-9)
    assert chosen.partition is ONE and not machine.tuned
    assert news.startswith("building the kernels of 2 partitions left no time to measure them")


def test_only_what_differs_is_compared() -> None:
    """Noise of a stage that both partitions have does not hide what one of them saves; noise of
    stages that differ does.
    """
    random = np.random.default_rng(0)
    loud = 100.0 * (1 + 0.3 * random.random((ROUNDS, 2)))
    quiet = np.full((ROUNDS, 2), 1.0)
    readings = RaceReadings({"loud": loud, "a": quiet, "b": 0.8 * quiet, "c": loud / 100}, ())
    assert saved({"loud": 3, "a": 2}, {"loud": 3, "b": 2}, readings) == pytest.approx(0.4)
    assert saved({"loud": 3, "b": 2}, {"loud": 3, "a": 2}, readings) == 0.0
    assert saved({"loud": 3, "a": 2}, {"loud": 3, "c": 2}, readings) == 0.0
    assert saved({"a": 2}, {"a": 2}, readings) == saved({"a": 1}, {"unread": 1}, readings) == 0.0
    assert saved({"a": 2}, {"a": 1}, readings) == pytest.approx(1.0)


def test_budgets_add_up() -> None:
    effort = Tune(trials=100, seconds=60.0, patience=3, fusion=True)
    assert part(effort, 0.5) == Tune(trials=50, seconds=30.0, patience=1)
    assert rest(effort, 20.0, 40) == Tune(trials=60, seconds=40.0, patience=3, fusion=True)
    assert rest(effort, 90.0, 400) == Tune(trials=1, seconds=1.0, patience=3, fusion=True)


def test_what_was_chosen_is_kept_where_no_time_is_left_to_tune_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tunings by turns with fusion measure; the last tuning has no time to. The machine decides
    which stage the few trials go to, and this stage may belong to a partition that was given up.
    """
    left = Tune(trials=1, seconds=0.01, learned=False)
    monkeypatch.setattr("gtco.driver.measuring.rest", lambda effort, seconds, trials: left)
    effort = Tune(trials=6, seconds=20.0, fusion=True, learned=False)
    path = tmp_path / "r"
    tuned = gtco.compile_model(small_model(), tune=effort, records=path)
    told = tuned.report.tuned
    assert told.trials == sum(stage["candidates"] for stage in tuned.report.tuning)
    assert told.trials + told.others > 0
    assert not any("nothing was measured" in note for note in tuned.report.notes)
    with Records(path) as records:
        chosen = {r.stage: r.parsed.to_json() for r in records.all() if r.outcome == "chosen"}
    assert chosen == {s["key"]: s["schedule"] for s in tuned.stages}


def test_a_model_that_is_fast_enough_is_cut_as_predicted(tmp_path: Path) -> None:
    effort = Tune(trials=6, seconds=20.0, fusion=True, latency=60.0)
    tuned = gtco.compile_model(small_model(), tune=effort, records=tmp_path / "r").report
    assert not tuned.fusion and tuned.tuned.trials + tuned.tuned.others == 0


def test_a_model_is_cooptimized(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(
        torch.nn.LayerNorm(64), torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)
    ).eval()
    x = torch.randn(50, 64)
    said: list[str] = []
    compiled = gtco.compile_model(
        model,
        x,
        tune=Tune(trials=24, seconds=20.0, fusion=True),
        progress=lambda phase, seconds, detail: said.append(f"{phase} {seconds} {detail}"),
    )
    assert any("partitions measured" in line for line in said)
    with torch.no_grad():
        assert agree(model(x).numpy(), np.asarray(compiled(x.numpy())))

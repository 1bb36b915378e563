"""``python -m bench readings`` and ``bench policy --readings``: files of measured configs, and how
the analytic price ranks them on the machines that were read.
"""

from __future__ import annotations

from math import inf
from pathlib import Path
from statistics import geometric_mean

import pytest

from bench.harness import readings
from bench.harness.readings import FOLDER, STAGES, append, load
from bench.search import carried
from bench.search import readings as command
from gtco.machine.target import target
from gtco.search.analytic import AnalyticPolicy
from gtco.search.calibration.measure import MachineRates
from gtco.search.calibration.profile import table_json, table_of
from gtco.support.errors import OptionError
from gtco.tensor.intrinsics.table import every_micro_kernel
from gtco.tensor.space import Config

# The shares of the best config that the policy reaches on each machine, rounded down: the geometric
# mean and the worst stage of its picks, and the mean after the tuner's first proposals.
FLOORS = {
    "granite-rapids": (0.96, 0.78, 0.98),
    "granite-rapids-bf16": (0.93, 0.75, 0.99),  # in tiles
    "emerald-rapids": (0.975, 0.87, 0.985),
    "zen-4": (0.97, 0.91, 0.985),
    "zen-5": (0.975, 0.915, 0.99),
}


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.gz")), ids=lambda f: f.name.split(".")[0])
def test_the_price_carries_over(file: Path) -> None:
    """The config with the least price among the measured ones is nearly the fastest of them, on
    every machine that was read. No time is measured here.
    """
    rows = carried.priced_stages(load(file))
    mean, worst, tried = FLOORS[file.name.split(".")[0]]
    assert len(rows) >= 18 and not any(r.gone for r in rows)
    assert carried.mean(rows) >= mean
    assert min(r.of_best for r in rows) >= worst
    assert geometric_mean(r.tried for r in rows) >= tried


def _machine() -> dict[str, object]:
    """A machine of whole numbers, as a file keeps it."""
    known = target("x86-64-v4")
    rates = {tile.kernel: 6e9 for tile in every_micro_kernel(known)}
    levels = {m.name: m.bandwidth for m in known.memory}
    table = table_of(known, MachineRates(rates, levels, 1e-6, {}, {}))
    return table_json(table, known)


def test_files_grow_by_batches(tmp_path: Path) -> None:
    """Batches of one stage are put on one scale by the config that they share. A pick that was not
    measured is not called one.
    """
    file, name = tmp_path / "r.gz", "product 197x192x576"
    append(file, {"about": "a machine", "table": _machine()})
    table = load(file).table
    pick, *others = AnalyticPolicy(table.target, table).best(STAGES[name].canonical, 4)
    a, b, c = (p.config.to_json() for p in others)
    append(file, {"stage": name, "standing": 2e-4, "ratios": [[a, 1.0], [b, 0.5]]})
    append(file, {"stage": name, "standing": 4e-4, "ratios": [[a, 1.0], [c, 2.0]]})
    found = load(file)
    assert found.about == "a machine" and found.table == table
    times = [found.seconds[name][p.config] for p in others]
    assert times == pytest.approx([3e-4, 1.5e-4, 6e-4])
    (row,) = carried.priced_stages(found)
    assert row.picked is None and row.configs == 3 and row.gone == 0
    assert row.of_best == pytest.approx(0.5)  # others are in the order of their prices
    append(file, {"stage": name, "standing": 3e-4, "ratios": [[pick.config.to_json(), 0.6]]})
    append(file, {"stage": name, "standing": 3e-4, "ratios": [[{**a, "kc": 7}, 0.6]]})
    (row,) = carried.priced_stages(load(file))
    assert row.picked == row.of_best == pytest.approx(0.5 / 0.6) and row.gone == 1


def test_the_fastest_are_read_once_more(tmp_path: Path) -> None:
    """The later reading counts, and is asked for until the fastest ones have it."""
    file, name = tmp_path / "r.gz", "product 197x192x576"
    append(file, {"about": "a machine", "table": _machine()})
    table = load(file).table
    policy, stage = AnalyticPolicy(table.target, table), STAGES[name].canonical
    picks = [p.config for p in policy.best(stage, command.FINALISTS + 3)]
    pick, others = picks[0], picks[1:]
    ratios = [[p.to_json(), 1.0 + n / 100] for n, p in enumerate(others)]
    append(file, {"stage": name, "standing": 1e-4, "ratios": [*ratios, [pick.to_json(), 2.0]]})

    def finalists() -> list[Config]:
        found = load(file)
        final = found.final.get(name, frozenset())
        return [p.config for p in command._finalists(policy, stage, found.seconds[name], final)]

    assert finalists() == [*others[: command.FINALISTS], pick]
    # one of them was lucky, so the next one counts among the fastest
    again = [[p.to_json(), 1.5 if n == 0 else 1.0 + n / 100] for n, p in enumerate(finalists())]
    append(file, {"stage": name, "final": True, "standing": 1e-4, "ratios": again})
    assert load(file).seconds[name][others[0]] == pytest.approx(1.5e-4)
    assert {*finalists()} == {*others[1 : command.FINALISTS + 1], pick}
    again = [[p.to_json(), 1.0] for p in finalists()]
    append(file, {"stage": name, "final": True, "standing": 1e-4, "ratios": again})
    assert finalists() == []


def test_a_file_of_another_machine_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "r.gz"
    append(file, {"about": "another machine", "table": _machine()})
    with pytest.raises(OptionError, match="readings of another machine"):
        command.main(["--out", str(file)])


def test_what_is_no_such_file_is_an_error(tmp_path: Path) -> None:
    for content in (b"", b"{}", b"\x1f\x8b"):
        (tmp_path / "r.gz").write_bytes(content)
        with pytest.raises(OptionError, match="bench readings"):
            load(tmp_path / "r.gz")


def test_reading_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call adds what a larger number asks for, and a third one nothing. In the end the
    fastest ones were timed once more.
    """
    small = {"small": readings.product(8, 16, 40)}
    monkeypatch.setattr(command, "STAGES", small)
    monkeypatch.setattr(command, "QUIET", inf)  # other tests may run beside this one
    monkeypatch.setattr(command, "BATCH_SECONDS", 0.0)
    monkeypatch.setattr(command, "FINAL_SECONDS", 0.0)
    monkeypatch.setattr(command, "FINALISTS", 2)
    file = tmp_path / "r.gz"
    sizes = []
    for wanted in ("3", "6", "6"):
        assert command.main(["--out", str(file), "--per-stage", wanted, "--threads", "2"]) == 0
        sizes.append(len(load(file).seconds["small"]))
    assert sizes == [3, 6, 6]
    seconds, final = load(file).seconds["small"], load(file).final["small"]
    first, table = next(iter(seconds)), load(file).table
    assert {*sorted(seconds, key=seconds.__getitem__)[:2], first} <= final
    pick = AnalyticPolicy(table.target, table).choose(small["small"].canonical)
    assert pick is not None and first == pick.config


def test_reading_refuses_a_busy_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If other processes take the cores, finer tasks would win that lose on a quiet machine."""
    monkeypatch.setattr(command, "STAGES", {"small": readings.product(8, 16, 40)})
    monkeypatch.setattr(command, "BATCH_SECONDS", 0.0)
    monkeypatch.setattr(command, "TRIES", 1)
    monkeypatch.setattr(command.Others, "share", lambda self: 0.9)
    with pytest.raises(OptionError, match="other processes took"):
        command.main(["--out", str(tmp_path / "r.gz"), "--per-stage", "2", "--threads", "2"])
    assert not load(tmp_path / "r.gz").seconds

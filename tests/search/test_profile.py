"""Measuring the machine: once, kept for each CPU, and again if the kept file is damaged."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from gtco.machine.target import Target, target
from gtco.search.calibration import profile
from gtco.search.calibration.measure import MachineRates, NotMeasured
from gtco.search.calibration.rates import WORK, RateTable
from gtco.tensor.intrinsics.table import every_micro_kernel

MACHINE = target("x86-64-v3")


def made_up(machine: Target, number: int) -> MachineRates:
    """A plausible measurement that differs for every number."""
    names = [*(tile.kernel for tile in every_micro_kernel(machine)), *WORK]
    rates = {name: 1e9 + number for name in names}
    bandwidths = {m.name: 1e10 for m in machine.memory}
    handed = {name: 2e9 + number for name in ("L2", "L3", "DRAM")}
    kept = {name: 2 * rate for name, rate in handed.items()}
    return MachineRates(rates, bandwidths, 1e-6 * number, handed, kept)


def table(machine: Target, number: int) -> RateTable:
    return profile.table_of(machine, made_up(machine, number))


def found(machine: Target) -> RateTable | None:
    """The table that a compile would use; the machine is measured now if no table is kept."""
    return profile.machine_table(machine).rates


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Target]:
    """The measurements so far; each is quick and made up. The cache is an empty folder."""
    calls: list[Target] = []

    def measured_now(machine: Target, say: object) -> MachineRates:
        calls.append(machine)
        return made_up(machine, len(calls))

    monkeypatch.setenv("GTCO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(profile, "measure", measured_now)
    monkeypatch.setattr(profile, "_unkept", {})
    monkeypatch.setattr(profile, "_again", {})
    return calls


def files(folder: Path) -> list[Path]:
    return sorted((folder / "cache").iterdir())


def test_measured_once(measured: list[Target], tmp_path: Path) -> None:
    assert profile.cached(MACHINE) is None and not measured
    first = found(MACHINE)
    assert found(MACHINE) == first == profile.cached(MACHINE)
    assert measured == [MACHINE] and first == table(MACHINE, 1)
    (path,) = files(tmp_path)
    assert MACHINE.mcpu in path.name and path.suffix == ".json"


def test_where_no_threads_start_constants_are_taken(
    measured: list[Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(machine: Target, say: object) -> MachineRates:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(profile, "measure", refused)
    made = profile.machine_table(MACHINE)
    assert made.rates is None and "temporarily unavailable. Kernels are chosen by" in made.note


def test_another_target_is_measured_for_itself(measured: list[Target], tmp_path: Path) -> None:
    other = target("x86-64-v4")
    assert found(MACHINE) != found(other)
    assert measured == [MACHINE, other] and len(files(tmp_path)) == 2


CHANGES = {
    "features": replace(MACHINE, features=MACHINE.features[:-1]),
    "cores": replace(MACHINE, cores=MACHINE.cores + 1),
    "caches": replace(
        MACHINE, memory=(replace(MACHINE.memory[0], capacity=1), *MACHINE.memory[1:])
    ),
    "tuning": replace(MACHINE, mcpu="haswell"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_setting_is_measured_for_itself(
    measured: list[Target], tmp_path: Path, change: str
) -> None:
    assert found(MACHINE) != found(CHANGES[change])
    assert len(measured) == 2 and len(files(tmp_path)) == 2
    found(MACHINE)
    found(CHANGES[change])
    assert len(measured) == 2, "both are kept"


@pytest.mark.parametrize("what", ["stepping", "model", "cpu family", "vendor_id", "model name"])
def test_another_cpu_is_measured_for_itself(
    measured: list[Target], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    found(MACHINE)
    other = {**profile.cpu_identity(), what: "another"}
    monkeypatch.setattr(profile, "cpu_identity", lambda: other)
    found(MACHINE)
    assert len(measured) == 2


def test_other_versions_measure_for_themselves(
    measured: list[Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("VERSION", -1), ("__version__", "0.0"), ("tvm", MACHINE)):
        with monkeypatch.context() as patched:
            before = len(measured)
            found(MACHINE)
            assert len(measured) == max(before, 1)
            if name == "tvm":
                patched.setattr(profile.tvm, "__version__", "0.0")
            else:
                patched.setattr(profile, name, value)
            found(MACHINE)
            assert len(measured) == max(before, 1) + 1


NONSENSE = [math.nan, math.inf, -math.inf, 0, -1.0, 1e-3, 1e20, "fast", None, True, [1e9]]


@pytest.mark.parametrize("part", ["rates", "bandwidths", "handed", "kept"])
@pytest.mark.parametrize("value", NONSENSE)
def test_a_value_that_cannot_be_is_measured_again(
    measured: list[Target], tmp_path: Path, part: str, value: object
) -> None:
    found(MACHINE)
    (path,) = files(tmp_path)
    data = json.loads(path.read_text())
    data[part][min(data[part])] = value
    path.write_text(json.dumps(data))
    assert profile.cached(MACHINE) is None
    assert found(MACHINE) == table(MACHINE, 2) == profile.cached(MACHINE)


@pytest.mark.parametrize("value", [*(v for v in NONSENSE if v not in (0, 1e-3)), 1.5, "missing"])
def test_a_barrier_that_cannot_be_is_measured_again(
    measured: list[Target], tmp_path: Path, value: object
) -> None:
    found(MACHINE)
    (path,) = files(tmp_path)
    data = json.loads(path.read_text())
    data["launch"] = value
    if value == "missing":
        del data["launch"]
    path.write_text(json.dumps(data))
    assert profile.cached(MACHINE) is None
    assert found(MACHINE) == table(MACHINE, 2) == profile.cached(MACHINE)


@pytest.mark.parametrize("part", ["rates", "bandwidths", "handed", "kept"])
def test_a_value_too_many_or_too_few(measured: list[Target], tmp_path: Path, part: str) -> None:
    for change in ("more", "less"):
        found(MACHINE)
        (path,) = files(tmp_path)
        data = json.loads(path.read_text())
        if change == "more":
            data[part]["fma:99x9"] = 1e9
        else:
            del data[part][max(data[part])]
        path.write_text(json.dumps(data))
        assert profile.cached(MACHINE) is None, change


def test_a_file_under_the_name_of_another(measured: list[Target], tmp_path: Path) -> None:
    """The circumstances inside the file count, not its name."""
    found(MACHINE)
    (path,) = files(tmp_path)
    other = CHANGES["cores"]
    profile._path(other).write_bytes(path.read_bytes())
    assert profile.cached(other) is None
    found(other)
    assert measured == [MACHINE, other] and profile.cached(other) == table(other, 2)


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[]", "null", "7", '{"rates": {}}', "[" * 100_000, "\0", "cut", "rates", "key"],
)
def test_a_damaged_file_is_measured_again(
    measured: list[Target], tmp_path: Path, damage: str
) -> None:
    found(MACHINE)
    (path,) = files(tmp_path)
    whole = path.read_text()
    spoilt = {
        "cut": whole[: len(whole) // 2],
        "rates": json.dumps({**json.loads(whole), "rates": None}),
        "key": json.dumps({**json.loads(whole), "key": None}),
    }
    path.write_text(spoilt.get(damage, damage))
    again = found(MACHINE)
    assert len(measured) == 2 and again == table(MACHINE, 2)
    assert found(MACHINE) == again and len(measured) == 2, "and kept anew"
    assert files(tmp_path) == [path]


def test_a_cache_that_cannot_be_written(
    measured: list[Target], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The machine is measured once in each process. This is no error, since the table is there. A
    note each time says what to do.
    """
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GTCO_CACHE", str(tmp_path / "file" / "cache"))
    for _ in range(2):
        made = profile.machine_table(MACHINE)
        assert made.rates == table(MACHINE, 1) and len(measured) == 1
        assert "each process measures again" in made.note and "GTCO_CACHE" in made.note
    assert profile.known(MACHINE) and profile.cached(MACHINE) is None


def test_a_machine_that_could_not_be_measured(
    measured: list[Target], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """There is no table then, but a note. The next processes do not try while others are busy, and
    later ones do.
    """
    tried, now, share = [], [1e9], [0.5]
    monkeypatch.setattr(profile.time, "time", lambda: now[0])
    monkeypatch.setattr(profile, "share_of_others", lambda seconds: share[0])

    def in_vain(machine: Target, say: object) -> MachineRates:
        tried.append(machine)
        raise NotMeasured("too little of everything")

    monkeypatch.setattr(profile, "measure", in_vain)
    for _ in range(2):
        made = profile.machine_table(MACHINE)
        assert made.rates is None and "too little of everything" in made.note
        assert "constants" in made.note and len(tried) == 1
        assert profile.known(MACHINE) and profile.cached(MACHINE) is None
        monkeypatch.setattr(profile, "_unkept", {})
    for moved, times in ((profile.LATER - 1, 1), (2, 2), (-1e6, 3)):  # a clock may be put back
        now[0] += moved
        assert profile.known(MACHINE) == (times == len(tried))
        assert found(MACHINE) is None and len(tried) == times
    share[0] = 0.1
    monkeypatch.setattr(profile, "_again", {})
    assert not profile.known(MACHINE)
    assert found(MACHINE) is None and len(tried) == 4


def test_a_folder_that_cannot_be_written_where_nothing_was_measured(
    measured: list[Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then each process tries once."""

    def in_vain(machine: Target, say: object) -> MachineRates:
        measured.append(machine)
        raise NotMeasured("too little of everything")

    monkeypatch.setattr(profile, "measure", in_vain)
    monkeypatch.setattr(profile, "save", lambda *_: "The folder cannot be written")
    for _ in range(2):
        assert found(MACHINE) is None and len(measured) == 1


def test_containers_that_share_a_folder(
    measured: list[Target], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Their processes have the same number; still neither writes into the other's file."""
    written: list[Path] = []

    def replaced(self: Path, path: Path) -> Path:
        written.append(self)
        return self

    monkeypatch.setattr(Path, "replace", replaced)
    for n in range(2):
        assert not profile.save(tmp_path / "cache" / "x.json", {"number": n})
    assert len(set(written)) == 2 == len(files(tmp_path))
    assert [json.loads(path.read_text())["number"] for path in written] == [0, 1]


def test_a_cached_file_is_for_all_who_may_read_the_folder(
    measured: list[Target], tmp_path: Path
) -> None:
    found(MACHINE)
    (path,) = files(tmp_path)
    beside = tmp_path / "cache" / "ordinary"
    beside.touch()
    assert path.stat().st_mode == beside.stat().st_mode


@pytest.fixture
def machine_load(measured: list[Target], monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The shares that others have: ``measuring``, while the machine is measured, and ``now``, when
    a process that finds the table asks. Each call of the fixture's functions is a new process.
    """
    load = {"measuring": 0.0, "now": 0.0}

    def measured_now(machine: Target, say: object) -> MachineRates:
        measured.append(machine)
        return replace(made_up(machine, len(measured)), others=load["measuring"])

    monkeypatch.setattr(profile, "measure", measured_now)
    monkeypatch.setattr(profile, "share_of_others", lambda seconds: load["now"])
    return load


def in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> RateTable | None:
    monkeypatch.setattr(profile, "_again", {})
    monkeypatch.setattr(profile, "_unkept", {})
    return found(MACHINE)


def test_a_table_of_a_busy_machine_is_measured_again(
    measured: list[Target], machine_load: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while others are as busy, and once for good when they are not."""
    machine_load.update(measuring=0.5, now=0.4)
    for _ in range(2):
        assert in_a_new_process(monkeypatch) == table(MACHINE, 1)
        assert profile.known(MACHINE)
    machine_load.update(measuring=0.05, now=0.1)
    assert found(MACHINE) == table(MACHINE, 1), "a process asks once"
    monkeypatch.setattr(profile, "_again", {})
    assert not profile.known(MACHINE), "so that the compile shows a phase"
    for _ in range(2):
        assert in_a_new_process(monkeypatch) == table(MACHINE, 2) == profile.cached(MACHINE)
        assert profile.known(MACHINE)
    assert len(measured) == 2


def test_the_better_of_two_measurements_is_kept(
    measured: list[Target], machine_load: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others came back while it was measured again, or it could not be measured."""
    machine_load.update(measuring=0.5, now=0.0)
    found(MACHINE)
    machine_load.update(measuring=0.6)
    assert in_a_new_process(monkeypatch) == table(MACHINE, 1) == profile.cached(MACHINE)
    assert len(measured) == 2
    assert found(MACHINE) == table(MACHINE, 1) and len(measured) == 2, "a process tries once"

    def in_vain(machine: Target, say: object) -> MachineRates:
        raise NotMeasured("too little of everything")

    monkeypatch.setattr(profile, "measure", in_vain)
    assert in_a_new_process(monkeypatch) == table(MACHINE, 1)
    assert profile.known(MACHINE)


def test_others_that_come_and_go_cost_a_few_measurements(
    measured: list[Target], machine_load: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine_load.update(measuring=0.5, now=0.0)
    for n in range(2 * profile.MOST_TIMES):
        machine_load["measuring"] = 0.5 + 0.1 * (n % 2)
        assert in_a_new_process(monkeypatch) == table(MACHINE, 1)
    assert len(measured) == profile.MOST_TIMES and profile.known(MACHINE)


@pytest.mark.parametrize("share", [0.0, 0.19])
def test_a_little_load_is_no_reason(
    measured: list[Target],
    machine_load: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
    share: float,
) -> None:
    machine_load.update(measuring=share, now=0.0)
    found(MACHINE)
    assert in_a_new_process(monkeypatch) == table(MACHINE, 1) and len(measured) == 1


@pytest.mark.parametrize("value", [math.nan, -0.1, 3.5, "much", None, True])
def test_a_share_that_cannot_be(measured: list[Target], tmp_path: Path, value: object) -> None:
    found(MACHINE)
    (path,) = files(tmp_path)
    whole = path.read_text()
    for name in ("others", "times"):
        path.write_text(json.dumps({**json.loads(whole), name: value}))
        assert profile.cached(MACHINE) is None
    assert found(MACHINE) == table(MACHINE, 2)

"""What a tuning does with the machines of a farm, on a farm that is played."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gtco.cli.commands import farm_command
from gtco.machine import identity as module
from gtco.machine.identity import Identity, governor, identity
from gtco.machine.target import CPUS, Target, detect
from gtco.search.records.records import Record, Records, circumstances
from gtco.search.records.text import from_lines, to_lines
from gtco.support.environment import ray_token
from gtco.support.errors import FarmError, OptionError
from gtco.support.options import CompileOptions
from gtco.tuning.farm import machine as there
from gtco.tuning.farm import runner as farming
from gtco.tuning.farm.connection import FarmMachine, MachineLost, check_address
from gtco.tuning.farm.runner import WAIT, FarmRunner, wanted
from gtco.tuning.runner import Budget, Readings
from tests.tuning.farm.cluster import ROOT

HERE = identity()
OTHER = replace(HERE, host="other", cores=HERE.cores + 1)
Answer = Callable[[], object]


def read_by(who: Identity) -> str:
    said = {"machine": who.to_json(), "seconds": [[[1.0, 2.0]] * 10], "wrong": [1]}
    return json.dumps(said)


class Played:
    """A farm of machines that answer as they are told; time passes when nobody is there."""

    address = "ray://localhost:1"

    def __init__(self, **answers: Answer) -> None:
        self.answers, self.asked, self.now = answers, list[str](), 0.0
        self.kinds = dict.fromkeys(answers, HERE.kind)

    def machines(self) -> list[FarmMachine]:
        self.now += 0.0 if self.answers else WAIT
        return sorted(FarmMachine(self.kinds[name], name) for name in self.answers)

    def ask(self, machine: FarmMachine, request: str, libraries: Sequence[bytes] = ()) -> object:
        self.asked.append(machine.name)
        return self.answers[machine.name]()


def lost() -> object:
    raise MachineLost("it died")


def read(farm: Played, tmp_path: Path) -> tuple[Readings, list[str]]:
    library = tmp_path / "x.so"
    library.write_bytes(b"code")
    runner = FarmRunner(farm, HERE.kind, lambda: farm.now)  # type: ignore[arg-type]
    found = runner.read([library], Budget(8))
    return found, runner.notes


def test_what_a_machine_read_says_who_it_is(tmp_path: Path) -> None:
    found, notes = read(Played(a=lambda: read_by(HERE)), tmp_path)
    assert Identity.from_json(found.machine) == HERE and found.wrong == {1} and not notes
    assert found.seconds[0].shape == (10, 2) and not found.failed


def test_a_lost_machine_costs_the_reading_in_flight(tmp_path: Path) -> None:
    farm = Played(a=lost, b=lambda: read_by(HERE))
    found, notes = read(farm, tmp_path)
    assert farm.asked == ["a", "b"] and len(found.seconds[0]) == 10
    assert len(notes) == 1 and "the machine a was lost: it died" in notes[0]


def test_a_library_that_costs_two_machines_is_blamed(tmp_path: Path) -> None:
    farm = Played(a=lost, b=lost, c=lambda: read_by(HERE))
    found, _ = read(farm, tmp_path)
    assert farm.asked == ["a", "b"] and "cost the farm a and b" in found.failed


def test_a_library_that_costs_one_machine_twice_is_blamed(tmp_path: Path) -> None:
    """It would be asked for ever otherwise, where there is no other one."""

    class Passing(Played):
        def machines(self) -> list[FarmMachine]:
            self.now += WAIT / 8
            return super().machines()

    farm = Passing(a=lost)
    found, notes = read(farm, tmp_path)
    assert farm.asked == ["a", "a"] and "cost the farm a, lost" in found.failed and len(notes) == 2


def gtco_fails() -> object:
    raise FarmError("gtco is not installed there")


@pytest.mark.parametrize(
    "bad",
    [
        lambda: read_by(OTHER),
        lambda: json.dumps({"machine": HERE.to_json()}),
        lambda: json.dumps({"failed": "this CPU has no AVX2"}),
        lambda: "no JSON",
        lambda: b"\x80\x04.",
        lambda: json.dumps({"machine": "{}", "seconds": [[[1.0]]], "wrong": []}),
        lambda: json.dumps({"machine": HERE.to_json(), "seconds": [[[-1.0]]], "wrong": []}),
        lambda: json.dumps({"machine": HERE.to_json(), "seconds": [], "wrong": []}),
        lambda: json.dumps({"machine": HERE.to_json(), "seconds": [[[1.0]]], "wrong": ["x"]}),
        lambda: json.dumps([1]),
        gtco_fails,
    ],
)
def test_a_machine_that_answers_wrongly_is_not_asked_again(tmp_path: Path, bad: Answer) -> None:
    farm = Played(a=bad, b=lambda: read_by(HERE))
    found, notes = read(farm, tmp_path)
    assert farm.asked == ["a", "b"] and found.seconds
    assert len(notes) == 1 and "the machine a is not used" in notes[0]


def test_a_failure_of_the_candidates_is_theirs(tmp_path: Path) -> None:
    said = json.dumps({"machine": HERE.to_json(), "failed": "crashed (SIGSEGV)"})
    found, notes = read(Played(a=lambda: said, b=lost), tmp_path)
    assert found.failed == "crashed (SIGSEGV)" and found.machine and not notes


def test_a_farm_that_stays_empty_ends_the_tuning(tmp_path: Path) -> None:
    with pytest.raises(FarmError, match=f"no machine of the kind {HERE.kind}.*in the records"):
        read(Played(), tmp_path)


def test_a_machine_that_comes_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while the tuning waits, which ends soon because the wait is made short."""
    monkeypatch.setattr(farming, "POLL", 0.01)
    farm = Played()
    machines = farm.machines

    def coming() -> list[FarmMachine]:
        if found := machines():
            return found
        farm.answers["late"], farm.kinds["late"] = (lambda: read_by(HERE)), HERE.kind
        farm.now -= WAIT
        return []

    monkeypatch.setattr(farm, "machines", coming)
    found, _ = read(farm, tmp_path)
    assert found.seconds and farm.asked == ["late"]


def test_the_kind_that_is_measured_on() -> None:
    """This machine's own target, or that of the farm's machines, with their CPU."""
    farm: Any = Played(a=lambda: read_by(HERE))
    assert wanted(farm, "") == (HERE.kind, detect())
    farm = Played(a=lambda: json.dumps({"machine": OTHER.to_json()}))
    farm.kinds["a"] = OTHER.kind
    kind, target = wanted(farm, OTHER.kind)
    assert kind == OTHER.kind and target.cores == OTHER.cores and dict(target.cpu) == OTHER.cpu
    assert Target.from_json(json.loads(json.dumps(target.to_json()))) == target
    assert json.loads(circumstances(target))["threads"] == OTHER.cores
    with pytest.raises(FarmError, match=f"which this machine is of. It has: {OTHER.kind}"):
        wanted(farm, "")


def test_a_machine_of_another_kind_runs_nothing() -> None:
    said = there.answer(there.request("another-kind", Budget(8)), b"no library")
    who, nothing = there.understood(said, 1)
    assert who == HERE and nothing is None


def test_a_machine_needs_no_compiler() -> None:
    """What runs there imports numpy, and none of what building needs."""
    modules = "farm.machine timing alternating".split()
    script = f"import sys, {', '.join(f'gtco.tuning.{name}' for name in modules)}\n"
    script += "print(*{'tvm', 'onnx', 'networkx', 'ml_dtypes', 'ray'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout.strip(), done.stdout + done.stderr


@pytest.mark.parametrize("name", ["CPU", "gtco:x", "gtco:x:y:z", "node:1.2.3.4"])
def test_other_resources_are_no_machines(name: str) -> None:
    assert there.parts(name) is None
    assert there.parts(there.resource(HERE.kind, "a-b.c")) == (HERE.kind, "a-b.c")


@pytest.mark.parametrize(
    "change",
    [{"cores": 64}, {"features": ("avx2",)}, {"gtco": "0.0.1"}, {"cpu": {"model": "other"}}],
)
def test_kinds_differ_where_readings_do(change: dict[str, Any]) -> None:
    assert replace(HERE, **change).kind != HERE.kind
    assert replace(HERE, host="x", governor="powersave").kind == HERE.kind
    assert Identity.from_json(HERE.to_json()) == HERE


@pytest.mark.parametrize("name", ["cortex-a76", "neoverse-v1", "znver4"])
def test_every_target_has_an_identity(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of AArch64."""
    monkeypatch.setattr(module, "detect", lambda: CPUS[name])
    one = identity()
    assert one.row == name and Identity.from_json(one.to_json()) == one
    assert one.target(HERE if one.kind != HERE.kind else OTHER).features == CPUS[name].features


def test_a_machine_without_a_target_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "detect", lambda: replace(CPUS["znver4"], mcpu="i386"))
    with pytest.raises(OptionError, match="no target for this machine's CPU"):
        identity()


def test_the_governor(tmp_path: Path) -> None:
    assert governor(tmp_path) == "unknown"
    path = tmp_path / module.GOVERNOR
    path.parent.mkdir(parents=True)
    path.write_text("performance\n")
    assert governor(tmp_path) == "performance"


def test_only_loopback_needs_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    token = tmp_path / "token"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    for host in ("localhost", "127.0.0.1", "127.3.2.1", "[::1]"):
        check_address(f"ray://{host}:10001")
    for host in ("192.0.2.1", "farm.example", "0.0.0.0"):
        with pytest.raises(FarmError, match=f"{host} is another machine, and there is no token"):
            check_address(f"ray://{host}:10001")
    token.write_text("a-secret\n")
    assert ray_token() == "a-secret"
    check_address("ray://192.0.2.1:10001")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(FarmError, match="there is no token"):
        check_address("ray://192.0.2.1:10001")
    for address in ("localhost:10001", "ray://localhost", "ray://:1", "http://localhost:1"):
        with pytest.raises(FarmError, match="give the address"):
            check_address(address)


def test_starting_says_how_to_join_and_measure(capsys: pytest.CaptureFixture[str]) -> None:
    """Ray's own text names its own commands, which would join without a kind."""
    options = Namespace(port=7000, client_port=7001, logs=None)
    assert {"--port=7000", "--ray-client-server-port=7001"} <= set(farm_command.start(options))
    said = capsys.readouterr().out
    assert re.search(r"gtco farm join \S+:7000\n", said)
    assert re.search(r"gtco tune MODEL.onnx --farm ray://\S+:7001\n", said)


def test_options_that_do_not_go_with_a_farm() -> None:
    farm = "ray://localhost:10001"
    for wrong in (
        {"farm_kind": "x"},
        {"farm": farm, "target": "znver4", "tune": "full"},
        {"farm": farm},
        {"farm": 1, "tune": "full"},
    ):
        with pytest.raises(OptionError, match="farm"):
            CompileOptions(**wrong)  # type: ignore[arg-type]
    assert CompileOptions(farm=farm, tune="full").farm == farm


def test_records_say_which_machine_measured(tmp_path: Path) -> None:
    """A file and a text from before have no such column; they are read, and added to."""
    config = json.dumps({"sketch": "gemm"})
    old = Record("k", "l", "{}", config, "kept", 1.0, 1.0, 1.0, 0.0, "", "t")
    assert "machine" not in to_lines([old])
    new = replace(old, machine=HERE.to_json())
    assert from_lines(to_lines([old, new]), "text") == [old, new]
    path = tmp_path / "r.records"
    with Records(path) as records:
        records.add([old])
        records._base.execute("ALTER TABLE records DROP COLUMN machine")
    with Records(path) as records:
        assert records.all() == [old]
        records.add([new])
        assert records.all() == [old, new]


def test_trials_are_dealt_out() -> None:
    """The heaviest first, each to the machine that has the least to do; one machine gets all."""
    from types import SimpleNamespace

    from gtco.tuning.measure import shares

    trials: list[Any] = [
        SimpleNamespace(picks=[SimpleNamespace(seconds=s)]) for s in (1.0, 5.0, 2.0, 4.0)
    ]
    assert shares(trials, 1) == [trials]
    dealt = shares(trials, 2)
    assert sorted(sum(t.picks[0].seconds for t in some) for some in dealt) == [6.0, 6.0]
    assert len(shares(trials, 9)) == 4 and np.sum([len(s) for s in shares(trials, 3)]) == 4

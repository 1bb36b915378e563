"""A farm of two fake machines: nothing is lost and nothing mixed up when one lies, is slow, or is
killed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from gtco.cli import main
from gtco.codegen.generate import generate
from gtco.codegen.workers import Workers
from gtco.machine.identity import Identity, identity
from gtco.machine.target import detect
from gtco.search.analytic import AnalyticPolicy
from gtco.search.records.records import Records, circumstances
from gtco.support.errors import FarmError
from gtco.tuning.farm.connection import Farm, FarmMachine
from gtco.tuning.farm.runner import FarmRunner, wanted
from gtco.tuning.measure import Measurer
from gtco.tuning.trial import Trial
from tests.tuning.farm.cluster import ROOT, TOKEN, Cluster, cluster
from tests.tuning.small import linear, small_model

# Ray is not imported here: it reads what the environment says of tokens when it is.
pytestmark = pytest.mark.skipif(
    find_spec("ray") is None or find_spec("grpc") is None,
    reason="Ray is not installed: pip install 'ray[client]'",
)


@pytest.fixture(scope="module")
def farm() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="gf"))  # short, for the names of Ray's sockets
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN", TOKEN)
        patch.setenv("RAY_AUTH_MODE", "token")
        try:
            with cluster(folder, "ann", "bob") as started:
                yield started
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def trials() -> list[Trial]:
    """Three stages with one candidate each."""
    policy = AnalyticPolicy(detect())
    stages = [linear(rows) for rows in (50, 60, 70)]
    with Workers(1) as workers:
        made = generate(stages, policy.choose, policy.target, workers)
    return [Trial(s, (made.choices[s.key],), (made.kernels[s.key],)) for s in stages]


@pytest.fixture
def behaving(farm: Cluster) -> Iterator[Any]:
    """Sets how a machine behaves; at the end of the test all are as they should be."""

    def behave(name: str, how: str) -> Path:
        (farm.folders[name] / how).touch()
        return farm.folders[name]

    yield behave
    for folder in farm.folders.values():
        for how in ("lying", "slow", "hanging"):
            (folder / how).unlink(missing_ok=True)


def measured(runner: FarmRunner, trials: list[Trial]) -> dict[str, str]:
    """Has all trials timed; the host that each was timed on, by the stage's key."""
    measurer = Measurer(None, detect(), 1, runner=runner)  # type: ignore[arg-type]
    found: dict[str, str] = {}
    for timed in measurer.time(trials, 0.1):
        assert not timed.failed and not timed.wrong
        assert timed.trial.stage.key not in found, "read twice"
        rounds, columns = timed.readings.shape
        assert rounds >= 8 and columns == 2 and (timed.readings > 0).all()
        found[timed.trial.stage.key] = Identity.from_json(timed.machine).host
    assert set(found) == {trial.stage.key for trial in trials}
    return found


def test_check_shows_the_machines(farm: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["farm", "check", farm.address, "--json"]) == 0
    ann, bob = json.loads(capsys.readouterr().out)
    assert (ann["name"], bob["name"]) == ("ann", "bob")
    here = identity()
    for one in (ann, bob):
        assert one["kind"] == here.kind and one["cores"] == here.cores and not one["said"]
        assert one["noise"] >= 0 and one["rate"] > 0


def test_a_tuning_with_a_machine_that_lies(
    farm: Cluster,
    behaving: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """ann is of another kind than it said when it joined. All that counts was measured by bob."""
    import onnx

    monkeypatch.chdir(tmp_path)
    onnx.save(small_model(), "m.onnx")
    behaving("ann", "lying")
    assert main(["tune", "m.onnx", "--trials", "6", "--farm", farm.address]) == 0
    told = capsys.readouterr()
    assert "the machine ann is not used: it is of the kind" in told.out + told.err
    with Records(tmp_path / "m.records") as records:
        rows = records.all()
    timed = [row for row in rows if row.seconds is not None and row.outcome != "chosen"]
    assert timed and {row.circumstances for row in rows} == {circumstances(detect())}
    machines = [Identity.from_json(row.machine) for row in timed]
    assert {machine.host for machine in machines} == {"bob"}
    assert {machine.kind for machine in machines} == {identity().kind}
    assert all(machine.governor and machine.features for machine in machines)


def test_a_slow_machine_costs_time_alone(
    farm: Cluster, behaving: Any, trials: list[Trial]
) -> None:
    """Both machines measure, and each reading is said to be by one of them."""
    behaving("ann", "slow")
    with Farm(farm.address) as connected:
        runner = FarmRunner(connected, wanted(connected, "")[0])
        assert runner.machines == 2
        assert {*measured(runner, trials).values()} == {"ann", "bob"}
    assert not runner.notes


OTHER_TUNING = """
import sys, time
from pathlib import Path
from gtco.tuning.farm.connection import Farm, FarmMachine
with Farm(sys.argv[1]) as farm:
    (machine,) = [m for m in farm.machines() if m.name == "ann"]
    for _ in range(6):
        asked = time.monotonic()
        farm.ask(machine, sys.argv[2], [Path(sys.argv[3]).read_bytes()])
        print(asked, time.monotonic(), flush=True)
"""


@pytest.mark.scheduled  # a minute; test_farm_runner.py has turns without Ray
def test_two_tunings_take_turns(
    farm: Cluster, behaving: Any, trials: list[Trial], tmp_path: Path
) -> None:
    """While one waits for a machine, the other gets the turn that is running and, as its request
    may have come a moment before, the next: no more.
    """
    from gtco.runtime.writing.linking import write_artifact
    from gtco.tuning.farm.machine import request
    from gtco.tuning.runner import Budget
    from gtco.tuning.trial import artifact

    library = tmp_path / "trial.so"
    write_artifact(artifact(trials[:1], detect(), 1), library)
    behaving("ann", "slow")  # a turn takes a second, and asking milliseconds
    asked = request(identity().kind, Budget(10, 0.0))
    command = [sys.executable, "-c", OTHER_TUNING, farm.address, asked, str(library)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        first = other.stdout.readline()  # it is connected, and goes on
        mine = []
        with Farm(farm.address) as connected:
            (ann,) = (m for m in connected.machines() if m.name == "ann")
            for _ in range(3):
                begin = time.monotonic()
                connected.ask(ann, asked, [library.read_bytes()])
                mine.append((begin, time.monotonic()))
        said = first + other.communicate()[0]
    assert other.returncode == 0
    ends = [float(line.split()[1]) for line in said.splitlines()]
    assert len(ends) == 6
    assert all(sum(begin < end < done for end in ends) <= 2 for begin, done in mine)


def test_a_machine_that_is_killed_in_the_middle(
    farm: Cluster, behaving: Any, trials: list[Trial]
) -> None:
    """What it was measuring is measured by the other one."""
    folder = behaving("ann", "hanging")
    killed = threading.Event()

    def kill() -> None:
        while not (folder / "started").exists():
            time.sleep(0.05)
        farm.kill("ann")
        killed.set()

    with Farm(farm.address) as connected:
        runner = FarmRunner(connected, wanted(connected, "")[0])
        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        found = measured(runner, trials)
        killer.join()
        while connected.machines() != [FarmMachine(identity().kind, "bob")]:
            time.sleep(0.1)  # until Ray has noticed
    assert killed.is_set() and {*found.values()} == {"bob"}
    (note,) = runner.notes
    assert "the machine ann was lost" in note


def test_a_kind_that_is_not_there(farm: Cluster) -> None:
    with (
        Farm(farm.address) as connected,
        pytest.raises(FarmError, match=r"has no machine of the kind m1-8c-0.*It has: "),
    ):
        wanted(connected, "m1-8c-0")

"""A tuning run that is killed or stopped loses only the measurements in flight and leaves nothing
behind. The next run continues from the records. Records that cannot be used are reported.
"""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import psutil
import pytest
from onnx import TensorProto, helper, numpy_helper

from gtco.cli import main
from gtco.runtime.publish import temporary
from gtco.search.calibration import peak
from gtco.search.records import records as kept_records
from gtco.search.records.records import Record, Records
from gtco.tuning import timing, tune
from tests.driver.test_compiler import mlp
from tests.robustness.test_interrupt import disk, leave, left, start  # noqa: F401

# Runs gtco, and prints when it begins. The machine's peak, which tuning shows, is read in a moment,
# and is not kept.
GTCO = """
from gtco.support.torchless import import_tvm
import_tvm()
from gtco.search.calibration import peak
peak.PEAK_SECONDS, peak.LEAST_HELD = 0.01, 2.0
import gtco.cli
from gtco.__main__ import main
print(flush=True)
raise SystemExit(main())
"""
SIGNALS = {signal.SIGKILL: -signal.SIGKILL, signal.SIGINT: 130, signal.SIGTERM: 143}


@pytest.fixture(autouse=True)
def short_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak, "PEAK_SECONDS", 0.01)
    monkeypatch.setattr(peak, "LEAST_HELD", 2.0)


def kept(path: Path) -> list[Record]:
    if not path.exists():
        return []
    with Records(path) as records:
        return records.all()


def products(n: int) -> onnx.ModelProto:
    """x -> n products of different sizes; each is a stage with a ReLU after it."""
    draw, nodes, weights, at, rows = np.random.default_rng(0), [], [], "x", 64
    for i in range(n):
        columns = 64 + 16 * i
        weight = draw.standard_normal((rows, columns)).astype(np.float32) / 8
        weights.append(numpy_helper.from_array(weight, f"w{i}"))
        nodes.append(helper.make_node("MatMul", [at, f"w{i}"], [f"m{i}"]))
        nodes.append(helper.make_node("Relu", [f"m{i}"], [f"r{i}"]))
        at, rows = f"r{i}", columns
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, (48, 64))]
    outputs = [helper.make_tensor_value_info(at, TensorProto.FLOAT, (48, rows))]
    graph = helper.make_graph(nodes, "products", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.mark.parametrize(
    ("turns", "stages"), [(3, 2), pytest.param(100, 6, marks=pytest.mark.scheduled)]
)
def test_what_was_measured_before_a_kill_is_kept(
    turns: int, stages: int, root: Path, tmp_path: Path
) -> None:
    """The run is killed, ended by SIGTERM or stopped by Ctrl-C, in turn: within a second after new
    records were seen or, in every fourth turn, at any moment from the start on. After each time the
    file opens and has everything that was in it, no process is left, and the next run removes the
    temporary files of a killed one. Then one run goes to its end.
    """
    draw = random.Random(turns)
    out, path, model = tmp_path / "out", tmp_path / "r", tmp_path / "m.onnx"
    out.mkdir()
    onnx.save(products(stages), model)
    command = ["tune", str(model), "-o", str(out / "m.so"), "--records", str(path)]
    seen: list[Record] = []
    by_kills: set[str] = set()
    came: Counter[str] = Counter()
    for turn in range(turns):
        number = list(SIGNALS)[turn % len(SIGNALS)]
        child = start(root, tmp_path, GTCO, *command, *("--trials", "12"))
        assert child.stdout is not None and child.stdout.readline() == "\n"
        if turn % 4 == 3:
            time.sleep(draw.uniform(0.05, 8))
        else:
            while child.poll() is None and kept(path) == seen:
                time.sleep(0.05)
            time.sleep(draw.random())
        before = kept(path)
        assert before[: len(seen)] == seen
        processes = [psutil.Process(child.pid)] if child.poll() is None else []
        processes += [p for parent in processes for p in parent.children(recursive=True)]
        child.send_signal(number)
        _, said = child.communicate(timeout=100)
        came[f"{number.name} {child.returncode}"] += 1
        ended = child.returncode == -number  # SIGTERM after the work is done, while Python ends
        assert child.returncode in (0, SIGNALS[number]) or (ended and "link" in said), said
        assert "Traceback" not in said
        if child.returncode == SIGNALS[number] > 0:
            assert f"what was measured is kept in {path}" in said or not before
        assert not psutil.wait_procs(processes, timeout=60)[1], "its processes end with it"
        behind = set(left(tmp_path / "tmp"))
        assert number == signal.SIGKILL or behind <= by_kills
        assert len(behind) <= 2, "what an earlier kill left goes when the next trial is timed"
        by_kills = behind
        seen = kept(path)
        assert seen[: len(before)] == before
    print(f"\n{turns} turns, {len(seen)} records: {dict(came)}")
    assert seen
    last_run = start(root, tmp_path, GTCO, *command, *("--trials", "4"))
    _, said = last_run.communicate(timeout=300)
    assert last_run.returncode == 0, said
    assert sorted(p.name for p in out.iterdir()) == ["m.h", "m.so"]
    assert not left(tmp_path / "tmp")
    last = kept(path)
    assert last[: len(seen)] == seen
    # except the pick that others are timed against, and configs that a noisy machine could not rank
    again = ("kept", "beaten", "noisy", "chosen")
    tried = Counter((r.stage, r.config) for r in last if r.outcome not in again)
    assert max(tried.values(), default=1) == 1, "nothing is measured twice"


def test_temporary_folders_of_the_dead_are_removed(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process that makes a folder removes those of killed processes. Those of living
    processes and of other users stay.
    """
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    script = (
        "import sys, time; from gtco.runtime.publish import temporary\n"
        "with temporary('trials') as folder:\n"
        "    (folder / 'large').write_bytes(b'x' * 1000)\n"
        "    print(folder, flush=True); time.sleep(300)\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    folders, children = [], []
    for _ in range(2):
        child = subprocess.Popen(
            [sys.executable, "-c", script],
            cwd=root,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        folders.append(Path(child.stdout.readline().strip()).parent)
        children.append(child)
    (tmp_path / "gtco-trials-of-another").mkdir()
    try:
        children[0].kill()
        children[0].wait()
        assert all(folder.is_dir() for folder in folders)
        with temporary("trials") as mine:
            assert sorted([mine.parent, folders[1]]) == sorted(tmp_path.glob("*.gtco"))
        assert not mine.exists() and folders[1].is_dir()
    finally:
        for child in children:
            child.kill()
            child.communicate()
    assert (tmp_path / "gtco-trials-of-another").is_dir()


def test_the_process_that_times_dies_with_the_one_that_tunes(root: Path) -> None:
    """However long a candidate takes: this one would take five minutes."""
    hang = (
        "import time; from gtco.tuning import timing\n"
        "timing.load = lambda _: print('hangs', flush=True) or time.sleep(300)\n"
    )
    parent = (
        "import subprocess, sys\n"
        f"script = {hang + 'timing.main(str(), 1.0, 1.0)'!r}\n"
        "child = subprocess.Popen([sys.executable, '-c', script])\n"
        "print(child.pid, flush=True); child.wait()\n"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", parent], cwd=root, stdout=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    child = psutil.Process(int(started.stdout.readline()))
    assert started.stdout.readline() == "hangs\n"
    started.kill()
    started.communicate()
    _, alive = psutil.wait_procs([child], timeout=60)
    for process in alive:
        process.kill()
    assert not alive


# records that cannot be used ------------------------------------------------------------------
@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(mlp(), tmp_path / "mlp.onnx")
    return tmp_path / "mlp.onnx"


def refused(model: Path, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The error of gtco tune about the records, which it does not change; it makes no library."""
    capsys.readouterr()
    before = path.read_bytes() if path.is_file() else None
    assert main(["tune", str(model), "--records", str(path), "--trials", "4"]) == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said and "internal failure" not in said and str(path) in said
    assert (path.read_bytes() if path.is_file() else None) == before
    assert not model.with_suffix(".so").exists()
    return said


def some(path: Path, version: int | None = None) -> Path:
    with Records(path) as records:
        records.add([Record("s", "matmul", "{}", '{"sketch": "gemm"}', "kept", time="t")] * 50)
    if version is not None:
        with sqlite3.connect(path) as base:
            base.execute(f"PRAGMA user_version = {version}")
    return path


def test_files_that_cannot_be_gone_on_from(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "version 99 of the format" in refused(model, some(tmp_path / "newer", 99), capsys)
    text = tmp_path / "text"
    text.write_text("no database" * 1000)
    assert "could not be opened" in refused(model, text, capsys)
    half = some(tmp_path / "half")
    half.write_bytes(half.read_bytes()[: half.stat().st_size // 2])
    assert "half" in refused(model, half, capsys)
    assert "is a folder" in refused(model, tmp_path, capsys)


def test_a_file_that_another_writer_holds(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = some(tmp_path / "r")
    monkeypatch.chdir(tmp_path)  # the library goes to the current folder
    monkeypatch.setattr(kept_records, "WAIT_SECONDS", 0.2)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    assert "database is locked" in refused(model, path, capsys)
    holder.execute("ROLLBACK")
    holder.close()
    assert main(["tune", str(model), "--records", str(path), "--trials", "4"]) == 0
    assert len(kept(path)) > 50


@pytest.fixture
def read_only(disk: Path) -> Iterator[Path]:  # noqa: F811
    """A file system with records, to which nothing can be written."""
    some(disk / "r")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    yield disk
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)


def test_a_place_that_cannot_be_written(
    read_only: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "could not be opened" in refused(model, read_only / "new", capsys)
    assert "readonly" in refused(model, read_only / "r", capsys)


def test_a_disk_that_fills_up_keeps_what_was_measured(
    disk: Path,  # noqa: F811
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The disk is full from the second round on. When there is space again, tuning continues."""
    monkeypatch.chdir(model.parent)  # the library goes to the current folder
    path = disk / "r"
    rounds = []
    real = tune._Tuner.round

    def filling(self: tune._Tuner) -> bool:
        rounds.append(kept(path))
        if len(rounds) == 2:
            leave(disk, 0)
        return real(self)

    monkeypatch.setattr(tune._Tuner, "round", filling)
    flags = ["--records", str(path), "--trials", "64"]
    assert main(["tune", str(model), *flags]) == 1
    said = capsys.readouterr().err
    assert "could not be written" in said and "disk is full" in said and "still there" in said
    assert len(rounds) == 2 and rounds[1] and kept(path) == rounds[1]
    assert not model.with_suffix(".so").exists()
    (disk / "junk").unlink()
    assert main(["tune", str(model), *flags]) == 0
    assert kept(path)[: len(rounds[1])] == rounds[1] and len(kept(path)) > len(rounds[1])
    assert timing.LEAST_ROUNDS and model.with_suffix(".so").exists()

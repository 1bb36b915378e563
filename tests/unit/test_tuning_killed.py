"""A run of tuning that is killed or stopped loses the measurements in flight and no other, and the
next run goes on from what is there.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import onnx
import psutil
import pytest

from gtco.search.records import Record, Records
from tests.unit.test_compiler import mlp

TUNE = "import sys; from gtco.cli import main; raise SystemExit(main(sys.argv[1:]))"


def kept(path: Path) -> list[Record]:
    if not path.exists():
        return []
    with Records(path) as records:
        return records.all()


@pytest.mark.parametrize("turns", [2, pytest.param(100, marks=pytest.mark.scheduled)])
def test_what_was_measured_before_a_kill_is_kept(turns: int, root: Path, tmp_path: Path) -> None:
    """Killed, or stopped by Ctrl-C, at a random moment after new records were seen; then run to its
    end.
    """
    draw = random.Random(turns)
    path, model = tmp_path / "r", tmp_path / "mlp.onnx"
    onnx.save(mlp(layers=3), model)
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "-c", TUNE, "tune", str(model), "--records", str(path)]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(root)}
    seen: list[Record] = []
    for turn in range(turns):
        child = subprocess.Popen(
            command, cwd=root, env=environment, stderr=subprocess.PIPE, text=True
        )
        processes = psutil.Process(child.pid).children(recursive=True)
        # a run that has nothing left to measure ends by itself
        while child.poll() is None and kept(path) == seen:
            time.sleep(0.05)
        time.sleep(draw.random())
        before = kept(path)
        assert before[: len(seen)] == seen
        if child.poll() is None:
            processes = psutil.Process(child.pid).children(recursive=True)
            os.kill(child.pid, signal.SIGINT if turn % 2 else signal.SIGKILL)
        _, said = child.communicate(timeout=100)
        assert child.returncode in (0, 130 if turn % 2 else -signal.SIGKILL), said
        if child.returncode == 130:
            assert f"what was measured is kept in {path}" in said
        seen = kept(path)
        assert seen[: len(before)] == before
        assert not psutil.wait_procs(processes, timeout=60)[1], "its processes end with it"
    assert seen
    assert subprocess.run([*command, "--trials", "4"], cwd=root, env=environment).returncode == 0
    assert (tmp_path / "mlp.so").exists()
    last = kept(path)
    assert last[: len(seen)] == seen
    # but the pick that others are timed against, and what a noisy machine could not rank
    again = ("kept", "beaten", "noisy")
    tried = Counter((r.stage, r.config) for r in last if r.outcome not in again)
    assert max(tried.values(), default=1) == 1, "nothing is measured twice"

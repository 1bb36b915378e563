"""Runs all node tests in child processes. A test that kills its process fails, and the others
continue.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.end_to_end.nodes.cases import cases

RUNNER = (sys.executable, "-m", "tests.torchless", "tests.end_to_end.nodes.runner")


def run_all(groups: Sequence[Sequence[str]], processes: int) -> dict[str, str]:
    """Each test's failure ("" if it passes), by name; ``processes`` children run at a time. ONNX
    computes all expected results when its tests are loaded, which takes seconds, so the children
    get them from here.
    """
    with tempfile.NamedTemporaryFile(suffix=".pickle") as file:
        file.write(pickle.dumps(cases()))
        file.flush()
        run = partial(run_some, command=(*RUNNER, file.name))
        with ThreadPoolExecutor(processes) as pool:
            parts = list(pool.map(run, [groups[i::processes] for i in range(processes)]))
    return {name: failure for part in parts for name, failure in part.items()}


def run_some(groups: Sequence[Sequence[str]], command: Sequence[str]) -> dict[str, str]:
    """Runs these tests in one child, and starts another one after each that died. The tests of the
    group that killed it are then run one by one.
    """
    found: dict[str, str] = {}
    left = [list(group) for group in groups]
    while left:
        child = subprocess.run(
            command,
            input="\n".join(map(" ".join, left)),
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).resolve().parents[3],
            check=False,
        )
        for line in child.stdout.splitlines():
            if line.startswith('{"name"'):
                result = json.loads(line)
                found[result["name"]] = result["failure"]
        left = [rest for group in left if (rest := [name for name in group if name not in found])]
        if left and len(left[0]) > 1:
            left[:1] = [[name] for name in left[0]]
        elif left:
            found[left[0][0]] = f"its process died with status {child.returncode}"
            del left[0]
    return found

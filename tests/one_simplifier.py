"""A process for onnxsim that outlives a compile. Each compile of an ONNX model starts Python and
imports onnxsim, 0.4 s of CPU. To simplify a small model takes a hundredth of that.

The process here has imported onnxsim, and forks for each model. The fork runs the same script as
the process of a compile, and its failures are the same. A test that gives onnxsim a time, or
another script, has the process of a compile, and so has a test that starts ``gtco`` as a process.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from gtco.frontend import simplify
from gtco.frontend.onnx import load_onnx
from tests.one_set_of_workers import surroundings

SCRIPT = simplify._CHILD
SECONDS = inspect.signature(load_onnx).parameters["simplify_timeout"].default

# The first line is the script, each other line its arguments for a model. An answer is the exit
# code and what the script said.
_SERVER = """
import json, os, sys, tempfile, traceback
sys.modules["torch"] = sys.modules["sympy"] = None
import onnx, onnxsim
script = json.loads(sys.stdin.readline())
for line in sys.stdin:
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.dup2(said.fileno(), 2)
                sys.argv[1:] = json.loads(line)
                exec(script, {})
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        print(json.dumps([code, said.read().decode(errors="replace")]), flush=True)
"""

_kept: list[tuple[dict[str, str], subprocess.Popen[str]]] = []
_one_at_a_time = threading.Lock()


class OneSimplifier:
    """Stands for the module ``subprocess`` in ``gtco.frontend.simplify``."""

    DEVNULL = subprocess.DEVNULL
    TimeoutExpired = subprocess.TimeoutExpired

    @staticmethod
    def run(command: Sequence[str], *, timeout: float, **given: Any) -> Any:
        """What ``subprocess.run`` returns."""
        _, _, script, *arguments = command
        if script != SCRIPT or timeout != SECONDS:
            return subprocess.run(command, timeout=timeout, **given)
        mine = f"/proc/{os.getpid()}/"
        with _one_at_a_time:
            line = json.dumps([a.replace("/proc/self/", mine) for a in arguments])
            code, said = json.loads(asked(line))
        return subprocess.CompletedProcess(command, code, "", said)


def asked(line: str) -> str:
    """The answer of the process, which is started if there is none that can be used."""
    setting = surroundings()
    if not _kept or _kept[0][0] != setting:
        end()
        process = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            start_new_session=True,
        )
        _kept.append((setting, process))
        print(json.dumps(SCRIPT), file=process.stdin)
    process = _kept[0][1]
    assert process.stdin and process.stdout
    print(line, file=process.stdin, flush=True)
    answer = process.stdout.readline()
    assert answer, f"onnxsim's process ended with {process.wait()}"
    return answer


def end() -> None:
    """Ends the process."""
    for _, process in _kept:
        process.communicate()
    _kept.clear()

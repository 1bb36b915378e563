"""The process that one system lives in while it is timed: JSON lines on its standard input and
output.

The harness writes one request a line and reads one reply a line::

    {"do": "open", "job": {...}}       -> {"ok": true, "version": "1.31.1"}
    {"do": "warm", "seconds": 1.0}     -> {"ok": true, "seconds": 0.0143, "calls": 70}
    {"do": "time", "calls": 8}         -> {"ok": true, "seconds": [0.0141, ...]}
    {"do": "save", "file": "out.npz"}  -> {"ok": true, "outputs": 2}
    {"do": "read"}                     -> {"ok": true, "value": 2.3e11}

``warm`` answers the median call; ``time`` makes some calls more, first, and throws them away;
``save`` writes the outputs in the model's order; ``read`` answers the first output as one number. A
failure answers ``{"ok": false, "error": "..."}`` and leaves the process able to answer again.
Between requests the harness stops the process (SIGSTOP), so that its spinning threads do not take
the cores from the system being timed.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

import numpy as np

from gtco.codegen.processes import die_with_parent

Arrays = Mapping[str, np.ndarray]
Job = Mapping[str, Any]


@dataclass(frozen=True)
class System:
    """A loaded model. ``call()`` runs it once on its fixed inputs; ``outputs()`` runs it and gives
    numpy arrays in order.
    """

    version: str
    call: Callable[[], Any]
    outputs: Callable[[], list[np.ndarray]]


Opener = Callable[[Job], System]
CLOCK = time.perf_counter
WAKING = 0.05  # seconds of calls that do not count, one at least


def serve(openers: Mapping[str, Opener]) -> None:
    """Answers requests until the input closes. A job's ``system`` says which opener loads it."""
    system: System | None = None

    def handle(request: Mapping[str, Any]) -> dict[str, Any]:
        nonlocal system
        if request["do"] == "open":
            system = openers[request["job"]["system"]](request["job"])
            return {"version": system.version}
        if system is None:
            raise RuntimeError("no system is open")
        return ACTIONS[request["do"]](system, request)

    answer(handle)


def answer(handle: Callable[[Mapping[str, Any]], dict[str, Any]]) -> None:
    """Answers each request with a line of JSON until the input closes; an exception becomes the
    answer.
    """
    replies = _private_stdout()
    die_with_parent()  # else a killed harness would leave stopped processes behind
    for line in sys.stdin:
        try:
            reply = {"ok": True, **handle(json.loads(line))}
        except Exception as error:
            reply = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)


def _warm(system: System, request: Mapping[str, Any]) -> dict[str, Any]:
    """Calls the system for the given time, at least three times. This compiles what is compiled
    lazily, and measures the time of a call.
    """
    seconds: list[float] = []
    end = CLOCK() + float(request["seconds"])
    while len(seconds) < 3 or CLOCK() < end:
        seconds.append(_timed(system.call))
    settled = seconds[len(seconds) // 2 :]
    return {"seconds": statistics.median(settled), "calls": len(seconds)}


def _time(system: System, request: Mapping[str, Any]) -> dict[str, Any]:
    # after a stop caches are cold, threads asleep, and a GPU's clocks low
    end = CLOCK() + WAKING
    system.call()
    while CLOCK() < end:
        system.call()
    return {"seconds": [_timed(system.call) for _ in range(int(request["calls"]))]}


def _save(system: System, request: Mapping[str, Any]) -> dict[str, Any]:
    outputs = system.outputs()
    np.savez(request["file"], *outputs)
    return {"outputs": len(outputs)}


def _read(system: System, request: Mapping[str, Any]) -> dict[str, Any]:
    return {"value": float(system.outputs()[0].item())}


ACTIONS: dict[str, Callable[[System, Mapping[str, Any]], dict[str, Any]]] = {
    "warm": _warm,
    "time": _time,
    "save": _save,
    "read": _read,
}


def _timed(call: Callable[[], Any]) -> float:
    start = CLOCK()
    call()
    return CLOCK() - start


def _private_stdout() -> TextIO:
    """The real standard output, for replies. Output that a library prints goes to standard error
    instead.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


if __name__ == "__main__":
    from .peers import OPENERS

    serve(OPENERS)

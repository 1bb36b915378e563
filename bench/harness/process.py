"""A worker process as the harness sees it: starts it, sends requests, stops and kills it."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gtco

CALL_TIMEOUT = 300.0  # seconds
ROOT = Path(gtco.__file__).resolve().parents[1]


class WorkerError(Exception):
    """A system failed, hung, or its process ended; the text is the reason that the table shows."""


class Worker:
    """A worker process and the harness's end of the line protocol. Every request wakes the process;
    ``stop`` puts it back to sleep.
    """

    def __init__(self, command: Sequence[str]):
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=child_environment(),
            # A group of its own: its children stop and end with it. No session of its own: Linux
            # shares a CPU between sessions first, not between threads (sched_autogroup).
            preexec_fn=os.setpgrp,
        )
        self._buffer = b""

    def ask(self, timeout: float = CALL_TIMEOUT, **request: Any) -> dict[str, Any]:
        """Sends one request and waits for its reply. Raises ``WorkerError`` with the reason if
        there is no good reply.
        """
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise WorkerError(self._epitaph()) from None
        reply = json.loads(self._line(timeout))
        if not reply.pop("ok"):
            raise WorkerError(reply["error"])
        return reply

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            try:
                if pipe is not None:
                    pipe.close()
            except OSError:
                pass  # bytes that could not be sent to a process that has ended

    def _line(self, timeout: float) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise WorkerError(f"no answer in {timeout:.0f} s")
                chunk = os.read(self._process.stdout.fileno(), 1 << 16)
                if not chunk:
                    raise WorkerError(self._epitaph())
                self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass  # it has ended; the next request reports that

    def _epitaph(self) -> str:
        """How the process ended, with the last lines that it wrote."""
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return "it closed its output and did not end"
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._errors.seek(0)
        tail = self._errors.read().decode(errors="replace").strip().splitlines()[-3:]
        return f"the process ended ({how})" + (": " + " | ".join(tail) if tail else "")


def child_environment() -> dict[str, str]:
    """This process's environment, with its import path: a child finds the same packages."""
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    return {**os.environ, "PYTHONPATH": path}

"""Building kernels in worker processes: all cores busy, and a crash of the compiler is an answer,
not the end.

Workers are forked from a server process that has imported TVM once. A job whose worker dies or
overruns its time becomes a :class:`Failure`; the worker is replaced and the other jobs go on.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from gtco.codegen.build import Failure, Job, Kernel

TIMEOUT = 120.0  # seconds for one kernel


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gtco.codegen.build"])
    return context


def warm_up() -> None:
    """Start the fork server, so that TVM is imported there while the caller reads the model."""
    process = _context().Process(target=_nothing, daemon=True)
    process.start()


def _nothing() -> None:
    return None


def _serve(connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from gtco.codegen.build import build

    while True:
        try:
            job: Job = connection.recv()
        except EOFError:
            return
        try:
            answer: Kernel | Failure = build(job)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            answer = Failure(
                job.symbol,
                f"{type(error).__name__}: {_first_line(error)} ({os.path.basename(last.filename)}:"
                f"{last.lineno})",
            )
        connection.send(answer)


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


@dataclass
class _Worker:
    process: Any
    connection: Connection
    job: Job | None = None
    started: float = 0.0


class Workers:
    """A few processes that build jobs; use as a context manager."""

    def __init__(
        self, count: int, *, serve: Callable[[Connection], None] = _serve, timeout: float = TIMEOUT
    ) -> None:
        self.count, self.serve, self.timeout = max(1, count), serve, timeout
        self.workers: list[_Worker] = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.connection.close()
            worker.process.terminate()
        for worker in self.workers:
            worker.process.join(5)
        self.workers = []

    def build(self, jobs: Iterable[Job]) -> Iterator[Kernel | Failure]:
        """Every job's answer, as it comes."""
        waiting = deque(jobs)
        while waiting or any(w.job for w in self.workers):
            while waiting and len(self.workers) < self.count:
                self.workers.append(self._start())
            for worker in self.workers:
                if waiting and worker.job is None:
                    worker.job, worker.started = waiting.popleft(), time.monotonic()
                    try:
                        worker.connection.send(worker.job)
                    except (BrokenPipeError, ConnectionError):
                        pass  # found dead below, by its sentinel
            yield from self._collect()

    def _start(self) -> _Worker:
        context = _context()
        ours, theirs = context.Pipe()
        process = context.Process(target=self.serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def _collect(self) -> Iterator[Kernel | Failure]:
        busy = [w for w in self.workers if w.job]
        ready = wait([w.connection for w in busy], timeout=1.0)
        for worker in busy:
            assert worker.job is not None
            if worker.connection in ready:
                try:
                    answer = worker.connection.recv()
                except (EOFError, OSError):
                    worker.process.join(5)
                    answer = Failure(
                        worker.job.symbol,
                        f"the compiler's process died ({_death(worker.process.exitcode)})",
                    )
                    self.workers.remove(worker)
                worker.job = None
                yield answer
            elif time.monotonic() - worker.started > self.timeout:
                worker.process.kill()
                self.workers.remove(worker)
                yield Failure(worker.job.symbol, f"code generation took over {self.timeout:.0f} s")


def _death(code: int | None) -> str:
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"

"""Building kernels in worker processes: all cores busy, and a crash of the compiler is an answer,
not the end.

Workers are fresh interpreters (:mod:`gtco.codegen.serve`), not forks: a fork after TVM has started
threads may hang, and multiprocessing's own would run the user's script again. A job whose worker
dies or overruns its time becomes a :class:`Failure`; the worker is replaced and the other jobs go
on.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from gtco.codegen.build import Failure, Job, Kernel, ProgramJob

TIMEOUT = 120.0  # seconds for one kernel
WHOLE = 5  # times that for the one kernel of a whole model
ENDING = 5.0  # seconds that a process may take to end once it has closed its socket
COMMAND = (sys.executable, "-m", "gtco.codegen.serve")


def environment() -> dict[str, str]:
    """Of a Python process that is to find this package, which may be run from its source folder."""
    root = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path])}


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    job: Job | ProgramJob | None = None
    started: float = 0.0


class Workers:
    """A few processes that build jobs; they start at once, to import TVM while the caller works.

    Use as a context manager. ``timeout``: seconds of ``clock`` for one job.
    """

    def __init__(
        self,
        count: int,
        *,
        command: Sequence[str] = COMMAND,
        timeout: float = TIMEOUT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.count, self.command, self.timeout = max(1, count), tuple(command), timeout
        self.workers: list[_Worker] = []
        try:
            for _ in range(self.count):
                self.workers.append(self._start())
        except BaseException:  # a signal among them: nobody else knows of those that are there
            self.__exit__()
            raise

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.connection.close()
            worker.process.kill()
        for worker in self.workers:
            worker.process.wait()
        self.workers = []

    def build(self, jobs: Iterable[Job | ProgramJob]) -> Iterator[Kernel | Failure]:
        """Every job's answer, as it comes."""
        waiting = deque(jobs)
        while waiting or any(w.job for w in self.workers):
            while waiting and len(self.workers) < self.count:
                self.workers.append(self._start())
            for worker in self.workers:
                if waiting and worker.job is None:
                    worker.job, worker.started = waiting.popleft(), self.clock()
                    with suppress(OSError):  # a dead worker is noticed when its answer is read
                        worker.connection.send(worker.job)
            yield from self._collect()

    def _start(self) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [*self.command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment(),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the parent's to handle, from the first moment
            )
        return _Worker(process, Connection(ours.detach()))

    def _collect(self) -> Iterator[Kernel | Failure]:
        busy = [w for w in self.workers if w.job]
        ready = wait([w.connection for w in busy], timeout=1.0)
        for worker in busy:
            assert worker.job is not None
            if worker.connection in ready:
                answer = self._answer(worker, worker.job)
                worker.job = None
                yield answer
            elif self.clock() - worker.started > (most := self._most(worker.job)):
                self._drop(worker)
                yield Failure(worker.job.symbol, f"code generation took over {most:.0f} s")

    def _most(self, job: Job | ProgramJob) -> float:
        """Seconds that the job may take."""
        return self.timeout * (WHOLE if isinstance(job, ProgramJob) else 1)

    def _answer(self, worker: _Worker, job: Job | ProgramJob) -> Kernel | Failure:
        try:
            answer = worker.connection.recv()
            assert isinstance(answer, Kernel | Failure)
            return answer
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):  # how it ends by itself is what is told
                worker.process.wait(ENDING)
            self._drop(worker)
            return Failure(
                job.symbol, f"the compiler's process died ({_death(worker.process.returncode)})"
            )

    def _drop(self, worker: _Worker) -> None:
        worker.connection.close()
        worker.process.kill()
        worker.process.wait()
        self.workers.remove(worker)


def _death(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"

"""Builds kernels in worker processes, on all cores. A crash of the compiler becomes an answer and
does not end the compile.

Workers are forks of one fresh interpreter that has imported TVM (:mod:`gtco.codegen.fork_server`).
They are not forks of the caller's process: a fork of a process with threads may hang, and
multiprocessing's own servers would run the user's script again. If the worker of a job dies or
takes too long, the job becomes a :class:`Failure`, the worker is replaced, and the other jobs go
on.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from gtco.codegen.jobs import Failure, Job, Kernel, ProgramJob
from gtco.codegen.processes import ENDING, Forked, Forks, Spawned, forks
from gtco.machine.cores import allowed_cores

TIMEOUT = 120.0  # seconds for one kernel
WHOLE = 5  # times that for the one kernel of a whole model
READ_BYTES = 1 << 20  # of a message at once


@dataclass
class _Worker:
    process: Spawned | Forked
    connection: Connection
    job: Job | ProgramJob | None = None
    started: float = 0.0
    inbox: bytearray = field(default_factory=bytearray)

    def receive(self) -> Any:
        """What the process has sent, once all of it is there; None before that. Waits for nothing
        where the connection is ready: ``Connection.recv`` would wait for the rest of a message from
        a process that stopped in the middle of it. Raises ``EOFError`` at the end.
        """
        read = os.read(self.connection.fileno(), READ_BYTES)
        if not read:
            raise EOFError
        self.inbox += read
        begin, nbytes = _message(self.inbox)
        if len(self.inbox) < begin + nbytes:
            return None
        message = pickle.loads(memoryview(self.inbox)[begin : begin + nbytes])
        del self.inbox[: begin + nbytes]
        return message


def _message(inbox: bytearray) -> tuple[int, int]:
    """Where the first message begins and its bytes, as multiprocessing's connections have it: its
    length in four bytes, or -1 and then its length in eight.
    """
    if len(inbox) < 4:
        return 4, 0
    (nbytes,) = struct.unpack_from("!i", inbox)
    if nbytes != -1:
        return 4, nbytes
    return 12, struct.unpack_from("!Q", inbox, 4)[0] if len(inbox) >= 12 else 0


class Workers:
    """Up to ``count`` processes that build jobs. Those that the cores can run start at once, to
    import TVM while the caller works, the others where there are jobs for them.

    Use as a context manager. ``timeout``: seconds of ``clock`` for one job. ``command``: what to
    start in the place of gtco's own processes, each with the number of a socket behind it.
    """

    def __init__(
        self,
        count: int,
        *,
        command: Sequence[str] = (),
        timeout: float = TIMEOUT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.count, self.command, self.timeout = max(1, count), tuple(command), timeout
        self.workers: list[_Worker] = []
        self.forks: Forks | None = None
        try:
            for _ in range(min(self.count, allowed_cores())):
                self.workers.append(self._start())
        except BaseException:  # a signal among them: nobody else knows of those that are there
            self.__exit__()
            raise

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.connection.close()
        if self.forks is not None:
            self.forks.close()
        for worker in self.workers:
            if isinstance(worker.process, Spawned):
                worker.process.end()
        self.workers, self.forks = [], None

    def build(self, jobs: Iterable[Job | ProgramJob]) -> Iterator[Kernel | Failure]:
        """Yields the answer of every job, as it comes."""
        waiting = deque(jobs)
        while waiting or any(w.job for w in self.workers):
            busy = sum(w.job is not None for w in self.workers)
            while len(self.workers) < min(self.count, busy + len(waiting)):
                self.workers.append(self._start())
            for worker in self.workers:
                if waiting and worker.job is None:
                    worker.job, worker.started = waiting.popleft(), self.clock()
                    with suppress(OSError):  # a dead worker is noticed when its answer is read
                        worker.connection.send(worker.job)
            yield from self._collect()

    def _start(self) -> _Worker:
        ours, theirs = socket.socketpair()
        # A process that stopped reading is not waited for without end either.
        patience = struct.pack("ll", max(int(self.timeout), 1), 0)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
        with theirs:
            process = self._process(theirs)
        return _Worker(process, Connection(ours.detach()))

    def _process(self, theirs: socket.socket) -> Spawned | Forked:
        if self.command:
            return Spawned(self.command, theirs)
        if self.forks is None or not self.forks.alive:
            self.forks = forks()
        return self.forks.start(theirs)

    def _collect(self) -> Iterator[Kernel | Failure]:
        busy = [w for w in self.workers if w.job]
        ready = wait([w.connection for w in busy], timeout=1.0)
        for worker in busy:
            assert worker.job is not None
            answer = self._answer(worker, worker.job) if worker.connection in ready else None
            if answer is not None:
                worker.job = None
                yield answer
            elif self.clock() - worker.started > (most := self._most(worker.job)):
                self._drop(worker)
                yield Failure(worker.job.symbol, f"code generation took over {most:.0f} s")

    def _most(self, job: Job | ProgramJob) -> float:
        """Seconds that the job may take."""
        return self.timeout * (WHOLE if isinstance(job, ProgramJob) else 1)

    def _answer(self, worker: _Worker, job: Job | ProgramJob) -> Kernel | Failure | None:
        """The answer, or None as long as it has not arrived as a whole."""
        try:
            answer = worker.receive()
            assert answer is None or isinstance(answer, Kernel | Failure)
            return answer
        except (EOFError, OSError):  # how it ends by itself is what is told
            code = self._drop(worker, ENDING)
            return Failure(job.symbol, f"the compiler's process died ({_death(code)})")

    def _drop(self, worker: _Worker, patience: float = 0.0) -> int:
        """Ends a process that is of no more use, and gives its exit code."""
        worker.connection.close()
        code = worker.process.end(patience)
        self.workers.remove(worker)
        return code


def _death(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"

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
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

from gtco.codegen.jobs import Failure, Job, Kernel, ProgramJob
from gtco.codegen.processes import ENDING, NO_PROCESS, Forked, Forks, Spawned, forks
from gtco.machine.cores import allowed_cores
from gtco.support.errors import BuildError

TIMEOUT = 120.0  # seconds for one kernel
WHOLE = 5  # times that for the one kernel of a whole model
READ_BYTES = 1 << 20  # bytes of a message that are read at once
Waiting = deque[tuple[Job | ProgramJob, bytes]]  # jobs, and these as messages


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
        waiting: Waiting = deque(map(message, jobs))
        while waiting or self.busy:
            self.hand_out(waiting)
            yield from (answer for _, answer in self.collect())

    def ahead(self) -> Ahead:
        """For jobs to be built while the caller does something else."""
        return Ahead(self)

    @property
    def busy(self) -> list[_Worker]:
        return [w for w in self.workers if w.job]

    def hand_out(self, waiting: Waiting) -> list[Job | ProgramJob]:
        """Gives each worker that has none a job, and gives these jobs."""
        many, given = len(self.busy), []
        while len(self.workers) < min(self.count, many + len(waiting)):
            self.workers.append(self._start())
        for worker in self.workers:
            if waiting and worker.job is None:
                (worker.job, text), worker.started = waiting.popleft(), self.clock()
                given.append(worker.job)
                with suppress(OSError):  # a dead worker is noticed when its answer is read
                    worker.connection.send_bytes(text)
        return given

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

    def collect(
        self, *others: socket.socket
    ) -> Iterator[tuple[Job | ProgramJob, Kernel | Failure]]:
        """Waits a moment for answers, or until one of ``others`` can be read. Yields the jobs that
        have one by then, with it.
        """
        busy = self.busy
        ready = wait([*(w.connection for w in busy), *others], timeout=1.0)
        for worker in busy:
            job = worker.job
            assert job is not None
            answer = self._answer(worker, job) if worker.connection in ready else None
            if answer is not None:
                worker.job = None
                yield job, answer
            elif self.clock() - worker.started > (most := self._most(job)):
                self._drop(worker)
                yield job, Failure(job.symbol, f"code generation took over {most:.0f} s")

    def _most(self, job: Job | ProgramJob) -> float:
        """Seconds that the job may take."""
        return self.timeout * (WHOLE if isinstance(job, ProgramJob) else 1)

    def _answer(self, worker: _Worker, job: Job | ProgramJob) -> Kernel | Failure | None:
        """The answer, or None as long as it has not arrived as a whole."""
        try:
            answer = worker.receive()
            assert answer is None or isinstance(answer, Kernel | Failure)
            return answer
        except (EOFError, OSError):  # what is told is the exit code with which it ends by itself
            code = self._drop(worker, ENDING)
            if code == NO_PROCESS:
                raise BuildError(
                    "no process for building kernels can be started: allow more processes (ulimit "
                    "-u, a container's limit of pids), or free memory"
                ) from None
            return Failure(job.symbol, f"the compiler's process died ({_death(code)})")

    def _drop(self, worker: _Worker, patience: float = 0.0) -> int:
        """Ends a process that is of no more use, and gives its exit code."""
        worker.connection.close()
        code = worker.process.end(patience)
        self.workers.remove(worker)
        return code


class Ahead:
    """Jobs that the workers build while their caller does something else. A thread hands them out,
    and nothing else may use the workers until it has ended.

    Use as a context manager: it ends with the context, and what is not built by then never is.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._lock = threading.Lock()  # it guards the jobs that are not begun
        self._waiting: Waiting = deque()
        self._spare: Waiting = deque()
        self._order: list[str] = []
        self._answers: dict[str, Kernel | Failure] = {}
        self._begun: dict[str, Job | ProgramJob] = {}  # the last guess of each symbol
        self._guessed: dict[str, tuple[Job | ProgramJob, Kernel | Failure]] = {}
        self._error: BaseException | None = None
        self._ours, self._theirs = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="gtco-workers")

    def __enter__(self) -> Ahead:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ours.close()  # the thread ends, and leaves its workers busy
        self._thread.join()
        self._theirs.close()

    def add(self, jobs: Iterable[Job | ProgramJob]) -> None:
        """Jobs to be built after those before. No two of all may have one symbol."""
        # made into messages here: who calls goes on to ask its stages, which remember answers
        new = [*map(message, jobs)]
        self._order += [job.symbol for job, _ in new]
        with self._lock:
            self._waiting.extend(new)
        self._say(b"+")

    def guess(self, jobs: Iterable[Job]) -> None:
        """Jobs that may be wanted later, for workers that nothing else waits for. They take the
        place of those that were guessed before and are not begun.
        """
        new = deque(message(job) for job in jobs if self._begun.get(job.symbol) != job)
        with self._lock:
            self._spare = deque(one for one in new if self._begun.get(one[0].symbol) != one[0])
        self._say(b"+")

    def so_far(self) -> list[Kernel | Failure]:
        """The answers that are there, in the order of the jobs."""
        there = dict(self._answers)
        return [there[symbol] for symbol in self._order if symbol in there]

    def answers(self) -> list[Kernel | Failure]:
        """Waits for all answers, and gives them in the order of the jobs. Guesses that are not
        begun are forgotten.
        """
        with self._lock:
            self._spare = deque()
        self._say(b".")
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self.so_far()

    def guessed(self) -> dict[str, tuple[Job | ProgramJob, Kernel | Failure]]:
        """The guesses that were built, and their answers; the last of each symbol."""
        return dict(self._guessed)

    def _say(self, word: bytes) -> None:
        with suppress(OSError):  # the thread has ended, and why is told by its error
            self._ours.send(word)

    def _run(self) -> None:
        workers, last = self._workers, False
        guesses: dict[int, Job | ProgramJob] = {}  # guesses that are being built, by their ids
        try:
            while self._waiting or workers.busy or not last:
                with self._lock:
                    workers.hand_out(self._waiting)
                    for job in workers.hand_out(self._spare):
                        guesses[id(job)] = self._begun[job.symbol] = job
                for job, answer in workers.collect(self._theirs):
                    if guesses.pop(id(job), None) is not None:
                        self._guessed[job.symbol] = job, answer
                    else:
                        self._answers[job.symbol] = answer
                if wait([self._theirs], timeout=0):
                    said = self._theirs.recv(READ_BYTES)
                    last = last or b"." in said
                    if not said:
                        return
        except BaseException as error:
            self._error = error


def message(job: Job | ProgramJob) -> tuple[Job | ProgramJob, bytes]:
    return job, bytes(ForkingPickler.dumps(job))


def _death(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"

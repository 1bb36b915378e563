"""The processes that kernels are built in, as :class:`gtco.codegen.workers.Workers` sees them: they
are started, and ended with an exit code. This module imports no TVM, so that processes can start
before TVM is imported.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

ENDING = 5.0  # seconds that a process may take to end once it has closed its socket
THREADS = "GTCO_NUM_THREADS"  # the runtime reads it, before the number of the compile
NO_PROCESS = 71  # what is told as the exit code of a process that could not be started
PR_SET_PDEATHSIG = 1
# `python -m` has the current folder first on its path. A user may have a random.py there.
RUN_MODULE = (
    "import sys\n"
    "if sys.path[:1] == ['']: del sys.path[0]\n"
    "import runpy\n"
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)

_early: list[Forks] = []  # forks of this process, until Workers take them


def environment() -> dict[str, str]:
    """The environment of a Python process that must find this package, which may be run from its
    source folder. Such a process may measure a library, which has to run with the threads that it
    was compiled for. So the user's number of threads for deployments is left out.
    """
    root = str(Path(__file__).resolve().parents[2])
    known = {**os.environ}
    known.pop(THREADS, None)
    return {**known, "PYTHONPATH": os.pathsep.join([root, *sys.path])}


def python(module: str) -> tuple[str, ...]:
    """The command that runs a module in a Python process, which imports nothing from the current
    folder. The module's arguments come behind it. Its environment is :func:`environment`.
    """
    return (sys.executable, "-c", RUN_MODULE, module)


def die_with_parent() -> None:
    """Asks Linux to kill this process when its parent ends, for whatever reason."""
    with suppress(OSError, AttributeError):  # elsewhere the parent has to end in order
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Spawned:
    """A process of its own: ``command``, followed by the number of its socket."""

    def __init__(self, command: Sequence[str], theirs: socket.socket) -> None:
        self.process = _popen(command, theirs, environment())
        self.pid = self.process.pid

    def end(self, patience: float = 0.0) -> int:
        """Its exit code; it is killed where it has not ended by itself in ``patience`` seconds."""
        if patience:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)
        self.process.kill()
        return self.process.wait()


class Forks:
    """Processes forked from one that has imported TVM (:mod:`gtco.codegen.fork_server`)."""

    def __init__(self) -> None:
        # Messages keep apart. BLAS threads would forbid to fork, and building kernels uses none.
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            setting = {**environment(), "OPENBLAS_NUM_THREADS": "1"}
            self.process = _popen(python("gtco.codegen.fork_server"), theirs, setting)
        self.started = 0

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def start(self, theirs: socket.socket) -> Forked:
        """A process that answers on that socket, soon: this does not wait for it."""
        with suppress(OSError):  # a dead server is noticed when an answer is read
            socket.send_fds(self.socket, [b"start"], [theirs.fileno()])
        self.started += 1
        return Forked(self, self.started - 1)

    def end(self, number: int, patience: float) -> int:
        """The exit code of the process with that number, as :meth:`Spawned.end`; that of the server
        where it is gone itself, and all its processes with it."""
        try:
            self.socket.settimeout(patience + ENDING)
            self.socket.send(f"end {number} {patience}".encode())
            if answer := self.socket.recv(64):
                return int(answer)
        except OSError:
            pass
        self.close()
        return self.process.wait()

    def close(self) -> None:
        """Ends the server and all its processes."""
        self.socket.close()
        self.process.terminate()  # while it imports; later it ends its processes, then itself
        try:
            self.process.wait(ENDING)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Forked:
    """One of the processes of :class:`Forks`."""

    def __init__(self, forks: Forks, number: int) -> None:
        self.forks, self.number = forks, number

    def end(self, patience: float = 0.0) -> int:
        """As :meth:`Spawned.end`."""
        return self.forks.end(self.number, patience)


@contextmanager
def early() -> Iterator[None]:
    """Starts the processes' server before the first :class:`Workers` of this context asks for it,
    so that it imports while this process imports.
    """
    forks = Forks()
    _early.append(forks)
    try:
        yield
    finally:
        if forks in _early:
            _early.remove(forks)
            forks.close()


def forks() -> Forks:
    """A server of the caller's own."""
    return _early.pop() if _early else Forks()


def _popen(
    command: Sequence[str], theirs: socket.socket, setting: dict[str, str]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*command, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env=setting,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is the parent's to handle, from the first moment
    )

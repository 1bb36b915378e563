"""The process that the workers are forked from: ``python -m gtco.codegen.fork_server FD``.

TVM is imported once, whatever the number of workers: they start with what it has read, and share
its memory. Asked on the socket FD, which keeps messages apart: a file with a message is the socket
of a new worker; ``end N SECONDS`` ends the N-th one, after the seconds that it may take to end by
itself, and is answered with its exit code. When the socket closes, all of them end, and then this.

A fork is of the one thread that calls it, so it is sound where there is no other: numpy's BLAS is
told to start none, LLVM starts none, and where something else did, workers are processes that
import TVM by themselves.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NoReturn

from gtco.codegen.processes import NO_PROCESS, die_with_parent, python
from gtco.support.garbage import uncollected

NOT_STARTED = 0  # in the place of a process's number


class ForkServer:
    """The workers that were asked for, in that order."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.workers: list[int] = []
        self.codes: dict[int, int] = {}

    def run(self) -> None:
        """Answer until the socket closes."""
        with suppress(ConnectionError):
            while True:
                message, files, _, _ = socket.recv_fds(self.control, 64, 1)
                if not message:
                    return
                if files:
                    self.workers.append(self._start(files[0]))
                    os.close(files[0])
                else:
                    _, number, patience = message.split()
                    code = self.end(int(number), float(patience))
                    self.control.send(str(code).encode())

    def end(self, number: int, patience: float) -> int:
        """The exit code of a worker that ends now; minus the signal's number where one ended it."""
        pid = self.workers[number]
        if pid == NOT_STARTED:
            return NO_PROCESS
        if number not in self.codes:
            self.codes[number] = os.waitstatus_to_exitcode(_ended(pid, patience))
        return self.codes[number]

    def close(self) -> None:
        for number, pid in enumerate(self.workers):
            if pid != NOT_STARTED and number not in self.codes:
                os.kill(pid, signal.SIGKILL)
        for number in range(len(self.workers)):
            self.end(number, 0.0)

    def _start(self, file: int) -> int:
        try:
            if len(os.listdir("/proc/self/task")) > 1:
                command = [*python("gtco.codegen.serve"), str(file)]
                return subprocess.Popen(command, pass_fds=[file], stdin=subprocess.DEVNULL).pid
            pid = os.fork()
        except OSError as error:
            print(f"gtco: no process for building kernels can be started: {error}", file=sys.stderr)
            return NOT_STARTED
        if pid == 0:
            self._work(file)
        return pid

    def _work(self, file: int) -> NoReturn:
        """What a fork does, to its end."""
        code = 1
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self.control.close()
            # A worker that hangs could not be ended without the process that it is a child of.
            die_with_parent()
            serve(Connection(file))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)


def _ended(pid: int, patience: float) -> int:
    """The status of a child, which is killed where it has not ended by itself in time."""
    until = time.monotonic() + patience
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        if time.monotonic() >= until:
            os.kill(pid, signal.SIGKILL)
            return os.waitpid(pid, 0)[1]
        time.sleep(0.01)


if __name__ == "__main__":
    with uncollected():
        from gtco.codegen.serve import serve

        gc.freeze()  # what was imported is not garbage, and a worker that looks at it would copy it
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, nobody would know how workers end
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from here on the socket says when to end
    server = ForkServer(socket.socket(fileno=int(sys.argv[1])))
    try:
        server.run()
    finally:
        server.close()

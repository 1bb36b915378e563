"""A worker's process: ``python -m gtco.codegen.serve FD`` answers jobs on the socket FD until it
closes.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

from gtco.support.errors import describe
from gtco.support.garbage import uncollected
from gtco.support.torchless import import_tvm

import_tvm()
from gtco.codegen.build import build  # noqa: E402
from gtco.codegen.jobs import Failure, Job, Kernel, ProgramJob  # noqa: E402


def serve(connection: Connection) -> None:
    """Answer each :class:`Job` with a :class:`Kernel` or, whatever went wrong, a failure."""
    while True:
        try:
            job: Job | ProgramJob = connection.recv()
        except (EOFError, ConnectionError):
            return
        try:
            connection.send(answer(job))
        except ConnectionError:  # the compile has ended without waiting for it
            return


def answer(job: Job | ProgramJob) -> Kernel | Failure:
    """The job's kernel or, after any exception, a failure that says which exception and where."""
    try:
        with uncollected():
            return build(job)
    except Exception as error:
        return Failure(job.symbol, describe(error))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))

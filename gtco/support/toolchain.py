"""The C compiler, which links kernels. Only this module runs it."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from gtco.support.errors import BuildError


class Compiling:
    """The C compiler at work in ``folder``, which also holds its temporary files."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self.command, self.folder = tuple(command), folder
        # restore_signals=False: a limit on file sizes makes the compiler print a message instead of
        # dying. A new session: gcc's children can be ended together with gcc.
        self.process = subprocess.Popen(
            self.command,
            cwd=folder,
            env={**os.environ, "TMPDIR": str(folder), "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            restore_signals=False,
            start_new_session=True,
        )

    def stop(self) -> None:
        """Ends all processes of the compiler."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()

    def finish(self) -> None:
        """Waits for the compiler; raises as :func:`run_compiler` does."""
        try:
            _, said = self.process.communicate()
        except BaseException:
            self.stop()
            raise
        if self.process.returncode == 0 and self._made():
            return
        if "No space left on device" in said or "Disk quota exceeded" in said:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if "File too large" in said:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        ending = "\n".join(said.strip().splitlines()[-20:])
        raise BuildError(
            f"the C compiler failed (exit status {self.process.returncode}) while linking kernels: "
            f"{' '.join(self.command[:3])} ...\n{ending}"
        )


    def _made(self) -> bool:
        """True if what the compiler was asked for is there. Where a program ignores SIGCHLD, nobody
        knows how a child ended, and Python says 0.
        """
        after = dict(zip(self.command, self.command[1:], strict=False))
        return "-o" not in after or (self.folder / after["-o"]).exists()


@cache
def compiles_for(compiler: str) -> str:
    """The machine that a C compiler makes code for, as ``x86_64-linux-gnu``; "" if it does not
    say.
    """
    return _said(compiler, "-dumpmachine")


@cache
def linker_of(compiler: str) -> str:
    """Path of the linker that a C compiler runs; "" if it does not say. By itself it links a kernel
    in a third of the time that the compiler takes.
    """
    return shutil.which(_said(compiler, "-print-prog-name=ld")) or ""


def _said(compiler: str, flag: str) -> str:
    try:
        done = subprocess.run(
            [compiler, flag], capture_output=True, text=True, errors="replace", check=False
        )
    except OSError:
        return ""
    return done.stdout.strip()


def run_compiler(command: Sequence[str], folder: Path) -> None:
    """Runs the C compiler in ``folder``. However this ends, no process of the compiler is left.

    Raises :class:`BuildError` with the compiler's message, and ``OSError`` if the compiler cannot
    be started or has no room for its files.
    """
    Compiling(command, folder).finish()

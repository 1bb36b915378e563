"""The C compiler, which links kernels: the one place that runs it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gtco.support.errors import BuildError


class Compiling:
    """The C compiler at work in ``folder``, its own temporary files included."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self.command = tuple(command)
        # restore_signals=False: a limit on file sizes is then a message of the compiler, not its
        # death. A session of its own: gcc's children can then be ended with it.
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
        """No process of it is left."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()

    def finish(self) -> None:
        """Wait for it; raises as :func:`run_compiler`."""
        try:
            _, said = self.process.communicate()
        except BaseException:
            self.stop()
            raise
        if self.process.returncode == 0:
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


def run_compiler(command: Sequence[str], folder: Path) -> None:
    """Runs the C compiler in ``folder``. Whatever ends this, no process of the compiler stays.

    Raises :class:`BuildError` with what the compiler said, and ``OSError`` where it cannot be
    started or has no room for its files.
    """
    Compiling(command, folder).finish()

"""The C compiler, which links kernels: the one place that runs it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gtco.errors import BuildError


def run_compiler(command: Sequence[str], folder: Path) -> None:
    """Runs the C compiler in ``folder``, its own temporary files included. Whatever ends this, no
    process of the compiler stays.

    Raises :class:`BuildError` with what the compiler said, and ``OSError`` where it cannot be
    started or has no room for its files.
    """
    # restore_signals=False: a limit on file sizes is then a message of the compiler, not its death.
    # A session of its own: gcc's children can then be ended with it.
    process = subprocess.Popen(
        command,
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
    try:
        _, said = process.communicate()
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    if process.returncode == 0:
        return
    if "No space left on device" in said or "Disk quota exceeded" in said:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if "File too large" in said:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    ending = "\n".join(said.strip().splitlines()[-20:])
    raise BuildError(
        f"the C compiler failed (exit status {process.returncode}) while linking kernels: "
        f"{' '.join(command[:3])} ...\n{ending}"
    )

"""Files of the cache's folder, which other processes may read or write at the same time."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path


def write_cache_file(path: Path, data: bytes) -> None:
    """Writes the file in one step, and makes its folder. Several processes, also in several
    containers, may write it at once: the last one counts. Raises OSError, and then leaves nothing.
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The name is not from the process id: processes of several containers have the same one.
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f"{path.stem}.", suffix=".new", delete=False
        ) as file:
            temporary = Path(file.name)
            file.write(data)
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except BaseException:
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink()
        raise


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask

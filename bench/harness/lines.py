"""Files of one JSON object a line: a long run keeps each row as soon as it is there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any


def append(path: Path, row: Any) -> None:
    """Adds a row: a dataclass, or a mapping. A line that was cut off gets its end first, else the
    row would be a part of it.
    """
    value = row if isinstance(row, Mapping) else asdict(row)
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(value).encode() + b"\n")


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, which need not exist. A line that was cut off is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found

"""Files of one JSON object a line: a long run keeps each row as soon as it is there."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any


def append(path: Path, row: Any) -> None:
    """Adds a row, which is a dataclass."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(row)) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, which need not exist. A line that was cut off is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found

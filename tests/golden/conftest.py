"""``golden(name, text)`` compares a text with a kept file; ``--update-golden`` writes the files
anew.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "files"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write the golden files instead of comparing"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with the file ``files/<name>``; the failure shows the lines that differ."""

    def compare(name: str, text: str) -> None:
        path = FOLDER / name
        text = "\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n"
        if request.config.getoption("--update-golden", default=False):
            FOLDER.mkdir(exist_ok=True)
            path.write_text(text)
            return
        kept = path.read_text() if path.exists() else ""
        if text != kept:
            lines = difflib.unified_diff(
                kept.splitlines(), text.splitlines(), f"kept {name}", "generated", lineterm="", n=2
            )
            shown = "\n".join(list(lines)[:80])
            pytest.fail(
                f"generated code changed; where that is meant: pytest {Path(__file__).parent} "
                f"--update-golden, and read the diff\n{shown}",
                pytrace=False,
            )

    return compare

"""Options of the fuzz test: how long it runs, which seed it has, or a single trial."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-seconds", type=float, default=240, help="of the scheduled fuzz test")
    parser.addoption("--fuzz-seed", type=int, default=None, help="default: another one each time")
    parser.addoption("--fuzz-trial", type=int, default=None, help="repeat this trial of the seed")

"""A benchmark of several steps: ``python -m bench NAME STEP ...``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence

Step = Callable[[argparse.Namespace], int]


def run(parser: argparse.ArgumentParser, steps: Mapping[str, Step], argv: Sequence[str]) -> int:
    """The step that the arguments name, and its exit status."""
    options = parser.parse_args(argv)
    return steps[options.step](options)


def say(text: str) -> None:
    """Prints at once: a step takes minutes, and its output may go to a file."""
    print(text, flush=True)

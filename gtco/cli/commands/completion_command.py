"""``gtco completion bash|zsh|tcsh``: prints a script with which the shell completes the command
line.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gtco.cli import arguments
from gtco.support.errors import OptionError, installing

SHELLS = ("bash", "zsh", "tcsh")
# The types of arguments that are files or folders.
FILES = (Path, arguments.new_file)


def add(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "completion",
        help="a script with which the shell completes commands, options and files",
        description="Prints a script with which the shell completes commands, options and files. "
        'In bash: eval "$(gtco completion bash)", in ~/.bashrc for every shell. In zsh the script '
        "is a file named _gtco in a folder of $fpath.",
    )
    parser.add_argument("shell", choices=SHELLS, help="whose script to print")
    return parser


def main(options: argparse.Namespace) -> int:
    print(script(options.whole, options.shell))
    return 0


def script(top: argparse.ArgumentParser, shell: str) -> str:
    """The script for ``shell``. Raises :class:`OptionError` if shtab is not installed."""
    try:
        import shtab
    except ImportError:
        raise OptionError(
            f"completion needs shtab, which is not installed: {installing('completion')}"
        ) from None
    for action in _actions(top):
        if action.type in FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    complete: Callable[..., str] = shtab.complete
    return complete(top, shell)


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The arguments of the parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for deeper in {id(choice): choice for choice in action.choices.values()}.values():
                yield from _actions(deeper)

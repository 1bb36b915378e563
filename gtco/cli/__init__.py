"""The command line: ``gtco compile | run | inspect | bench | doctor``.

Exit codes: 0 done; 1 a ``GtcoError`` (its text on standard error; ``--debug`` shows the traceback);
2 wrong usage; 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from gtco.cli import bench, compile, doctor, inspect, run
from gtco.errors import GtcoError
from gtco.version import __version__

COMMANDS = (compile, run, inspect, bench, doctor)  # each has add(commands) and main(options)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="gtco", description="Compiles vision transformers to one standalone shared library."
    )
    top.add_argument("--version", action="version", version=f"gtco {__version__}")
    top.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        added = command.add(commands)
        added.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
        added.set_defaults(main=command.main)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and give its exit code; wrong usage raises ``SystemExit(2)``."""
    options = parser().parse_args(argv)
    try:
        return int(options.main(options))
    except GtcoError as error:
        if options.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if options.debug:
            raise
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # gtco inspect ... | head
        sys.stderr.close()
        return 0

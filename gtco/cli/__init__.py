"""The command line: ``gtco compile | tune | quantize | candidates | measure | run | inspect |
report | bench | records | farm | doctor | completion``.

Exit codes: 0 done; 1 a ``GtcoError`` (its text is on standard error; ``--debug`` shows the
traceback); 2 wrong usage; 129 SIGHUP (the terminal is gone); 130 Ctrl-C; 143 SIGTERM. After these
signals the command cleans up before it ends; a second signal does not interrupt the cleaning.
"""

from __future__ import annotations

import _thread
import argparse
import difflib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from gtco.cli.commands import (
    bench_command,
    candidates_command,
    compile_command,
    completion_command,
    doctor_command,
    farm_command,
    inspect_command,
    measure_command,
    quantize_command,
    records_command,
    report_command,
    run_command,
    tune_command,
)
from gtco.support.errors import GtcoError, guarded
from gtco.support.version import __version__, versions

# each has add(commands) and main(options)
COMMANDS = (
    compile_command,
    tune_command,
    quantize_command,
    candidates_command,
    measure_command,
    run_command,
    inspect_command,
    report_command,
    bench_command,
    records_command,
    farm_command,
    doctor_command,
    completion_command,
)
AGAIN = 1.0  # seconds until a stop that was lost is raised again


class Parser(argparse.ArgumentParser):
    """Says what is wrong in a line, without the list of all options, which would hide it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n{self.prog} --help lists the options\n")


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="gtco", description="Compiles vision transformers to one standalone shared library."
    )
    top.add_argument("--version", action=_Version, help="show the versions that matter, and exit")
    top.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        added = command.add(commands)
        added.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
        added.set_defaults(main=command.main, label=added.prog, whole=top, own=added)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and give its exit code; wrong usage raises ``SystemExit(2)``."""
    options, unknown = parser().parse_known_args(argv)
    if unknown:
        options.own.error(_unknown(unknown[0], options.own))
    try:
        with _stopped_once(), guarded(options.label):
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
    except _Terminated as stop:
        with suppress(OSError):  # after SIGHUP there may be no terminal
            print(f"interrupted by {stop.signal.name}", file=sys.stderr, flush=True)
        return 128 + stop.signal
    except BrokenPipeError:  # gtco inspect ... | head: the process ends well (gtco/__main__.py)
        raise
    except OSError as error:  # no output to print to, no place for temporary files
        if options.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1


def _unknown(argument: str, command: argparse.ArgumentParser) -> str:
    """What to say of an argument that the command does not have."""
    known = [name for action in command._actions for name in action.option_strings]
    name = argument.partition("=")[0]
    if name in known:
        return f"{argument} stands behind --, and what stands there is no option: put it before"
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"unknown argument {argument}{f': did you mean {close[0]}?' if close else ''}"


class _Version(argparse.Action):
    """Prints gtco's version, and those of what decides how it compiles."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(f"gtco {__version__}")
        print(", ".join(f"{name} {found}" for name, found in versions().items()))
        parser.exit()


class _Terminated(BaseException):
    """SIGTERM or SIGHUP as an exception, so that the command cleans up as after Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = signal.Signals(number)


@contextmanager
def _stopped_once() -> Iterator[None]:
    """Makes Ctrl-C raise ``KeyboardInterrupt``, and SIGTERM and SIGHUP :class:`_Terminated`. While
    such an exception is handled, further signals do nothing, so that the cleaning is complete. The
    exception may get lost: TVM turns it into a ``RuntimeError`` of a stage in functions that it
    calls back. Then it is raised again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    before: dict[int, Any] = {}
    over = threading.Event()
    raised: list[int] = []
    main_thread = threading.get_ident()

    def repeat(number: int) -> None:
        while not over.wait(AGAIN):
            signal.pthread_kill(main_thread, number)

    def stop(number: int, _: object) -> None:
        if over.is_set() or _stopping(sys.exc_info()[1]):
            return
        if not raised:
            raised.append(number)
            _thread.start_new_thread(repeat, (number,))  # no lock that is held here, as Thread has
        raise KeyboardInterrupt if raised[0] == signal.SIGINT else _Terminated(raised[0])

    try:
        before[signal.SIGTERM] = signal.signal(signal.SIGTERM, stop)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else as it was set
            before[signal.SIGINT] = signal.signal(signal.SIGINT, stop)
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup has it ignored
            before[signal.SIGHUP] = signal.signal(signal.SIGHUP, stop)
        yield
    finally:
        over.set()
        for number, handler in before.items():
            signal.signal(number, handler)


def _stopping(handled: BaseException | None) -> bool:
    """True if the exception that is handled is a stop, or was raised while a stop was handled."""
    while handled is not None and not isinstance(handled, KeyboardInterrupt | _Terminated):
        handled = handled.__context__
    return handled is not None

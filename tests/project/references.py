# ruff: noqa: E501 (lines of text are written as the pages have them)
"""The reference pages of docs/reference, made from the code that they describe: argparse's parsers,
signatures with their docstrings, and the table in gtco/support/environment.py.

``python -m tests.project.references`` writes them; a test compares them with the code.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gtco
import gtco.support.environment
from gtco import cli
from gtco.driver.compiled import CompileReport
from gtco.quantization.report import QuantizationReport, QuantizedModel
from gtco.support import errors, options

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reference"
HOW = "<!-- Written by python -m tests.project.references; a test compares it with the code. -->\n"


def command_line() -> str:
    """Every command with its arguments, as ``--help`` has them."""
    top = cli.parser()
    lines = [
        "# The command line",
        HOW,
        "`gtco COMMAND --help` prints the same. `python -m gtco` is `gtco`.",
        "",
        "Exit codes: 0 done; 1 an error, whose text is on standard error; 2 wrong usage; 129 SIGHUP;",
        "130 Ctrl-C; 143 SIGTERM. An interrupted command cleans up before it ends. `gtco --debug COMMAND` shows the",
        "traceback of an error.",
        "",
        "Tables fit the terminal: a narrow one leaves out columns and says which. In a pipe or a file",
        "a row is one line, whatever its length.",
    ]
    for name, parser, about in _commands(top):
        about = f"{about[:1].upper()}{about[1:]}."
        lines += ["", f"## gtco {name}", _sentence(about), "", *_usage(parser, name), ""]
        lines += _arguments(parser)
    return "\n".join(lines) + "\n"


def _commands(
    parser: argparse.ArgumentParser, before: str = ""
) -> Iterator[tuple[str, argparse.ArgumentParser, str]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, found in action.choices.items():
                full = f"{before} {name}".strip()
                deeper = list(_commands(found, full))
                yield from deeper or [(full, found, helps.get(name, ""))]


def _usage(parser: argparse.ArgumentParser, name: str) -> list[str]:
    more = {"+": "{0} ...", "?": "[{0}]", "*": "[{0} ...]"}
    needed = [
        more.get(str(a.nargs), "{0}").format(a.metavar or a.dest.upper())
        for a in parser._actions
        if not a.option_strings
    ]
    return [f"    gtco {name} {' '.join([*needed, '[options]'])}"]


def _arguments(parser: argparse.ArgumentParser) -> list[str]:
    rows = ["| argument | what it is |", "|---|---|"]
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or "--help" in action.option_strings:
            continue
        value = action.metavar or (
            "|".join(map(str, action.choices)) if action.choices else action.dest.upper()
        )
        takes = action.nargs != 0
        flags = ", ".join(
            f"{flag} {_values(action, value)}" if takes and not _is_switch(action) else flag
            for flag in action.option_strings
        )
        cells = (f"`{flags or value}`", _sentence(str(action.help or "the file")))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return rows


def _values(action: argparse.Action, value: str) -> str:
    if action.nargs == "?":
        return f"[{value}]"
    return f"{value} [{value} ...]" if action.nargs == "+" else value


def _is_switch(action: argparse.Action) -> bool:
    return isinstance(action, argparse.BooleanOptionalAction)


def python() -> str:
    """The public names, with signatures and docstrings."""
    lines = [
        "# Python",
        HOW,
        "`import gtco` imports nothing heavy; `gtco.load` needs numpy alone.",
    ]
    compiling = ("compile_model", "compile_to_file", "aot_compile")
    for name in (*compiling, "quantize", "quantize_weights", "load"):
        lines += _callable(f"gtco.{name}", getattr(gtco, name))
    for shown in (
        options.CompileOptions,
        options.Quantization,
        gtco.Tune,
        gtco.CompiledModel,
        CompileReport,
        QuantizedModel,
        QuantizationReport,
        gtco.Model,
        gtco.InferenceSession,
        gtco.SessionOptions,
    ):
        home = "gtco" if hasattr(gtco, shown.__name__) else shown.__module__
        lines += ["", f"## {home}.{shown.__name__}", _prose(shown)]
        for name, member in vars(shown).items():
            if name.startswith("_") and name != "__call__":
                continue
            if isinstance(member, property):
                lines += ["", f"### {shown.__name__}.{name}", _prose(member)]
            elif callable(member) and inspect.getdoc(member):
                lines += _callable(f"{shown.__name__}.{name}", member, "###")
    lines += [
        "",
        "## Errors",
        "All are in `gtco.support.errors`.",
        "",
        "| error | when |",
        "|---|---|",
    ]
    for name, value in vars(errors).items():
        if inspect.isclass(value) and issubclass(value, errors.GtcoError):
            first = _prose(value).split("\n\n")[0].replace("\n", " ")
            lines.append(f"| `{name}` | {first} |")
    return "\n".join(lines) + "\n"


def _callable(title: str, function: Callable[..., Any], level: str = "##") -> list[str]:
    shown = f"{title.rpartition('.')[2]}{inspect.signature(function)}"
    if len(shown) > 90:
        every = list(inspect.signature(function).parameters.values())
        parts = [str(p) for p in every]
        named = [n for n, p in enumerate(every) if p.kind is p.KEYWORD_ONLY]
        if named and not any(p.kind is p.VAR_POSITIONAL for p in every):
            parts.insert(named[0], "*")
        shown = f"{title.rpartition('.')[2]}(\n" + "".join(f"    {part},\n" for part in parts) + ")"
    shown = re.sub(r" object at 0x[0-9a-f]+", "", shown).replace("'", "").replace('"', "")
    return ["", f"{level} {title}", "```python", shown, "```", _prose(function)]


def _prose(thing: Any) -> str:
    """A docstring as Markdown: roles and double backquotes are code."""
    text = inspect.getdoc(thing) or ""
    text = re.sub(r":\w+:`[.~]*([^`]*)`", r"`\1`", text).replace("``", "`")
    return re.sub(r"(?m)^([^\n|> -].*)\n(- )", r"\1\n\n\2", text)


def environment() -> str:
    """The table of gtco/support/environment.py."""
    lines = [
        "# The environment's variables",
        HOW,
        "| variable | what it sets |",
        "|---|---|",
    ]
    for name, what in variables().items():
        lines.append(f"| `{name}` | {what.replace('``', '`')} |")
    lines += [
        "",
        "All but `GTCO_NUM_THREADS` are read by the compiler alone; that one is read by the library",
        "itself when it is opened, from C too. `TMPDIR` says where temporary files go, as everywhere.",
        "",
        "The thread count is, in this order: the argument of `gtco.load` (`--threads`,",
        "`options.num_threads` in C), `GTCO_NUM_THREADS`, the number given at compile time, every core",
        "that the process may use (affinity and cgroup quota counted).",
    ]
    return "\n".join(lines) + "\n"


def variables() -> dict[str, str]:
    rows = re.findall(r"(?m)^([A-Z_]+) {2,}(.*(?:\n {8,}.*)*)$", gtco.support.environment.__doc__ or "")
    return {name: _sentence(what) for name, what in rows}


def operators() -> str:
    """Every operator of ONNX: how it is read, and what its kernels are."""
    from tests.project.operator_page import page  # here, because it imports the compiler

    return page()


def _sentence(text: str) -> str:
    return " ".join(text.split()).replace("%%", "%")


PAGES: dict[str, Callable[[], str]] = {
    "command-line.md": command_line,
    "python.md": python,
    "environment.md": environment,
    "operators.md": operators,
}


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

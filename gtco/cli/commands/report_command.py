"""``gtco report MODEL.so``: the library's stages as a page of HTML, or as JSON. With two libraries,
what changed from the first to the second.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtco.cli import arguments
from gtco.cli.commands.run_command import add_threads
from gtco.cli.console import say, size
from gtco.cli.outputs import add_force, check_ours, here
from gtco.runtime.publish import write_whole
from gtco.support.errors import OptionError
from gtco.support.options import check_apart

if TYPE_CHECKING:
    from gtco.report.facts import Facts


def add(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "report", help="a page of HTML about a library, or about what two of them differ in"
    )
    parser.add_argument("library", type=Path, metavar="MODEL.so")
    parser.add_argument(
        "other",
        type=Path,
        nargs="?",
        metavar="NEWER.so",
        help="another library of the same model: the report is about the difference",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=arguments.new_file,
        metavar="FILE.html",
        help="the file (default: the library's name with .html, in the current folder; JSON goes "
        "to standard output)",
    )
    parser.add_argument(
        "--json", action="store_true", help="JSON instead of a page (docs/report.md has the schema)"
    )
    parser.add_argument(
        "--no-run",
        dest="run",
        action="store_false",
        help="run no code of the library: times are predicted ones",
    )
    add_force(parser)
    arguments.add_dim(parser)
    add_threads(parser)
    return parser


def main(options: argparse.Namespace) -> int:
    if not options.json:
        from gtco.report.page import check_installed

        check_installed()
    check_apart(options.output, options.library, options.other)
    path = options.output
    if path is None and not options.json:
        path = here(options.library, ".html")
    check_ours(path, options.force, is_report, "a report")
    facts = facts_of(options.library, options)
    if options.other is not None:
        from gtco.report.difference import difference

        found: Any = difference(facts, facts_of(options.other, options))
    else:
        found = facts
    if options.json:
        text = json.dumps(found.to_json(), indent=1, allow_nan=False)
        if path is None:
            print(text)
            return 0
    else:
        from gtco.report.page import difference_page, page

        text = page(found) if options.other is None else difference_page(found)
    write(path, text)
    return 0


def is_report(first: bytes) -> bool:
    """Whether a file that begins so is one that ``gtco report`` wrote."""
    return b'<meta name="generator" content="gtco ' in first or b'"format": "gtco-report' in first


def facts_of(library: Path, options: argparse.Namespace) -> Facts:
    from gtco.report.gather import gather

    facts = gather(library, arguments.one_size_each(options.dim))
    if options.run:
        from gtco.report.measured import measured

        facts = measured(facts, library, options.threads)
    return facts


def check_report(path: Path | None) -> None:
    """Raises what would go wrong at the end of a compile that writes a report."""
    if path is not None:
        from gtco.report.page import check_installed

        check_installed()
        if path.suffix == ".so":
            raise OptionError(f"--report {path}: the report is a page of HTML, such as report.html")


def write_report(path: Path, library: Path, report: Any) -> None:
    """Writes the page of a library that was just compiled, with what the compile knows. The stages
    are measured if the library can be opened here.
    """
    from gtco.report.compiled import with_report
    from gtco.report.gather import gather
    from gtco.report.measured import measured
    from gtco.report.page import page

    write(path, page(with_report(measured(gather(library), library), report)))


def write(path: Path, text: str) -> None:
    content = text.encode(errors="replace")  # a file's name may have bytes that are not UTF-8
    write_whole(path, content)
    say(f"{path} ({size(len(content))})")

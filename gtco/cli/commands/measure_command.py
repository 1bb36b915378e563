"""``gtco measure FILE.bundle -o answers.jsonl``: times candidates; it needs no compiler."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from gtco.cli import arguments
from gtco.cli.console import say
from gtco.cli.outputs import add_force, check_ours, here
from gtco.runtime.publish import write_whole
from gtco.support.counting import counted
from gtco.support.errors import OptionError
from gtco.support.options import check_place


def add(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "measure", help="time the candidates of a file on this machine or its GPU"
    )
    parser.add_argument(
        "bundle", type=Path, metavar="FILE.bundle", help="what gtco candidates made"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="ANSWERS.jsonl",
        help="for gtco records import (default: the file's name with .jsonl, in the current "
        "folder)",
    )
    add_force(parser)
    parser.add_argument(
        "--rounds",
        type=arguments.positive,
        default=50,
        metavar="N",
        help="each runs every candidate once (default 50)",
    )
    parser.add_argument(
        "--device", type=arguments.zero_or_more, default=0, metavar="N", help="which GPU"
    )
    return parser


def main(options: argparse.Namespace) -> int:
    from gtco.search.records.text import RECORD, to_lines
    from gtco.tuning.offline import measure

    output = options.output or here(options.bundle, ".jsonl")
    check_place(output)
    if output.exists() and options.bundle.exists() and output.samefile(options.bundle):
        raise OptionError(f"--output {output} is what is measured itself: give another name")
    check_ours(output, options.force, lambda first: first.startswith(RECORD), "a file of answers")
    found = measure(options.bundle, options.rounds, options.device)
    write_whole(output, to_lines(found).encode())
    came = Counter(record.outcome for record in found)
    stages = len({record.stage for record in found})
    say(
        f"{output}: {counted(len(found), 'candidate')} of {counted(stages, 'stage')}, "
        + ", ".join(f"{n} {outcome}" for outcome, n in came.items())
    )
    return 0

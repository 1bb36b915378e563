"""``gtco records show|export|import|merge FILE``: shows and moves measurements."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from gtco.cli import console
from gtco.cli.console import say, text
from gtco.cli.tables import Table
from gtco.search.records.records import Record, Records
from gtco.search.records.standing import only_standing, stood
from gtco.search.records.text import from_lines, program_lines, programs, to_lines
from gtco.support.counting import counted
from gtco.support.errors import RecordError
from gtco.tensor.stage import Stage

A_FILE = "a file of records, as --records of gtco compile and gtco tune makes"
ADDED_TO = "a file of records, made where there is none"


def add(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "records", help="measurements: show, export, import, merge"
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True, dest="action")
    show = actions.add_parser("show", help="the configs that stand, by stage and circumstances")
    show.add_argument("file", type=Path, metavar="FILE", help=A_FILE)
    export = actions.add_parser("export", help="a line of JSON for each record and stage")
    export.add_argument("files", type=Path, nargs="+", metavar="FILE", help=A_FILE)
    export.add_argument(
        "--standing",
        action="store_true",
        help="only the newest standing config of each stage and circumstances, and the stages that "
        "models were cut into, sorted; the records that ship with gtco are made this way",
    )
    fill = actions.add_parser("import", help="add the lines of exports to FILE")
    fill.add_argument("file", type=Path, metavar="FILE", help=ADDED_TO)
    fill.add_argument(
        "sources",
        type=Path,
        nargs="+",
        metavar="EXPORT.jsonl",
        help="what gtco records export or gtco measure wrote",
    )
    merge = actions.add_parser("merge", help="add the records of other files to FILE")
    merge.add_argument("file", type=Path, metavar="FILE", help=ADDED_TO)
    merge.add_argument("sources", type=Path, nargs="+", metavar="OTHER", help=A_FILE)
    return parser


def main(options: argparse.Namespace) -> int:
    if options.action == "show":
        show(options.file, _read(options.file, options.action)[0])
        return 0
    if options.action == "export":
        files = [_read(file, options.action) for file in options.files]
        found = [record for records, _ in files for record in records]
        if options.standing:
            found = only_standing(found)
        elif stages := {stage.key: stage for _, kept in files for stage in kept}:
            sys.stdout.write(program_lines(stages.values()))
        sys.stdout.write(to_lines(found))
        return 0
    # all is read before anything is written
    read = [_read(source, options.action) for source in options.sources]
    new = [record for records, _ in read for record in records]
    with Records(options.file, write=True) as records:
        added = records.merge(new)
        records.remember(stage for _, stages in read for stage in stages)
    print(f"{options.file}: {added} of {len(new)} records added, the others were there")
    return 0


def _read(source: Path, action: str) -> tuple[list[Record], list[Stage]]:
    """The records of a source and the stages whose programs it keeps."""
    if action != "import":
        with Records(source, create=False) as records:
            return records.all(), list(records.stages().values())
    try:
        text = source.read_text()
        if found := from_lines(text, str(source)):
            return found, programs(text, str(source))
        raise RecordError(
            f"{source} has no records: gtco measure or gtco records export did not finish writing "
            "it, or had none to write"
        )
    except OSError as error:
        raise RecordError(f"{source} could not be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise RecordError(
            f"{source} is not text: give what gtco records export or gtco measure wrote; gtco "
            "records merge joins files of records"
        ) from error


def show(file: Path, records: list[Record]) -> None:
    """Prints one table for each machine, target and version: the stages, the configs that stand,
    and how many candidates were tried.
    """
    say(f"{file}: {counted(len(records), 'record')}")
    for known in dict.fromkeys(record.circumstances for record in records):
        here = [record for record in records if record.circumstances == known]
        table = Table(text(here[0].known))
        table.column("stage", least=14)
        table.column("key", rank=2)
        table.column("stands", least=16, rank=1)
        table.column("us", right=True)
        table.column("tried", right=True)
        table.column("came of it", least=16)
        for stage in dict.fromkeys(record.stage for record in here):
            rows = [record for record in here if record.stage == stage]
            stands = stood(rows)
            microseconds = f"{stands.seconds * 1e6:.1f}" if stands and stands.seconds else "-"
            counts = Counter(row.outcome for row in rows)
            table.row(
                rows[0].label,
                stage,
                text(stands.parsed.to_json()) if stands else "-",
                microseconds,
                str(len({row.config for row in rows})),
                ", ".join(f"{n} {outcome}" for outcome, n in counts.items()),
            )
        console.show(table)

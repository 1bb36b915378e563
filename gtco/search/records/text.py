"""Records as text: a line of JSON for each record, and one for the program of each stage that the
file keeps, so that records which were exported can still be learned from.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any

from gtco.search.records.records import LATER, LINES, Record, checked
from gtco.support.errors import RecordError
from gtco.tensor.stage import Stage

RECORD = LINES[0]  # how a line of to_lines begins
PROGRAM = "program"  # the only field of a line that keeps what a stage computes


def to_lines(records: Iterable[Record]) -> str:
    """A line for each record. What only some records have is left out of the others."""
    rows = ({k: v for k, v in asdict(r).items() if v or k not in LATER} for r in records)
    return "".join(json.dumps(row, sort_keys=True) + "\n" for row in rows)


def program_lines(stages: Iterable[Stage]) -> str:
    """Lines beside those of :func:`to_lines`, that keep what the stages compute."""
    return "".join(
        json.dumps({PROGRAM: stage.canonical.to_json()}, sort_keys=True) + "\n" for stage in stages
    )


def from_lines(text: str, name: str) -> list[Record]:
    """The records of a text; errors call the text ``name``. Programs of stages are passed over."""
    return _from_lines(text, name)[0]


def programs(text: str, name: str) -> list[Stage]:
    """The stages whose programs a text keeps, each once."""
    return list({stage.key: stage for stage in _from_lines(text, name)[1]}.values())


def _from_lines(text: str, name: str) -> tuple[list[Record], list[Stage]]:
    found, stages = [], []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                data = json.loads(line)
                if isinstance(data, dict) and data.keys() == {PROGRAM}:
                    stages.append(_stage(data[PROGRAM]))
                else:
                    found.append(_record(data))
            except (ValueError, OverflowError, RecursionError, RecordError) as error:
                raise RecordError(f"{name}, line {number}, is not a record: {error}") from error
    return found, stages


def _stage(data: Any) -> Stage:
    """The stage of a program's line, or ValueError."""
    try:
        stage = Stage.from_json(data)
        hash(stage.key)
        return stage
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError("the program of its stage cannot be read") from error


def _record(data: Mapping[str, Any]) -> Record:
    names = [field.name for field in fields(Record)]
    if not isinstance(data, dict) or not set(names) - {*LATER} <= set(data) <= set(names):
        raise ValueError(f"it needs {', '.join(names)}, and nothing else")
    record = checked({**dict.fromkeys(LATER, ""), **data})
    if not isinstance(record.parsed.sketch, str) or not record.parsed.sketch:
        raise ValueError("a config names its sketch")
    _ = record.known  # raises where it is none
    return record

"""Records that come with gtco: the configs that stood for the stages of whole models, on the
machines where these were tuned. Each is a line of JSON in ``measured/*.jsonl`` (CONTRIBUTING.md
says how to make such a file).

They are used only by a compile that measures. If their circumstances (CPU, instruction sets,
threads, versions) are those of the compile, they count like any other record. Records of other
circumstances say only what to measure first of the same stage, beginning with the most similar
circumstances: a config that stood on one machine is worth a try on the next one.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from math import inf, log2
from pathlib import Path
from typing import Any

from gtco.search.records.records import Record
from gtco.search.records.standing import stood
from gtco.search.records.text import from_lines
from gtco.support.errors import RecordError
from gtco.tensor.space import Config

FOLDER = Path(__file__).with_name("measured")


def shipped() -> list[Record]:
    """All records that come with gtco; raises :class:`RecordError` if a file is damaged."""
    found: list[Record] = []
    for file in sorted(FOLDER.glob("*.jsonl")):
        try:
            found += from_lines(file.read_text(encoding="utf-8"), str(file))
        except (OSError, UnicodeDecodeError) as error:
            raise RecordError(f"{file} could not be read: {error}") from error
    return found


def nearest(
    records: Iterable[Record], stages: Collection[str], here: str
) -> dict[str, list[Config]]:
    """For each stage asked for, the configs that stood under other circumstances than ``here``,
    each once. Those of the most similar circumstances come first.
    """
    trials: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.stage in stages and record.circumstances != here:
            trials.setdefault((record.circumstances, record.stage), []).append(record)
    wanted = json.loads(here)
    distance = {known: unlike(rows[0].known, wanted) for (known, _), rows in trials.items()}
    found: dict[str, list[Config]] = {}
    for (known, stage), rows in sorted(trials.items(), key=lambda item: distance[item[0][0]]):
        best = stood(rows)
        if best is not None and distance[known] < (inf,):
            found.setdefault(stage, []).append(best.parsed)
    return {stage: list(dict.fromkeys(configs)) for stage, configs in found.items()}


def unlike(known: Mapping[str, Any], here: Mapping[str, Any]) -> tuple[float, ...]:
    """How different two circumstances of CPUs are, as a key to sort by. Instruction sets come
    first, because they decide which tiles exist; then the name of the architecture; then threads,
    which decide how tasks are cut; then the CPU with its caches; then versions. Circumstances of
    GPUs are infinitely different.
    """
    try:
        features = {*known["features"]} ^ {*here["features"]}
        threads = abs(log2(known["threads"] / here["threads"]))
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return (inf,)
    same = [known.get(name) == here.get(name) for name in ("mcpu", "cpu", "gtco", "tvm")]
    return (len(features), not same[0], threads, *(not equal for equal in same[1:]))

"""Benchmarks that go model by model: their common options, and the loop over the models, which
writes its results after each.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from gtco.cli.arguments import new_file, positive
from gtco.cli.console import say
from gtco.support.errors import GtcoError

from .suite import available_threads, header, write_value
from .workload import check_models

Row = TypeVar("Row")


def parser(
    name: str, doc: str | None, models: Iterable[str], file: str = "--json"
) -> argparse.ArgumentParser:
    """Of the benchmark ``name``, described by its module's ``doc`` up to the first colon; ``file``
    is the option that says where to keep what was measured.
    """
    found = argparse.ArgumentParser(
        prog=f"python -m bench {name}", description=str(doc).split(":")[0]
    )
    found.add_argument("--models", default=",".join(models), help="by comma")
    found.add_argument("--threads", type=positive, default=available_threads())
    found.add_argument(file, type=new_file, metavar="FILE")
    found.add_argument("--folder", type=Path, default=Path("build/bench"))
    return found


def write_rows(file: Path, rows: Sequence[Any]) -> None:
    write_value(file, [asdict(row) for row in rows])


def every_model(
    options: argparse.Namespace,
    measure: Callable[[str, argparse.Namespace], Iterable[Row]],
    keep: Callable[[Path, Sequence[Row]], None] = write_rows,
    check: Callable[[Sequence[str], Path], None] = check_models,
) -> tuple[list[Row], list[str]]:
    """The rows of all models, and the names of those that failed: a ``GtcoError`` is said and costs
    one model. After each model the rows so far are written to the file of ``--json``, so that a
    long run that ends early has kept them.

    Raises ``GtcoError`` if no model has a row. ``check`` raises before anything is measured if one
    of the names is wrong.
    """
    names = options.models.split(",")
    check(names, options.folder)
    header(options.threads)
    rows: list[Row] = []
    failed: list[str] = []
    for name in names:
        try:
            rows += measure(name, options)
        except GtcoError as error:
            if len(names) == 1:
                raise
            say(f"{name} failed: {error}")
            failed.append(name)
            continue
        if getattr(options, "json", None):
            keep(options.json, rows)
    if failed and not rows:
        raise GtcoError("no model could be measured")
    return rows, failed


def ended(failed: Sequence[str], sound: bool = True) -> int:
    """The exit status. Names the models that failed, because their reasons stand far above."""
    if failed:
        say(f"not measured: {', '.join(failed)}")
    return 0 if sound and not failed else 1

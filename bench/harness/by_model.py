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

from .suite import available_threads, header, write_value

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
) -> list[Row]:
    """The rows of all models. After each model the rows so far are written to the file of
    ``--json``, so that a long run that ends early has kept them.
    """
    header(options.threads)
    rows: list[Row] = []
    for name in options.models.split(","):
        rows += measure(name, options)
        if getattr(options, "json", None):
            keep(options.json, rows)
    return rows

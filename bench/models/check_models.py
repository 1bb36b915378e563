"""The whole family, one row a model: does it compile, is it right, how fast, by which kernels?

``python -m bench check_models [--models swinv2,beit] [--exporters dynamo,torchscript] [--part 2/6]
[--rounds 5] [--no-peers] [--precision bf16] [--json FILE]``

For every model of ``models.family``, exported by each of torch's exporters:

- agreement with ONNX Runtime (``gtco.verification``: random and adversarial inputs); where they
  differ, or ONNX Runtime's answer is unstable, with PyTorch in float64; what neither settles is
  named after the table,
- the ratio to the better of ONNX Runtime and OpenVINO (above 1, gtco is faster), timed as all
  benchmarks here are (``bench.harness.rounds``),
- the share of time in stages that no sketch took, by operator,
- seconds to compile, and of the fusion search in them.

A model that fails costs its row. Exit status 1 when one is not exported, does not compile or
disagrees.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from gtco.cli.arguments import positive
from gtco.support.errors import BuildError, GtcoError, OptionError
from gtco.support.options import PRECISIONS

from ..harness.build import build
from ..harness.peers import SETTINGS
from ..harness.rounds import Contender, Measurement, compare
from ..harness.suite import available_threads, console, header, write_report
from .examine import Examination, examine

SYSTEMS = tuple(s for peer in ("onnxruntime", "openvino") for s in SETTINGS[peer])
OPSETS = {"dynamo": 20, "torchscript": 18}
SLOW, FALLBACK = 0.9, 0.05  # a ratio below and a share above are named after the table


@dataclass(frozen=True)
class Row:
    """The results of one model with one exporter. ``failure`` says why it is not right, None if it
    is; ``medians`` are seconds by system.
    """

    model: str
    exporter: str
    failure: str | None = None
    compile_seconds: float | None = None
    fuse_seconds: float | None = None
    stages: int = 0
    notes: tuple[str, ...] = ()
    examination: Examination = field(default_factory=Examination)
    medians: tuple[tuple[str, float], ...] = ()
    errors: tuple[tuple[str, str], ...] = ()

    @property
    def best_peer(self) -> tuple[str, float] | None:
        peers = [(name, seconds) for name, seconds in self.medians if name != "gtco"]
        return min(peers, key=lambda item: item[1], default=None)

    @property
    def ratio(self) -> float | None:
        """The better peer's time over gtco's; None if either was not timed."""
        ours, best = dict(self.medians).get("gtco"), self.best_peer
        return None if ours is None or best is None else best[1] / ours

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "medians": dict(self.medians),
            "errors": dict(self.errors),
            "ratio": self.ratio,
            "fallback_share": self.examination.fallback_share,
        }


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    output = console()
    try:
        chosen = _chosen(options)
    except OptionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    header(options.threads)
    output.print(HEADINGS, markup=False, highlight=False)
    rows: list[Row] = []
    try:
        for name, exporter in chosen:
            rows.append(check(name, exporter, options, output))
            output.print(line(rows[-1]), markup=False, highlight=False)
            write_json(options, rows)
    except GtcoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        summary(rows, output)
        return 130
    summary(rows, output)
    return 1 if any(row.failure for row in rows) else 0


def check(name: str, exporter: str, options: argparse.Namespace, output: Console) -> Row:
    """Exports, compiles, examines and times one model. A failure of any step becomes part of the
    row.
    """
    folder: Path = options.folder
    row = Row(name, exporter)
    stem, precision = f"{name}-{exporter}", options.precision
    suffix = "" if precision == "fp32" else f".{precision}"
    model, library = folder / f"{stem}.onnx", folder / f"{stem}{suffix}.so"
    with output.status(f"{stem}: export") as status:
        inputs = folder / f"{stem}.npz"
        if not (options.reuse and model.exists() and inputs.exists()):
            error = export(name, exporter, model, inputs)
            if error:
                return replace(row, failure=f"not exported: {error}")
        if not (options.reuse and library.exists()):
            status.update(f"{stem}: compile")
            built = build(model, library, options.threads, precision=precision)
            if built.error:
                return replace(row, failure=f"not compiled: {built.error}")
            phases = dict(built.phases)
            row = replace(
                row,
                compile_seconds=sum(phases.values()),
                fuse_seconds=phases["fuse"],
                stages=built.stages,
                notes=built.notes,
            )
        status.update(f"{stem}: verify")
        from gtco.models.family import find

        seen = examine(model, library, options.threads, find(name).ranked, name)
        failure = f"no answer: {seen.error}" if seen.error else None
        if seen.disagrees:
            failure = f"disagrees: {seen.disagrees}"
        row = replace(row, examination=seen, failure=failure)
        if options.peers and not seen.error:
            job = {
                "threads": options.threads,
                "onnx": str(model),
                "inputs": str(inputs),
                "library": str(library),
                "precision": precision,
            }
            systems = [Contender(n, {"system": n, **job}) for n in ("gtco", *SYSTEMS)]
            raced = compare(
                systems,
                options.rounds,
                warm=0.3,
                budget=0.15,
                progress=lambda text: status.update(f"{stem}: {text}"),
            )
            row = timed(row, raced.measurements)
    return row


def timed(row: Row, measurements: Sequence[Measurement]) -> Row:
    """The row with the systems' medians, and the reasons of those that could not be timed."""
    return replace(
        row,
        medians=tuple((m.system, m.median) for m in measurements if m.rounds),
        errors=tuple((m.system, m.error) for m in measurements if m.error),
    )


def export(name: str, exporter: str, model: Path, inputs: Path) -> str | None:
    """Writes the ONNX file and the inputs for timing; gives the reason if torch cannot export the
    model.
    """
    import onnx

    from gtco.models.export import export_onnx
    from gtco.models.family import find

    try:
        member = find(name)
        module = member.create()
        tensors = member.inputs()
        export_onnx(module, tensors, model, opset=OPSETS[exporter], exporter=exporter)
    except Exception as error:  # transformers and torch raise whatever they like
        return " ".join(str(error).split()) or type(error).__name__
    # Names by what the exporter kept: an input that nothing reads is gone from the graph.
    kept = [value.name for value in onnx.load(model, load_external_data=False).graph.input]
    if len(kept) != len(tensors):
        return f"the graph has the inputs {', '.join(kept)}, the model {len(tensors)}"
    arrays = {n: t.numpy() for n, t in zip(kept, tensors, strict=True)}
    np.savez(inputs, **arrays)
    return None


HEADINGS = (
    f"{'model':22} {'exporter':11} {'agrees':>8} {'ratio':>6} {'gtco ms':>8} {'best peer':>31} "
    f"{'fallback':>8} {'compile s':>9} {'fuse s':>6}"
)


def line(row: Row) -> str:
    """The row as one line of the table, with ``!`` if it is not right."""
    seen, best, ours = row.examination, row.best_peer, dict(row.medians).get("gtco")
    agrees = "-" if seen.difference is None else f"{seen.difference:.0e}"
    cells = [
        f"{row.model:22}",
        f"{row.exporter:11}",
        f"{agrees + (' !' if row.failure else ''):>8}",
        f"{row.ratio:6.2f}" if row.ratio else f"{'-':>6}",
        f"{ours * 1e3:8.2f}" if ours else f"{'-':>8}",
        f"{best[0]} {best[1] * 1e3:8.2f}".rjust(31) if best else f"{'-':>31}",
        f"{seen.fallback_share:8.1%}",
    ]
    if row.compile_seconds is not None and row.fuse_seconds is not None:
        cells += [f"{row.compile_seconds:9.1f}", f"{row.fuse_seconds:6.1f}"]
    return " ".join(cells)


def summary(rows: Sequence[Row], output: Console) -> None:
    """Prints why models failed, what the fallback compiled, which models are slow, and the
    compiler's notes.
    """

    def section(title: str, lines: list[str]) -> None:
        if lines:
            output.print(f"\n{title}", markup=False, highlight=False)
            for text in lines:
                output.print(f"  {text}", markup=False, highlight=False, soft_wrap=True)

    def name(row: Row) -> str:
        return f"{row.model} ({row.exporter})"

    section("failed", [f"{name(r)}: {r.failure}" for r in rows if r.failure])
    section(
        f"over {FALLBACK:.0%} of the time in fallback stages",
        [
            f"{name(r)}: " + ", ".join(f"{op} {share:.1%}" for op, share in r.examination.fallbacks)
            for r in rows
            if r.examination.fallback_share > FALLBACK
        ],
    )
    slow = [r for r in rows if r.ratio is not None and r.ratio < SLOW]
    section(
        f"under {SLOW} of the better peer",
        [f"{name(r)}: {r.ratio:.2f}" for r in sorted(slow, key=lambda r: r.ratio or 0.0)],
    )
    section(
        "right, where ONNX Runtime is not or cannot run the model",
        [f"{name(r)}: {r.examination.judged}" for r in rows if r.examination.judged],
    )
    section(
        "not settled: off by more than the tolerance, but not by more than rounding costs there",
        [f"{name(r)}: {r.examination.unsettled}" for r in rows if r.examination.unsettled],
    )
    section("peers that failed", [f"{name(r)}: {n}: {e}" for r in rows for n, e in r.errors])
    section("notes", [f"{name(r)}: {note}" for r in rows for note in r.notes])
    good = sum(not r.failure for r in rows)
    output.print(f"\n{good} of {len(rows)} compile and agree", highlight=False)


def write_json(options: argparse.Namespace, rows: Sequence[Row]) -> None:
    """Writes the machine, the versions and all rows. Makes the folder; the file is written
    completely or not at all.
    """
    path: Path = options.json
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(f"cannot write {path}: {error.strerror}") from None
    found = {"precision": options.precision, "rows": [row.to_json() for row in rows]}
    write_report(path, options.threads, options.rounds, found)


def _chosen(options: argparse.Namespace) -> list[tuple[str, str]]:
    """(model, exporter) of every requested row; raises ``OptionError``."""
    from gtco.models.export import EXPORTERS
    from gtco.models.family import FAMILY, find

    names = options.models.split(",") if options.models else list(FAMILY)
    exporters = options.exporters.split(",")
    unknown = [e for e in exporters if e not in EXPORTERS]
    if unknown:
        raise OptionError(f"unknown exporter {unknown[0]!r}: choose from {', '.join(EXPORTERS)}")
    rows = [(n, e) for n in names for e in exporters if e in find(n).exporters]
    part, _, parts = options.part.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise OptionError(f"--part {options.part}: give K/N with K from 1 to N")
    return rows[int(part) - 1 :: int(parts)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench check_models", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--models", default="", help="names of models.family, by comma; else all")
    parser.add_argument("--exporters", default="dynamo,torchscript", help="by comma")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="every Nth row from the Kth")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="fp32",
        help="of gtco, and of every peer that has it; agreement is with fp32",
    )
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="time nothing")
    parser.add_argument(
        "--reuse",
        action="store_true",
        help="take the exports and libraries of an earlier run where they are: only to race them",
    )
    parser.add_argument("--threads", type=positive, default=available_threads())
    parser.add_argument("--folder", type=Path, default=Path("build/check-models"))
    parser.add_argument("--json", type=Path, default=Path("build/check-models.json"))
    return parser

"""Whole models beside their peers: the table of docs/results.md.

``python -m bench end_to_end [--suite wide | --models vit-ti-16,swin-t] [--threads 2] [--rounds 7]
[--json FILE] [--peers onnxruntime,openvino,torch,torch-compile] [--precision bf16]
[--efforts quick,full [--minutes 30] [--records FOLDER]]``

gtco is timed untuned and tuned with each of the efforts. A peer's name stands for all of its
settings (``bench/harness/peers.py``), of which the best counts. ``--minutes`` is what each model is
tuned for by the effort ``full``. Its measurements are kept in the folder of ``--records``, and a
later run goes on from them: the minutes add up, and with ``--minutes 0`` the tuned library is made
of what was measured before.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from math import inf
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gtco.cli.arguments import new_file, positive
from gtco.cli.console import say
from gtco.support.errors import GtcoError, OptionError
from gtco.support.options import EFFORTS, PRECISIONS

from ..harness import ahead
from ..harness.build import Tuning
from ..harness.by_model import ended
from ..harness.peers import SETTINGS, peer_of
from ..harness.suite import (
    Result,
    available_threads,
    console,
    header,
    run_model,
    show,
    sound,
    write_json,
)
from ..harness.workload import check_models, check_peers
from .names import FIVE, SUITES, WIDER


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    output = console()
    peers = check_peers(options.peers)
    tunings = tunings_of(options)
    named = options.models.split(",") if options.models else SUITES[options.suite]
    check_models(named, options.folder)
    results: list[Result] = []
    failed: list[str] = []
    header(options.threads)
    for name in named:
        try:
            results.append(
                run_model(
                    name,
                    peers,
                    options.folder,
                    options.threads,
                    options.rounds,
                    None,
                    precision=options.precision,
                    tunings=tunings,
                )
            )
        except GtcoError as error:
            say(f"{name} failed: {error}")
            failed.append(name)
            continue
        show(results[-1])
        if options.json:  # after each: a long run keeps what it has
            write_json(options.json, results, options.threads, options.rounds)
    if results:
        summary(results, peers, output)
    return ended(failed, sound(results))


def tunings_of(options: argparse.Namespace) -> list[Tuning]:
    """The efforts with which each model is compiled once more."""
    efforts = [effort for effort in options.efforts.split(",") if effort]
    if unknown := [effort for effort in efforts if effort not in EFFORTS]:
        raise OptionError(f"unknown effort {', '.join(unknown)}: choose from {', '.join(EFFORTS)}")
    given = options.minutes is not None or options.records is not None
    if given and "full" not in efforts:
        raise OptionError("--minutes and --records are of the effort full: --efforts quick,full")
    if options.minutes == 0 and options.records is None:
        raise OptionError("--minutes 0 measures nothing: give the --records of earlier runs")
    if options.records is not None:
        try:
            options.records.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(f"--records {options.records}: {error.strerror}") from None
    full = Tuning("full", options.minutes, options.records)
    return [full if effort == "full" else Tuning(effort) for effort in efforts]


def summary(results: Sequence[Result], systems: Sequence[str], console: Console) -> None:
    """One row a model: times, share of the peak, the best of each peer's settings over gtco's time,
    compile time and memory; then, untuned and tuned, the mean of each peer and of the best one of
    each model, and the models gtco is least ahead on.
    """
    rows = [result.to_json() for result in results]
    peers = tuple(dict.fromkeys(peer_of(system) for system in systems))
    ways, efforts = ahead.ways(rows), ahead.efforts(rows)
    titles = {way: ahead.title(rows, way) for way in ways}
    table = Table(title="gtco beside its peers (peer's time / gtco's)", title_justify="left")
    table.add_column("model")
    for heading in (
        *("gtco ms", *(f"{titles[way]} ms" for way in ways[1:]), "% of peak", *peers),
        *(f"best peer / {titles[way]}" for way in ways),
        *("compile s", *(f"{effort} s" for effort in efforts), "compile GB"),
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        share, compiled = ahead.system(row, "gtco").get("share_of_peak"), row["compile"]
        tuned = [row["tuned"].get(effort) for effort in efforts]
        table.add_row(
            row["model"],
            *(ahead.milliseconds(row, way) for way in ways),
            f"{share:.1%}" if share else "-",
            *(_ratio(ahead.best(row, [peer])) for peer in peers),
            *(_ratio(ahead.best(row, peers, way), named=True) for way in ways),
            f"{compiled['seconds']:.1f}",
            *(f"{made['seconds']:.1f}" if made else "-" for made in tuned),
            f"{compiled['peak_memory_bytes'] / 1e9:.2f}",
        )
    console.print(table)
    for way in ways:
        for peer in peers:
            console.print(
                f"geometric mean of {peer} / {way}: {_mean_of_five(rows, peer, way)}",
                highlight=False,
            )
        console.print(
            f"geometric mean of each model's best peer / {way}: {ahead.mean(rows, peers, way)}",
            highlight=False,
        )
        told = (
            f"{name} {best[0]:.2f} ({best[1]})" for best, name in ahead.least(rows, peers, way)[:3]
        )
        console.print(f"least ahead, {way}: {'; '.join(told) or 'not known'}", highlight=False)
    for way in ways[1:]:
        console.print(f"geometric mean of gtco / {way}: {_gain(rows, way)}", highlight=False)


def _ratio(best: ahead.Best | None, named: bool = False) -> str:
    if best is None:
        return "-"
    return f"{best[0]:.2f} {best[1]}" if named else f"{best[0]:.2f}"


def _gain(rows: Sequence[ahead.Row], way: str) -> str:
    """The gain in time by tuning, over the models that ran both ways."""
    gains = ahead.gains(rows, way).values()
    if not gains:
        return "not known"
    return f"{statistics.geometric_mean(gains):.3f} over {len(gains)} models"


def _mean_of_five(rows: Sequence[ahead.Row], peer: str, way: str) -> str:
    """The mean of the ratios of :data:`FIVE`; a sentence if one of them is missing."""
    found = ahead.ratios(rows, [peer], way)
    if missing := [name for name in FIVE if name not in found]:
        return f"not known without {', '.join(missing)}"
    ratio = statistics.geometric_mean(found[name][0] for name in FIVE)
    return f"{ratio:.3f} over {', '.join(FIVE)}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench end_to_end", description=__doc__.split(":")[0]
    )
    parser.add_argument(
        "--suite",
        choices=tuple(SUITES),
        default="readme",
        help=f"the models of docs/results.md, or these and {', '.join(WIDER)}",
    )
    parser.add_argument(
        "--models", help="instead of a suite's: its names, or of python -m models list, by comma"
    )
    parser.add_argument(
        "--peers", default=",".join(SETTINGS), help="by comma; default: %(default)s"
    )
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="fp32",
        help="of gtco, and of every peer that has it",
    )
    parser.add_argument(
        "--efforts",
        default="quick",
        help=f"compile and time once more with each of {', '.join(EFFORTS)}; may be empty",
    )
    parser.add_argument(
        "--minutes",
        type=_minutes,
        metavar="M",
        help="how long full tunes each model (default 10); 0 measures nothing, for --records",
    )
    parser.add_argument(
        "--records",
        type=Path,
        metavar="FOLDER",
        help="what full measures is kept here, a file for each model and precision, and gone on "
        "from",
    )
    parser.add_argument("--threads", type=positive, default=available_threads())
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--json", type=new_file, metavar="FILE")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("build/bench"),
        help="exports and libraries are kept here",
    )
    return parser


def _minutes(text: str) -> float:
    """A time of zero or more minutes, in seconds."""
    try:
        seconds = 60 * float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of minutes, such as 30")
    return seconds

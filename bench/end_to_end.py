"""Whole models beside their peers: the README's table.

``python -m bench end_to_end [--suite wide | --models vit-ti-16,swin-t] [--threads 2] [--rounds 7]
[--json FILE] [--peers onnxruntime,openvino,torch,torch-compile] [--precision bf16]
[--efforts quick,full]``

gtco is timed untuned, which all ratios are to, and tuned with each of the efforts. A peer's name
stands for all of its settings (``bench/peers.py``), of which the best counts.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.peers import SETTINGS, peer_of
from bench.suite import (
    Result,
    available_threads,
    console,
    header,
    run_model,
    show,
    sound,
    write_json,
)
from bench.workload import check_peers
from gtco.cli.arguments import new_file, positive
from gtco.errors import OptionError
from gtco.options import EFFORTS, PRECISIONS

# the geometric mean is over these
FIVE = ("vit-ti-16", "vit-s-16", "vit-base-16", "dinov2-s-14", "swin-t")
MODELS = (*FIVE, "detr-resnet50-e6", "setr-naive-base", "segformer-b0")
# Other batches and resolutions, and models that need ``transformers`` (``bench/wide.py``).
WIDER = ("vit-ti-16-batch16", "vit-s-16-512", "beit-b-16", "swinv2-t", "mobilevit-s")
SUITES = {"readme": MODELS, "wide": (*MODELS, *WIDER)}


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    output = console()
    peers = check_peers(options.peers)
    efforts = [effort for effort in options.efforts.split(",") if effort]
    if unknown := [effort for effort in efforts if effort not in EFFORTS]:
        raise OptionError(f"unknown effort {', '.join(unknown)}: choose from {', '.join(EFFORTS)}")
    results: list[Result] = []
    header(output, options.threads)
    named = options.models.split(",") if options.models else SUITES[options.suite]
    for name in named:
        results.append(
            run_model(
                name,
                peers,
                options.folder,
                options.threads,
                options.rounds,
                None,
                output,
                precision=options.precision,
                efforts=efforts,
            )
        )
        show(results[-1], output)
        if options.json:  # after each: a long run keeps what it has
            write_json(options.json, results, options.threads, options.rounds)
    summary(results, peers, output)
    return 0 if sound(results) else 1


def summary(results: Sequence[Result], systems: Sequence[str], console: Console) -> None:
    """One row a model: time, share of the peak, the best of each peer's settings over gtco's time,
    compile time and memory; then the mean of each peer, and the models gtco is least ahead on.
    """
    peers = tuple(dict.fromkeys(peer_of(system) for system in systems))
    table = Table(title="gtco beside its peers (peer's time / gtco's)", title_justify="left")
    table.add_column("model")
    efforts = list(dict.fromkeys(effort for result in results for effort in result.tuned))
    for heading in (
        *("gtco ms", *(f"{effort} ms" for effort in efforts), "% of peak", *peers, "best peer"),
        *("compile s", *(f"{effort} s" for effort in efforts), "compile GB"),
    ):
        table.add_column(heading, justify="right")
    closest: list[tuple[float, str, str]] = []
    for result in results:
        ours, build = result.comparison["gtco"], result.workload.build
        share = result.share_of_peak(ours)
        found = [best for peer in peers if (best := result.best(peer))]
        least = min(found, key=lambda best: best[1], default=None)
        if least:
            closest.append((least[1], result.workload.name, least[0]))
        ratios = [result.best(peer) for peer in peers]
        table.add_row(
            result.workload.name,
            f"{ours.median * 1e3:.2f}" if ours.rounds else "failed",
            *(
                f"{tuned.median * 1e3:.2f}" if tuned.rounds else "failed"
                for tuned in (result.comparison[f"gtco:{effort}"] for effort in efforts)
            ),
            f"{share:.1%}" if share else "-",
            *(f"{best[1]:.2f}" if best else "-" for best in ratios),
            f"{least[1]:.2f} {least[0]}" if least else "-",
            f"{build.seconds:.1f}",
            *(f"{result.tuned[effort].seconds:.1f}" for effort in efforts),
            f"{build.peak_memory_bytes / 1e9:.2f}",
        )
    console.print(table)
    for peer in peers:
        console.print(f"geometric mean of {peer} / gtco: {mean(results, peer)}", highlight=False)
    for effort in efforts:
        console.print(
            f"geometric mean of gtco / gtco:{effort}: {gain(results, effort)}", highlight=False
        )
    worst = "; ".join(f"{name} {ratio:.2f} ({peer})" for ratio, name, peer in sorted(closest)[:3])
    console.print(f"least ahead: {worst or 'not known'}", highlight=False)


def gain(results: Sequence[Result], effort: str) -> str:
    """What tuning makes of the time, over the models that ran both ways."""
    ratios = [ratio for r in results if (ratio := r.ratio(f"gtco:{effort}"))]
    if not ratios:
        return "not known"
    return f"{1 / statistics.geometric_mean(ratios):.3f} over {len(ratios)} models"


def mean(results: Sequence[Result], peer: str) -> str:
    """Of the ratios of :data:`FIVE`, in words where one of them is missing."""
    found = {r.workload.name: r for r in results}
    missing = [name for name in FIVE if name not in found or not found[name].best(peer)]
    if missing:
        return f"not known without {', '.join(missing)}"
    ratios = [best[1] for name in FIVE if (best := found[name].best(peer))]
    return f"{statistics.geometric_mean(ratios):.3f} over {', '.join(FIVE)}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench end_to_end", description=__doc__.split(":")[0]
    )
    parser.add_argument(
        "--suite",
        choices=tuple(SUITES),
        default="readme",
        help=f"the README's models, or these and {', '.join(WIDER)}",
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

"""Whole models beside their peers: the README's table, and the first issue's claims on speed.

``python -m bench end_to_end [--models vit-ti-16,swin-t] [--threads 2] [--rounds 7]
[--json FILE] [--peers onnxruntime,openvino,torch,torch-compile]``
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.suite import (
    Result,
    available_threads,
    console,
    geometric_mean,
    header,
    run_model,
    show,
    sound,
    write_json,
)
from bench.workload import check_peers
from gtco.cli.arguments import positive
from gtco.errors import GtcoError

FIVE = (
    "vit-ti-16",
    "vit-s-16",
    "vit-base-16",
    "dinov2-s-14",
    "swin-t",
)  # the geometric mean is over these
MODELS = (*FIVE, "detr-resnet50-e6", "setr-naive-base", "segformer-b0")
COMPILE_SECONDS = {"vit-ti-16": 20, "vit-base-16": 45, "detr-resnet50-e6": 90}


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    output = console()
    try:
        peers = check_peers(options.peers)
        results: list[Result] = []
        header(output, options.threads)
        for name in options.models.split(","):
            results.append(
                run_model(
                    name, peers, options.folder, options.threads, options.rounds, None, output
                )
            )
            show(results[-1], output)
            if options.json:
                write_json(
                    options.json, results, options.threads, options.rounds
                )  # after each: a long run keeps what it has
    except GtcoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    summary(results, peers, output)
    return 0 if sound(results) else 1


def summary(results: Sequence[Result], peers: Sequence[str], console: Console) -> None:
    """One row a model: time, share of peak, every peer's time over gtco's, compile time and memory;
    then the mean.
    """
    table = Table(title="gtco beside its peers (peer's time / gtco's)", title_justify="left")
    table.add_column("model")
    for heading in ("gtco ms", "% of peak", *peers, "compile s", "compile GB", "limit GB"):
        table.add_column(heading, justify="right")
    for result in results:
        ours, build = result.comparison["gtco"], result.workload.build
        share, limit = result.share_of_peak(ours), COMPILE_SECONDS.get(result.workload.name)
        ratios = [result.ratio(peer) for peer in peers]
        table.add_row(
            result.workload.name,
            f"{ours.median * 1e3:.2f}" if ours.rounds else "failed",
            f"{share:.1%}" if share else "-",
            *(f"{r:.2f}" if r else "-" for r in ratios),
            f"{build.seconds:.1f}" + (f" (of {limit})" if limit else ""),
            f"{build.peak_memory_bytes / 1e9:.2f}",
            f"{(3 * build.weights_bytes + 1.5e9) / 1e9:.2f}",
        )
    console.print(table)
    found = {r.workload.name: r for r in results}
    five = [found[name] for name in FIVE if name in found]
    if len(five) < len(FIVE):
        console.print(f"no geometric mean: it is over {', '.join(FIVE)}")
        return
    for peer in peers:
        mean = geometric_mean([result.ratio(peer) for result in five])
        console.print(
            f"geometric mean of {peer} / gtco over {', '.join(FIVE)}: "
            + (f"{mean:.3f}" if mean else "not known, one of them failed"),
            highlight=False,
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench end_to_end", description=__doc__.split(":")[0]
    )
    parser.add_argument(
        "--models", default=",".join(MODELS), help="names of python -m models list, by comma"
    )
    parser.add_argument(
        "--peers", default="onnxruntime,openvino,torch,torch-compile", help="by comma"
    )
    parser.add_argument("--threads", type=positive, default=available_threads())
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("build/bench"),
        help="exports and libraries are kept here",
    )
    return parser

"""The tables of docs/results.md, each written from one run of ``end_to_end``, and that of
docs/int8.md, from one run of ``int8``.

``python -m bench readme build/bench/end_to_end.json [docs/results.md]``
``python -m bench readme --table peers build/bench/bf16.json [docs/results.md]``
``python -m bench readme --table int8 build/bench/int8.json [docs/int8.md]``

Every number of a section comes from that one file, so that no column is of another run and no row
is left out. The table of fp32 is between the ``results`` marks, and that of the best peers between
marks that name the precision, ``peers bf16``. Without a file to write to it is printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..harness import ahead
from ..harness.ahead import Row
from ..harness.peers import SETTINGS, peer_of
from . import int8_table
from .names import FIVE, WIDER

TITLES = {
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "torch": "torch",
    "torch-compile": "torch.compile",
}
NAMES = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO", "torch": "torch"}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench readme", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("json", type=Path, help="what end_to_end --json or int8 --json wrote")
    parser.add_argument("file", type=Path, nargs="?", help="rewritten between its marks")
    parser.add_argument(
        "--table",
        choices=("results", "peers", "int8"),
        default="results",
        help="every peer in fp32 (default), the best peer of each model, or int8",
    )
    options = parser.parse_args(argv)
    try:
        run = json.loads(options.json.read_text())
        text = TABLES[options.table](run)
        if options.file is None:
            print(text)
        else:
            known = f" {precision_of(run)}" if options.table == "peers" else ""
            replace(options.file, text, options.table + known)
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    except (ValueError, KeyError) as error:
        print(f"error: {options.json}: {error!r}", file=sys.stderr)
        return 1
    return 0


def replace(file: Path, text: str, name: str = "results") -> None:
    """Replaces the text between the marks of that name in ``file``; ValueError if it has no such
    marks.
    """
    first, last = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, begin, rest = file.read_text().partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"{file} has no {first} ... {last}")
    file.write_text(f"{before}{first}\n{text}\n{last}{after}")


def precision_of(run: Mapping[str, Any]) -> str:
    """The precision that all models of a run were compiled for; ValueError if they differ."""
    found = {model.get("precision", "fp32") for model in run["models"]}
    if len(found) != 1:
        raise ValueError(f"a table is of one precision, and this run has {sorted(found)}")
    return str(found.pop())


def section(run: Mapping[str, Any]) -> str:
    """Machine and versions, one row a model, the means, and the rows gtco is least ahead on."""
    models: list[Row] = run["models"]
    if precision_of(run) != "fp32":
        raise ValueError("the table of results is of fp32 alone")
    peers = [p for p in SETTINGS if any(ahead.best(model, [p]) for model in models)]
    ways, efforts = ahead.ways(models), ahead.efforts(models)
    timed = [effort for effort in efforts if effort != "full"]  # full takes what it is given
    heads = [
        *("model", "gtco ms", *(f"{ahead.title(models, way)} ms" for way in ways[1:]), "% of peak"),
        *(TITLES[p] for p in peers),
        *("compile s", *(f"{effort} s" for effort in timed), "compile peak GB"),
    ]
    lines = [_about(run, peers), "", *_head(heads)]
    for model in models:
        share, build = ahead.system(model, "gtco").get("share_of_peak"), model["compile"]
        cells = [
            model["model"],
            *(ahead.milliseconds(model, way) for way in ways),
            f"{share:.0%}".rstrip("%") if share else "-",
            *(_ratio(ahead.best(model, [peer])) for peer in peers),
            f"{build['seconds']:.1f}",
            *(f"{model['tuned'][effort]['seconds']:.1f}" for effort in timed),
            f"{build['peak_memory_bytes'] / 1e9:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    told = [_means(models, peers), *_against_best(models, peers)]
    told += [*(_gain(models, way) for way in ways[1:]), *_conditions(models)]
    return "\n".join([*lines, "", int8_table.filled(" ".join(told))])


def best_peers(run: Mapping[str, Any]) -> str:
    """Machine and versions; one row a model: gtco's times, the best peer and its time, and how far
    gtco is ahead of it, untuned and tuned; the means and the least of these columns.
    """
    models: list[Row] = run["models"]
    peers = [p for p in SETTINGS if any(ahead.best(model, [p]) for model in models)]
    ways = ahead.ways(models)
    titles = [ahead.title(models, way) for way in ways]
    heads = ["model", *(f"{title} ms" for title in titles), "best peer", "its ms", *titles]
    lines = [_about(run, peers, of_best=True), "", *_head(heads)]
    for model in models:
        found = next((best for way in ways if (best := ahead.best(model, peers, way))), None)
        cells = [
            model["model"],
            *(ahead.milliseconds(model, way) for way in ways),
            _named(found[1]) if found else "-",
            ahead.milliseconds(model, found[1]) if found else "-",
            *(_ratio(ahead.best(model, peers, way)) for way in ways),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    told = [*_against_best(models, peers), *(_gain(models, way) for way in ways[1:])]
    return "\n".join([*lines, "", int8_table.filled(" ".join([*told, *_conditions(models)]))])


def _head(cells: Sequence[str]) -> tuple[str, str]:
    return f"| {' | '.join(cells)} |", "|" + "---|" * len(cells)


def _named(system: str) -> str:
    """``ONNX Runtime (optimizer)`` of ``onnxruntime:optimizer``."""
    setting = system.partition(":")[2]
    return TITLES[peer_of(system)] + (f" ({setting})" if setting else "")


def _ratio(best: ahead.Best | None) -> str:
    return f"{best[0]:.2f}" if best else "-"


def _about(run: Mapping[str, Any], peers: Sequence[str], of_best: bool = False) -> str:
    """The command, the machine, the versions, and what a ratio is."""
    about, models = run["machine"], run["models"]
    precision, efforts = precision_of(run), ahead.efforts(models)
    wide = any(model["model"] in WIDER for model in models)
    timed = {system["system"] for model in models for system in model["systems"]}
    ran = {p: [s for s in SETTINGS[p] if s in timed] for p in peers}
    asked = [
        *(["--suite wide"] if wide else []),
        f"--peers {','.join(p if (*ran[p],) == SETTINGS[p] else ','.join(ran[p]) for p in peers)}",
        *([f"--precision {precision}"] if precision != "fp32" else []),
        *([f"--efforts {','.join(efforts)}"] if "full" in efforts else []),
    ]
    packages = {peer.partition("-")[0] for peer in peers}  # torch of torch-compile
    known = about["versions"].items()
    versions = [f"{NAMES[n]} {v}" for n, v in known if n in NAMES and n in packages and v]
    if precision != "fp32" and "onnxruntime" in peers:
        versions.append("ONNX Runtime has no bf16 on a CPU and ran in fp32")
    settings = "; ".join(
        f"{TITLES[peer]}: {', '.join(s.partition(':')[2] or 'default' for s in systems)}"
        for peer, systems in ran.items()
        if len(systems) > 1
    )
    what = (
        "The last columns are the time of the model's best peer over gtco's"
        if of_best
        else "A peer's column is its time over gtco's, untuned"
    )
    counts = f"; of a peer's settings ({settings}) the best counts" if settings else ""
    batch = "batch 1 unless the name says another, " if wide else "batch 1, "
    return int8_table.filled(
        f"`python -m bench end_to_end {' '.join(asked)}` on {about['cores']} cores of an "
        f"{about['cpu']}, {about['threads']} threads, {batch}{precision}, {about['date'][:10]}, "
        f"all of it one run. {', '.join(versions)}. {what}: above 1 gtco is faster{counts}."
    )


def _means(models: Sequence[Row], peers: Sequence[str]) -> str:
    """The means over the five models, for each peer by itself."""
    names = f"Geometric mean over {', '.join(FIVE)}: "
    told = []
    for way in ahead.ways(models):
        over = []
        for peer in peers:
            found = ahead.ratios(models, [peer], way)
            if all(name in found for name in FIVE):
                ratio = statistics.geometric_mean(found[name][0] for name in FIVE)
                over.append(f"{ratio:.2f} over {TITLES[peer]}")
        told.append(f"{_way(models, way)}{', '.join(over) or 'not known, a row is missing'}")
    return f"{names}{'; '.join(told)}."


def _against_best(models: Sequence[Row], peers: Sequence[str]) -> list[str]:
    """The comparison with the best peer of each model: the geometric mean, and the three rows on
    which gtco is least ahead.
    """
    ways = ahead.ways(models)
    means = "; ".join(f"{_way(models, way)}{ahead.mean(models, peers, way)}" for way in ways)
    least = "; ".join(
        _way(models, way)
        + ", ".join(
            f"{name} {ratio:.2f} ({TITLES[peer_of(peer)]})"
            for (ratio, peer), name in ahead.least(models, peers, way)[:3]
        )
        for way in ways
    )
    return [
        f"Geometric mean over the best peer of each model: {means}.",
        f"Least ahead of the best peer: {least}.",
    ]


def _way(models: Sequence[Row], way: str) -> str:
    """The words that begin the figures of this way; empty if there is only one way."""
    return f"{ahead.title(models, way)} " if len(ahead.ways(models)) > 1 else ""


def _gain(models: Sequence[Row], way: str) -> str:
    """The gain in time by tuning, in the mean and for the worst row."""
    title, gains = ahead.title(models, way), ahead.gains(models, way)
    title = title if title.startswith("tuned") else f"tuned ({title})"
    if not gains:
        return f"{title.capitalize()}: no model ran."
    least = min(gains, key=lambda name: gains[name])
    mean = statistics.geometric_mean(gains.values())
    return (
        f"{title.capitalize()}: {mean:.3f} times as fast as untuned in the geometric mean of "
        f"{len(gains)} models, least {least} {gains[least]:.3f}."
    )


def _conditions(models: Sequence[Row]) -> Iterator[str]:
    """The machine's peak during the run, and how far the outputs agree."""
    peaks = [m["peak_flops_per_second"] / 1e9 for m in models if m["peak_flops_per_second"]]
    if peaks:
        yield (
            f"The peak, read beside each model, ranged from {min(peaks):.0f} to {max(peaks):.0f} "
            "GFLOP/s: the machine is shared, and ratios within a row are what counts."
        )
    ours = [ahead.system(model, way) for model in models for way in ahead.ways(models)]
    found = [s["difference"] for s in ours if s.get("difference") is not None]
    peers = [s["system"] for model in models for s in model["systems"] if "median_s" in s]
    # without ONNX Runtime the first peer is the reference, in its own precision
    whose = "ONNX Runtime" if any(p.startswith("onnxruntime") for p in peers) else "the first peer"
    if found:
        yield f"gtco's outputs agree with {whose}'s to {max(found):.0e} of their magnitude."


TABLES = {"results": section, "peers": best_peers, "int8": int8_table.section}

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

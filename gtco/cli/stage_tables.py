"""The tables of ``gtco inspect``: the stages of one shape, and the variants of a library."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gtco.cli import console
from gtco.cli.console import milliseconds, say, size, text
from gtco.cli.inspection import Inspection, looked_at
from gtco.cli.tables import Table
from gtco.report.words import FEWER_PRODUCTS
from gtco.support.counting import counted


def show_variants(title: str, found: Mapping[str, Inspection], every: bool) -> None:
    """Prints a row for each variant, or for some of many."""
    from gtco.runtime.library import tensor_specs

    table = Table(f"{title}: {counted(len(found), 'variant')}")
    table.column("sizes", least=12)
    for heading in ("stages", "MFLOP", "arena", "predicted ms", "measured ms", "% of peak"):
        table.column(heading, right=True)
    shown = looked_at([seen.details.get("sizes", {}) for seen in found.values()], every)
    for number, (sizes, seen) in enumerate(found.items()):
        if number not in shown:
            continue
        measured = all("measured_seconds" in stage for stage in seen.stages)
        time = total(seen.stages, "measured_seconds") if measured else None
        flops = total(seen.stages, "flops")
        table.row(
            sizes,
            str(len(seen.stages)),
            f"{flops / 1e6:.1f}",
            size(seen.details["arena_bytes"]),
            milliseconds(total(seen.stages, "predicted_seconds")),
            milliseconds(time),
            share(seen.stages),
        )
    console.show(table)
    if len(shown) < len(found):
        say(f"{len(found) - len(shown)} more variants: --all shows a row for each")
    seen = next(iter(found.values()))
    weights = seen.details["metadata"].get("weights_bytes")
    if of := seen.details["metadata"].get("range"):
        step = f" in steps of {of['step']}" if of["step"] > 1 else ""
        first = {**seen.details["sizes"], of["symbol"]: of["low"]}
        others = [name for name in first if name != of["symbol"]]
        more = f" that have its {' and '.join(others)}" if others else ""
        say(
            f"{of['symbol']} of {of['low']} to {of['high']}{step} runs as the cheapest sum of "
            f"these{more}; they share one arena and {size(weights)} of weights"
        )
        for kind in ("inputs", "outputs"):
            say(f"{kind}: {'; '.join(map(str, tensor_specs(seen.details['metadata'], kind)))}")
        say(f"{chosen_by(first)} shows the stages of one size")
        return
    say(f"all share one arena and {size(weights)} of weights")
    say(f"{chosen_by(seen.details['sizes'])} shows the stages of one of them")


def chosen_by(sizes: Mapping[str, int]) -> str:
    """The options that choose these sizes."""
    return " ".join(f"--dim {name}={size}" for name, size in sizes.items())


def show(title: str, seen: Inspection, every: bool) -> None:
    groups = [[s] for s in seen.stages] if every else grouped(seen.stages)
    measured = all("measured_seconds" in s for s in seen.stages)
    firsts = seen.details["metadata"].get("parts", (0,))
    parts = f", a batch in {len(firsts)} parts of {firsts[1]}" if len(firsts) > 1 else ""
    table = Table(f"{title}: {counted(len(seen.stages), 'stage')}{parts}")
    images = seen.details["metadata"].get("images")  # of a model for GPUs
    launch = ("grid", "threads", "shared") if images else ()
    table.column("stage", least=14, rank=2 if every else 3)
    table.column("operators", least=16)
    table.column("shapes", least=18, rank=5)
    table.column("schedule", least=18, rank=6)
    for heading in launch:
        table.column(heading, right=True, rank=7)
    table.column("n", right=True)
    table.column("MFLOP", right=True, rank=1)
    table.column("bytes", right=True, rank=4)
    for heading in ("predicted ms", "measured ms", "% of peak"):
        table.column(heading, right=True)
    for group in groups:
        first = group[0]
        time = total(group, "measured_seconds") if measured else None
        table.row(
            text(first["name"]),
            text(first["operators"], "+"),
            shapes(first),
            text(first["schedule"]),
            *([grid(first), str(first["threads"]), str(first["shared"])] if launch else []),
            str(len(group)),
            f"{total(group, 'flops') / 1e6:.1f}",
            size(total(group, "bytes")),
            milliseconds(total(group, "predicted_seconds")),
            milliseconds(time),
            share(group),
        )
    table.rule()
    time = total(seen.stages, "measured_seconds") if measured else None
    flops = total(seen.stages, "flops")
    table.row(
        "",
        "all",
        "",
        "",
        *("" for _ in launch),
        str(len(seen.stages)),
        f"{flops / 1e6:.1f}",
        size(total(seen.stages, "bytes")),
        milliseconds(total(seen.stages, "predicted_seconds")),
        milliseconds(time),
        share(seen.stages),
    )
    console.show(table)
    known = str(seen.peak) if seen.peak else seen.peak_reason
    if seen.int8_peak:
        known = f"{known}; of int8 products {seen.int8_peak}"
    metadata = seen.details["metadata"]
    precision = metadata.get("precision", "fp32")
    formats = metadata.get("weights_by_dtype") or {}  # libraries of older versions have none
    stored = ", ".join(f"{size(nbytes)} {dtype}" for dtype, nbytes in formats.items())
    weights = f"; weights {stored}" if stored else ""
    if images:
        target = metadata["target"].get("name")
        kernels = len({stage["kernel"] for stage in seen.stages})
        code = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in images.items())
        runs_on = f"target {target}; {kernels} kernels, images: {code}"
        runs_on += launches(metadata)
    else:
        runs_on = f"threads {seen.threads or 'all that a process may use'}"
    say(f"precision {precision}{weights}; {runs_on}; peak: {known}")
    for why in above_peak(seen.stages):
        say(why)


def launches(metadata: Mapping[str, Any]) -> str:
    """How a model for GPUs is launched, and the time that each way is predicted to take."""
    prices = metadata.get("predicted_launches") or {}
    known = [f"{name} {milliseconds(s)} ms" for name, s in prices.items() if s is not None]
    predicted = f" (predicted: {', '.join(known)})" if known else ""
    spilled = metadata.get("persistent_would_spill") or {}
    there = ", ".join(f"{nbytes} bytes on {arch}" for arch, nbytes in spilled.items())
    left_out = f"; as graph where one kernel would spill: {there}" if spilled else ""
    return f"; launched as {metadata.get('launches', 'graph')}{predicted}{left_out}"


def grouped(stages: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Groups stages with equal operators, shapes and schedule; groups are in the order of their
    first stages.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for stage in stages:
        key = json.dumps(
            [stage["operators"], shapes(stage), stage["schedule"]], sort_keys=True, default=str
        )
        groups.setdefault(key, []).append(stage)
    return list(groups.values())


def grid(stage: Mapping[str, Any]) -> str:
    """The blocks of a launch, ``48x2``. Sizes of 1 after the first are left out."""
    sizes = list(stage["grid"])
    while len(sizes) > 1 and sizes[-1] == 1:
        sizes.pop()
    return "x".join(map(str, sizes))


def shapes(stage: Mapping[str, Any]) -> str:
    """``1x197x192 192x768 -> 1x197x768``; a dtype is named if it is not float32."""
    types = [re.sub(r"^float32\[(.*)\]$", r"\1", t) for t in (*stage["inputs"], stage["output"])]
    return f"{' '.join(types[:-1])} -> {types[-1]}"


def total(stages: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(sum(stage[key] or 0 for stage in stages))


def share(stages: Sequence[Mapping[str, Any]]) -> str:
    """The share of the peak of these stages together: the time that they take at their peaks, over
    the time that they take.
    """
    known = [stage for stage in stages if stage.get("share_of_peak")]
    if not known:
        return "-"
    at_peak = sum(stage["share_of_peak"] * stage["measured_seconds"] for stage in known)
    return f"{at_peak / total(stages, 'measured_seconds'):.1%}"


def above_peak(stages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Explains stages whose share of the peak is above 100 %; empty if there are none."""
    above = [stage for stage in stages if (stage.get("share_of_peak") or 0.0) > 1.0]
    fewer = [stage for stage in above if stage["schedule"].get("sketch") in FEWER_PRODUCTS]
    said = []
    if fewer:
        said.append(
            f"{counted(len(fewer), 'stage')} above 100 % of the peak because their FLOPs are those "
            "of the definition, and Winograd's and Strassen's algorithms multiply less"
        )
    if len(above) > len(fewer):
        said.append(
            f"{counted(len(above) - len(fewer), 'stage')} above 100 % of the peak: the machine was "
            "faster during the run than while its peak was read"
        )
    return said


def show_loops(found: Sequence[Inspection]) -> None:
    """Prints the loops of each kernel once."""
    from gtco.tensor.loops import Line

    shown: set[str] = set()
    for seen in found:
        loops = seen.details["metadata"].get("loops", {})
        for stage in seen.stages:
            kernel = stage["kernel"]
            if kernel in shown:
                continue
            shown.add(kernel)
            say(f"{text(stage['name'])}: {text(stage['operators'], '+')}, {shapes(stage)}")
            lines = map(Line.from_json, loops.get(kernel, ()))
            say("\n".join(f"  {line}" for line in lines) or "  no nest is described")

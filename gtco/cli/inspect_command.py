"""``gtco inspect MODEL.so|MODEL.onnx``: shows every stage, its schedule, time and share of the
peak.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtco.cli import arguments, console
from gtco.cli.console import Phases, milliseconds, say, size, text
from gtco.cli.run_command import make_inputs
from gtco.cli.tables import Table
from gtco.support.errors import PACKAGES, ArtifactError, GtcoError, OptionError
from gtco.support.options import PRECISIONS
from gtco.support.sizes import said, spread

if TYPE_CHECKING:
    from gtco.runtime.module import Model
    from gtco.search.calibration.peak import Peak

MOST_ROWS = 16  # variants of a library that are measured and shown without --all
REPEAT = 20  # a stage's measured time is the median of so many calls


def add(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "inspect", help="the stages of a model: what, how and how fast"
    )
    parser.add_argument("model", type=Path, metavar="MODEL.so|MODEL.onnx")
    parser.add_argument("--json", action="store_true", help="print JSON, one entry a stage")
    parser.add_argument(
        "--all",
        action="store_true",
        help="a row for every stage, where equal ones are one row otherwise, and for each of many "
        "variants",
    )
    parser.add_argument(
        "--loops",
        action="store_true",
        help="also print the loop nest of each kernel, in the order of the first stages with it",
    )
    parser.add_argument(
        "--profile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure each stage and the machine's peak (default: yes)",
    )
    arguments.add_compile_options(parser)
    arguments.add_tuning(parser)
    return parser


@dataclass(frozen=True)
class Inspection:
    """A model's stages: the artifact's dictionaries, with ``measured_seconds`` and
    ``share_of_peak`` if they are known.

    ``peak`` is that of the library's precision. Products of integers have one of their own,
    ``int8_peak``, which is read only if there are such products.
    """

    stages: tuple[Mapping[str, Any], ...]
    threads: int
    peak: Peak | None
    peak_reason: str | None
    details: Mapping[str, Any]
    int8_peak: Peak | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            **self.details,
            "threads": self.threads,
            "peak_flops_per_second": self.peak.flops if self.peak else None,
            "peak_readings": list(self.peak.readings) if self.peak else [],
            "int8_peak_operations_per_second": self.int8_peak.flops if self.int8_peak else None,
            "peak_reason": self.peak_reason,
            "stages": [dict(s) for s in self.stages],
        }


def main(options: argparse.Namespace) -> int:
    if options.model.suffix in (".onnx", ".pt2"):
        from gtco.support.torchless import import_tvm

        import_tvm()
        from gtco.compiler import compile_to_file

        with tempfile.TemporaryDirectory(prefix="gtco-inspect-") as folder:
            library = Path(folder, options.model.stem + ".so")
            with Phases() as progress:
                compile_to_file(
                    options.model,
                    library,
                    **arguments.compile_options(options),
                    progress=progress,
                )
            found = inspect_variants(library, options)
    elif given := arguments.compile_options_given(options):
        raise OptionError(
            f"{', '.join(given)}: that is of a compile, and '{options.model}' is taken for a "
            "compiled library: leave it out, or give the MODEL.onnx"
        )
    else:
        found = inspect_variants(options.model, options)
    title, every = str(options.model), list(found.values())
    # of a range these are its parts, unless --dim chose one size of a library
    of_range = every[0].details["metadata"].get("range")
    if of_range and options.dim and options.model.suffix == ".so":
        of_range = None
    alone = len(every) == 1 and not of_range
    if options.json:
        print(json.dumps(whole_json(found, of_range, alone, options.all), indent=1, default=str))
    elif alone:
        sizes = next(iter(found))
        show(f"{title} ({sizes})" if sizes else title, every[0], options.all)
    else:
        show_variants(title, found, options.all)
    if options.loops and not options.json:
        show_loops(every)
    return 0


def whole_json(
    found: Mapping[str, Inspection], of_range: Any, alone: bool, every: bool
) -> dict[str, Any]:
    """What ``--json`` prints. Of many variants it shows the ones that were measured, because 256
    variants would be 20 MB.
    """
    if alone:
        return next(iter(found.values())).to_json()
    shown = looked_at([seen.details.get("sizes", {}) for seen in found.values()], every)
    return {
        **({"range": of_range} if of_range else {}),
        "variants": {
            sizes: seen.to_json() for n, (sizes, seen) in enumerate(found.items()) if n in shown
        },
        "variants_left_out": [sizes for n, sizes in enumerate(found) if n not in shown],
    }


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


def inspect_variants(library: Path, options: argparse.Namespace) -> dict[str, Inspection]:
    """What :func:`inspect` says of the variant that ``--dim`` chooses, or of each, by its sizes.
    A compile has chosen already: then ``--dim`` is not looked at. Of many variants some are
    measured, unless all are asked for.
    """
    from gtco.runtime.library import check_model, read_metadata
    from gtco.runtime.variants import choose, described_variants

    metadata = read_metadata(library)
    check_model(library, metadata)
    chosen = None
    if library == options.model:
        if None in options.dim:
            raise OptionError("--dim alone is of gtco compile; here give a size: --dim batch=4")
        chosen = choose(metadata, arguments.one_size_each(options.dim), library)
    every = [chosen] if chosen else described_variants(metadata)
    shown = looked_at([one.get("sizes", {}) for one in every], options.all)
    peak_of = cache(measured_peak)  # of one machine, whatever the variant
    return {
        said(one.get("sizes", {})): inspect(
            library,
            options.threads,
            options.profile and number in shown,
            one.get("sizes", {}),
            one,
            metadata,
            peak_of,
        )
        for number, one in enumerate(every)
    }


def looked_at(sizes: Sequence[Mapping[str, int]], every: bool) -> Collection[int]:
    """The numbers of the variants that are measured and shown."""
    return spread(sizes, len(sizes) if every else MOST_ROWS)


def show_variants(title: str, found: Mapping[str, Inspection], every: bool) -> None:
    """Prints a row for each variant, or for some of many."""
    from gtco.runtime.library import tensor_specs

    table = Table(f"{title}: {len(found)} variants")
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


def inspect(
    library: Path,
    threads: int,
    profile: bool,
    sizes: Mapping[str, int] | None = None,
    variant: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    peak_of: Callable[[int, str], tuple[Peak | None, str | None]] | None = None,
) -> Inspection:
    """Reads what a library says about itself, or about its variant of these sizes, without running
    any code of it. With ``profile``, opens the library and measures its stages (median of calls on
    random inputs) and the machine's peak. A library for GPUs that cannot be opened here is only
    read, and so is one for another kind of CPU; the reason replaces the peak. ``variant`` and
    ``metadata``: what was read already. ``peak_of``: :func:`measured_peak`, which may keep peaks.
    """
    from gtco.runtime.elf import read_contents
    from gtco.runtime.library import read_metadata
    from gtco.runtime.module import load
    from gtco.runtime.variants import choose

    peak_of = peak_of or measured_peak
    metadata = metadata or read_metadata(library)
    variant = variant or choose(metadata, sizes or {}, library)
    assert variant is not None
    opened: Model | None = None
    reason = "not measured (--no-profile)"
    if profile:
        try:
            opened = load(library, threads=threads, dims=sizes)
        except ArtifactError as error:
            if "images" in metadata:
                reason = f"not measured: {error}"  # no GPU here runs the model
            elif (isa := read_contents(library).isa).here:
                raise
            else:
                reason = f"not measured: a library for {isa.name}, which this machine is not"
    if opened is None:
        return Inspection(
            tuple(variant["steps"]),
            threads or metadata.get("threads", 0),
            None,
            reason,
            _details(metadata, variant),
        )
    with opened as model:
        stages: list[dict[str, Any]] = [dict(stage) for stage in model.stages]
        inputs = make_inputs(model.inputs, {}, seed=0)
        seconds = model.profile(*inputs.values(), repeat=REPEAT)
        integers = [stage.get("multiplies") == "int8" for stage in stages]
        precision = model.metadata.get("precision", "fp32")
        peak, unknown = (
            peak_of(model.threads, PRECISIONS[precision])
            if model.device is None
            else (None, "not measured on a GPU")
        )
        int8_peak = peak_of(model.threads, "int8")[0] if any(integers) and peak else None
        for stage, measured, whole in zip(stages, seconds, integers, strict=True):
            most = int8_peak if whole else peak
            reached = stage["flops"] / measured if measured > 0 else None
            stage["measured_seconds"] = float(measured)
            stage["share_of_peak"] = reached / most.flops if reached and most else None
        details = _details(metadata, variant)
        return Inspection(tuple(stages), model.threads, peak, unknown, details, int8_peak)


def _details(metadata: Mapping[str, Any], variant: Mapping[str, Any]) -> dict[str, Any]:
    own = {k: v for k, v in metadata.items() if k not in ("steps", "variants")}
    if loops := metadata.get("loops"):  # many variants have many kernels, each variant a few
        kernels = dict.fromkeys(step["kernel"] for step in variant["steps"])
        own["loops"] = {name: loops[name] for name in loops if name in kernels}
    found = {"inputs": variant["inputs"], "outputs": variant["outputs"], "metadata": own}
    if sizes := variant.get("sizes"):
        found |= {"sizes": sizes, "arena_bytes": variant["arena_bytes"]}
    return found


def measured_peak(threads: int, operand: str) -> tuple[Peak | None, str | None]:
    """The machine's peak of products of this dtype on this many threads, or the reason why it is
    not known.
    """
    try:
        from gtco.search.calibration.peak import machine_peak

        return machine_peak(threads, operand), None
    except GtcoError as error:
        return None, f"not measured: {error}"
    except ModuleNotFoundError as error:
        package = PACKAGES.get(str(error.name), error.name)
        return None, f"not measured: that takes {package}, which is not installed"


def show(title: str, seen: Inspection, every: bool) -> None:
    groups = [[s] for s in seen.stages] if every else grouped(seen.stages)
    measured = all("measured_seconds" in s for s in seen.stages)
    firsts = seen.details["metadata"].get("parts", (0,))
    parts = f", a batch in {len(firsts)} parts of {firsts[1]}" if len(firsts) > 1 else ""
    table = Table(f"{title}: {len(seen.stages)} stages{parts}")
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
    fewer = [stage for stage in above if stage["schedule"].get("sketch") == "winograd"]
    said = []
    if fewer:
        said.append(
            f"{len(fewer)} stages are above 100 % of the peak because their FLOPs are those of a "
            "direct convolution, and Winograd's algorithm multiplies less"
        )
    if len(above) > len(fewer):
        said.append(
            f"{len(above) - len(fewer)} stages are above 100 % of the peak because the machine was "
            "faster while they ran than while its peak was read: the cores' clock and other "
            "processes change it, and a peak is kept for an hour"
        )
    return said

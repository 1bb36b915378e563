"""``gtco inspect MODEL.so|MODEL.onnx``: shows every stage, its schedule, time and share of the
peak.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from gtco.cli import arguments
from gtco.cli.console import Phases
from gtco.cli.inspection import Inspection, inspect, looked_at, measured_peak
from gtco.cli.stage_tables import show, show_loops, show_variants
from gtco.runtime.publish import temporary
from gtco.support.errors import OptionError
from gtco.support.sizes import sizes_text


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


def main(options: argparse.Namespace) -> int:
    if options.model.suffix in (".onnx", ".pt2"):
        from gtco.support.torchless import import_tvm

        import_tvm()
        from gtco.compiler import compile_to_file

        with temporary("inspect") as folder:
            library = folder / f"{options.model.stem}.so"
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
        sizes_text(one.get("sizes", {})): inspect(
            library,
            options.threads,
            options.profile and number in shown,
            metadata,
            one,
            peak_of,
        )
        for number, one in enumerate(every)
    }

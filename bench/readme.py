"""The README's table, written from one run of ``end_to_end``.

``python -m bench readme build/bench/end_to_end.json [README.md]``

Every number of the section between the ``results`` marks comes from that one file, so that no
column is of another run and no row is left out. Without a README the section is printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.end_to_end import FIVE
from bench.peers import SETTINGS, peer_of

BEGIN, END = "<!-- results -->", "<!-- /results -->"
TITLES = {
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "torch": "torch",
    "torch-compile": "torch.compile",
}
Row = Mapping[str, Any]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench readme", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("json", type=Path, help="what end_to_end --json wrote")
    parser.add_argument("readme", type=Path, nargs="?", help="rewritten between its marks")
    options = parser.parse_args(argv)
    try:
        text = section(json.loads(options.json.read_text()))
        if options.readme is None:
            print(text)
        else:
            replace(options.readme, text)
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    except (ValueError, KeyError) as error:
        print(f"error: {options.json}: {error!r}", file=sys.stderr)
        return 1
    return 0


def replace(readme: Path, text: str) -> None:
    """Put ``text`` between the marks of ``readme``; ValueError where it has none."""
    before, begin, rest = readme.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{readme} has no {BEGIN} ... {END}")
    readme.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def section(run: Mapping[str, Any]) -> str:
    """Machine and versions, one row a model, the means, and the rows gtco is least ahead on."""
    models: list[Row] = run["models"]
    if any(model.get("precision", "fp32") != "fp32" for model in models):
        raise ValueError("the README's table is of fp32 alone")
    peers = [p for p in SETTINGS if any(_best(model, p) for model in models)]
    lines = [_about(run, peers), ""]
    efforts = list(dict.fromkeys(effort for model in models for effort in model.get("tuned", {})))
    heads = [
        *("model", "gtco ms", *(f"{effort} ms" for effort in efforts), "% of peak"),
        *(TITLES[p] for p in peers),
        *("compile s", *(f"{effort} s" for effort in efforts), "compile peak GB"),
    ]
    lines.append(f"| {' | '.join(heads)} |")
    lines.append("|" + "---|" * len(heads))
    for model in models:
        ours = _system(model, "gtco")
        share, build = ours.get("share_of_peak"), model["compile"]
        cells = [
            model["model"],
            *(_milliseconds(model, name) for name in ("gtco", *(f"gtco:{e}" for e in efforts))),
            f"{share:.0%}".rstrip("%") if share else "-",
            *(f"{best[0]:.2f}" if (best := _best(model, p)) else "-" for p in peers),
            f"{build['seconds']:.1f}",
            *(f"{model['tuned'][effort]['seconds']:.1f}" for effort in efforts),
            f"{build['peak_memory_bytes'] / 1e9:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", _means(models, peers), *(_gain(models, effort) for effort in efforts)]
    lines.append(_worst(models, peers))
    peaks = [m["peak_flops_per_second"] / 1e9 for m in models if m["peak_flops_per_second"]]
    if peaks:
        lines.append(
            f"The peak, read beside each model, ranged from {min(peaks):.0f} to {max(peaks):.0f} "
            "GFLOP/s: the machine is shared, and ratios within a row are what counts."
        )
    largest = max(_system(m, "gtco").get("difference") or 0.0 for m in models)
    lines.append(f"gtco's outputs agree with ONNX Runtime's to {largest:.0e} of their magnitude.")
    return "\n".join(lines)


def _about(run: Mapping[str, Any], peers: Sequence[str]) -> str:
    about = run["machine"]
    names = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO", "torch": "torch"}
    versions = [f"{names[n]} {v}" for n, v in about["versions"].items() if n in names and v]
    settings = "; ".join(
        f"{TITLES[peer]}: {', '.join(s.partition(':')[2] or 'default' for s in systems)}"
        for peer, systems in SETTINGS.items()
        if peer in peers and len(systems) > 1
    )
    return textwrap.fill(
        f"`python -m bench end_to_end --peers {','.join(peers)}` on {about['cores']} cores of an "
        f"{about['cpu']}, "
        f"{about['threads']} threads, batch 1, fp32, {about['date'][:10]}, all of it one run. "
        f"{', '.join(versions)}. A peer's column is its time over gtco's, untuned: above 1 gtco is "
        f"faster; "
        f"each peer is timed in all of its settings ({settings}) and the best counts.",
        width=118,
        break_on_hyphens=False,
    )


def _means(models: Sequence[Row], peers: Sequence[str]) -> str:
    found = {m["model"]: m for m in models}
    told = []
    for peer in peers:
        ratios = [best[0] for n in FIVE if n in found and (best := _best(found[n], peer))]
        if len(ratios) == len(FIVE):
            told.append(f"{statistics.geometric_mean(ratios):.2f} over {TITLES[peer]}")
    names = ", ".join(FIVE)
    return f"Geometric mean over {names}: {', '.join(told) or 'not known, a row is missing'}."


def _gain(models: Sequence[Row], effort: str) -> str:
    """What tuning makes of the time, in the mean and of the worst row, and beside the best peer."""
    ratios = {
        m["model"]: 1 / s["ratio_to_gtco"]
        for m in models
        for s in m["systems"]
        if s["system"] == f"gtco:{effort}" and s.get("ratio_to_gtco")
    }
    if not ratios:
        return f"Tuned ({effort}): no model ran."
    least = min(ratios, key=lambda name: ratios[name])
    mean = statistics.geometric_mean(ratios.values())
    return (
        f"Tuned ({effort}): {mean:.3f} times as fast as untuned in the geometric mean of "
        f"{len(ratios)} models, least {least} {ratios[least]:.3f}."
    )


def _milliseconds(model: Row, system: str) -> str:
    found = _system(model, system)
    return f"{found['median_s'] * 1e3:.2f}" if "median_s" in found else "failed"


def _worst(models: Sequence[Row], peers: Sequence[str]) -> str:
    """The three rows with the least ratio to the best of all peers."""
    least = sorted(
        (*min(found), model["model"])
        for model in models
        if (found := [best for peer in peers if (best := _best(model, peer))])
    )
    told = [f"{title} {ratio:.2f} ({TITLES[peer_of(system)]})" for ratio, system, title in least]
    return f"Least ahead of the best peer: {', '.join(told[:3])}."


def _best(model: Row, peer: str) -> tuple[float, str] | None:
    """The least ratio among the settings of a peer, and which it was."""
    ratios = [
        (s["ratio_to_gtco"], s["system"])
        for s in model["systems"]
        if peer_of(s["system"]) == peer and s.get("ratio_to_gtco")
    ]
    return min(ratios, default=None)


def _system(model: Row, name: str) -> Row:
    return next(s for s in model["systems"] if s["system"] == name)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

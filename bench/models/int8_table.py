"""The table of docs/int8.md: times, ratios and losses of one run of ``int8``."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

TITLES = {
    "gtco": "gtco int8",
    "gtco:fp32": "gtco fp32",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "openvino:nncf": "OpenVINO, NNCF",
}
LOSSES = ("gtco", "onnxruntime", "openvino", "openvino:nncf")
NAMES = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}


def section(run: Mapping[str, Any]) -> str:
    """Machine and versions; a row a model with times, ratios and losses; the geometric means and
    the worst row. Raises ValueError if the models are not of one quantizer.
    """
    models: Sequence[Mapping[str, Any]] = run["models"]
    quantizers = {model["quantizer"] for model in models}
    if len(quantizers) != 1:
        raise ValueError(f"a table is of one quantizer, and this run has {sorted(quantizers)}")
    heads = [
        *("model", *TITLES.values(), "fp32 / int8", "best peer / gtco", "library, of fp32's"),
        *(f"loss, {TITLES[system].removesuffix(' int8')}" for system in LOSSES),
    ]
    lines = [_about(run, quantizers.pop()), ""]
    lines += [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for model in models:
        times, lost = model["milliseconds"], model["losses"]
        cells = [
            model["model"],
            *(f"{times[s]:.2f}" if s in times else "-" for s in TITLES),
            f"{gain(model):.2f}",
            "-" if (ratio := best(model)) is None else f"{ratio:.2f}",
            f"{model['size']:.2f}",
            *(f"{lost[s]:.1%}" if s in lost else "-" for s in LOSSES),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", filled(_means(models))])


def gain(model: Mapping[str, Any]) -> float:
    """gtco's time in float over its time in int8."""
    return float(model["milliseconds"]["gtco:fp32"] / model["milliseconds"]["gtco"])


def best(model: Mapping[str, Any]) -> float | None:
    """The best peer's time over gtco's; None if no peer ran."""
    times = model["milliseconds"]
    peers = [t for s, t in times.items() if not s.startswith("gtco")]
    return float(min(peers) / times["gtco"]) if peers else None


def _about(run: Mapping[str, Any], quantizer: str) -> str:
    about = run["machine"]
    versions = [f"{NAMES[n]} {v}" for n, v in about["versions"].items() if n in NAMES and v]
    return filled(
        f"`python -m bench int8 --quantizer {quantizer}` on {about['cores']} cores of an "
        f"{about['cpu']}, {about['threads']} threads, batch 1, {about['date'][:10]}, all of it one "
        f"run. Times in ms. {', '.join(versions)}. The best peer is the best of all columns but "
        "gtco's, and of ONNX Runtime on the file of its own quantizer. A loss is the relative "
        "error of the outputs against the float model's."
    )


def _means(models: Sequence[Mapping[str, Any]]) -> str:
    told = []
    for what, ratio in (("fp32 / int8", gain), ("best peer / gtco", best)):
        found = {m["model"]: value for m in models if (value := ratio(m)) is not None}
        if not found:
            continue
        least = min(found, key=lambda name: found[name])
        mean = statistics.geometric_mean(found.values())
        told.append(
            f"{what}: {mean:.2f} in the geometric mean of {len(found)} models, least {least} "
            f"{found[least]:.2f}."
        )
    return " ".join(told)


def filled(text: str) -> str:
    return textwrap.fill(text, width=118, break_on_hyphens=False, break_long_words=False)

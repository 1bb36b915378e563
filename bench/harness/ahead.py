"""How far gtco is ahead of its peers, untuned and tuned, read from the rows that ``end_to_end``
writes.

A row is one model of its JSON. It has gtco once for each *way* of compiling the model: ``gtco``,
which is untuned, and ``gtco:quick`` and so on. The *best peer* of a model is the fastest of all
settings of all peers, so that a peer that is weak on a model does not count there.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .peers import peer_of

Row = Mapping[str, Any]
Best = tuple[float, str]  # a ratio to gtco's time, and whose
UNTUNED = "gtco"


def efforts(models: Iterable[Row]) -> list[str]:
    """The efforts that the models were tuned with, in that order."""
    return list(dict.fromkeys(effort for model in models for effort in model.get("tuned", {})))


def ways(models: Iterable[Row]) -> list[str]:
    """gtco's systems in the rows, the untuned one first."""
    return [UNTUNED, *(f"{UNTUNED}:{effort}" for effort in efforts(models))]


def title(models: Sequence[Row], way: str) -> str:
    """``untuned``, ``quick``, or ``tuned`` and the minutes of measuring behind it."""
    effort = way.partition(":")[2]
    if effort != "full":
        return effort or "untuned"
    builds = [model["tuned"][effort] for model in models if effort in model.get("tuned", {})]
    known = [build.get("measured_seconds") for build in builds if not build.get("error")]
    if not known or None in known:
        return "tuned"
    least, most = _minutes(min(known)), _minutes(max(known))
    return f"tuned ({least} min)" if least == most else f"tuned ({least} to {most} min)"


def _minutes(seconds: float) -> str:
    minutes = seconds / 60
    return f"{minutes:.0f}" if minutes >= 9.5 else f"{minutes:.1g}"


def system(model: Row, name: str) -> Row:
    """One system of a row; empty if the row does not have it."""
    return next((s for s in model["systems"] if s["system"] == name), {})


def seconds(model: Row, name: str) -> float | None:
    """A system's median; None if it was not timed."""
    return system(model, name).get("median_s")


def milliseconds(model: Row, name: str) -> str:
    found = seconds(model, name)
    return "failed" if found is None else f"{found * 1e3:.2f}"


def best(model: Row, peers: Iterable[str], way: str = UNTUNED) -> Best | None:
    """The fastest of all settings of these peers: its time over gtco's, and its name. None if none
    of them was timed, or gtco was not.
    """
    ours, asked = seconds(model, way), set(peers)
    timed = [
        (s["median_s"], s["system"])
        for s in model["systems"]
        if peer_of(s["system"]) in asked and "median_s" in s
    ]
    if ours is None or not timed:
        return None
    theirs, whose = min(timed)
    return theirs / ours, whose


def ratios(models: Iterable[Row], peers: Sequence[str], way: str = UNTUNED) -> dict[str, Best]:
    """The best peer's ratio, for each model that was timed with both."""
    return {m["model"]: found for m in models if (found := best(m, peers, way))}


def mean(models: Sequence[Row], peers: Sequence[str], way: str = UNTUNED) -> str:
    """The geometric mean of the best peers' ratios, and the models that it is over."""
    found = ratios(models, peers, way)
    if not found:
        return "not known"
    ratio = statistics.geometric_mean(ratio for ratio, _ in found.values())
    missing = [m["model"] for m in models if m["model"] not in found]
    without = f" (without {', '.join(missing)})" if missing else ""
    return f"{ratio:.3f} over {len(found)} models{without}"


def least(
    models: Sequence[Row], peers: Sequence[str], way: str = UNTUNED
) -> list[tuple[Best, str]]:
    """The models on which gtco is least ahead, the least first."""
    return sorted((found, name) for name, found in ratios(models, peers, way).items())


def gains(models: Iterable[Row], way: str) -> dict[str, float]:
    """The gain of tuning for each model: untuned over tuned time, if both were timed."""
    found = {m["model"]: (seconds(m, UNTUNED), seconds(m, way)) for m in models}
    return {name: a / b for name, (a, b) in found.items() if a is not None and b is not None}

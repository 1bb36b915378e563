"""Facts -> one file of HTML that loads nothing: pictures are SVG, styles and the script inside."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gtco.report import charts, text
from gtco.report.difference import Difference, ModelDifference, Row, changed_choices
from gtco.report.drawing import svg
from gtco.report.facts import Facts, ModelFacts, StageFacts
from gtco.report.families import family
from gtco.report.graph import Picture, picture
from gtco.report.roofline import roofline
from gtco.report.words import loops_source, sketch_words
from gtco.support.errors import BuildError, installing
from gtco.support.sizes import sizes_text
from gtco.support.version import __version__

TEMPLATES = Path(__file__).parent / "templates"
NEEDED = {"vl_convert": "vl-convert-python", "fast_sugiyama": "fast-sugiyama", "jinja2": "jinja2"}
MOST_VARIANTS = 3  # variants that a page shows in full
HEAVIEST = 8
DISTURBED = 0.15  # the share of a run that other processes take, from which on the page says so
MOST_BYTES = 3_000_000  # what mail takes and a browser opens at once
# Where the page would have more bytes: are equal kernels' loops there once, and how many characters
# has a name?
SHORTER = ((False, 1000), (True, 1000), (True, 72), (True, 36))


def check_installed() -> None:
    """Raises :class:`BuildError` if a package is missing that draws the page."""
    missing = [package for module, package in NEEDED.items() if find_spec(module) is None]
    if not missing:
        return
    are = "are" if len(missing) > 1 else "is"
    what = f"the HTML report needs {' and '.join(missing)}, which {are} not installed"
    if sys.version_info < (3, 11):
        raise BuildError(f"{what} and needs Python 3.11 or later. --json does without")
    raise BuildError(
        f"{what}: {installing('report')}. --json does without"
    )


@dataclass(frozen=True)
class View:
    """A variant with its pictures. ``prefix`` makes its ids different from the other variants'."""

    model: ModelFacts
    prefix: str
    title: str
    operators: int
    peak: str
    formats: str
    tensors: int
    unattributed: str
    disturbed: str
    where: str
    order: str
    roofline: str
    memory: str
    errors: str
    losses: str
    picture: Picture

    @property
    def lost(self) -> dict[int, list[tuple[Mapping[str, str], str]]]:
        """By stage each measure with the error of its layer; of several layers the largest one."""
        found: dict[int, list[tuple[Mapping[str, str], str]]] = {}
        if (losses := self.model.losses) is None:
            return found
        errors: dict[int, list[list[float | None]]] = {}
        for layer in losses["layers"]:
            if layer["stage"] is not None:
                errors.setdefault(layer["stage"], []).append(layer["errors"])
        for stage, every in errors.items():
            for measure, ones in zip(losses["measures"], zip(*every, strict=True), strict=True):
                most = max((one for one in ones if one is not None), default=None)
                found.setdefault(stage, []).append((measure, text.error_text(most)))
        return found

    @property
    def same_loops(self) -> dict[int, int]:
        """For each stage whose kernel an earlier stage has, the number of the first such stage."""
        first: dict[str, int] = {}
        found = {s.number: first.setdefault(s.kernel, s.number) for s in self.model.stages}
        return {number: of for number, of in found.items() if of != number}


def page(facts: Facts) -> str:
    """The page of a library. Raises :class:`BuildError` if a package for it is missing."""
    check_installed()
    shown = facts.models[:MOST_VARIANTS]
    views = [
        view(facts, model, f"v{number}-" if number else "") for number, model in enumerate(shown)
    ]
    heaviest = sorted(shown[0].stages, key=lambda s: -s.seconds)[:HEAVIEST]
    longest = {id(s): max(s.seconds for s in one.stages) for one in shown for s in one.stages}
    gpu = facts.target.startswith("cuda")
    drawn = ""
    for short, names in SHORTER:
        drawn = render(
            "report.html.j2",
            title=f"{facts.name}: gtco report",
            facts=facts,
            views=views,
            heaviest=heaviest,
            hidden=len(facts.models) - len(shown),
            longest=longest,
            gpu=gpu,
            units="multiprocessors" if gpu else "threads",
            short=short,
            names=names,
        )
        if len(drawn.encode(errors="replace")) < MOST_BYTES:
            break
    return drawn


def view(facts: Facts, model: ModelFacts, prefix: str) -> View:
    draw = partial(svg, prefix=prefix)
    count = len(model.stages)
    reached = model.flops / model.seconds if model.seconds else None
    dtype = main_format(facts, model)
    peak = facts.machine.peaks.get(dtype)
    found = model.verification
    drawn = found and any(d["relative"] is not None for d in found["differences"])
    return View(
        model=model,
        prefix=prefix,
        title=sizes_text(model.sizes) if model.sizes else "",
        operators=sum(len(stage.operators) for stage in model.stages),
        peak=f"{text.percent(reached / peak)} of the {dtype} peak" if reached and peak else "",
        formats=", ".join(f"{text.nbytes(n)} {d}" for d, n in facts.weights_by_dtype.items()),
        tensors=sum(place.nbytes for place in model.arena),
        unattributed=unattributed(model, facts.target),
        disturbed=disturbed(model),
        where=draw(
            charts.where_time_goes(model),
            f"{prefix}where",
            "Bars: the time of each group of equal stages, of a run of "
            f"{text.milliseconds(model.seconds)}",
        ),
        order=draw(
            charts.in_order(model),
            f"{prefix}order",
            f"One strip: the {count} stages in the order in which they run, as long as their times",
        ),
        roofline=draw(
            roofline(facts, model),
            f"{prefix}roof",
            f"Roofline: {count} stages by FLOPs a byte and FLOP/s, under the machine's limits",
        ),
        memory=draw(
            charts.memory(model),
            f"{prefix}arena",
            f"The arena over time: {len(model.arena)} tensors by their places and lifetimes",
        )
        if model.arena
        else "",
        errors=draw(
            charts.errors(found), f"{prefix}errors", "Relative errors of every output in every case"
        )
        if found and drawn
        else "",
        losses=draw(
            charts.losses(model.losses),
            f"{prefix}losses",
            f"Heat map: what each of {len(model.losses['layers'])} layers loses, in the order in "
            "which they run; the table below has the same figures",
        )
        if model.losses and model.losses["layers"]
        else "",
        picture=picture(model),
    )


def main_format(facts: Facts, model: ModelFacts) -> str:
    """The number format of most FLOPs, of those whose peak is known."""
    counts = {"float32": 0.0, **dict.fromkeys(facts.machine.peaks, 0.0)}
    for stage in model.stages:
        if stage.number_format in counts:
            counts[stage.number_format] += stage.flops
    return max(counts, key=lambda dtype: counts[dtype])


@dataclass(frozen=True)
class DifferenceView:
    """A variant that both libraries have, with its chart and what a reader should know."""

    model: ModelDifference
    prefix: str
    title: str
    verdict: str
    counts: str
    notes: tuple[str, ...]
    chart: str


def difference_page(found: Difference) -> str:
    """The page of two libraries. Raises :class:`BuildError` if a package for it is missing."""
    check_installed()
    views = []
    for number, model in enumerate(found.models):
        prefix = f"v{number}-" if number else ""
        ranked = sorted(model.rows, key=lambda row: -abs(row.gain))[: charts.MOST_BARS]
        label = f"Bars: the {len(ranked)} stages whose times differ most, before and after"
        states = Counter(row.state for row in model.rows)
        one_sided = (model.before.measurement is None) != (model.after.measurement is None)
        both = "Only one of the two libraries was measured: its times stand beside predicted ones."
        views.append(
            DifferenceView(
                model=model,
                prefix=prefix,
                title=sizes_text(model.sizes) if model.sizes else "",
                verdict=f"{text.ratio(model.before.seconds, model.after.seconds)} as fast",
                counts=", ".join(f"{n} {WORDS[state]}" for state, n in states.items()) + ".",
                notes=(both,) if one_sided else (),
                chart=svg(
                    charts.compared([(r.name, r.before_seconds, r.after_seconds) for r in ranked]),
                    f"{prefix}compared",
                    label,
                ),
            )
        )
    return render(
        "difference.html.j2", title=f"{found.after.name}: what changed", found=found, views=views
    )


WORDS = {
    "same": "built the same way",
    "changed": "built in another way",
    "partition": "cut in another way",
    "before only": "only in the older library",
    "after only": "only in the newer library",
}


def unattributed(model: ModelFacts, target: str) -> str:
    """Says what the bar of this name is."""
    copies = ", the copies of inputs and outputs from and to the host" * target.startswith("cuda")
    found = model.measurement
    if found is None:
        return ""
    share = text.percent(abs(found.unattributed_seconds) / found.end_to_end.median)
    if found.unattributed_seconds < 0:
        return (
            f"The stages add up to {text.milliseconds(found.stages_seconds)}, {share} more than a "
            "run takes: reading the clock between stages costs time, and so does what else runs "
            "on the machine."
        )
    noise = max(0.0, found.summed_seconds - found.stages_seconds)
    said = (
        f"The stages add up to {text.milliseconds(found.stages_seconds)}; the rest, {share} of a "
        f"run, is unattributed: the call{copies}, and the waits between stages"
    )
    if noise > 0.1 * found.unattributed_seconds:
        said += (
            f"; {text.milliseconds(noise)} of it are stages that took longer than their median, "
            "another one in each run, as other processes make them"
        )
    return f"{said}."


def disturbed(model: ModelFacts) -> str:
    """Says that other processes took much of a run, if they did."""
    if (found := model.measurement) is None:
        return ""
    taken, whole = found.summed_seconds - found.stages_seconds, found.end_to_end.median
    if taken < DISTURBED * whole:
        return ""
    return (
        f"Other processes took about {text.milliseconds(taken)} of a run's "
        f"{text.milliseconds(whole)} while this was measured. Measure again on a machine at rest: "
        "the times of stages below are too long, and the least ones are nearest to the truth."
    )


def render(
    template: str,
    longest: Mapping[int, float] | None = None,
    names: int = SHORTER[0][1],
    **values: Any,
) -> str:
    """The page of a template. ``longest``: by a stage's id the seconds of its model's longest
    stage; ``names``: the most characters of a name that the details of a stage show.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    def heat(stage: StageFacts) -> float:
        most = (longest or {}).get(id(stage), 0.0)
        return stage.seconds / most if most else 0.0

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "capitalize_first": lambda value: value[:1].upper() + value[1:],
        "changes": lambda first, last: "; ".join(changed_choices(first, last)),
        "error_text": text.error_text,
        "error": lambda value: text.NONE if value is None else f"{value:.2e}",
        "family": family,
        "family_class": lambda stage: family(stage).replace("-", ""),
        "flops": text.flops,
        "heat": heat,
        "launch_name": lambda name: LAUNCH.get(name, name),
        "launch_value": launch_value,
        "loops_source": loops_source,
        "middle": text.middle,
        "ms": text.milliseconds,
        "name": lambda value: text.middle(value, names),
        "nbytes": text.nbytes,
        "num": lambda value: f"{value:g}",
        "percent": text.percent,
        "ratio": text.ratio,
        "signed": lambda value: ("+" if value > 0 else "") + text.milliseconds(value),
        "speed": speed,
        "sketch": sketch_words,
        "telling": lambda stage: "+".join(charts.telling(stage)),
    }
    return environment.get_template(template).render(
        version=__version__,
        style=(TEMPLATES / "style.css").read_text(),
        script=(TEMPLATES / "page.js").read_text(),
        **values,
    )


def speed(row: Row) -> str:
    """The class of a row whose time changed by 3 % or more; less is noise."""
    if not row.before_seconds or not row.after_seconds:
        return ""
    times = row.before_seconds / row.after_seconds
    return "faster" if times > 1.03 else "slower" if times < 0.97 else ""


LAUNCH = {
    "tasks": "tasks",
    "workspace": "scratch a thread",
    "grid": "blocks",
    "threads": "threads a block",
    "shared": "shared memory",
    "registers": "registers",
    "spilled_bytes": "spilled bytes",
}


def launch_value(value: Any, name: str) -> str:
    if name in ("workspace", "shared"):
        return text.nbytes(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {one}" for key, one in value.items())
    return "x".join(map(str, value)) if isinstance(value, list | tuple) else str(value)

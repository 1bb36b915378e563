"""What each part of the compiler is worth: models compiled without it, beside the whole; as GTCO's
Table III switches its techniques, on CPUs.

``python -m bench ablation [--models vit-base-16,swin-t] [--variants greedy,winograd] [--rounds 5]
[--json FILE]``

All variants of a model are timed in interleaved rounds, each in a process of its own, untuned, and
compared with ONNX Runtime's outputs. What the tuner's parts are worth is shown by the benchmarks
``tuning``, ``scheduler`` and ``cost_model``.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from rich.table import Table

from gtco import compiler
from gtco.cli.arguments import positive
from gtco.driver import compilation
from gtco.driver.compilation import Among, Compilation
from gtco.driver.phases import Fused, Simplified, Whole
from gtco.graph.fusion.greedy import fuse_greedy
from gtco.graph.fusion.stages import fuse
from gtco.graph.fusion.take_apart import kinds_of_attention, taken_apart
from gtco.machine.target import Machine
from gtco.search.analytic import AnalyticPolicy
from gtco.search.policy import Policy
from gtco.search.recorded import RecordedPolicy
from gtco.support.errors import BuildError, OptionError
from gtco.tensor.intrinsics.table import MicroKernel
from gtco.tensor.space import Decision, Option, Pick
from gtco.tensor.stage import Stage

from ..harness.by_model import ended, every_model, parser
from ..harness.rounds import Contender, Measurement, compare
from ..harness.suite import console, judge, tolerance
from ..harness.workload import candidates, prepare

P = TypeVar("P", bound=AnalyticPolicy)


class Alone(Compilation):
    """Makes every operator a stage of its own."""

    def partitioned(self, whole: Whole, among: Among | None = None) -> Fused:
        policy = whole.policy

        def cost(stage: Stage) -> float:
            return policy.predict(stage) if len(stage.operators) == 1 else math.inf

        return Fused(whole, *fuse(whole.graph, cost, policy.floor, policy.possible))


class Greedy(Compilation):
    """Fusion by the rules of TVM and Ansor, which look at no cost."""

    def partitioned(self, whole: Whole, among: Among | None = None) -> Fused:
        return Fused(whole, whole.graph, fuse_greedy(whole.graph, whole.policy.predict))


class InParts(Compilation):
    """Attention as two products and a softmax, without the sketch that fuses them."""

    def rounded(self, simple: Simplified, policy: RecordedPolicy) -> Whole:
        whole = super().rounded(simple, policy)
        every = [name for _, names in kinds_of_attention(whole.graph) for name in names]
        return replace(whole, graph=taken_apart(whole.graph, every).check())


class _Without(AnalyticPolicy):
    """A policy that does not use sketches with these names."""

    names: Collection[str] = ()

    def choose(self, stage: Stage, without: Collection[str] = ()) -> Pick | None:
        return super().choose(stage, (*without, *self.names))


class _OneMicroKernel(AnalyticPolicy):
    """Uses the largest micro-kernel that a stage may have, for every shape."""

    def _worthwhile(self, decision: Decision, tasks: int) -> tuple[Option, ...]:
        if decision.role != "micro-kernel":
            return super()._worthwhile(decision, tasks)

        def cells(option: Option) -> int:
            tile = MicroKernel.parse(str(option), self.target.lanes)
            return tile.rows * tile.vectors

        return (max(decision.options, key=cells),)


class WithoutSketches(Compilation):
    """Leaves out the kernels of these sketches."""

    sketches: tuple[str, ...]

    def predicting(self, machine: Machine) -> Policy:
        policy = _copied(_Without, super().predicting(machine))
        policy.names = self.sketches
        return policy


class NoWinograd(WithoutSketches):
    """3x3 convolutions by their definition."""

    sketches = ("winograd",)


class NoStrassen(WithoutSketches):
    """Large products by their definition."""

    sketches = ("strassen",)


class NoWindows(WithoutSketches):
    """Computes convolutions as matrix products of their windows (im2col), if possible."""

    sketches = ("winograd", "convolution")


class OneMicroKernel(Compilation):
    """Makes no choice at the register level."""

    def predicting(self, machine: Machine) -> Policy:
        return _copied(_OneMicroKernel, super().predicting(machine))


def _copied(kind: type[P], policy: Policy) -> P:
    assert isinstance(policy, AnalyticPolicy)
    return kind(policy.target, policy.rates)


# by the name on the command line, with the technique that is switched off
VARIANTS: dict[str, tuple[str, type[Compilation]]] = {
    "alone": ("fusion", Alone),
    "greedy": ("DPOF: greedy rules", Greedy),
    "parts": ("fused attention", InParts),
    "winograd": ("Winograd", NoWinograd),
    "strassen": ("Strassen", NoStrassen),
    "windows": ("Winograd, direct convolution", NoWindows),
    "registers": ("choice of micro-kernels", OneMicroKernel),
}
WHOLE = "gtco"


@dataclass(frozen=True)
class Row:
    """A model without one technique: its milliseconds, those of the whole compiler, the predicted
    ones, the number of stages, and the reason if the outputs are wrong or missing.
    """

    model: str
    variant: str
    milliseconds: float
    whole: float
    predicted: float
    stages: int
    error: str = ""

    @property
    def gain(self) -> float:
        """The time without the technique over the time with it."""
        return self.milliseconds / self.whole


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    names = options.variants.split(",")
    if unknown := [name for name in names if name not in VARIANTS]:
        raise OptionError(
            f"unknown variant {', '.join(unknown)}: choose from {', '.join(VARIANTS)}"
        )
    rows, failed = every_model(options, measure)
    output = console()
    output.print(table(rows))
    for row in rows:
        if row.error:
            output.print(f"  {row.model} without {row.variant}: {row.error}", markup=False)
    return ended(failed, not any(row.error for row in rows))


def measure(model: str, options: argparse.Namespace) -> list[Row]:
    """Measures one model without each of the techniques, side by side."""
    names: Sequence[str] = options.variants.split(",")
    work = prepare(model, options.folder, options.threads)
    if work.build.error:
        raise BuildError(f"{model} cannot be compiled: {work.build.error}")
    (whole, peer), _ = candidates(work, ["onnxruntime"], options.threads)
    rivals, made = [], {}
    for name in names:
        library = options.folder / f"{model}-without-{name}.so"
        with compiled_by(VARIANTS[name][1]):
            made[name] = compiler.compile_to_file(
                work.onnx, library, threads=options.threads, cache=False
            )
        rivals.append(Contender(name, {**whole.job, "library": str(library)}))
    seen = compare(
        [whole, *rivals, peer], options.rounds, tolerance=tolerance(work), judge=judge(work)
    )

    def wrong(one: Measurement) -> str:
        if one.error or one.disagrees:
            return str(one.error or one.disagrees)
        return "" if one.difference is not None else f"not compared: {seen[peer.name].error}"

    return [
        Row(
            model,
            VARIANTS[name][0],
            1e3 * seen[name].median,
            1e3 * seen[WHOLE].median,
            1e3 * made[name].predicted_seconds,
            len(made[name].stages),
            wrong(seen[name]),
        )
        for name in names
    ]


@contextmanager
def compiled_by(variant: type[Compilation]) -> Iterator[None]:
    """Makes compiles of this process use the variant's steps."""
    kept = compilation.Compilation
    compilation.Compilation = variant  # type: ignore[misc]
    try:
        yield
    finally:
        compilation.Compilation = kept  # type: ignore[misc]


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title="without one technique", title_justify="left")
    shown.add_column("without")
    models = list(dict.fromkeys(row.model for row in rows))
    for model in models:
        shown.add_column(f"{model}: ms", justify="right")
        shown.add_column("x", justify="right")
    shown.add_column("x, mean", justify="right")
    whole = {row.model: row.whole for row in rows}
    shown.add_row("nothing", *(text for m in models for text in (f"{whole[m]:.2f}", "1")), "1")
    for variant in dict.fromkeys(row.variant for row in rows):
        mine = {row.model: row for row in rows if row.variant == variant and not row.error}
        cells = [
            text
            for m in models
            for text in (
                (f"{mine[m].milliseconds:.2f}", f"{mine[m].gain:.2f}") if m in mine else ("", "")
            )
        ]
        mean = statistics.geometric_mean(r.gain for r in mine.values()) if mine else math.nan
        shown.add_row(variant, *cells, f"{mean:.2f}")
    return shown


def _parser() -> argparse.ArgumentParser:
    found = parser("ablation", __doc__, ("vit-base-16", "swin-t", "detr-resnet50-e6"))
    found.add_argument("--variants", default=",".join(VARIANTS), help="by comma; the default: all")
    found.add_argument("--rounds", type=positive, default=5)
    return found

"""The steps of quantizing, in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy
import onnx

from gtco.frontend.onnx import OnnxSource
from gtco.quantization.calibration import Observed, Run, Say, Switchboard
from gtco.quantization.data import Samples, samples_of
from gtco.quantization.insertion import insert, with_switches
from gtco.quantization.observers import OBSERVERS, Range
from gtco.quantization.products import Product, products_of
from gtco.quantization.reading import input_specs, read_model
from gtco.quantization.report import Layer, QuantizationReport, QuantizedModel, Tried
from gtco.quantization.sensitivity import Trial, arriving, sensitivities, within_budget
from gtco.quantization.smoothing import STRENGTHS, smoothed
from gtco.quantization.upsampling import products_before_upsampling
from gtco.quantization.verdict import OutputVerdict, compare
from gtco.support.counting import counted
from gtco.support.errors import guarded
from gtco.support.options import Quantization

# Compiles a model for inputs of these shapes, with this to say how it goes.
Compiler = Callable[
    [OnnxSource, Mapping[str, tuple[int, ...]], Say], AbstractContextManager[Any]
]
Progress = Callable[[str, float | None, Any], None]

CHOICES = 16  # runs by which observers and strengths are compared, at most
ALONE = 4  # runs by which each product alone is judged, at most
READ = 4  # runs by which what products read is judged, at most
_MUCH = 0.1  # a relative error that a note is for
MAX_DROP = "max-drop"


@dataclass(frozen=True)
class _Calibrated:
    """A model with its ranges, chosen on the samples."""

    model: OnnxSource
    products: Sequence[Product]
    strength: float
    observed: Observed
    observer: str
    ranges: Mapping[str, Range]
    error: float


class Quantizer:
    """One model on its way; see :func:`quantize_model`."""

    def __init__(self, settings: Quantization, compiler: Compiler, progress: Progress) -> None:
        self.settings, self.compiler, self.progress = settings, compiler, progress
        self.phases: list[tuple[str, float]] = []
        self.tried: list[Tried] = []
        self.samples: Samples

    @contextmanager
    def phase(self, name: str) -> Iterator[Say]:
        """A phase; it gives a function for news, of which the last stays as the result."""
        start, said = time.perf_counter(), ""
        self.progress(name, None, "")

        def say(text: str) -> None:
            nonlocal said
            said = text
            self.progress(name, None, text)

        with guarded(f"the phase '{name}' of quantizing"):
            yield say
        seconds = time.perf_counter() - start
        self.phases.append((name, seconds))
        self.progress(name, seconds, said)

    def run(self, model: Any, data: Any, example_inputs: Any) -> QuantizedModel:
        with self.phase("read") as say:
            source = read_model(model, example_inputs)
            exclude = self.settings.exclude
            products = products_of(source, exclude)
            self.samples = samples_of(data, input_specs(source))
            shapes = self.samples.shapes
            source, products, moved = products_before_upsampling(
                source, products, shapes, exclude
            )
            may = sum(not p.float_because for p in products)
            before = f", {moved} of them moved before upsampling" if moved else ""
            say(
                f"{len(self.samples)} samples, {may} of {len(products)} products to quantize"
                f"{before}"
            )
        with ExitStack() as stack:
            board = stack.enter_context(self.board(source, products))
            found = plain = self.calibrated(board, source, products, 0.0)
            for strength in self.strengths():
                # one library beside the best so far is open
                with ExitStack() as trying:
                    other, smooth = self.smoothing(plain, strength, trying)
                    if self.settings.smooth == "auto" and smooth.error >= found.error:
                        continue
                    stack.close()
                    stack.push(trying.pop_all())
                    board, found = other, smooth
            made = self.decided(board, found)
        return made

    def strengths(self) -> tuple[float, ...]:
        """The strengths of smoothing to try."""
        if self.settings.smooth == "auto":
            return STRENGTHS
        return () if self.settings.smooth == "off" else (float(self.settings.smooth),)

    @contextmanager
    def board(self, model: OnnxSource, products: Sequence[Product]) -> Iterator[Switchboard]:
        """The library with switches."""
        switched = with_switches(model, products)
        outputs = tuple(value.name for value in model.skeleton.graph.output)
        with self.phase("build") as say:
            opened = self.compiler(switched.model, self.samples.shapes, say)
            say("one library, in which each product is in float and in int8")
        with opened as library:
            yield Switchboard(switched, library.run, outputs)

    def calibrated(
        self,
        board: Switchboard,
        model: OnnxSource,
        products: Sequence[Product],
        strength: float,
    ) -> _Calibrated:
        """Observes the float model, and chooses the observer."""
        with self.phase("observe") as say:
            observed = board.observe(self.samples.chosen_by, say)
            tensors = counted(len(board.switched.tensors), "tensor")
            say(f"{tensors}, {len(self.samples.chosen_by)} samples")
        with self.phase("ranges") as say:
            wanted = self.settings.observer
            names = list(OBSERVERS) if wanted == "auto" else [wanted]
            trial = Trial(board, _some(self.samples.chosen_by, CHOICES))
            every = [p.output for p in board.switched.products]
            ranges, errors = {}, {}
            for observer in names:
                say(observer)
                ranges[observer] = {
                    tensor: OBSERVERS[observer](seen)
                    for tensor, seen in observed.histograms.items()
                }
                errors[observer] = trial.error(ranges[observer], every)
                self.tried.append(Tried(strength, observer, errors[observer]))
            best = min(names, key=lambda n: errors[n])
            listed = ", ".join(f"{n} {100 * e:.2f} %" for n, e in errors.items())
            say(f"{best}: {listed}" if len(names) > 1 else listed)
        return _Calibrated(model, products, strength, observed, best, ranges[best], errors[best])

    def smoothing(
        self, plain: _Calibrated, strength: float, stack: ExitStack
    ) -> tuple[Switchboard, _Calibrated]:
        """The model with a strength of smoothing, calibrated; ``stack`` closes its library."""
        model = smoothed(plain.model, plain.products, plain.observed.largest, strength)
        known = {p.output: p for p in plain.products}
        products = [
            replace(
                p,
                label=known[p.output].label,
                names=known[p.output].names,
                float_because=known[p.output].float_because,
            )
            for p in products_of(model)
        ]
        board = stack.enter_context(self.board(model, products))
        return board, self.calibrated(board, model, products, strength)

    def decided(self, board: Switchboard, found: _Calibrated) -> QuantizedModel:
        """Asks what each product costs, keeps some in float, writes the model and judges it."""
        may = board.switched.products
        operations = operations_of(found.model, self.samples.shapes, found.products)
        with self.phase("sensitivity") as say:
            trial = Trial(board, _some(self.samples.chosen_by, ALONE))
            alone = sensitivities(trial, may, found.ranges, say)
            worst_first = sorted(may, key=lambda p: alone[p.output], reverse=True)
            first = worst_first[0]
            say(f"most of all '{first.label}': {100 * alone[first.output]:.2f} %")
        held_out = Trial(board, self.samples.held_out)
        kept: tuple[str, ...] = ()
        if self.settings.max_drop is not None:
            with self.phase("budget") as say:
                budget = self.settings.max_drop / 100

                def error(quantized: Sequence[str]) -> float:
                    return held_out.error(found.ranges, quantized)

                result = within_budget(may, alone, operations, error, budget, say)
                kept = result.outputs
                left = counted(len(kept), "product")
                say(f"{left} left in float for {self.settings.max_drop:g} %")
        quantized = [p for p in may if p.output not in kept]
        model = insert(found.model, quantized, found.ranges)
        with self.phase("verdict") as say:
            say("what arrives at each product")
            names = [p.output for p in quantized]
            arrives = arriving(board, _some(self.samples.held_out, READ), found.ranges, names)
            outputs = self.verdict(model, held_out, say)
            say("; ".join(map(_said, outputs[:3])))
        layers = [
            Layer(
                p.label,
                p.node,
                p.kind,
                operations[p.output],
                alone.get(p.output),
                arrives.get(p.tensor),
                MAX_DROP if p.output in kept else p.float_because,
            )
            for p in found.products
        ]
        used = {p.tensor for p in quantized}
        report = QuantizationReport(
            settings=self.settings,
            samples=len(self.samples.chosen_by) * self.samples.batch,
            held_out=len(self.samples.held_out) * self.samples.batch,
            observer=found.observer,
            smooth=found.strength,
            tried=self.tried,
            layers=layers,
            outputs=outputs,
            ranges={name: r for name, r in found.ranges.items() if name in used},
            notes=_notes(outputs, worst_first, self.settings),
            phases=self.phases,
        )
        return QuantizedModel(model, report)

    def verdict(self, model: OnnxSource, held_out: Trial, say: Say) -> list[OutputVerdict]:
        """Compiles the quantized model and compares it with the float one."""
        with self.compiler(model, self.samples.shapes, say) as library:

            def results(samples: Sequence[Run]) -> Iterator[Mapping[str, Any]]:
                for sample in samples:
                    yield library.run(sample)

            return compare(held_out.wanted(), results(held_out.samples), self.samples.shapes)


def quantize_model(
    model: Any,
    data: Any,
    settings: Quantization,
    compiler: Compiler,
    progress: Progress,
    example_inputs: Any = None,
) -> QuantizedModel:
    """Quantizes a model by samples. ``compiler`` compiles ONNX for inputs of the given shapes and
    gives a context in which the result runs.
    """
    return Quantizer(settings, compiler, progress).run(model, data, example_inputs)


def operations_of(
    model: OnnxSource, shapes: Mapping[str, tuple[int, ...]], products: Sequence[Product]
) -> dict[str, int]:
    """Multiplications and additions of a run, by the product's output. Where ONNX infers no shape,
    those of one row.
    """
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model.skeleton)
    del fixed.graph.value_info[:]
    for value in fixed.graph.input:
        for dim, size in zip(
            value.type.tensor_type.shape.dim, shapes.get(value.name, ()), strict=False
        ):
            dim.dim_value = size
    for value in fixed.graph.output:
        value.type.tensor_type.ClearField("shape")
    try:
        inferred = onnx.shape_inference.infer_shapes(fixed, data_prop=True)
        values = (*inferred.graph.value_info, *inferred.graph.output)
    except Exception:  # the figures order products and are shown; nothing else depends on them
        values = ()
    sizes = {
        v.name: int(numpy.prod([d.dim_value for d in v.type.tensor_type.shape.dim], dtype=int))
        for v in values
    }
    return {
        p.output: 2 * p.depth * (sizes.get(p.output) or p.weights.shape[p.axis]) for p in products
    }


def _some(runs: Sequence[Run], most: int) -> Sequence[Run]:
    """At most so many of the runs, evenly spaced."""
    if len(runs) <= most:
        return runs
    return [runs[int(n)] for n in numpy.linspace(0, len(runs) - 1, most).round()]


def _said(output: OutputVerdict) -> str:
    more = ""
    if output.top1 is not None:
        more = f", the same first class in {100 * output.top1:.1f} %"
    if output.maps:
        more = f", mean IoU of its classes {100 * output.maps.mean_iou:.1f} %"
    if output.boxes and output.boxes.mean_iou is not None:
        more = f", mean IoU of boxes {100 * output.boxes.mean_iou:.1f} %"
    return f"'{output.name}' is off by {100 * output.error:.2f} %{more}"


def _notes(
    outputs: Sequence[OutputVerdict], worst_first: Sequence[Product], settings: Quantization
) -> list[str]:
    error, most = max(output.error for output in outputs), settings.max_drop
    if most is not None:
        if error <= most / 100:
            return []
        return [
            f"the outputs are off by {100 * error:.2f} % in the end, and max_drop is {most:g} %: "
            "the budget was met by a library with a switch for each product, and the final one "
            "rounds sums in another order. Ask for a little less"
        ]
    if error <= _MUCH:
        return []
    named = ", ".join(f"'{p.label}'" for p in worst_first[:3])
    more = "" if settings.smooth != "off" else ", smooth='auto' often helps transformers"
    return [
        f"the outputs are off by {100 * error:.0f} %, most of all because of {named}: max_drop "
        f"leaves such products in float, exclude leaves out those that you name{more}"
    ]

"""The result of a compile: the model, ready to be called, and a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtco.runtime.module import Model
from gtco.runtime.publish import TemporaryFolder
from gtco.tuning.view import View

if TYPE_CHECKING:
    from gtco.driver.linking.layers import StageLosses
    from gtco.quantization.report import QuantizationReport
    from gtco.tuning.whole import ModelVerdict

OF_ALL = ("calibrate", "tune")  # phases that go over all variants of a library


@dataclass
class CompileReport:
    """What a compile did.

    - ``phases``: seconds of each phase;
    - ``stages``: what ``gtco inspect`` shows of each stage;
    - ``tuning``: the result of each stage that was measured;
    - ``tuned``: the tuning as a whole; None if nothing was to be measured;
    - ``fusion``: a sentence on how measuring changed the partition;
    - ``settled``: the verdict of running the whole model; None if it was not run;
    - ``notes``: sentences for the user;
    - ``launches``: how a model for GPUs is launched; ``predicted_seconds`` are for that;
    - ``variants``: of a library of several shapes, the report of each by its sizes ("batch=4");
      ``stages``, ``predicted_seconds``, ``verification``, ``losses``, ``fusion`` and ``settled``
      are there;
    - ``rejections``: how many configs gave no program, by reason;
    - ``cached``: when the library was made, if it comes from the cache (ISO 8601); otherwise
      empty. ``tuning``, ``tuned`` and ``settled`` are only of this compile.
    - ``quantization``: with precision ``int8``, how the model was quantized and what it lost;
      otherwise None.
    - ``losses``: what each stage loses (``verify_layers``); otherwise None.
    """

    phases: list[tuple[str, float]] = field(default_factory=list)
    stages: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    rejections: dict[str, int] = field(default_factory=dict)
    predicted_seconds: float = 0.0
    launches: str = "graph"
    weights_bytes: int = 0
    arena_bytes: int = 0
    peak_memory_bytes: int = 0
    verification: Any = None
    tuning: list[dict[str, Any]] = field(default_factory=list)
    tuned: View | None = None
    fusion: str = ""
    settled: ModelVerdict | None = None
    variants: dict[str, CompileReport] = field(default_factory=dict)
    cached: str = ""
    quantization: QuantizationReport | None = None
    losses: StageLosses | None = None

    @property
    def seconds(self) -> float:
        return sum(seconds for _, seconds in self.phases)


def of_all(variants: Mapping[str, CompileReport]) -> CompileReport:
    """The report of a library of several variants, by those of each."""
    first, *others = variants.values()
    phases = list(first.phases)
    for report in others:
        phases += [(name, seconds) for name, seconds in report.phases if name not in OF_ALL]
    return replace(
        first,
        phases=phases,
        stages=[],
        notes=notes_of_all(variants),
        predicted_seconds=0.0,
        tuning=[stage for report in variants.values() for stage in report.tuning],
        verification=None,
        losses=None,
        fusion="",
        settled=None,
        variants=dict(variants),
    )


def notes_of_all(variants: Mapping[str, CompileReport]) -> list[str]:
    """The notes of all variants; a note that not all have says whose it is."""
    found: dict[str, list[str]] = {}
    for name, report in variants.items():
        for note in report.notes:
            found.setdefault(note, []).append(name)
    return [
        note if len(whose) == len(variants) else f"{'; '.join(whose)}: {note}"
        for note, whose in found.items()
    ]


class CompiledModel(Model):
    """A compiled model, loaded and ready. :meth:`~gtco.Model.save` keeps its files; otherwise they
    are deleted when it is closed. ``report`` says what the compile did.
    """

    def __init__(self, path: Path, report: CompileReport, folder: TemporaryFolder) -> None:
        super().__init__(path, temporary=folder)
        self.report = report

"""The result of a compile: the model, ready to be called, and a report."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtco.runtime.module import Model
from gtco.tuning.view import View

if TYPE_CHECKING:
    from gtco.driver.layers import StageLosses
    from gtco.quantization.report import QuantizationReport
    from gtco.tuning.whole import ModelVerdict


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


class CompiledModel(Model):
    """A compiled model, loaded and ready. :meth:`~gtco.Model.save` keeps its files; otherwise they
    are deleted when it is closed. ``report`` says what the compile did.
    """

    def __init__(self, path: Path, report: CompileReport) -> None:
        super().__init__(path, temporary=True)
        self.report = report

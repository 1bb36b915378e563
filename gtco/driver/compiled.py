"""What a compile gives: the model, ready to be called, and the report of what was done."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtco.runtime.module import Model
from gtco.tuning.view import View

if TYPE_CHECKING:
    from gtco.tuning.whole import ModelVerdict


@dataclass
class CompileReport:
    """What a compile did: seconds of each phase, the stages, memory, what ``tuning`` made of each
    stage that it measured and in sum (``tuned``, None where nothing was to be measured), what
    measuring made of the partition, in words (``fusion``), and the whole model of all of it
    (``settled``, None where it was not run); notes for the user; ``launches``: how a model for GPUs
    is launched, and ``predicted_seconds`` are of that; ``rejections`` are the configs that no
    program was made of, by reason.
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

    @property
    def seconds(self) -> float:
        return sum(seconds for _, seconds in self.phases)


class CompiledModel(Model):
    """A compiled model, loaded and ready: :meth:`~gtco.Model.save` keeps it, else its files go
    when it is closed. ``report``: what the compile did.
    """

    def __init__(self, path: Path, report: CompileReport) -> None:
        super().__init__(path, temporary=True)
        self.report = report

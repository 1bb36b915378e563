"""The facts of a report as one value. Its JSON is described by ``schema.json`` and docs/report.md.

Seconds, bytes and FLOPs are in plain units. A field that is not known is None, and ``unmeasured``
says why nothing was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from gtco.tensor.loops import Line

FORMAT, VERSION = "gtco-report", 3

Place = Literal["input", "weight", "stage", "output"]


@dataclass(frozen=True)
class Timing:
    """Seconds over all runs."""

    minimum: float
    median: float
    p99: float


@dataclass(frozen=True)
class Operator:
    """One operator of a stage: its kind, the model's node ("" where gtco made the operator), and
    the type of its result.
    """

    kind: str
    node: str
    result: str


@dataclass(frozen=True)
class Tensor:
    """A tensor that a stage reads or writes.

    - ``place``: where it comes from: an input of the model, a weight, another stage; or where it
      goes to: an output of the model, other stages;
    - ``stage``: the number of the stage that wrote it; None for an input or a weight;
    - ``packed``: the shape in which the kernel reads a weight, if it is another than the weight's.
    """

    name: str
    type: str
    nbytes: int
    place: Place
    stage: int | None = None
    packed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Bound:
    """The least seconds that the machine needs for a stage, and what decides that: ``compute``, or
    a level of memory.
    """

    seconds: float
    by: str


@dataclass(frozen=True)
class Decision:
    """A decision of a stage's config: its name, its value, and what that means in words."""

    name: str
    value: int | str
    words: str


@dataclass(frozen=True)
class StageFacts:
    """A stage.

    - ``sketch``, ``structure``: its kind of loops, in a word and as the papers write them;
    - ``instructions``: the instruction set of its innermost loop;
    - ``number_format``: the dtype that it multiplies, or computes in;
    - ``config``: the choices, the sketch's own name left out;
    - ``flops``: the operations for which the stage is counted;
    - ``nbytes``: inputs and output, each once;
    - ``share``: its part of the time of a run, measured if that is known, else predicted;
    - ``roofline``: ``bound`` over the time;
    - ``peak``: FLOP/s over the peak of its number format;
    - ``launch``: how a kernel of a CPU or a GPU is called, by the name of the number;
    - ``loops``: of the kernel, outermost first; none in libraries of older versions.
    """

    number: int
    name: str
    key: str
    kernel: str
    sketch: str
    structure: str
    operators: tuple[Operator, ...]
    inputs: tuple[Tensor, ...]
    output: Tensor
    read_by: tuple[int, ...]
    instructions: str
    number_format: str
    layout: str
    config: tuple[Decision, ...]
    flops: float
    nbytes: int
    predicted_seconds: float | None
    measured: Timing | None
    share: float | None
    bound: Bound | None
    roofline: float | None
    peak: float | None
    launch: Mapping[str, Any]
    loops: tuple[Line, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """The measured median, or else the prediction."""
        return self.measured.median if self.measured else self.predicted_seconds or 0.0

    @property
    def reads(self) -> tuple[int, ...]:
        """The numbers of the stages that it reads from."""
        return tuple(sorted({t.stage for t in self.inputs if t.stage is not None}))


@dataclass(frozen=True)
class ArenaPlace:
    """The bytes of a stage's output in the arena, from before stage ``first`` to after ``last``."""

    stage: int
    offset: int
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Measurement:
    """A run of all stages.

    - ``runs``: so many, after some to warm up, each once with the clock read between stages and
      once without;
    - ``end_to_end``: without;
    - ``stages_seconds``: the sum of the stages' medians;
    - ``summed_seconds``: the median of the sums of all stages in one run. It is larger where other
      processes slow down another stage in each run;
    - ``unattributed_seconds``: what ``stages_seconds`` leaves of ``end_to_end``: that, the call,
      and the waits between stages. Reading the clock costs too, so it may be below 0.
    """

    runs: int
    threads: int
    end_to_end: Timing
    stages_seconds: float
    summed_seconds: float
    unattributed_seconds: float


@dataclass(frozen=True)
class Machine:
    """The machine that bounds are taken from.

    - ``peaks``: FLOP/s of all threads by number format;
    - ``bandwidths``, ``capacities``: bytes a second of all threads, and bytes, by level of memory;
    - ``source``: in words, where these come from.
    """

    name: str
    threads: int
    peaks: Mapping[str, float]
    bandwidths: Mapping[str, float]
    capacities: Mapping[str, int]
    source: str


@dataclass(frozen=True)
class ModelFacts:
    """One variant of a library: the model at one choice of sizes.

    - ``verification``, ``losses`` (of the layers), ``tuning``: None if the report was not made by a
      compile that did them.
    """

    sizes: Mapping[str, int]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    stages: tuple[StageFacts, ...]
    arena_bytes: int
    arena: tuple[ArenaPlace, ...]
    flops: float
    predicted_seconds: float | None
    measurement: Measurement | None
    unmeasured: str
    verification: Mapping[str, Any] | None = None
    losses: Mapping[str, Any] | None = None
    tuning: Mapping[str, Any] | None = None

    @property
    def seconds(self) -> float:
        """The measured time of a run, or else the predicted one."""
        if self.measurement:
            return self.measurement.end_to_end.median
        return self.predicted_seconds or 0.0


@dataclass(frozen=True)
class Facts:
    """A library and its variants."""

    name: str
    file: str
    nbytes: int
    versions: Mapping[str, str]
    target: str
    features: tuple[str, ...]
    precision: str
    weights_bytes: int
    weights_by_dtype: Mapping[str, int]
    notes: tuple[str, ...]
    machine: Machine
    models: tuple[ModelFacts, ...]
    format: str = field(default=FORMAT)
    version: int = field(default=VERSION)

    def to_json(self) -> dict[str, Any]:
        return {"format": self.format, "version": self.version, **asdict(self)}

"""Makes one artifact of the candidates of stages. Each of its steps is a candidate, timed as the
runtime times the stages of a model, by the same threads.

Candidates of one stage are consecutive steps, so that in every round they run within milliseconds
of each other, at whatever speed the machine then has. The first candidate runs three times. Its
first run brings the activations into the caches, which in a model are warm from the stage before.
It runs again at the beginning and at the end, and the difference of these two readings is the
machine's noise. Each step has its own copy of the weights, so that a round of all candidates evicts
them from the caches, as a run of the model does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gtco.codegen.jobs import Kernel
from gtco.machine.target import Target
from gtco.runtime.artifact import Artifact
from gtco.runtime.plan import BufferRef, Step, TensorSpec, round_up
from gtco.support.errors import InternalError
from gtco.tensor.operators import INDEXING
from gtco.tensor.space import Pick
from gtco.tensor.stage import Stage, TensorType
from gtco.tuning.timing import values

REPEATS = 2  # further runs of the first candidate, beside its own step
BATCH_BYTES = 1 << 30  # bytes of activations, results and weights of one artifact


@dataclass(frozen=True)
class Trial:
    """A stage in its canonical form, its candidates and their kernels. The first candidate is the
    one that the others have to beat.
    """

    stage: Stage
    picks: tuple[Pick, ...]
    kernels: tuple[Kernel, ...]

    def only(self, rivals: Sequence[int]) -> Trial:
        """The trial with the first candidate and these rivals alone, given by number."""
        kept = (0, *rivals)
        return replace(
            self,
            picks=tuple(self.picks[n] for n in kept),
            kernels=tuple(self.kernels[n] for n in kept),
        )

    @property
    def rounded(self) -> bool:
        """True if a tensor of the stage has bfloat16's eight bits of precision."""
        return any(type_.dtype == "bfloat16" for type_ in self.stage.types.values())

    @property
    def quantized(self) -> bool:
        """True if the stage rounds floats to integers of 8 bits."""
        narrow = self.stage.output.type.dtype in ("int8", "uint8")
        return narrow and any(t.dtype.startswith("float") for t in self.stage.types.values())

    @property
    def numbers(self) -> bool:
        """True if the stage computes with its integers, so that none of them is an index."""
        return not any(op.kind in INDEXING for op in self.stage.operators)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that timing the trial takes."""
        return buffers(self.stage, len(self.kernels))


def buffers(stage: Stage, kernels: int) -> int:
    """Bytes of the inputs, and of the constants and results of so many kernels."""
    constants = sum(i.type.nbytes for i in stage.inputs if i.constant)
    each = constants + stage.output.type.nbytes
    return stage.input_bytes + each * (kernels + REPEATS)


def batches(trials: Iterable[Trial], most: int = BATCH_BYTES) -> Iterator[list[Trial]]:
    """The trials in order, cut into batches whose buffers take at most ``most`` bytes."""
    batch: list[Trial] = []
    for trial in trials:
        if batch and sum(t.nbytes for t in batch) + trial.nbytes > most:
            yield batch
            batch = []
        batch.append(trial)
    if batch:
        yield batch


def artifact(trials: Sequence[Trial], target: Target, threads: int) -> Artifact:
    """An artifact with the steps of each trial: the first candidate, all candidates, the first
    again. ``metadata["trials"]`` has the numbers of the steps, trial by trial, ``"rounded"`` and
    ``"quantized"`` say which trials round to bfloat16 and to 8 bits, and ``"numbers"`` lists the
    inputs whose integers are not indices. The result of every step is an output.
    """
    random = np.random.default_rng(0)
    inputs: dict[tuple[TensorType, bool], int] = {}
    outputs: list[TensorSpec] = []
    weights: list[tuple[int, np.ndarray]] = []
    steps: list[Step] = []
    groups: list[list[int]] = []
    end = 0
    for trial in trials:
        numbers = trial.numbers
        arrays = {
            i.name: values(random, i.type, numbers) for i in trial.stage.inputs if i.constant
        }
        group = []
        for kernel in (trial.kernels[0], *trial.kernels, trial.kernels[0]):
            buffers = []
            for i in trial.stage.inputs:
                if not i.constant:
                    known = inputs.setdefault((i.type, numbers), len(inputs))
                    buffers.append(BufferRef("input", known))
                    continue
                packing = kernel.packings.get(i.name)
                packed = packing.apply(arrays[i.name]) if packing else arrays[i.name]
                buffers.append(BufferRef("weight", end))
                weights.append((end, packed))
                end = round_up(end + packed.nbytes)
            buffers.append(BufferRef("output", len(outputs)))
            if kernel.numbers_dtype:
                read = np.array(kernel.numbers, kernel.numbers_dtype)
                buffers.append(BufferRef("weight", end))
                weights.append((end, read))
                end = round_up(end + read.nbytes)
            outputs.append(_spec(f"y{len(outputs)}", trial.stage.output.type))
            group.append(len(steps))
            steps.append(Step(kernel.symbol, tuple(buffers), kernel.tasks, kernel.workspace))
        groups.append(group)
    kernels: dict[str, Kernel] = {}
    for kernel in (k for trial in trials for k in trial.kernels):
        if kernels.setdefault(kernel.symbol, kernel).code != kernel.code:
            raise InternalError(f"two kernels to be timed are called {kernel.symbol}")
    return Artifact(
        name="trials",
        inputs=tuple(_spec(f"x{n}", type_) for (type_, _), n in inputs.items()),
        outputs=tuple(outputs),
        steps=tuple(steps),
        arena_bytes=0,
        kernels={f"{symbol}.o": kernel.code for symbol, kernel in kernels.items()},
        weights=weights,
        cpu_features=target.required(any(kernel.tiles for kernel in kernels.values())),
        threads=threads,
        isa=target.isa,
        metadata={
            "trials": groups,
            "rounded": [trial.rounded for trial in trials],
            "quantized": [trial.quantized for trial in trials],
            "numbers": [n for (_, numbers), n in inputs.items() if numbers],
        },
    )


def _spec(name: str, type_: TensorType) -> TensorSpec:
    return TensorSpec(name, type_.dtype, type_.shape)

"""Kernels for GPUs whose machine code spills registers -> those of what stands in for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gtco.codegen.jobs import Failure, GpuKernel, Job, Kernel
from gtco.codegen.workers import Workers
from gtco.machine.target import Machine
from gtco.tensor.space import Pick
from gtco.tensor.stage import Stage

# A stage and the pick whose kernel spills: what to try instead, the most promising first.
StandIns = Callable[[Stage, Pick], Sequence[Pick]]


def spilled(kernel: Kernel | Failure | None) -> dict[str, int]:
    """Bytes that a thread of the kernel spills, by architecture, where it does."""
    if not isinstance(kernel, GpuKernel):
        return {}
    return {arch: image.spills for arch, image in kernel.images.items() if image.spills}


def without_spills(
    stages: Mapping[str, Stage],
    kernels: dict[str, Kernel],
    choices: dict[str, Pick],
    stand_ins: StandIns,
    target: Machine,
    workers: Workers,
    text: bool,
    ptx: bool,
) -> list[str]:
    """Puts in the place of each kernel that spills on an architecture, and of its choice, the first
    of its stand-ins whose kernel spills on none. Gives a note for each where there is none: it
    stays as it was chosen. ``stages`` are those to look at; all three go by stage key.
    """
    left = {
        key: list(stand_ins(stage, choices[key]))
        for key, stage in stages.items()
        if spilled(kernels.get(key))
    }
    tried = {key: len(picks) for key, picks in left.items()}
    while turn := {key: picks.pop(0) for key, picks in left.items() if picks}:
        jobs = [
            Job(f"gtco_{key}", stages[key].canonical, pick.config, target, text, ptx)
            for key, pick in turn.items()
        ]
        for answer in workers.build(jobs):
            key = answer.symbol.removeprefix("gtco_")
            if isinstance(answer, GpuKernel) and not spilled(answer):
                kernels[key], choices[key] = answer, turn[key]
                del left[key]
    notes = []
    for key in left:
        where = ", ".join(f"{n} bytes on {arch}" for arch, n in spilled(kernels[key]).items())
        notes.append(
            f"a thread of stage {stages[key].label} ({key}, {choices[key].config.to_json()}) "
            f"spills {where}, which its predicted time does not count: "
            + (
                f"so do the {tried[key]} next-best configs with fewer registers"
                if tried[key]
                else "no config with fewer registers is predicted to take about as long"
            )
        )
    return notes

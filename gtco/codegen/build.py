"""One stage and its config -> a compiled kernel, as data that crosses processes."""

from __future__ import annotations

from dataclasses import dataclass

from gtco.codegen.llvm import lower, object_code
from gtco.errors import describe
from gtco.target import Target
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Config, Packing, Rejection
from gtco.tensor.stage import Stage


@dataclass(frozen=True)
class Job:
    """A kernel to build. ``text``: give the lowered TIR too, for a dump."""

    symbol: str
    stage: Stage
    config: Config
    target: Target
    text: bool = False


@dataclass(frozen=True)
class Kernel:
    """A built kernel: its object file, what the runtime must know, how its constant inputs are laid
    out.
    """

    symbol: str
    code: bytes
    tasks: int
    workspace: int
    packings: dict[str, Packing]
    text: str = ""


@dataclass(frozen=True)
class Failure:
    """Why a job gave no kernel: a rejection, an exception, or the crash of its process.
    ``rejected``: the reason by which a rejection is counted.
    """

    symbol: str
    reason: str
    rejected: str = ""


def build(job: Job) -> Kernel | Failure:
    """Derive the stage's space again, build the config's program and compile it."""
    errors: list[Exception] = []
    space = space_of(job.stage, job.target, lambda rule, error: errors.append(error))
    program = space.build(job.config, job.symbol)
    if isinstance(program, Rejection):
        reason = "; ".join([program.detail, *map(describe, errors)])
        return Failure(job.symbol, reason, program.reason)
    text = lower([program.function], job.target).script() if job.text else ""
    return Kernel(
        job.symbol,
        object_code([program.function], job.target),
        program.tasks,
        program.workspace,
        dict(program.packings),
        text,
    )

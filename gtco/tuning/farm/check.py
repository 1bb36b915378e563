"""Looks at every machine of a farm: who it is, and how steady its readings are."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from gtco.codegen.generate import generate
from gtco.codegen.workers import Workers
from gtco.machine.identity import Identity, identity
from gtco.runtime.publish import temporary
from gtco.runtime.writing.linking import write_artifact
from gtco.search.analytic import AnalyticPolicy
from gtco.support.errors import FarmError, OptionError
from gtco.tensor.stage import Operator, Stage, StageInput, TensorType
from gtco.tuning.farm import machine as there
from gtco.tuning.farm.connection import Farm, FarmMachine, MachineLost
from gtco.tuning.farm.runner import identities
from gtco.tuning.runner import Budget
from gtco.tuning.timing import LEAST_ROUNDS
from gtco.tuning.trial import Trial, artifact
from gtco.tuning.verdict import judge

SIZE = 384  # rows, columns and depth of the product that is read
SECONDS = 0.5


@dataclass(frozen=True)
class Checked:
    """A machine. ``noise``: how far two readings of one kernel are apart, as a share; ``rate``: the
    FLOP/s of that kernel. Both are None if nothing was read; ``said`` tells why.
    """

    name: str
    kind: str
    cpu: str = ""
    cores: int = 0
    governor: str = ""
    noise: float | None = None
    rate: float | None = None
    said: str = ""

    @property
    def ok(self) -> bool:
        return self.noise is not None


def check_farm(address: str) -> list[Checked]:
    """All machines, sorted by kind and name. Each reads a product, when its turn comes."""
    with Farm(address) as farm:
        machines = farm.machines()
        known = identities(farm)
        libraries = {kind: _library(who) for kind, who in known.items()}
        with ThreadPoolExecutor(max(len(machines), 1)) as threads:
            return list(threads.map(lambda m: _checked(farm, m, libraries.get(m.kind)), machines))


def _product() -> Stage:
    square = TensorType((SIZE, SIZE))
    inputs = (StageInput("x", square), StageInput("w", square, True))
    return Stage(inputs, (Operator("matmul", ("x", "w"), "y", square),)).canonical


def _library(who: Identity) -> bytes:
    """A library for this kind of machine, whose steps are one kernel several times."""
    target, stage = who.target(identity()), _product()
    policy = AnalyticPolicy(target)
    with Workers(1) as workers, temporary("farm") as folder:
        made = generate([stage], policy.choose, target, workers)
        trial = Trial(stage, (made.choices[stage.key],), (made.kernels[stage.key],))
        write_artifact(artifact([trial], target, 0), folder / "product.so")
        return (folder / "product.so").read_bytes()


def _checked(farm: Farm, machine: FarmMachine, library: bytes | None) -> Checked:
    libraries: Sequence[bytes] = () if library is None else (library,)
    asked = there.request(machine.kind, Budget(LEAST_ROUNDS, SECONDS))
    try:
        who, read = there.understood(farm.ask(machine, asked, libraries), len(libraries))
    except (MachineLost, OptionError, FarmError) as error:
        return Checked(machine.name, machine.kind, said=str(error))
    found = Checked(machine.name, machine.kind, who.name, who.cores, who.governor)
    if who.kind != machine.kind:
        return Checked(**{**vars(found), "said": f"joined as another kind; it is {who.kind}"})
    if read is None or read.failed:
        return Checked(**{**vars(found), "said": read.failed if read else "it read nothing"})
    verdict = judge(read.seconds[0][:, 1:])  # the first step brought in the activations
    rate = 2 * SIZE**3 / verdict.first_seconds
    return Checked(**{**vars(found), "noise": verdict.noise, "rate": rate})

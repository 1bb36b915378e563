"""Decides how a model for GPUs is launched: as a graph with a kernel for each stage, or as one
persistent kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gtco.codegen.generate import Generated
from gtco.codegen.jobs import GpuKernel
from gtco.codegen.workers import Workers
from gtco.driver.linking.persistent import persistent
from gtco.graph.graph import Graph
from gtco.machine.gpu import GpuTarget
from gtco.runtime.gpu.plan import PersistentKernel
from gtco.search.gpu.launches import LaunchPrices, launch_prices, narrow
from gtco.search.gpu.policy import GpuPolicy, constant_bytes
from gtco.support.errors import BuildError
from gtco.support.options import CompileOptions
from gtco.tensor.space import Rejection


@dataclass(frozen=True)
class Launching:
    """The decision how the model is launched.

    - the predicted seconds of each way;
    - the kernel of the whole model, if it is launched as one;
    - ``one_kernel``: true if the first architecture is launched as one kernel;
    - ``spilled``: by architecture, the bytes that the kernel would spill; for these architectures
      it is left out;
    - ``listing``: the kernel's text, if it is dumped.
    """

    prices: LaunchPrices
    persistent: PersistentKernel | None = None
    one_kernel: bool = False
    spilled: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    symbol: str = ""
    listing: str = ""


def launching(
    generated: Generated,
    graph: Graph,
    machine: GpuTarget,
    options: CompileOptions,
    workers: Workers,
) -> Launching:
    """Makes the persistent kernel if the options or the prices ask for it.

    If such a kernel is impossible, this is a note, or an error if the options ask for it. If it
    would spill registers for an architecture, it is left out there, with a note. The prices are
    those of the first architecture: if they asked for the kernel and it would spill there, it is
    left out everywhere.
    """
    prices = _prices(generated, machine)
    asked, wanted = options.launches == "persistent", options.launches
    if (prices.cheaper if wanted == "auto" else wanted) == "graph":
        return Launching(prices)
    tensors = len(graph.inputs) + len(graph.outputs)
    made = persistent(generated, tensors, machine, workers, text=options.dump is not None)
    if isinstance(made, Rejection):
        why = f"this model cannot have a persistent kernel: {made.detail}"
        if asked:
            raise BuildError(f"{why}; leave launches=persistent out")
        return Launching(prices, notes=(f"{why}; it is launched as a graph",))
    kernel, listing = made
    spilled = {arch: n for arch, n in kernel.info["spilled_bytes"].items() if n}
    wanted_there = kernel.images.values() if asked else [kernel.images[machine.arch]]
    taken = kernel if any(wanted_there) else None
    notes = []
    if spilled:
        how_much = ", ".join(f"{n} bytes on {arch}" for arch, n in spilled.items())
        there = " there" if taken is not None else ""
        notes.append(
            f"the persistent kernel would spill {how_much}, since stages have fewer registers in "
            f"it: the model is launched as a graph{there}"
        )
    here = taken is not None and bool(taken.images[machine.arch])
    return Launching(prices, taken, here, spilled, tuple(notes), kernel.symbol, listing or "")


def _prices(generated: Generated, machine: GpuTarget) -> LaunchPrices:
    """The predicted seconds of a run for each way to launch it."""
    policy, found = GpuPolicy(machine), {}
    for stage in generated.different.values():
        choice, kernel = generated.choices[stage.key], generated.kernels[stage.key]
        assert isinstance(kernel, GpuKernel)
        launch: Any = choice.sketch.workload(choice.config)
        used = kernel.images[machine.arch].registers or launch.registers
        own = replace(launch, registers=used), constant_bytes(stage)
        fewer = narrow(policy, choice, generated.wrong.get(stage.key, ()))
        other: Any = fewer.sketch.workload(fewer.config)
        found[stage.key] = own, own if fewer is choice else (other, constant_bytes(stage))
    steps = [found[stage.key] for stage in generated.stages]
    return launch_prices(policy, [own for own, _ in steps], [within for _, within in steps])

"""The policy that a compile asks for, and what records make of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from gtco.driver.linking.metadata import versions
from gtco.machine.gpu import GpuTarget
from gtco.machine.target import Machine
from gtco.search.analytic import AnalyticPolicy
from gtco.search.calibration.rates import RateTable
from gtco.search.gpu.policy import GpuPolicy
from gtco.search.policy import Policy
from gtco.search.recorded import MODEL_PICKS, RecordedPolicy, measured_elsewhere
from gtco.search.records.records import Record, Records, circumstances
from gtco.support.counting import counted
from gtco.support.options import CompileOptions


def policy_of(
    options: CompileOptions, machine: Machine, threads: int, rates: RateTable | None
) -> tuple[Policy, list[str]]:
    """The policy that the options ask for, and notes for the report. On a CPU its target has as
    many cores as the model has ``threads``, since the space and the price of a stage depend on that
    one number. ``rates`` are those of the whole machine, if it was measured.
    """
    policy: Policy
    if isinstance(machine, GpuTarget):
        policy = GpuPolicy(machine)
    else:
        known = rates.target if rates else machine
        asked = replace(known, cores=threads, fast_algorithms=options.fast_algorithms)
        policy = AnalyticPolicy(asked, rates)
    if options.policy == "language-model":
        from gtco.search.language.policy import LanguagePolicy

        return cast("Policy", LanguagePolicy(policy, rates)), []
    if options.policy == "closed-form":
        from gtco.search.closed_form.policy import ClosedFormPolicy

        closed = ClosedFormPolicy(policy)
        return cast("Policy", closed), list(closed.notes)
    return policy, []


def overruled(
    policy: Policy, machine: Machine, records: Records | None, shipped: Sequence[Record]
) -> tuple[RecordedPolicy, list[str]]:
    """The policy overruled by ``records`` if there are some, and notes for the report. ``shipped``
    are the records that come with gtco; they count for the machine that compiles.
    """
    if records is None:
        return RecordedPolicy(policy), []
    if isinstance(machine, GpuTarget) or not machine.here:
        return measured_elsewhere(policy, records, versions(machine))
    found = RecordedPolicy(policy, records, shipped=shipped)
    others = records.circumstances()
    if shipped or not others or circumstances(policy.target) in others:
        return found, []
    if machine.name != "native" and not machine.name.startswith("x86-64"):
        # a kind of CPU was named: answers of gtco measure, from a machine of it
        elsewhere = measured_elsewhere(policy, records, versions(machine))
        if not elsewhere[1]:
            return elsewhere
    return found, [
        f"{records.path} holds nothing that was measured on this machine with "
        f"{counted(policy.target.cores, 'thread')}, these options and these versions of gtco and "
        f"TVM: {MODEL_PICKS}"
    ]

"""The policy that a compile asks for, by its name."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from gtco.machine.gpu import GpuTarget
from gtco.machine.target import Machine
from gtco.search.analytic import AnalyticPolicy
from gtco.search.calibration.rates import RateTable
from gtco.search.gpu.policy import GpuPolicy
from gtco.search.policy import Policy


def policy_of(
    name: str, machine: Machine, threads: int, rates: RateTable | None
) -> tuple[Policy, list[str]]:
    """The policy, and notes for the report. On a CPU its target has as many cores as the model has
    ``threads``, since the space and the price of a stage depend on that one number. ``rates`` are
    those of the whole machine, if it was measured.
    """
    policy: Policy
    if isinstance(machine, GpuTarget):
        policy = GpuPolicy(machine)
    else:
        known = rates.target if rates else machine
        policy = AnalyticPolicy(replace(known, cores=threads), rates)
    if name == "language-model":
        from gtco.search.language.policy import LanguagePolicy

        return cast("Policy", LanguagePolicy(policy, rates)), []
    if name == "closed-form":
        from gtco.search.closed_form.policy import ClosedFormPolicy

        closed = ClosedFormPolicy(policy)
        return cast("Policy", closed), list(closed.notes)
    return policy, []

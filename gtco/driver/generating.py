"""Stages -> kernels, of which other sizes of the model may have some."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import numpy as np

from gtco.codegen.generate import Choose, Generated, generate
from gtco.codegen.workers import Workers
from gtco.driver.sizes.layouts import Copies
from gtco.driver.sizes.shared import Shared
from gtco.driver.sizes.sharing import shared_steps
from gtco.machine.target import Target
from gtco.search.gpu.stand_ins import stand_ins
from gtco.search.recorded import RecordedPolicy
from gtco.support.options import CompileOptions
from gtco.tensor.space import Pick
from gtco.tensor.stage import Stage


def generated(
    stages: Sequence[Stage],
    policy: RecordedPolicy,
    workers: Workers,
    options: CompileOptions,
    shared: Shared | None,
    constants: Mapping[str, np.ndarray],
    progress: Callable[[int, int], None],
) -> Generated:
    """A kernel for each different stage, by the policy's pick, built in the worker processes.

    With other sizes (``shared``) a kernel that is there already is taken, picks prefer the layouts
    in which ``constants`` are kept already, and on CPUs kernels that many stages share are made
    first.
    """
    choose: Choose = policy.choose
    if shared is not None:
        copies = Copies(
            shared.layouts, stages, lambda: sum(map(policy.predict, stages)), constants
        )
        choose = partial(copies.choose, policy, shared.kernels)
    known = shared.kernels if shared is not None else {}
    picks = dict(shared.picks) if shared is not None else {}
    text = options.dump is not None
    if isinstance(policy.target, Target):
        left = [stage for stage in stages if stage.key not in picks]
        picks |= shared_steps(left, choose, policy.target, text, workers, known)

    def chosen(stage: Stage, without: Collection[str]) -> Pick | None:
        there = picks.get(stage.key)
        return there if there is not None and not without else choose(stage, without)

    return generate(
        stages,
        chosen,
        policy.target,
        workers,
        text=text,
        ptx=options.ptx,
        strict=options.strict,
        progress=progress,
        stand_ins=partial(stand_ins, policy),
        known=known,
    )

"""Builds candidates of a model's heavy stages for a CPU elsewhere into one library, to be timed
there (:mod:`gtco.tuning.offline`). The machine needs gtco and numpy, and neither a compiler nor
TVM. The steps are those of :func:`gtco.tuning.trial.artifact`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gtco.codegen.jobs import Failure, Job, Kernel
from gtco.codegen.workers import Workers
from gtco.driver.candidates import comparable, heavy
from gtco.driver.compilation import Compilation
from gtco.driver.linking.metadata import describe, versions
from gtco.driver.phases import Fused
from gtco.machine.target import Target
from gtco.runtime.artifact import Artifact
from gtco.search.policy import Policy, priced
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Pick
from gtco.tensor.stage import Stage
from gtco.tuning.timing import TOLERANCE
from gtco.tuning.trial import Trial, artifact, batches


def bundle(run: Compilation, fused: Fused, per_stage: int, workers: Workers) -> Artifact:
    """The ``per_stage`` most promising configs of each heavy stage, the policy's pick first. Raises
    :class:`BuildError` if no stage has two configs that can be built.
    """
    target = fused.policy.target
    assert isinstance(target, Target)
    notes = run.report.notes
    stages = heavy(fused.partition.stages, fused.policy)
    found = _trials(fused.policy, stages, per_stage, workers, notes)
    trials = comparable(found, lambda trial: len(trial.picks))
    kept = next(batches(trials))
    if len(kept) < len(trials):
        left = ", ".join(trial.stage.label for trial in trials[len(kept) :])
        notes.append(f"the candidates of all stages take too much memory; left out: {left}")
    made = artifact(kept, target, run.threads(target))
    groups: list[list[int]] = made.metadata["trials"]
    steps = list(made.steps)
    for trial, group in zip(kept, groups, strict=True):
        # the first step brings in the activations, and the last is the first candidate again
        rivals = [None, *range(len(trial.picks)), 0]
        for step, rival in zip(group, rivals, strict=True):
            pick = trial.picks[rival or 0]
            info = {**describe(trial.stage, pick), "label": trial.stage.label, "rival": rival}
            steps[step] = replace(steps[step], info=info)
    compared = [
        {
            "key": trial.stage.key,
            "first": group[1],
            "count": len(trial.picks),
            "tolerance": TOLERANCE["bfloat16" if trial.rounded else "float32"],
            "steps": int(trial.quantized),
        }
        for trial, group in zip(kept, groups, strict=True)
    ]
    return replace(
        made,
        name="candidates",
        steps=tuple(steps),
        metadata={
            **made.metadata,
            **versions(target),
            "precision": fused.whole.facts.precision,
            "notes": list(notes),
            "candidates": {
                "stages": len(kept),
                "kernels": sum(len(trial.picks) for trial in kept),
                "compared": compared,
            },
        },
    )


def _trials(
    policy: Policy, stages: Sequence[Stage], per_stage: int, workers: Workers, notes: list[str]
) -> list[Trial]:
    """Each stage's candidates in the policy's order. A candidate without a kernel is left out and
    noted.
    """
    jobs: dict[str, tuple[Job, Pick]] = {}
    for stage in stages:
        space = space_of(stage.canonical, policy.target)
        for n, config in enumerate(policy.propose(stage, per_stage)):
            pick = priced(policy, space, config)
            assert pick is not None
            symbol = f"gtco_{stage.key}_{n}"
            jobs[symbol] = Job(symbol, stage.canonical, config, policy.target), pick
    kernels: dict[str, Kernel] = {}
    for answer in workers.build(job for job, _ in jobs.values()):
        if isinstance(answer, Failure):
            job, pick = jobs[answer.symbol]
            what = f"{job.stage.label} ({job.stage.key}, {pick.config.to_json()})"
            notes.append(f"a candidate of {what} was left out: {answer.reason}")
        else:
            kernels[answer.symbol] = answer
    found = []
    for stage in stages:
        own = [s for s, (job, _) in jobs.items() if job.stage.key == stage.key and s in kernels]
        if own:
            picks, built = (jobs[s][1] for s in own), (kernels[s] for s in own)
            found.append(Trial(stage.canonical, tuple(picks), tuple(built)))
    return found

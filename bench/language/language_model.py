"""The tensor language model from its sentences to its figures (TLM; docs/papers/tlm.md).

``python -m bench language_model sample [--seconds 3600]``
``python -m bench language_model pretrain [--seconds 1800] [--epochs 2]``
``python -m bench language_model rank [--seconds 3600]``
``python -m bench language_model measure FILE.records [--stages 64] [--trials 16]``
``python -m bench language_model finetune [--records FILE ...] [--readings FILE ...] [--name NAME]``
``python -m bench language_model ablate --seconds 60 [--readings FILE ...]``
``python -m bench language_model evaluate [--model FILE] [--records F ...] [--readings F ...]``
``python -m bench language_model live FILE.jsonl [--model FILE] [--stages 12] [--trials 64]``
``python -m bench language_model whole FILE.jsonl [--models vit-s-16,...] [--sentences 1 10 32]``

Each step may be stopped at any moment and goes on where it was, in ``--folder``. The extra
``train`` brings what they need.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gtco.codegen.workers import Workers
from gtco.machine.target import cpu_target
from gtco.search.analytic import AnalyticPolicy
from gtco.search.calibration.profile import cached
from gtco.search.language.model import Sizes, load, save
from gtco.search.language.sentence import Grammar
from gtco.search.language.words import Vocabulary
from gtco.search.records.records import Record, Records, circumstances
from gtco.search.records.shipped import shipped
from gtco.search.records.text import from_lines, programs
from gtco.support.errors import OptionError
from gtco.tensor.stage import Stage

from ..harness.readings import FOLDER as READINGS
from ..harness.steps import run, say
from .data import corpus, demonstrations, rankings, sample
from .data.demonstrations import Demonstration
from .data.stages import Collected, read
from .data.workloads import CPU, workloads
from .options import parser

if TYPE_CHECKING:
    from .training.train import Course, Lessons


def main(argv: Sequence[str]) -> int:
    return run(parser(__doc__), STEPS, argv)


# the steps ----------------------------------------------------------------------------------------
def sampling(options: argparse.Namespace) -> int:
    wanted = {row.stage for row in records_of(options.records)[0]}
    if options.vocabulary and corpus.read_vocabulary(options.folder) is None:
        corpus.write_vocabulary(load(options.vocabulary).vocabulary, options.folder)
    found = sample.sampled(options.folder, wanted, options.seconds, say)
    say(f"{len(found)} sentences about {len(set(found.stages))} stages")
    return 0


def pretraining(options: argparse.Namespace) -> int:
    from .training.finetune import pretrain
    from .training.train import Course

    vocabulary = vocabulary_of(options.folder)
    held = sample.held_out(collected_in(options.folder))
    every = corpus.read_all(options.folder / "sampled", vocabulary).besides(held)
    sizes = Sizes(len(vocabulary), options.layers, options.width)
    say(f"{sizes.parameters} parameters, {len(every)} sentences")
    course = Course(epochs=options.epochs, seed=options.seed)
    done = pretrain(
        options.folder, vocabulary, every, sizes, course, options.seconds, say, options.name
    )
    say("finished" if done.finished else "stopped: the same command goes on from here")
    return 0


def finetuning(options: argparse.Namespace) -> int:
    from .training.finetune import MEASURED, RANKED, base_of, beside, best_only, finetune, mean_of

    base = base_of(options.folder, options.base)
    grammar = Grammar(base.vocabulary)
    collected = collected_in(options.folder)
    held = sample.held_out(collected)
    taught = rankings.read_all(options.folder / "ranked", base.vocabulary).besides(held)
    say(f"{len(taught)} rankings of the price, {len(taught.slower)} sentences")
    name = f"{options.base}.ranked"
    ranked = replace(RANKED, epochs=options.epochs, seed=options.seed + RANKED.seed)
    parts: list[tuple[str, Lessons, Course]] = [
        ("ranked", best_only(taught) if options.best_only else taught, ranked)
    ]
    first = finetune(base, parts, options.folder, name, options.seconds, say)
    if not first.finished:
        say("stopped: the same command goes on from here")
        return 0
    if not (options.readings or options.records or options.shipped):
        say(f"{options.folder / name}.npz; no readings or records are given")
        return 0
    shown, lost = measured(options, collected)
    own = [one for one in shown if one.stage.key not in held]
    lists = [found for one in own if (found := demonstrations.ranking(grammar, one)) is not None]
    say(
        f"{len(lists)} measured rankings; left out: {len(shown) - len(own)} of held-out models, "
        f"{len(own) - len(lists)} of too few configs, {lost} that no program is known of"
    )
    tuned = []
    for seed in range(options.seed, options.seed + options.seeds):
        course = replace(MEASURED, seed=seed + MEASURED.seed)
        both = beside(lists, taught, seed)
        last: list[tuple[str, Lessons, Course]] = [
            ("measured", best_only(both) if options.best_only else both, course)
        ]
        name = f"{options.name}.{seed}"
        done = finetune(first.model, last, options.folder, name, options.seconds, say)
        if not done.finished:
            say("stopped: the same command goes on from here")
            return 0
        tuned.append(done.model)
    save(mean_of(tuned), options.folder / f"{options.name}.npz")
    say(f"{options.folder / options.name}.npz")
    return 0


def ranking(options: argparse.Namespace) -> int:
    """Rankings of drawn configs by the analytic price."""
    from .data.teaching import of_prices

    grammar = Grammar(vocabulary_of(options.folder))
    training = sample.new_stages(collected_in(options.folder))
    found = of_prices(training, grammar, options.folder, options.seconds, say)
    say(f"{len(found)} rankings of {len(found.slower)} sentences, {len(set(found.stages))} stages")
    return 0


def measuring(options: argparse.Namespace) -> int:
    """The loop of :mod:`bench.language.training.measuring` on this machine."""
    from .training.finetune import MEASURED, beside, finetune
    from .training.measuring import loop

    end = time.monotonic() + options.seconds
    collected = collected_in(options.folder)
    held = sample.held_out(collected)
    training = sample.new_stages(collected, resize=False)
    stages = [s for w, some in training.items() if w.machine == CPU for s in some]
    stages = sorted(stages, key=lambda stage: stage.key)[: options.stages]
    target = replace(cpu_target(), cores=options.threads)
    table = cached(cpu_target())
    known = demonstrations.tables((), table)
    policy = AnalyticPolicy(
        replace(table.target, cores=options.threads) if table else target, table
    )
    weights = options.model or options.folder / "base.ranked.npz"
    first = load(weights)
    grammar = Grammar(first.vocabulary)
    taught = rankings.read_all(options.folder / "ranked", first.vocabulary).besides(held)

    def finetuned(rows: Sequence[Record], programs: Mapping[str, Stage]) -> Path:
        shown, _ = demonstrations.of_records(rows, programs, known, "loop")
        own = [one for one in shown if one.stage.key not in held]
        lists = [found for one in own if (found := demonstrations.ranking(grammar, one))]
        if not lists:
            return weights
        name = f"loop-{len(rows)}"  # a new training for each number of records
        parts: list[tuple[str, Lessons, Course]] = [
            ("measured", beside(lists, taught, options.seed), MEASURED)
        ]
        finetune(first, parts, options.folder, name, max(end - time.monotonic(), 1.0), say)
        return options.folder / f"{name}.npz"

    with Workers(options.threads) as workers, Records(options.file, write=True) as records:
        here = circumstances(policy.target)
        turns = loop(
            stages,
            policy,
            workers,
            records,
            here,
            options.threads,
            weights,
            finetuned,
            lambda: end - time.monotonic(),
            options.trials,
            say,
        )
    say(f"{turns[-1].measurements} measurements of {len(stages)} stages in {options.file}")
    return 0


def evaluating(options: argparse.Namespace) -> int:
    from .evaluation.evaluate import LEAST, agreement, errors, judge, lines, summary

    model = load(options.model)
    collected = collected_in(options.folder)
    held = sample.held_out(collected)
    shown, _ = measured(options, collected)
    report: dict[str, object] = {"model": str(options.model), "about": model.about}
    groups: dict[str, list[Demonstration]] = {}
    for one in shown:
        groups.setdefault(one.source, []).append(one)
    for source, every in groups.items():
        for part, some in _parts(every, held).items():
            several = [one for one in some if len(one.times) >= LEAST]
            if several:
                found = summary([judge(model, one) for one in several])
                say("\n".join(lines(f"{source}, {part}", found)))
                report[f"{source}, {part}"] = asdict(found)
            if len(several) < len(some):
                known = agreement(model, some)
                say(
                    f"{source}, {part}: of {known.stages} standing configs the first sentence is "
                    f"{known.model[0]:.0%}, the first ten have {known.model[1]:.0%}; of the policy "
                    f"{known.analytic[0]:.0%} and {known.analytic[1]:.0%}"
                )
                report[f"{source}, {part}, standing"] = asdict(known)
    wrong = errors(model, shown[:: max(len(shown) // 50, 1)], options.draws, options.seed)
    say(f"without masks {wrong:.1%} of the sentences are not configs")
    report["errors"] = wrong
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    return 0


def searching(options: argparse.Namespace) -> int:
    """The model beside other searches on stages of held-out models, measured here."""
    from .evaluation import live

    table = cached(cpu_target())
    if table is None:
        raise OptionError("this machine was not measured yet: compile or tune any model first")
    policy = AnalyticPolicy(replace(table.target, cores=options.threads), table)
    chosen = live.heavy_stages(collected_in(options.folder), policy, options.stages)
    trials = {name: options.trials for name in options.systems}
    for name in {"search", "MetaSchedule"} & set(trials):
        trials[name] = max(options.most, options.trials)
    rows = live.run(
        chosen,
        policy,
        options.threads,
        options.model,
        trials,
        options.seed,
        options.file,
        options.seconds,
        options.each,
        say,
    )
    if rows:
        say("\n".join(live.lines(rows)))
    return 0


def comparing(options: argparse.Namespace) -> int:
    """Libraries of whole models, made with the model and with the search."""
    from .evaluation import whole

    rows = whole.run(
        options.models.split(","),
        options.folder,
        options.threads,
        options.sentences,
        options.seconds,
        options.file,
        say,
    )
    say("\n".join(whole.lines(rows)))
    return 1 if any(row.wrong for row in rows) else 0


def _parts(
    every: Sequence[Demonstration], held: Mapping[str, Stage]
) -> dict[str, list[Demonstration]]:
    found: dict[str, list[Demonstration]] = {}
    for one in every:
        part = "held-out models" if one.stage.key in held else "other stages"
        found.setdefault(part, []).append(one)
    return found


def ablating(options: argparse.Namespace) -> int:
    from .evaluation.ablate import ablate
    from .training.finetune import base_of

    base = base_of(options.folder)
    collected = collected_in(options.folder)
    taught = rankings.read_all(options.folder / "ranked", base.vocabulary)
    grammar, judged = Grammar(base.vocabulary), {}
    for file in options.readings:
        shown = demonstrations.of_readings(file)
        lists = [found for one in shown if (found := demonstrations.ranking(grammar, one))]
        judged[file.name.partition(".")[0]] = rankings.rankings_of(lists)
    taught = taught.besides(sample.held_out(collected))
    outcomes = ablate(base, taught, judged, options.seconds, say, options.seed)
    if options.json:
        report = {name: asdict(outcome) for name, outcome in outcomes.items()}
        options.json.write_text(json.dumps(report, indent=1))
    return 0


# what they read -----------------------------------------------------------------------------------
def vocabulary_of(folder: Path) -> Vocabulary:
    found = corpus.read_vocabulary(folder)
    if found is None:
        raise OptionError(
            f"{folder} has no vocabulary: run python -m bench language_model sample first"
        )
    return found


def collected_in(folder: Path) -> list[Collected]:
    return [found for workload in workloads() if (found := read(workload, folder)) is not None]


def records_of(files: Sequence[Path]) -> tuple[list[Record], dict[str, Stage]]:
    """The records of files of records and of exports, and the programs that these keep."""
    rows: list[Record] = []
    stages: dict[str, Stage] = {}
    for file in files:
        if file.suffix == ".jsonl":
            text = file.read_text()
            rows += from_lines(text, str(file))
            stages |= {stage.key: stage for stage in programs(text, str(file))}
        else:
            with Records(file, create=False) as records:
                rows += records.all()
                stages |= records.stages()
    return rows, stages


def measured(
    options: argparse.Namespace, collected: Sequence[Collected]
) -> tuple[list[Demonstration], int]:
    """The demonstrations of the given readings and records, and how many stages are of no use."""
    shown = [one for file in options.readings for one in demonstrations.of_readings(file)]
    programs = {s.key: s for one in collected for s, _ in one.stages}
    programs |= {s.key: s for one in collected for s in one.considered}
    known = demonstrations.tables(sorted(READINGS.glob("*.gz")), cached(cpu_target()))
    lost = 0
    sources = [(str(file), *records_of([file])) for file in options.records]
    if options.shipped:
        sources.append(("shipped records", list(shipped()), {}))
    for source, rows, stages in sources:
        found, none = demonstrations.of_records(rows, {**programs, **stages}, known, source)
        shown += found
        lost += none
    return shown, lost


STEPS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "sample": sampling,
    "pretrain": pretraining,
    "rank": ranking,
    "measure": measuring,
    "finetune": finetuning,
    "evaluate": evaluating,
    "ablate": ablating,
    "live": searching,
    "whole": comparing,
}

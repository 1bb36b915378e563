"""Samples tensor sentences (TLM, Algorithm 1 and Section 4.3): every stage of the workloads, on
drawn machines, with decisions drawn at random. No kernel is built and nothing is measured.

The steps: collect the stages of the workloads, make the vocabulary of what stands in them, and
write for each workload a file of sentences about the stages that no workload before it has. Stages
of held-out models get none. Each step goes on where it was stopped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from random import Random

from gtco.search.language.prompt import machine_words, prompt, stage_words
from gtco.search.language.sentence import Grammar, write
from gtco.search.language.words import BASE, Vocabulary
from gtco.tensor.elementwise import ELEMENTWISE_OPERATORS
from gtco.tensor.operators import OPERATORS
from gtco.tensor.sketch import space_of
from gtco.tensor.space import Space
from gtco.tensor.stage import ITEM_BYTES, Stage

from . import corpus
from .corpus import Corpus, Sentence
from .machines import Place, places
from .resizing import resized
from .stages import Collected, collect_all
from .workloads import CPU, GPU, Workload, workloads

RESIZED = 2  # of each stage, where it may have other sizes
PLACES, DRAWN = 6, 6  # machines of a stage, and sentences for each
NUMBERS = 384  # the most frequent sizes beyond the digits get words of their own
TEXTS = 160  # the most frequent texts of options
WALKS = 2  # through a space, for the words of its decisions


def sampled(
    folder: Path,
    wanted: Iterable[str],
    seconds: float,
    say: Callable[[str], None],
    every: Iterable[Workload] | None = None,
) -> Corpus:
    """All sentences, after making those that are missing."""
    chosen = list(workloads() if every is None else every)
    collected = collect_all(chosen, folder, set(wanted), seconds, say)
    training = new_stages(collected)
    vocabulary = corpus.read_vocabulary(folder)
    if vocabulary is None:
        vocabulary = vocabulary_of(training)
        corpus.write_vocabulary(vocabulary, folder)
        say(f"vocabulary: {len(vocabulary)} words")
    grammar, found = Grammar(vocabulary), []
    for workload, stages in training.items():
        file = folder / "sampled" / f"{workload.name}.npz"
        part = corpus.read(file, vocabulary)
        if part is None:
            part = corpus.corpus_of(
                s for stage in stages for s in about(stage, workload.machine, grammar)
            )
            corpus.write(part, vocabulary, file)
            say(f"{workload.name}: {len(part)} sentences about {len(stages)} stages")
        found.append(part)
    return corpus.joined(found)


def held_out(collected: Iterable[Collected]) -> dict[str, Stage]:
    """The stages of held-out models."""
    return {s.key: s for one in collected if one.workload.held_out for s, _ in one.stages}


def new_stages(collected: Sequence[Collected], resize: bool = True) -> dict[Workload, list[Stage]]:
    """The stages to train on, each under the first workload that has it; with ``resize``, some of
    them also with other sizes.
    """
    seen = set(held_out(collected))
    found: dict[Workload, list[Stage]] = {}
    for one in collected:
        if one.workload.held_out:
            continue
        for stage in (*(stage for stage, _ in one.stages), *one.considered):
            random = Random(stage.key)
            others = [resized(stage, random) for _ in range(RESIZED if resize else 0)]
            for new in (stage, *others):
                if new is not None and new.key not in seen:
                    seen.add(new.key)
                    found.setdefault(one.workload, []).append(new)
    return found


def drawn_places(stage: Stage, kind: str, n: int, salt: str = "") -> list[Place]:
    """Machines for a stage, always the same."""
    return Random(f"{stage.key} {salt}").sample(list(places(kind)), n)


def about(stage: Stage, kind: str, grammar: Grammar) -> list[Sentence]:
    """Different sentences about a stage; none where it has no sketch."""
    found: dict[tuple[int, ...], Sentence] = {}
    random = Random(stage.key)
    for place in drawn_places(stage, kind, PLACES):
        space = space_of(stage, place.machine)
        if not space.sketches:
            continue
        said = machine_words(place.machine, place.rates)
        begin = prompt(grammar.vocabulary, stage, said)
        for _ in range(DRAWN):
            words = (*begin, *write(grammar, space, space.sample(random)))
            found.setdefault(words, Sentence(stage.key, words, len(begin)))
    return list(found.values())


def vocabulary_of(training: Mapping[Workload, Sequence[Stage]]) -> Vocabulary:
    """Every operator and format, all words of machines, and the names, texts and numbers that are
    frequent in the stages and in their decisions.
    """
    kinds = dict.fromkeys((*OPERATORS, *ELEMENTWISE_OPERATORS))
    fixed = [*(f"o.{kind}" for kind in kinds), *(f"t.{dtype}" for dtype in ITEM_BYTES)]
    words: Counter[str] = Counter()
    numbers: Counter[int] = Counter()
    texts: Counter[str] = Counter()
    for kind in (CPU, GPU):
        for place in places(kind):
            words.update(machine_words(place.machine, place.rates))
    for workload, stages in training.items():
        for stage in stages:
            for word in set(stage_words(stage)):
                if isinstance(word, str):
                    words[word] += 1
                else:
                    numbers[word] += 1
            random = Random(stage.key)
            for place in drawn_places(stage, workload.machine, 1):
                space = space_of(stage, place.machine)
                for _ in range(WALKS if space.sketches else 0):
                    _walk(space, random, words, numbers, texts)
    rest = [f"={n}" for n, _ in numbers.most_common() if n >= BASE][:NUMBERS]
    spoken = [f"={t}" for t, _ in texts.most_common(TEXTS)]
    return Vocabulary.of((*fixed, *sorted(words), *_classes(words), *rest, *spoken))


def _walk(
    space: Space,
    random: Random,
    words: Counter[str],
    numbers: Counter[int],
    texts: Counter[str],
) -> None:
    """Counts the names and options of the decisions along one random config."""
    chosen: dict[str, int | str] = {}
    while decision := space.next_decision(chosen):
        words[f"d.{decision.name}"] += 1
        for option in decision.options:
            if isinstance(option, int):
                numbers[option] += 1
            elif ":" not in option and not option.replace("x", "").isdecimal():
                texts[option] += 1
            else:
                texts.update(p for p in option.split(":") if not p.replace("x", "").isdecimal())
        chosen[decision.name] = random.choice(decision.options)


def _classes(words: Iterable[str]) -> list[str]:
    """The classes between and around those that were seen."""
    seen: dict[str, list[int]] = {}
    for word in words:
        field, _, number = word.rpartition("=")
        if field.startswith(("m.", "w.")):
            seen.setdefault(field, []).append(int(number))
    spans = {f: range(max(0, min(n) - 2), max(n) + 3) for f, n in seen.items()}
    small = {f: span for f, span in spans.items() if len(span) <= 48}
    return [f"{field}={n}" for field, span in sorted(small.items()) for n in span]

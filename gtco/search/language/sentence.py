"""The second part of a tensor sentence: a config as decisions in the space's order, each a name and
a value (TLM, Section 4.2); and which words may follow a prefix.

Given the space, sentence and config are two forms of one thing: :func:`write` and :func:`read` are
each other's inverse. The paper generates a decision and then checks it, which takes 1.1 calls for
each program. Here :class:`Cursor` knows the legal words before one is chosen, so every sentence is
a config of the space.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gtco.search.language.words import END, UNKNOWN, Vocabulary
from gtco.support.errors import OptionError
from gtco.tensor.space import SKETCH, Config, Decision, Option, Space

LONGEST = 128  # words of a sentence, with its prompt

# The options that begin with a node's words: by the next word, or under None the option that ends
# here, by its place.
Node = dict[Any, Any]


@dataclass(frozen=True)
class Grammar:
    """Spells the options of decisions with a vocabulary; what was spelled once is kept."""

    vocabulary: Vocabulary
    _spelled: dict[object, tuple[tuple[int, ...], ...]] = field(default_factory=dict, repr=False)
    _nodes: dict[object, Node] = field(default_factory=dict, repr=False)

    def name(self, decision: Decision) -> int:
        """The word of a decision's name."""
        return self.vocabulary.number(f"d.{decision.name}")

    @property
    def end(self) -> int:
        return self.vocabulary.numbers[END]

    def spelled(self, options: tuple[Option, ...]) -> tuple[tuple[int, ...], ...]:
        """The words of each option, no two alike."""
        key = tuple((type(option), option) for option in options)
        if key not in self._spelled:
            found = [self.vocabulary.spell(option) for option in options]
            if len(set(found)) < len(found):
                found = [self.vocabulary.exactly(option) for option in options]
            self._spelled[key] = tuple(found)
        return self._spelled[key]

    def node(self, options: tuple[Option, ...]) -> Node:
        """The words of all options as a tree."""
        key = tuple((type(option), option) for option in options)
        if key not in self._nodes:
            root: Node = {}
            for place, words in enumerate(self.spelled(options)):
                node = root
                for word in words:
                    node = node.setdefault(word, {})
                node[None] = place
            self._nodes[key] = root
        return self._nodes[key]


@dataclass(frozen=True)
class Cursor:
    """A place in a sentence of a space, after a prefix of words.

    ``chosen`` are the decisions that are made; ``decision`` is the one whose value is being
    written, at ``node``, or None before its name. ``ended`` is true after the last word.
    """

    grammar: Grammar
    space: Space
    chosen: Mapping[str, Option] = field(default_factory=dict)
    decision: Decision | None = None
    node: Node | None = None
    ended: bool = False

    def legal(self) -> dict[int, Cursor]:
        """The words that may follow, each with the place after it; none after the end. This is the
        exact set: each of them begins a config of the space, and no other word does.
        """
        if self.ended:
            return {}
        if self.decision is None or self.node is None:
            return self._named()
        found = {
            word: Cursor(self.grammar, self.space, self.chosen, self.decision, node)
            for word, node in self.node.items()
            if word is not None
        }
        if None in self.node:  # the option may end here, and another one may go on
            option = self.decision.options[self.node[None]]
            made = {**self.chosen, self.decision.name: option}
            found |= Cursor(self.grammar, self.space, made)._named()
        return found

    def _named(self) -> dict[int, Cursor]:
        """The name of the next decision, or the end."""
        decision = self.space.next_decision(self.chosen)
        if decision is None:
            end = Cursor(self.grammar, self.space, self.chosen, ended=True)
            return {self.grammar.end: end}
        node = self.grammar.node(decision.options)
        after = Cursor(self.grammar, self.space, self.chosen, decision, node)
        return {self.grammar.name(decision): after}

    @property
    def config(self) -> Config:
        """The config of a sentence that has ended."""
        if not self.ended:
            raise ValueError("the sentence has not ended")
        return Config.from_json(self.chosen)


def begin(vocabulary: Vocabulary, space: Space) -> Cursor:
    """The place before the first word. Raises :class:`OptionError` if the stage has no sketch."""
    if not space.sketches:
        raise OptionError(f"there is nothing to say of {space.stage.label}: it has no sketch")
    return Cursor(Grammar(vocabulary), space)


def next_decision(cursor: Cursor, prefix: Iterable[int]) -> frozenset[int]:
    """The exact set of words that may follow ``prefix``. Raises :class:`OptionError` if the prefix
    itself has a word that may not stand there.
    """
    return frozenset(after(cursor, prefix).legal())


def after(cursor: Cursor, words: Iterable[int]) -> Cursor:
    """The place after these words. Raises :class:`OptionError` if one may not stand there."""
    for place, word in enumerate(words):
        legal = cursor.legal()
        if word not in legal:
            known = cursor.grammar.vocabulary.words
            said = known[word] if 0 <= word < len(known) else UNKNOWN
            raise OptionError(
                f"word {place} of a sentence about {cursor.space.stage.label} cannot be {said!r}: "
                f"there may be {', '.join(known[n] for n in sorted(legal)) or 'nothing more'}"
            )
        cursor = legal[word]
    return cursor


def write(grammar: Grammar, space: Space, config: Config) -> list[int]:
    """The decisions of a config, in words. Raises :class:`OptionError` if the space does not
    contain it.
    """
    if (rejection := space.check(config)) is not None:
        raise OptionError(f"a config cannot be written as a sentence: {rejection}")
    wanted: dict[str, Option] = {SKETCH: config.sketch, **config.by_name}
    chosen: dict[str, Option] = {}
    words: list[int] = []
    while decision := space.next_decision(chosen):
        option = wanted[decision.name]
        words.append(grammar.name(decision))
        words += grammar.spelled(decision.options)[decision.options.index(option)]
        chosen[decision.name] = option
    return [*words, grammar.end]


def read(grammar: Grammar, space: Space, words: Sequence[int]) -> Config:
    """The config of a whole sentence's decisions. Raises :class:`OptionError` if they are none."""
    cursor = after(Cursor(grammar, space), words)
    if not cursor.ended:
        raise OptionError(f"a sentence about {space.stage.label} ends before its last decision")
    return cursor.config

"""The words of tensor sentences (TLM, Section 4.2), and how values are spelled with them.

A vocabulary is a list of words; a word's number is its place in the list. It belongs to the weights
that were trained with it and is kept in their file. What has no word of its own is spelled with the
words of :data:`BASIC`, which every vocabulary has: a number by its digits to the base 256, a text
by its characters. So a value that no training ever saw can be read and written, which a vocabulary
of whole values cannot do.

Kinds of words are told apart by what they begin with: ``=`` values (``=13``, ``=packed``), ``d.``
the names of decisions, ``c.`` the characters of a text; and in prompts ``o.`` operators, ``t.``
formats, ``a.`` attributes, ``m.`` the machine and ``w.`` amounts of work, both in classes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import cos, log2, pi, sin

import numpy as np

from gtco.support.errors import OptionError

BEGIN, END, UNKNOWN, CUT, MINUS = "<begin>", "<end>", "<unknown>", "<cut>", "-"
BASE = 256  # base of digits
DIGITS = tuple(f"#{n}" for n in range(1, 9))  # so many digits follow
CHARACTERS = tuple(f"c.{chr(n)}" for n in range(32, 127))
SPELLED, OTHER = "<spelled>", "c.other"  # a text by its characters; one that is not ASCII follows
BASIC = (
    *(BEGIN, END, UNKNOWN, CUT, MINUS, SPELLED, OTHER),
    *DIGITS,
    *CHARACTERS,
    *(f"={n}" for n in range(BASE)),
)
# Other numbers that have words whatever the corpus is: sizes of blocks, rows and threads.
USUAL = sorted({*range(256, 1025, 16), *range(1024, 4097, 64), *(1 << n for n in range(8, 21))})
_PIECES = re.compile(r"\d+|[A-Za-z_]+|.", re.DOTALL)
_SILENT = re.compile(r":|(?<=\d)x(?=\d)")  # the signs between the fields of tiles:32x2 say nothing
_WAVES, _FACTORS = 8, (2, 4, 8, 16, 32, 64, 3, 5, 7)
FEATURES = 3 + 2 * _WAVES + len(_FACTORS)


@dataclass(frozen=True)
class Vocabulary:
    """Words by number. Raises :class:`OptionError` if a word of :data:`BASIC` is missing or a word
    stands there twice.
    """

    words: tuple[str, ...]

    def __post_init__(self) -> None:
        missing = set(BASIC) - set(self.words)
        if missing or len(set(self.words)) != len(self.words):
            what = f"it lacks {min(missing)!r}" if missing else "a word stands there twice"
            raise OptionError(f"no vocabulary of tensor sentences: {what}")

    @staticmethod
    def of(words: Iterable[str]) -> Vocabulary:
        """The basic and usual words, and these."""
        usual = (f"={n}" for n in USUAL)
        return Vocabulary(tuple(dict.fromkeys((*BASIC, *usual, *words))))

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each word."""
        return {word: n for n, word in enumerate(self.words)}

    def number(self, word: str) -> int:
        """The number of the word, or of :data:`UNKNOWN`."""
        return self.numbers.get(word, self.numbers[UNKNOWN])

    def text(self, sentence: Sequence[int]) -> str:
        """The sentence for people."""
        return " ".join(self.words[n] for n in sentence)

    # spelling -------------------------------------------------------------------------------------
    def spell(self, value: int | str) -> tuple[int, ...]:
        """The words of a decision's option or of a size. An option of one type is spelled in one
        way; two options of one decision may be spelled alike, and then :meth:`exactly` tells them
        apart.
        """
        if isinstance(value, int):
            return self._integer(value)
        if f"={value}" in self.numbers and not value.isdigit():
            return (self.numbers[f"={value}"],)
        spelled: list[int] = []
        for piece in self._pieces(value):
            if piece.isdecimal() and piece.isascii():
                spelled += self._integer(int(piece))
            elif f"={piece}" in self.numbers:
                spelled.append(self.numbers[f"={piece}"])
            else:
                return self.exactly(value)
        return tuple(spelled) or self.exactly(value)

    def _pieces(self, value: str) -> list[str]:
        found: list[str] = []
        for part in _SILENT.split(value):
            found += [part] if f"={part}" in self.numbers else _PIECES.findall(part)
        return found

    def exactly(self, value: int | str) -> tuple[int, ...]:
        """The words of a value by its characters; no other value has the same."""
        text = value if isinstance(value, str) else f"\n{value}"
        found = [self.numbers[SPELLED]]
        for character in text:
            word = self.numbers.get(f"c.{character}")
            if word is None:
                found += (self.numbers[OTHER], *self._integer(ord(character)))
            else:
                found.append(word)
        return tuple(found)

    def _integer(self, value: int) -> tuple[int, ...]:
        if value < 0:
            return (self.numbers[MINUS], *self._integer(-value))
        if (own := self.numbers.get(f"={value}")) is not None:
            return (own,)
        digits: list[int] = []
        while value:
            value, digit = divmod(value, BASE)
            digits.insert(0, self.numbers[f"={digit}"])
        if len(digits) > len(DIGITS):
            raise OptionError(f"a number of {len(digits)} digits has no place in a sentence")
        return (self.numbers[DIGITS[len(digits) - 1]], *digits)

    @cached_property
    def features(self) -> np.ndarray:
        """What words of numbers and of classes say of themselves, [words, FEATURES] in float32:
        their size, waves of its logarithm, what divides them. So a model knows that 96 lies near
        100 and is a multiple of 32 from its first step on. Other words have zeros.
        """
        found = np.zeros((len(self.words), FEATURES), np.float32)
        for row, word in zip(found, self.words, strict=True):
            name, _, tail = word.rpartition("=")
            if tail.isdecimal() and tail.isascii():
                row[:] = _number_features(int(tail), bool(name))
        return found


def _number_features(value: int, is_class: bool) -> list[float]:
    size = value / 2 if is_class else log2(1 + value)
    waves = [f(2 * pi * size / 2.0**n) for n in range(_WAVES) for f in (sin, cos)]
    factors = [0.0 if is_class or not value else float(value % n == 0) for n in _FACTORS]
    return [float(is_class), 1.0, size / 16, *waves, *factors]

"""Sentences as files: one ``.npz`` for each workload, and the vocabulary that they share.

- ``words``: all sentences one after the other, uint16; ``starts`` [sentences + 1]; ``prompts``: the
  words of each sentence that are its prompt; ``stages``: the place of each sentence's stage in
  ``keys``.

A file is written whole or not at all, so making a corpus can be stopped at any moment.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gtco.search.language.sentence import LONGEST
from gtco.search.language.words import Vocabulary
from gtco.support.errors import OptionError

from . import archive


@dataclass(frozen=True)
class Sentence:
    """A whole sentence in numbers: ``words``, of which the first ``prompt`` are the prompt."""

    stage: str
    words: tuple[int, ...]
    prompt: int


@dataclass(frozen=True)
class Corpus:
    """Many sentences: ``words`` [sentences, LONGEST] filled up with -1, and the length of each
    sentence's prompt.
    """

    words: np.ndarray
    prompts: np.ndarray
    stages: np.ndarray

    def __len__(self) -> int:
        return len(self.words)

    @property
    def lengths(self) -> np.ndarray:
        found: np.ndarray = (self.words >= 0).sum(axis=1)
        return found

    def besides(self, keys: Collection[str]) -> Corpus:
        """The sentences about other stages than those with these ``keys``: a model that is held out
        may be known only after its stages were sampled for another one.
        """
        return self.part(~np.isin(self.stages, list(keys)))

    def part(self, chosen: np.ndarray) -> Corpus:
        return Corpus(self.words[chosen], self.prompts[chosen], self.stages[chosen])

    def batches(self, most_words: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
        """The places of the sentences of each batch, in an order drawn anew. Sentences of about the
        same length go together, so that few words of a batch are padding.
        """
        lengths = self.lengths + rng.uniform(0, 4, len(self))
        order = np.argsort(lengths, kind="stable")
        found, begin = [], 0
        while begin < len(order):
            count = 1
            while (
                begin + count < len(order)
                and (count + 1) * lengths[order[begin + count]] < most_words
            ):
                count += 1
            found.append(order[begin : begin + count])
            begin += count
        for place in rng.permutation(len(found)):
            yield found[place]


def joined(parts: Sequence[Corpus]) -> Corpus:
    if not parts:
        raise OptionError("there are no sentences: run python -m bench language_model sample first")
    return Corpus(
        *(np.concatenate([getattr(p, n) for p in parts]) for n in ("words", "prompts", "stages"))
    )


def corpus_of(sentences: Iterable[Sentence]) -> Corpus:
    """The sentences that fit; a longer one, which only a very odd config has, is left out."""
    fitting = [s for s in sentences if len(s.words) <= LONGEST]
    words = np.full((len(fitting), LONGEST), -1, np.int16)
    for row, sentence in zip(words, fitting, strict=True):
        row[: len(sentence.words)] = sentence.words
    return Corpus(
        words,
        np.array([s.prompt for s in fitting], np.int16),
        np.array([s.stage for s in fitting], "U16"),
    )


# files --------------------------------------------------------------------------------------------
def write(corpus: Corpus, vocabulary: Vocabulary, file: Path) -> None:
    kept = corpus.words >= 0
    arrays = {
        "words": corpus.words[kept].astype(np.uint16),
        "lengths": kept.sum(axis=1).astype(np.uint8),
        "prompts": corpus.prompts.astype(np.uint8),
        "stages": corpus.stages,
    }
    archive.write(file, vocabulary, arrays)


def read(file: Path, vocabulary: Vocabulary) -> Corpus | None:
    """The sentences of a file, as :func:`archive.read` reads it."""
    return archive.read(file, vocabulary, "sentences", _corpus)


def _corpus(data: Mapping[str, np.ndarray]) -> Corpus:
    words, lengths = data["words"], data["lengths"].astype(int)
    table = np.full((len(lengths), LONGEST), -1, np.int16)
    table[np.arange(LONGEST)[None, :] < lengths[:, None]] = words
    return Corpus(table, data["prompts"].astype(np.int16), data["stages"])


def read_all(folder: Path, vocabulary: Vocabulary) -> Corpus:
    """The sentences of all files of a folder."""
    found = (read(file, vocabulary) for file in archive.files_of(folder))
    return joined([part for part in found if part is not None])


def write_vocabulary(vocabulary: Vocabulary, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / "vocabulary.new"
    new.write_text(json.dumps(vocabulary.words))
    new.replace(folder / "vocabulary.json")


def read_vocabulary(folder: Path) -> Vocabulary | None:
    """The vocabulary of a folder, None if it has none. Raises :class:`OptionError` if the file is
    damaged.
    """
    file = folder / "vocabulary.json"
    try:
        return Vocabulary(tuple(map(str, json.loads(file.read_text()))))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise OptionError(
            f"{file} is not a vocabulary ({error}): delete it and what was made with it"
        ) from error

"""A trained language model, run with numpy alone, and its file.

The model is a decoder-only transformer (TLM, Section 5.1, where it is GPT-2 small; here a
hundredth of that): words and places are embedded, layers of causal attention and of a
multilayer perceptron add to the stream, and the stream's last value is compared with the embedding
of every word. A word of a number or of a class is embedded by what :attr:`Vocabulary.features` says
of it too. The keys and values of a prefix are kept, so a further word costs one step.

The file is numpy's ``.npz``: the arrays in float16 and a header with version, sizes and
vocabulary. ``bench/language/training/network.py`` is the same model in torch, for training.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from gtco.search.language.words import FEATURES, Vocabulary
from gtco.support.errors import OptionError

VERSION = 1  # version of the file, the prompt and the sentence: raised where any of them changes
SHIPPED = Path(__file__).parent / "trained.npz"
EPSILON = 1e-6


@dataclass(frozen=True)
class Sizes:
    """``width`` of the stream, ``heads`` that share it, ``places`` of a sentence."""

    words: int
    layers: int = 4
    width: int = 128
    heads: int = 4
    places: int = 128

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each array of weights, by name."""
        w = self.width
        found: dict[str, tuple[int, ...]] = {
            "words": (self.words, w),
            "features": (FEATURES, w),
            "places": (self.places, w),
            "last": (w,),
        }
        for n in range(self.layers):
            found |= {
                f"{n}.before": (w,),
                f"{n}.qkv": (w, 3 * w),
                f"{n}.out": (w, w),
                f"{n}.between": (w,),
                f"{n}.up": (w, 4 * w),
                f"{n}.down": (4 * w, w),
            }
        return found

    @property
    def parameters(self) -> int:
        return sum(int(np.prod(shape)) for shape in self.shapes().values())


@dataclass(frozen=True)
class Prefix:
    """What the model keeps of a prefix: keys and values of each layer, [layers, words, width], and
    the scores of all words to come next.
    """

    keys: np.ndarray
    values: np.ndarray
    scores: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))

    @property
    def length(self) -> int:
        return int(self.keys.shape[1])


class LanguageModel:
    """Scores the word that comes next. ``about`` says how the weights were trained."""

    def __init__(
        self,
        sizes: Sizes,
        vocabulary: Vocabulary,
        weights: Mapping[str, np.ndarray],
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.sizes, self.vocabulary, self.about = sizes, vocabulary, dict(about or {})
        self.weights = {n: np.ascontiguousarray(a, np.float32) for n, a in weights.items()}
        own = self.weights
        self._embedded = own["words"] + vocabulary.features @ own["features"]
        self._compared = np.ascontiguousarray((self._embedded * own["last"]).T)

    def empty(self) -> Prefix:
        shape = self.sizes.layers, 0, self.sizes.width
        return Prefix(np.zeros(shape, np.float32), np.zeros(shape, np.float32))

    def read(self, prefix: Prefix, words: Sequence[int]) -> Prefix:
        """The prefix with these words after it, at least one. Words beyond the last place that was
        trained stand at that place.
        """
        begin, new = prefix.length, len(words)
        places = np.minimum(np.arange(begin, begin + new), self.sizes.places - 1)
        x = self._embedded[np.asarray(words)] + self.weights["places"][places]
        keys, values = [], []
        for n in range(self.sizes.layers):
            layer, own = f"{n}.", self.weights
            q, k, v = np.split(_norm(x, own[layer + "before"]) @ own[layer + "qkv"], 3, axis=1)
            k = np.concatenate([prefix.keys[n], k])
            v = np.concatenate([prefix.values[n], v])
            keys.append(k)
            values.append(v)
            x = x + self._attend(q, k, v) @ own[layer + "out"]
            inner = _norm(x, own[layer + "between"]) @ own[layer + "up"]
            x = x + _gelu(inner) @ own[layer + "down"]
        scores = _norm(x[-1:], 1.0)[0] @ self._compared
        return Prefix(np.stack(keys), np.stack(values), scores)

    def _attend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Attention of the last ``len(q)`` words to all words up to themselves."""
        new, every, heads = len(q), len(k), self.sizes.heads
        split = (a.reshape(len(a), heads, -1).transpose(1, 0, 2) for a in (q, k, v))
        q, k, v = split
        scores = q @ k.transpose(0, 2, 1) * (q.shape[-1] ** -0.5)
        if new > 1:
            later = np.arange(every)[None, :] > np.arange(every - new, every)[:, None]
            scores[:, later] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed: np.ndarray = (weights @ v).transpose(1, 0, 2).reshape(new, -1)
        return mixed


def _norm(x: np.ndarray, gain: np.ndarray | float) -> np.ndarray:
    """Root-mean-square norm of the rows."""
    found: np.ndarray = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + EPSILON) * gain
    return found


def _gelu(x: np.ndarray) -> np.ndarray:
    """GELU by tanh."""
    found: np.ndarray = 0.5 * x * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))
    return found


# the file -----------------------------------------------------------------------------------------
def save(model: LanguageModel, file: Path) -> None:
    """Writes the model, whole or not at all."""
    header = {
        "version": VERSION,
        "sizes": vars(model.sizes),
        "vocabulary": model.vocabulary.words,
        "about": model.about,
    }
    arrays = {name: array.astype(np.float16) for name, array in model.weights.items()}
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    new = file.with_name(f"{file.stem}.new.npz")
    np.savez_compressed(new, **{"header": text, **arrays})  # type: ignore[arg-type]
    new.replace(file)


def load(file: Path) -> LanguageModel:
    """The model of a file. Raises :class:`OptionError` where there is none, where it is damaged or
    of another version, or where its vocabulary or sizes do not fit its weights.
    """
    what = f"{file} is not a language model that this gtco reads"
    advice = (
        "make one with python -m gtco.bench language_model, or use the one that ships with gtco"
    )
    try:
        with np.load(file, allow_pickle=False) as data:
            header = json.loads(data["header"].tobytes().decode())
            if header["version"] != VERSION:
                raise OptionError(
                    f"{what}: it has version {header['version']}, and this gtco reads {VERSION}; "
                    f"{advice}"
                )
            vocabulary = Vocabulary(tuple(map(str, header["vocabulary"])))
            sizes = Sizes(**header["sizes"])
            if sizes.words != len(vocabulary):
                raise ValueError(f"{sizes.words} words are trained, {len(vocabulary)} are listed")
            weights = {name: data[name] for name in sizes.shapes()}
        for name, shape in sizes.shapes().items():
            if weights[name].shape != shape or not np.isfinite(weights[name]).all():
                raise ValueError(f"its array {name} has another shape, or values that are none")
        return LanguageModel(sizes, vocabulary, weights, header["about"])
    except FileNotFoundError as error:
        raise OptionError(f"there is no language model {file}: {advice}") from error
    except (
        OSError,
        EOFError,
        ValueError,
        LookupError,
        TypeError,
        zipfile.BadZipFile,
        zlib.error,
        NotImplementedError,  # zipfile raises it for an unknown compression
    ) as error:
        if isinstance(error, OptionError) and str(error).startswith(what):
            raise
        raise OptionError(f"{what} ({error}): {advice}") from error


@lru_cache(maxsize=4)
def loaded(file: Path = SHIPPED) -> LanguageModel:
    """:func:`load`, once in a process."""
    return load(file)

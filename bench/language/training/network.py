"""The model of :mod:`gtco.search.language.model` in torch, for training; its weights have the same
names and shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtco.search.language.model import EPSILON, LanguageModel, Sizes
from gtco.search.language.words import Vocabulary

from ..data.corpus import Corpus

INITIAL = 0.02  # the standard deviation of weights


class Network(nn.Module):
    """Words [sentences, length] -> scores of the next word [sentences, length, words]."""

    def __init__(self, sizes: Sizes, vocabulary: Vocabulary, seed: int = 0) -> None:
        super().__init__()
        self.sizes, self.vocabulary = sizes, vocabulary
        generator = torch.Generator().manual_seed(seed)
        self.own = nn.ParameterDict()
        for name, shape in sizes.shapes().items():
            value = torch.ones(shape)
            if len(shape) > 1:
                value = torch.randn(shape, generator=generator) * INITIAL
            if name.endswith((".out", ".down")):
                value /= (2 * sizes.layers) ** 0.5
            self.own[_named(name)] = nn.Parameter(value)
        self.register_buffer("features", torch.from_numpy(vocabulary.features), persistent=False)

    def weight(self, name: str) -> Tensor:
        found: Tensor = self.own[_named(name)]
        return found

    def embedding(self) -> Tensor:
        known: Any = self.features
        found: Tensor = self.weight("words") + known @ self.weight("features")
        return found

    def forward(self, words: Tensor, asked: Tensor | None = None) -> Tensor:
        """With ``asked`` [sentences, length], true where a score is wanted, the scores of these
        places alone [places, words].
        """
        embedded = self.embedding()
        x = F.embedding(words, embedded) + self.weight("places")[: words.shape[1]]
        for n in range(self.sizes.layers):
            x = x + self._attend(_norm(x) * self.weight(f"{n}.before"), n)
            inner = (_norm(x) * self.weight(f"{n}.between")) @ self.weight(f"{n}.up")
            x = x + F.gelu(inner, approximate="tanh") @ self.weight(f"{n}.down")
        x = x if asked is None else x[asked]
        found: Tensor = _norm(x) @ (embedded * self.weight("last")).T
        return found

    def _attend(self, x: Tensor, n: int) -> Tensor:
        batch, length, width = x.shape
        heads = self.sizes.heads
        split = (x @ self.weight(f"{n}.qkv")).split(width, dim=-1)
        q, k, v = (a.view(batch, length, heads, -1).transpose(1, 2) for a in split)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: Tensor = mixed.transpose(1, 2).reshape(batch, length, width) @ self.weight(
            f"{n}.out"
        )
        return found

    def arrays(self) -> dict[str, np.ndarray]:
        """The weights by the names of the file."""
        return {n: self.weight(n).detach().numpy().copy() for n in self.sizes.shapes()}

    def set(self, arrays: Mapping[str, np.ndarray]) -> None:
        with torch.no_grad():
            for name in self.sizes.shapes():
                self.weight(name).copy_(torch.from_numpy(np.asarray(arrays[name], np.float32)))

    def model(self, about: Mapping[str, Any]) -> LanguageModel:
        """The network as it is now, to be run with numpy."""
        return LanguageModel(self.sizes, self.vocabulary, self.arrays(), about)


def _named(name: str) -> str:
    return name.replace(".", "_")  # torch allows no dots


def _norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + EPSILON)


def batch_of(corpus: Corpus, chosen: np.ndarray) -> tuple[Tensor, Tensor]:
    """The words [sentences, length - 1] of a batch, and the words that come next; those of prompts
    and of padding are -100, which the loss ignores.
    """
    words = corpus.words[chosen].astype(np.int64)
    length = int((words >= 0).sum(axis=1).max())
    words = words[:, :length]
    given, wanted = np.maximum(words[:, :-1], 0), words[:, 1:].copy()
    places = np.arange(1, length)[None, :]
    wanted[(wanted < 0) | (places < corpus.prompts[chosen].astype(int)[:, None])] = -100
    return torch.from_numpy(given), torch.from_numpy(wanted)


def loss_of(network: Network, given: Tensor, wanted: Tensor) -> Tensor:
    """The mean negative log-likelihood of the words of decisions."""
    asked = wanted >= 0
    return F.cross_entropy(network(given, asked).float(), wanted[asked])

"""Learns from rankings (listwise learning): the likelihood of a sentence among the legal ones is to
fall with the time of its config.

The loss of a ranking has three parts:

- the cross-entropy between the likelihoods of its sentences and a target that falls with the times,
  ``softmax(-SHARPNESS * log(time / best))``: what is asked of a model is the order of the best;
- the difference between the logarithm of each likelihood and the same slope, both around their
  means, as far as :data:`SLOPE` goes: so each sentence teaches something, and not the best alone;
- the probability of all legal words at each place, which teaches the language itself.

The prompt is read once for all sentences of a ranking.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gtco.search.language.policy import SHARPNESS

from ..data.rankings import Rankings
from .network import Network, _norm

SLOPE = 0.6  # nats of time: sentences that are slower still need only be as unlikely
SLOPED, LEGAL = 0.02, 1.0  # the weights of the second and the third part
WATCHED = 3  # sentences of a ranking whose legal words are learned


@dataclass(frozen=True)
class Batch:
    """Some rankings. A place without a word holds -1.

    - ``prompts`` [rankings, words];
    - ``words`` [rankings, sentences, words], those of decisions;
    - ``legal``, of the same shape: which set of words was legal there;
    - ``slower`` [rankings, sentences]: a place without a sentence holds infinity.
    """

    prompts: Tensor
    words: Tensor
    legal: Tensor
    slower: Tensor


def batch_of(
    every: Rankings, chosen: np.ndarray, rng: np.random.Generator | None, most: int = 0
) -> Batch:
    """Up to ``most`` sentences of each chosen ranking, the best one and others that ``rng`` draws;
    without ``rng`` all of them.
    """
    rows = []
    for n in chosen:
        own = np.arange(every.starts[n], every.starts[n + 1])
        if rng is not None and len(own) > most:
            best = own[np.argmin(every.slower[own])]
            others = rng.choice(own[own != best], most - 1, replace=False)
            own = np.concatenate([[best], others])
        rows.append(own)
    table = np.full((len(rows), max(map(len, rows))), -1)
    for row, own in zip(table, rows, strict=True):
        row[: len(own)] = own
    words, legal = every.words[table], every.legal[table]
    words[table < 0] = -1
    slower = np.where(table < 0, np.inf, every.slower[table]).astype(np.float32)
    length = int((words >= 0).sum(axis=-1).max())
    prompts = every.prompts[chosen]
    prompts = prompts[:, : int((prompts >= 0).sum(axis=1).max())]
    return Batch(
        torch.from_numpy(prompts.astype(np.int64)),
        torch.from_numpy(words[..., :length].astype(np.int64)),
        torch.from_numpy(legal[..., :length].astype(np.int64)),
        torch.from_numpy(slower),
    )


def states(network: Network, batch: Batch, embedded: Tensor) -> Tensor:
    """What the network knows before each word of the decisions: [rankings, sentences, words,
    width].
    """
    count, sentences, length = batch.words.shape
    known = batch.prompts >= 0
    sizes = known.sum(dim=1)
    first = F.embedding(batch.prompts.clamp(min=0), embedded)
    first = first + network.weight("places")[: first.shape[1]]
    # the last word of a prompt is the first that is read with a sentence, the last of which is not
    last = torch.gather(batch.prompts, 1, (sizes - 1)[:, None])[:, :, None]
    read = torch.cat([last.expand(-1, sentences, 1), batch.words[..., :-1]], dim=2).clamp(min=0)
    places = (sizes - 1)[:, None] + torch.arange(length)
    top = len(network.weight("places")) - 1
    at = F.embedding(places.clamp(max=top), network.weight("places"))
    x = F.embedding(read, embedded) + at[:, None]
    x = x.reshape(count, sentences * length, -1)
    # a sentence sees the prompt without its last word, and itself up to each word
    before = known & (torch.arange(known.shape[1])[None] < (sizes - 1)[:, None])
    hidden = torch.zeros(before.shape).masked_fill(~before, -1e9)[:, None, None, :]
    for n in range(network.sizes.layers):
        first, x = _layer(network, n, first, x, hidden, sentences)
    return _norm(x).reshape(count, sentences, length, -1)


def _layer(
    network: Network, n: int, first: Tensor, x: Tensor, hidden: Tensor, sentences: int
) -> tuple[Tensor, Tensor]:
    count, heads = len(x), network.sizes.heads
    own = network.weight
    begin, end = first.shape[1], x.shape[1]
    both = torch.cat([first, x], dim=1)
    split = (_norm(both) * own(f"{n}.before")) @ own(f"{n}.qkv")
    q, k, v = (
        a.reshape(count, begin + end, heads, -1).transpose(1, 2)
        for a in split.split(both.shape[-1], dim=-1)
    )
    size, length = q.shape[-1], end // sentences
    q = q * size**-0.5
    later = torch.full((begin, begin), -1e9).triu(1).to(q.dtype)
    of_first = q[:, :, :begin] @ k[:, :, :begin].transpose(-1, -2) + later
    of_first = of_first.float().softmax(dim=-1).to(q.dtype) @ v[:, :, :begin]
    q = q[:, :, begin:]
    to_prompt = q @ k[:, :, :begin].transpose(-1, -2) + hidden.to(q.dtype)
    shape = count, heads, sentences, length, size
    later = torch.full((length, length), -1e9).triu(1).to(q.dtype)
    to_own = q.reshape(shape) @ k[:, :, begin:].reshape(shape).transpose(-1, -2) + later
    to_own = to_own.reshape(count, heads, end, length)
    weights = torch.cat([to_prompt, to_own], dim=-1).float().softmax(dim=-1).to(q.dtype)
    mixed = weights[..., :begin] @ v[:, :, :begin]
    of_own = weights[..., begin:].reshape(*shape[:-1], length) @ v[:, :, begin:].reshape(shape)
    mixed = mixed + of_own.reshape(count, heads, end, size)
    mixed = torch.cat([of_first, mixed], dim=2).transpose(1, 2).reshape(both.shape)
    both = both + mixed @ own(f"{n}.out")
    inner = (_norm(both) * own(f"{n}.between")) @ own(f"{n}.up")
    both = both + F.gelu(inner, approximate="tanh") @ own(f"{n}.down")
    return both[:, :begin], both[:, begin:]


def likelihoods(network: Network, every: Rankings, batch: Batch) -> tuple[Tensor, Tensor]:
    """The logarithm of each sentence's likelihood among the legal ones [rankings, sentences]; and
    the mean of that of all legal words together, over the places of :data:`WATCHED` sentences.
    """
    embedded = network.embedding()
    known = states(network, batch, embedded)
    compared = (embedded * network.weight("last")).T
    places, which = torch.unique(batch.legal.clamp(min=0), return_inverse=True)
    sets = [sorted(every.sets[place]) for place in places.tolist()]
    most = max(map(len, sets))
    options = torch.tensor([words + [words[0]] * (most - len(words)) for words in sets])
    counts = torch.tensor([len(words) for words in sets])
    spare = torch.where(torch.arange(most) < counts[:, None], 0.0, -1e9)
    forks = (batch.words >= 0) & (counts[which] > 1)
    at = which[forks]
    scores = known[forks] @ compared
    among = torch.logsumexp(scores.gather(1, options[at]).float() + spare[at], dim=1)
    right = scores.gather(1, batch.words[forks][:, None])[:, 0].float()
    total = torch.zeros(batch.words.shape).masked_scatter(forks, right - among).sum(dim=-1)
    seen = batch.words[:, :WATCHED] >= 0
    at = which[:, :WATCHED][seen]
    scores = (known[:, :WATCHED][seen] @ compared).float()
    among = torch.logsumexp(scores.gather(1, options[at]) + spare[at], dim=1)
    return total, (torch.logsumexp(scores, dim=1) - among).mean()


def loss_of(
    network: Network,
    every: Rankings,
    chosen: np.ndarray,
    rng: np.random.Generator | None,
    most: int = 0,
) -> Tensor:
    """The loss of the chosen rankings; ``rng`` draws up to ``most`` sentences of each."""
    batch = batch_of(every, chosen, rng, most)
    total, illegal = likelihoods(network, every, batch)
    there = batch.slower.isfinite()
    wanted = (-SHARPNESS * batch.slower).softmax(dim=1)
    likely = total.masked_fill(~there, -1e9).log_softmax(dim=1)
    listed = -(wanted * likely.masked_fill(~there, 0.0)).sum(dim=1)
    listed = listed + torch.special.xlogy(wanted, wanted).sum(dim=1)  # 0 is the best
    near = there & (batch.slower < SLOPE)
    slope = -SHARPNESS * batch.slower.masked_fill(~there, 0.0)
    off = (total - slope).masked_fill(~near, 0.0)
    count = near.sum(dim=1, keepdim=True)
    off = (off - off.sum(dim=1, keepdim=True) / count).masked_fill(~near, 0.0)
    sloped = F.smooth_l1_loss(off, torch.zeros_like(off), reduction="none", beta=2.0)
    sloped = (sloped.sum(dim=1) / count[:, 0]).mean()
    found: Tensor = listed.mean() + SLOPED * sloped + LEGAL * illegal
    return found

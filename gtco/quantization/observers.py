"""Histograms that grow with what they see, and the ranges that observers read from them.

A histogram is made in one pass and takes the same memory however much is added. Its bins are as
wide as a power of two and begin at its multiples, so that two bins become one of twice the width
without any error. What it holds in the end does not depend on the order or on the batches in which
the values came.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import floor, frexp, inf, ldexp, log2
from typing import Any

import numpy
from numpy.typing import NDArray

from gtco.support.errors import InputError

Array = NDArray[Any]

BINS = 1 << 14  # at most: 64 for each step of uint8, so that a few values far out leave some
LEVELS = 256
_NARROWEST = -160  # exponent of the narrowest bin, below the smallest float32
_DIGITS = 24  # binary digits of a float32: narrower bins tell no more values apart
_PERCENT = 99.99  # percentage of the values inside the range of the percentile observer
_FACTORS = numpy.geomspace(1.0, 1 / 64, 73)  # an end of the range is tried times these


class Histogram:
    """How often values of each size were added. ``counts[i]`` is of the values from
    (first + i) * 2^exponent up to the next bin.
    """

    def __init__(self) -> None:
        self.counts: Array = numpy.zeros(0, numpy.int64)
        self.first = 0
        self.exponent: int | None = None
        self.low, self.high = inf, -inf

    def add(self, values: Array) -> None:
        """Counts the values. Raises :class:`InputError` for NaN and infinity."""
        if not values.size:
            return
        low, high = float(values.min()), float(values.max())
        if not (-inf < low and high < inf):  # false for NaN too
            raise InputError("NaN or infinity")
        self.low, self.high = min(low, self.low), max(high, self.high)
        exponent = _exponent(self.low, self.high)
        if self.exponent is not None:
            self._coarsen(exponent - self.exponent)
        self.exponent = exponent
        # exact in float64; in float32 a tiny negative value would become 0
        scaled = values.ravel().astype(numpy.float64) * ldexp(1.0, -exponent)
        index = numpy.floor(scaled).astype(numpy.int64)
        start, stop = int(index.min()), int(index.max()) + 1
        if self.counts.size:
            start, stop = min(start, self.first), max(stop, self.first + self.counts.size)
        grown = numpy.bincount(index - start, minlength=stop - start).astype(numpy.int64)
        grown[self.first - start : self.first - start + self.counts.size] += self.counts
        self.counts, self.first = grown, start

    def _coarsen(self, doublings: int) -> None:
        """Makes the bins 2^doublings times as wide."""
        if not doublings:
            return
        index = (self.first + numpy.arange(self.counts.size)) >> min(doublings, 62)
        self.first = int(index[0])
        # whole numbers below 2^53 stay exact as the weights of a bincount
        self.counts = numpy.bincount(index - self.first, self.counts).astype(numpy.int64)

    @property
    def width(self) -> float:
        assert self.exponent is not None
        return ldexp(1.0, self.exponent)

    @property
    def centers(self) -> Array:
        return (self.first + numpy.arange(self.counts.size) + 0.5) * self.width


def _exponent(low: float, high: float) -> int:
    """The exponent of the narrowest bins of which at most ``BINS`` hold everything. It never falls
    when the range grows.
    """
    largest = max(abs(low), abs(high))
    least = max(_NARROWEST, frexp(largest)[1] - _DIGITS) if largest else _NARROWEST
    exponent = max(least, floor(log2((high - low) / BINS)) if high > low else least)
    while floor(ldexp(high, -exponent)) - floor(ldexp(low, -exponent)) >= BINS:
        exponent += 1
    return exponent


@dataclass(frozen=True)
class Range:
    """What uint8 shall hold of a tensor. Zero is always inside: a zero is a zero after
    quantization, which padding and masks rely on.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        assert self.low <= 0.0 <= self.high, self

    @property
    def scale(self) -> float:
        """The size of a step, a float32."""
        step = numpy.float32((self.high - self.low) / (LEVELS - 1))
        return float(step) if step >= numpy.finfo(numpy.float32).tiny else 1.0

    @property
    def zero(self) -> int:
        """The step that is 0."""
        return int(numpy.clip(numpy.rint(-self.low / self.scale), 0, LEVELS - 1))


def rounded(values: Array, chosen: Range) -> Array:
    """The values after quantization and dequantization."""
    steps = numpy.clip(numpy.rint(values / chosen.scale) + chosen.zero, 0, LEVELS - 1)
    return (steps - chosen.zero) * chosen.scale


def minmax(seen: Histogram) -> Range:
    """Everything that was seen."""
    return Range(min(seen.low, 0.0), max(seen.high, 0.0))


def percentile(seen: Histogram, percent: float = _PERCENT) -> Range:
    """All but the smallest and the largest values, of each the same share."""
    whole = minmax(seen)
    total = numpy.cumsum(seen.counts)
    tail = (1 - percent / 100) / 2 * total[-1]
    low = int(numpy.searchsorted(total, tail, side="right"))
    high = int(numpy.searchsorted(total, total[-1] - tail, side="left"))
    edges = (seen.first + low) * seen.width, (seen.first + high + 1) * seen.width
    return Range(max(whole.low, min(edges[0], 0.0)), min(whole.high, max(edges[1], 0.0)))


def mse(seen: Histogram) -> Range:
    """The range with the least mean square error."""
    there = seen.counts > 0
    centers, counts = seen.centers[there], seen.counts[there].astype(numpy.float64)

    def error(chosen: Range) -> float:
        return float((counts * (centers - rounded(centers, chosen)) ** 2).sum())

    return _best(minmax(seen), error)


def entropy(seen: Histogram) -> Range:
    """The range after which the distribution of the values differs least from the one before, by
    the Kullback-Leibler divergence (Migacz, 8-bit inference with TensorRT, 2017).
    """
    centers, counts = seen.centers, seen.counts.astype(numpy.float64)

    def divergence(chosen: Range) -> float:
        inside = (centers >= chosen.low) & (centers <= chosen.high)
        if inside.sum() < LEVELS:  # fewer bins than steps: nothing is lost that can be seen
            return inf if len(centers) >= LEVELS else chosen.low - chosen.high
        kept = counts[inside]
        # what is cut off lies at the ends after quantization
        before = kept.copy()
        before[0] += counts[centers < chosen.low].sum()
        before[-1] += counts[centers > chosen.high].sum()
        steps = numpy.rint(centers[inside] / chosen.scale).astype(numpy.int64)
        steps -= steps[0]
        there = (kept > 0).astype(numpy.float64)
        mass, bins = numpy.bincount(steps, kept), numpy.bincount(steps, there)
        share = numpy.divide(mass, bins, out=numpy.zeros_like(mass), where=bins > 0)
        after = share[steps] * there
        if not after.sum():
            return inf
        p, q = before / before.sum(), after / after.sum()
        p, q = p[p > 0], numpy.maximum(q[p > 0], 1e-12)
        return float((p * numpy.log(p / q)).sum())

    return _best(minmax(seen), divergence)


def _best(whole: Range, cost: Callable[[Range], float]) -> Range:
    """The range of least cost: first both ends are moved together, then each alone, twice. The
    wider range wins a tie.
    """
    best, least = whole, cost(whole)
    moves = [(1, 1), (0, 1), (1, 0), (0, 1), (1, 0)]
    for low, high in moves:
        if (low, high) != (1, 1) and not (whole.low if low else whole.high):
            continue
        start = best
        for factor in _FACTORS:
            tried = Range(
                whole.low * float(factor) if low else start.low,
                whole.high * float(factor) if high else start.high,
            )
            if (found := cost(tried)) < least:
                best, least = tried, found
    return best


OBSERVERS: Mapping[str, Callable[[Histogram], Range]] = {
    "minmax": minmax,
    "percentile": percentile,
    "entropy": entropy,
    "mse": mse,
}

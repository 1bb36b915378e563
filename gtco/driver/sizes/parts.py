"""The parts of a range: at which sizes a model is compiled so that any size of the range is a sum
of them, and the proof that it may be run in parts. With lists of other sizes, each choice of these
has parts of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, gcd, inf, log
from types import MappingProxyType
from typing import TYPE_CHECKING

from gtco.graph.rewrites import canonicalize
from gtco.graph.rewrites.fold_constants import fold_constants
from gtco.graph.samples import Samples, equal_arrays, samples_along
from gtco.support.errors import ShapeError
from gtco.support.sizes import Range
from gtco.tensor.operators import INJECTIVE, pattern

if TYPE_CHECKING:
    from gtco.graph.graph import Graph

LARGEST_BASE = 32  # samples of the smallest part, at most
GROWTH = 4  # from one part to the next
MANY_CORES = 16  # from here on a part of 64 is tried too
# Parts are left out while the range's sizes get slower by so much at most: on average, each.
MEAN_LOSS, WORST_LOSS = 1.02, 1.06
SAMPLED = 256  # sizes of a range whose prices are looked at
MOST_PROVEN = 1 << 14  # the proof is asked at the range's last size too, or at about this many
MOST_EXAMPLES = 1 << 27  # bytes of a module's example inputs for that
LEAST_PROVEN = 64
ODD = (11, 7, 5, 3)  # times the base: the first of these that is in the range is asked at too
MOST_PLANS = 32  # parts of all choices of the other sizes, before some are left out
# If there are more choices, machines of few cores try two sizes of parts: base and GROWTH * base.
FEW_CHOICES = 4
LEAST_PARTS = 2  # at least so many sizes of parts are tried, however many choices there are


class Inseparable(ShapeError):
    """A model cannot be run in parts: samples depend on each other. Its text is the reason."""


def candidates(sizes: Range, cores: int, choices: int = 1) -> list[int]:
    """Sizes of parts to price, ascending. Every size of the range is a multiple of the first.
    ``choices``: of the other sizes, each of which has these parts; where there are many, fewer
    parts are tried.
    """
    common = gcd(sizes.low, sizes.step)
    base = max(d for d in range(1, min(common, LARGEST_BASE) + 1) if common % d == 0)
    most = (2 if choices > FEW_CHOICES else 3) if cores < MANY_CORES else 4
    most = min(most, max(LEAST_PARTS, MOST_PLANS // choices - len(sizes.weighted)))
    found = [part for i in range(most) if (part := base * GROWTH**i) <= sizes.high]
    if len(found) < most and 2 * found[-1] <= sizes.high:
        found.append(2 * found[-1])
    return sorted({*found, *sizes.weighted})


def most_choices(sizes: Range) -> int:
    """How many choices of other sizes a library with this range may have, on any machine."""
    return MOST_PLANS // len(candidates(sizes, MANY_CORES, MOST_PLANS))


def proof_sizes(
    sizes: Range, tried: Sequence[int], examples: Mapping[int, int] | None = None
) -> list[int]:
    """The sizes at which the proof is asked beside those of the parts ``tried``, ascending. A model
    that takes the first 20 samples is the same as one that takes all, until there are more. And
    two sizes above 1 are needed, because a size of 1 says nothing of where samples are. Parts are
    powers of 4 times the base. A roll by 16 and a remainder by 3 are the same at all of these, so
    the proof is asked at one more size, which is no such power.

    An ONNX file takes as long to import at any size. A module is exported with example inputs,
    which take memory: ``examples`` has their bytes at two of the parts.
    """
    base, most = tried[0], MOST_PROVEN
    if examples and len(examples) > 1:
        (one, some), (two, more) = sorted(examples.items())[:2]
        most = min(most, max(LEAST_PROVEN, MOST_EXAMPLES * (two - one) // max(1, more - some)))
    last = sizes.high if sizes.high <= most else most // base * base
    found = [last] if last > tried[-1] else []
    odd = [base * n for n in ODD if base * n < max(last, tried[-1])]
    found += [size for size in odd[:1] if size not in tried]
    while sum(size > 1 for size in (*tried, *found)) < 2:
        found.append(2 * max(*tried, *found, 1))
    return sorted(found)


def kept(sizes: Range, prices: Mapping[int, float]) -> list[int]:
    """The parts that the library gets, of those with these prices: few, since each takes time to
    compile and code in the library, and enough for the range's sizes to be nearly as fast as with
    all of them. Sizes that the user weighted always stay.
    """
    found = sorted(prices)
    every = [*sizes]
    looked = every[:: -(-len(every) // SAMPLED)]
    best = _costs(looked, found, prices)

    def losses(parts: Sequence[int]) -> tuple[float, float]:
        ratios = [a / b for a, b in zip(_costs(looked, parts, prices), best, strict=True)]
        return exp(sum(map(log, ratios)) / len(ratios)), max(ratios)

    while len(found) > 1:
        tries = [
            (*losses([p for p in found if p != part]), part)
            for part in found[1:]
            if part not in sizes.weighted
        ]
        if not tries:
            break
        mean, worst, part = min(tries)
        if mean > MEAN_LOSS or worst > WORST_LOSS:
            break
        found.remove(part)
    return found


def _costs(sizes: Sequence[int], parts: Sequence[int], prices: Mapping[int, float]) -> list[float]:
    """The least price of each size in parts, which add up to it, or of which the last one has more
    than are left; csrc/cover.c does the same at run time. A size that is too large for a table
    counts as the part of least price a sample alone.
    """
    bound = min(max(sizes), (parts[-1] + 1) * parts[-1])
    table = [0.0] + [inf] * bound
    for n in range(1, bound + 1):
        table[n] = min((table[n - p] + prices[p] for p in parts if p <= n), default=inf)

    def cheapest(n: int) -> float:
        more = (prices[p] + min(table[max(0, n - p + 1) : n]) for p in parts if p > 1)
        return min([table[n], *more])

    rate = min(prices[p] / p for p in parts)
    return [cheapest(n) if n <= bound else rate * n for n in sizes]


def proven(
    name: str, graphs: Mapping[int, Graph], kinds: Mapping[str, str] = MappingProxyType({})
) -> Samples:
    """Where the model has its samples (:func:`gtco.graph.samples.samples_along`), from the model as
    it was lowered at several sizes of the dimension ``name``. ``kinds``: the model's own operators
    by the names of their nodes. Raises :class:`Inseparable` if samples depend on each other.
    """
    folded = {size: fold_constants(graph) for size, graph in graphs.items()}
    several = [size for size in sorted(graphs) if size > 1]
    one, two = several[0], several[-1]
    try:
        found = samples_along(folded[one], folded[two], (one, two), name, kinds)
        for size in several[1:-1]:  # a number may be the same at both ends by chance
            samples_along(folded[one], folded[size], (one, size), name, kinds)
    except ShapeError as error:
        raise Inseparable(str(error)) from None
    if 1 in folded and not _alike(folded[1], found.at(1)):
        raise Inseparable(f"the model computes something else at {name}=1 than at {name}={two}")
    for size, graph in folded.items():
        if _work(graph) != _work(folded[two]):
            raise Inseparable(
                f"the model computes something else at {name}={size} than at {name}={two}"
            )
    return found


def _alike(imported: Graph, derived: Graph) -> bool:
    """True if both compute the same, as they are or in canonical form: an exporter may move a
    single sample in another way.
    """
    return _same(imported, derived) or _same(canonicalize(imported), canonicalize(derived))


def _same(a: Graph, b: Graph) -> bool:
    """True if both have the same operators, types and values of constants, in the same order."""
    return len(a.operators) == len(b.operators) and all(
        (x.kind, x.type, len(x.inputs)) == (y.kind, y.type, len(y.inputs))
        and (x.kind == "relax" or x.attrs == y.attrs)
        and all(
            a.is_constant(m) == b.is_constant(n)
            and (not a.is_constant(m) or equal_arrays(a.constants[m], b.constants[n]))
            for m, n in zip(x.inputs, y.inputs, strict=True)
        )
        for x, y in zip(a.operators.values(), b.operators.values(), strict=True)
    )


def _work(graph: Graph) -> list[tuple[str, object]]:
    """The operators that compute, in order. Those that move data may differ at size 1."""
    return [
        (op.kind, () if op.kind == "relax" else op.attrs)
        for op in graph.operators.values()
        if pattern(op.kind) != INJECTIVE
    ]

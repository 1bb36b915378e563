"""The parts of a range: at which sizes a model is compiled so that any size of the range is a sum
of them, and the proof that it may be run in parts. With lists of other sizes, each choice of these
has parts of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, gcd, inf, log
from typing import TYPE_CHECKING

from gtco.graph.rewrites.fold_constants import fold_constants
from gtco.graph.samples import samples_along
from gtco.support.errors import OptionError, ShapeError
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
MOST_PROVEN = 64  # the proof is asked at the range's last size too, or at about this many
MOST_PLANS = 32  # parts of all choices of the other sizes, before some are left out


def candidates(sizes: Range, cores: int) -> list[int]:
    """Sizes of parts to price, ascending. Every size of the range is a multiple of the first."""
    common = gcd(sizes.low, sizes.step) if sizes.high > sizes.low else sizes.low
    base = max(d for d in range(1, min(common, LARGEST_BASE) + 1) if common % d == 0)
    most = 3 if cores < MANY_CORES else 4
    found = [part for i in range(most) if (part := base * GROWTH**i) <= sizes.high]
    if len(found) < most and 2 * found[-1] <= sizes.high:
        found.append(2 * found[-1])
    return sorted({*found, *sizes.weighted})


def check_plans(name: str, sizes: Range, choices: int) -> None:
    """Raises :class:`OptionError` if a library with so many choices of other sizes would have too
    many plans. It counts the parts of the machine that tries the most, so that what is compiled on
    one machine is compiled on another.
    """
    parts = len(candidates(sizes, MANY_CORES))
    if choices * parts > MOST_PLANS:
        raise OptionError(
            f"dims: the range {name}={sizes} has up to {parts} plans at each of the {choices} "
            f"choices of the other sizes, {choices * parts} in all, and one library has at most "
            f"{MOST_PLANS}: give fewer sizes (--dim; in Python: dims), or compile several libraries"
        )


def proof_sizes(sizes: Range, tried: Sequence[int]) -> list[int]:
    """The sizes at which the proof is asked beside those of the parts ``tried``, ascending. A model
    that takes the first 20 samples is the same as one that takes all, until there are more. And
    two sizes above 1 are needed, because a size of 1 says nothing of where samples are.
    """
    base = tried[0]
    last = sizes.high if sizes.high <= MOST_PROVEN else MOST_PROVEN // base * base
    found = [last] if last > tried[-1] else []
    while sum(size > 1 for size in (*tried, *found)) < 2:
        found.append(2 * max(*tried, *found, 1))
    return found


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
    """The least price of each size as a sum of parts; csrc/cover.c does the same at run time. A
    size that is too large for a table counts as the part of least price a sample alone.
    """
    bound = min(max(sizes), (parts[-1] + 1) * parts[-1])
    table = [0.0] + [inf] * bound
    for n in range(1, bound + 1):
        table[n] = min((table[n - p] + prices[p] for p in parts if p <= n), default=inf)
    rate = min(prices[p] / p for p in parts)
    return [table[n] if n <= bound else rate * n for n in sizes]


def proven(name: str, given: str, graphs: Mapping[int, Graph]) -> dict[str, int | None]:
    """Where inputs and outputs have the samples (:func:`gtco.graph.samples.samples_along`), from
    the model as it was lowered at several sizes of the dimension ``name``. ``given`` is the flag,
    for the message. Raises :class:`ShapeError` if samples depend on each other.
    """
    folded = {size: fold_constants(graph) for size, graph in graphs.items()}
    several = [size for size in sorted(graphs) if size > 1]
    one, two = several[0], several[-1]
    try:
        axes = samples_along(folded[one], folded[two], (one, two), name)
        for size, graph in folded.items():
            if _work(graph) != _work(folded[two]):
                raise ShapeError(
                    f"the model computes something else at {name}={size} than at {name}={two}"
                )
    except ShapeError as error:
        raise ShapeError(
            f"--dim {given}: a range needs a model that computes each sample along '{name}' by "
            f"itself, and {error}. Give a list of the sizes that you need, each of which is "
            f"compiled: --dim {name}=SIZE,SIZE,..."
        ) from None
    return axes


def _work(graph: Graph) -> list[tuple[str, object]]:
    """The operators that compute, in order. Those that move data may differ at size 1."""
    return [
        (op.kind, () if op.kind == "relax" else op.attrs)
        for op in graph.operators.values()
        if pattern(op.kind) != INJECTIVE
    ]

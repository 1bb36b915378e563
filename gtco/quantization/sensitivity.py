"""What each product alone costs, and which must stay in float so that a budget holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gtco.quantization.calibration import Array, Say, Switchboard
from gtco.quantization.data import Run
from gtco.quantization.observers import Range
from gtco.quantization.products import Product
from gtco.quantization.verdict import compare, worst
from gtco.support.errors import QuantizationError

KEPT_BYTES = 1 << 29  # bytes of the float model's outputs; more are computed again each time


class Trial:
    """The error of any choice on some samples, against the float model's outputs there."""

    def __init__(self, board: Switchboard, samples: Sequence[Run]) -> None:
        self.board, self.samples = board, samples
        self._kept: list[dict[str, Array]] | None = None

    def wanted(self) -> Iterable[Mapping[str, Array]]:
        """The float model's outputs."""
        if self._kept is not None:
            return self._kept
        made = self.board.results(self.samples, {}, ())
        first = next(made)
        if sum(array.nbytes for array in first.values()) * len(self.samples) <= KEPT_BYTES:
            self._kept = [first, *made]
            return self._kept
        return self.board.results(self.samples, {}, ())

    def error(self, ranges: Mapping[str, Range], quantized: Sequence[str]) -> float:
        """The relative error of the output that lost most; ``quantized``: outputs of products."""
        got = self.board.results(self.samples, ranges, quantized)
        return worst(compare(self.wanted(), got))


def sensitivities(
    trial: Trial, products: Sequence[Product], ranges: Mapping[str, Range], say: Say
) -> dict[str, float]:
    """The error of the outputs if one product alone is quantized, by the product's output."""
    found: dict[str, float] = {}
    trial.wanted()
    start = time.perf_counter()
    for number, product in enumerate(products):
        say(f"{number + 1}/{len(products)} products{_left(start, number, len(products))}")
        found[product.output] = trial.error(ranges, [product.output])
    return found


def _left(start: float, done: int, of: int) -> str:
    """How long the rest will take, once something is done."""
    if not done:
        return ""
    return f", about {(time.perf_counter() - start) / done * (of - done):.0f} s left"


def arriving(
    board: Switchboard,
    samples: Sequence[Run],
    ranges: Mapping[str, Range],
    quantized: Sequence[str],
) -> dict[str, float]:
    """The error of each tensor that products read, with all of ``quantized``: what the layers
    before have lost together.
    """
    plain = board.read(samples, {}, ())
    return {v.name: v.error for v in compare(plain, board.read(samples, ranges, quantized))}


@dataclass(frozen=True)
class Kept:
    """The outputs of the products that stay in float, and the error that this leaves."""

    outputs: tuple[str, ...]
    error: float


def within_budget(
    products: Sequence[Product],
    sensitivity: Mapping[str, float],
    operations: Mapping[str, int],
    error: Callable[[Sequence[str]], float],
    budget: float,
    say: Say,
) -> Kept:
    """The fewest products in float with which the error is at most ``budget``. Those go first that
    lose most for the operations that they save: errors of several products add up like variances.
    ``error`` gives the error of quantizing these products. Raises :class:`QuantizationError` if not
    even one product may be quantized.
    """

    def price(product: Product) -> float:
        return sensitivity[product.output] ** 2 / max(1, operations[product.output])

    order = [p.output for p in sorted(products, key=price, reverse=True)]
    known: dict[int, float] = {}

    def of(kept: int) -> float:
        if kept not in known:
            say(f"{kept} products in float")
            known[kept] = error(order[kept:])
        return known[kept]

    low, high = 0, len(order) - 1
    if of(high) > budget:
        best = min(known, key=lambda kept: known[kept])
        last = next(p.label for p in products if p.output == order[-1])
        raise QuantizationError(
            f"max_drop={100 * budget:g}: no choice of products keeps the outputs within it. The "
            f"best found loses {100 * known[best]:.3g} %, with '{last}' alone in int8: give a "
            "larger max_drop, other samples, or compile the float model"
        )
    while low < high:  # the error falls as more stay in float
        middle = (low + high) // 2
        if of(middle) <= budget:
            high = middle
        else:
            low = middle + 1
    return Kept(tuple(order[:high]), of(high))

"""The proof that a model can be run in parts of a range, at each choice of its other sizes, and the
parts' graphs.

A model is imported at few sizes. At the smallest and the largest choice these are one sample, some,
and the range's last size (:mod:`gtco.driver.sizes.parts` says why). The graphs of the parts between
follow from the proof, which says where each tensor has its samples. At another choice the model is
imported at one size, and its graph is walked with the places that the proof has found: if every
rule agrees, the graphs of all parts follow. If one does not, the model is imported as it is at the
first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from gtco.driver.checks import at_sizes, check_dump
from gtco.driver.compilation import Compilation
from gtco.driver.phases import Lowered
from gtco.driver.sizes import parts
from gtco.driver.sizes.plan import Sizes
from gtco.graph.graph import Graph
from gtco.graph.rewrites.fold_constants import fold_constants
from gtco.graph.samples import Samples, narrow, samples_along
from gtco.machine.target import Machine
from gtco.support.errors import GtcoError, ShapeError
from gtco.support.nested import call_arguments
from gtco.support.sizes import Range, sizes_text


class Proofs:
    """The proofs for a range of sizes of the dimension ``symbol``. ``at`` gives a compilation of
    any sizes. ``one_source``: is the model read once, and not exported for each of its shapes?

    - ``lowered``: the model as it was lowered for compilations so far; what a proof lowers is added
      there, also by one that fails;
    - ``axes``: of each input and output that has the samples, once there is a proof.
    """

    def __init__(
        self,
        symbol: str,
        sizes: Range,
        machine: Machine,
        at: Callable[[Sizes], Compilation],
        one_source: bool,
        lowered: dict[Compilation, Lowered],
    ) -> None:
        self.symbol, self.sizes, self.machine = symbol, sizes, machine
        self.at, self.one_source, self.lowered = at, one_source, lowered
        self.axes: Mapping[str, int | None] = {}
        self._first: Sizes = {}
        self._known: tuple[Samples, int] | None = None  # and the range's last size

    def ask(self, choices: list[tuple[Sizes, Mapping[int, Compilation]]]) -> None:
        """Lowers the model at the parts of all choices, and proves that it can be run in them.
        Each choice has other sizes, and the parts' compilations by their samples. Raises
        :class:`parts.Inseparable`.
        """
        order = sorted(range(len(choices)), key=lambda n: prod(choices[n][0].values()))
        ends = dict.fromkeys((order[0], order[-1]))
        for number in (*ends, *(n for n in order if n not in ends)):
            others, runs = choices[number]
            if number in ends or not self._follow(others, runs):
                self._prove(others, runs)

    def _prove(self, others: Sizes, parted: Mapping[int, Compilation]) -> None:
        """The proof from the model at several sizes."""
        examples = {size: _bytes(run.source.example_inputs) for size, run in parted.items()}
        more = parts.proof_sizes(self.sizes, sorted(parted), None if self.one_source else examples)
        runs = dict(parted)
        for size in more:
            runs[size] = self.at({self.symbol: size, **others})
            check_dump(runs[size].options.dump)
        several = [size for size in sorted(runs) if size > 1]
        some, last = several[0], several[-1]
        # two sizes show most models that cannot be run in parts
        graphs = {size: self._lowered(runs[size], size, others).graph for size in (some, last)}
        kinds = self.lowered[runs[some]].facts.operators
        found = parts.proven(self.symbol, graphs, kinds)
        own = {*parted} - {*self.sizes.weighted}
        between = [] if narrow(found.graph) else [n for n in several[1:-1] if n in own]
        for size in runs:
            if size not in between and size not in graphs:
                graphs[size] = self._lowered(runs[size], size, others).graph
        if len(graphs) > 2:
            found = parts.proven(self.symbol, graphs, kinds)
        self._agree(found, others)
        for size in between:
            self._take(runs[size], found.at(size), runs[some])
        for size in more:  # no part
            del self.lowered[runs[size]]
        if not narrow(found.graph):
            self._known = found, last

    def _follow(self, others: Sizes, runs: Mapping[int, Compilation]) -> bool:
        """The proof from the model at one size, and from what is known of other choices. False if
        there is none.
        """
        if self._known is None:
            return False
        known, last = self._known
        source = runs.get(known.size)
        if source is None:
            return False
        lowered = self._lowered(source, known.size, others)
        graph = fold_constants(lowered.graph)
        if narrow(graph) or (twin := known.like(graph, last)) is None:
            return False
        try:
            found = samples_along(
                graph, twin, (known.size, last), self.symbol, lowered.facts.operators
            )
        except ShapeError:
            return False
        self._agree(found, others)
        for size, run in runs.items():
            if run is not source:
                self._take(run, found.at(size), source)
        return True

    def _agree(self, found: Samples, others: Sizes) -> None:
        if not self.axes:
            self.axes, self._first = found.axes, others
        elif found.axes != self.axes:
            raise parts.Inseparable(
                f"the samples along '{self.symbol}' are on other axes of the outputs at "
                f"{sizes_text(others)} than at {sizes_text(self._first)}"
            )

    def _take(self, run: Compilation, graph: Graph, source: Compilation) -> None:
        """``graph`` is the model of ``run``. It follows from that of ``source``."""
        run.said_as(source)
        self.lowered[run] = replace(self.lowered[source], graph=graph)

    def _lowered(self, run: Compilation, size: int, others: Sizes) -> Lowered:
        try:
            if run not in self.lowered:
                self.lowered[run] = run.read(self.machine)
            return self.lowered[run]
        except GtcoError as error:
            if size in self.sizes:
                with at_sizes({self.symbol: size, **others}):
                    raise
            raise parts.Inseparable(
                f"it does not compile for {self.symbol}={size}: {error}"
            ) from None


def _bytes(example_inputs: Any) -> int:
    """Of all tensors among the example inputs of a module."""
    args, kwargs = call_arguments(example_inputs)
    return sum(int(getattr(value, "nbytes", 0)) for value in (*args, *kwargs.values()))

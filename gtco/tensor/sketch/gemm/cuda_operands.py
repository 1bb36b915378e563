"""The ways a kernel reads a product's operands: in place by chunks of 16 bytes, through a prologue
by runs of neighbours or element by element, or packed at compile time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tvm import tirx

from gtco.tensor.analysis.contraction import ConvView
from gtco.tensor.analysis.mapped import MappedProduct
from gtco.tensor.analysis.probe import Probe
from gtco.tensor.analysis.scope import Expr, Scope
from gtco.tensor.cuda import lambdas, neighbours
from gtco.tensor.cuda.arguments import Arguments
from gtco.tensor.stage import ITEM_BYTES, Stage

CHUNK = 16  # bytes
RUN = 4  # neighbours that are computed at once: 16 bytes of float32
At = Callable[[Expr, Expr, Expr], Any]  # (batch, row or column, step of k) -> value


@dataclass(frozen=True)
class Reading:
    """The way an operand is read.

    - ``way``: ``in_place``, ``computed`` or ``packed``;
    - ``along_k``: True if neighbours along k lie side by side, False if those along the operand's
      own axis do;
    - ``run``: the number of elements that are computed at once.
    """

    way: str
    along_k: bool = True
    run: int = 1


@dataclass(frozen=True)
class Source:
    """One operand of a product: its tensor, the places of its elements, and its own extent."""

    stage: Stage
    product: MappedProduct
    letter: str  # "a" or "b"

    @property
    def tensor(self) -> str:
        return self.product.view.op.inputs["ab".index(self.letter)]

    @property
    def own(self) -> tuple[str, int]:
        """Name and extent of A's rows or B's columns."""
        p = self.product
        return ("m", p.m) if self.letter == "a" else ("n", p.n)

    @property
    def params(self) -> tuple[tuple[str, int], ...]:
        return ("b", self.product.batch), self.own, ("k", self.product.k)

    def index(self, b: Expr, i: Expr, k: Expr) -> list[Expr]:
        p = self.product
        return p.a_index(b, i, k) if self.letter == "a" else p.b_index(b, k, i)

    @property
    def image(self) -> bool:
        """True if windows of a convolution's image read it."""
        return self.letter == "a" and isinstance(self.product.view, ConvView)

    @property
    def padded(self) -> bool:
        """True if an element may lie outside the tensor, and count as zero."""
        view = self.product.view
        return self.letter == "a" and isinstance(view, ConvView) and view.padded

    @cached_property
    def even(self) -> bool:
        """True if its rows (columns) lie evenly apart, and none outside of the tensor."""
        if self.padded:
            return False
        scope, size = Scope(), self.own[1]
        b, i, k = scope.variables((self.product.batch, max(1, size - 1), self.product.k))
        here, next_one, first, second = (
            self._flat(scope, at) for at in ((b, i, k), (b, i + 1, k), (0, 0, 0), (0, 1, 0))
        )
        if size == 1 or here is None or next_one is None or first is None or second is None:
            return size == 1
        return scope.known(next_one - here == second - first) is True

    @property
    def constant(self) -> bool:
        return self.tensor in self.stage.constants

    # the analysis ---------------------------------------------------------------------------------
    @cached_property
    def reading(self) -> Reading:
        if self.letter == "b" and self.constant:
            return Reading("packed")
        if lambdas.addressable(self.stage, self.tensor):
            for along_k in (True, False):
                if self.in_chunks(along_k):
                    return Reading("in_place", along_k)
        return self.computed(self.runs_along_k())

    def computed(self, along_k: bool) -> Reading:
        """The reading of the operand through its prologue."""
        return Reading("computed", along_k, RUN if self.in_runs(along_k) else 1)

    def in_chunks(self, along_k: bool) -> bool:
        """True if aligned chunks of 16 bytes of the operand lie in an input unchanged."""
        p, (_, size) = self.product, self.own
        count = CHUNK // ITEM_BYTES[self.stage.types[self.tensor].dtype]
        if (p.depth if along_k else size) % count:
            return False
        scope = Scope()
        extents = (p.batch, *((size, p.k // count) if along_k else (size // count, p.k)), count)
        b, i, k, one = scope.variables(extents)

        def at(step: Expr) -> tuple[Expr, Expr, Expr]:
            return (b, i, k * count + step) if along_k else (b, i * count + step, k)

        first, one_on = self._flat(scope, at(0)), self._flat(scope, at(one))
        if first is None or one_on is None or scope.known(one_on - first == one) is not True:
            return False
        if scope.known(tirx.floormod(_expr(first), count) == 0) is not True:
            return False
        if not self.padded:
            return True
        here, there = (p.source(*at(step)) for step in (0, one))
        pairs = zip(here, there, strict=True)
        return all(scope.known(x - y == 0) is True for x, y in pairs)

    def in_runs(self, along_k: bool) -> bool:
        """True if ``RUN`` neighbours are computed from one access to each tensor, in whole runs."""
        p, (_, size) = self.product, self.own
        if (p.depth if along_k else size) % RUN:
            return False
        at = self._runs(along_k)
        extents = [n for _, n in self._run_params(along_k)]

        def follow(probe: Probe, b: Expr, i: Expr, k: Expr, lane: Expr) -> None:
            probe.follow(self.tensor, at(b, i, k, lane))

        if not neighbours.side_by_side(self.stage, extents, follow, RUN):
            return False
        return not self.padded or self._one_place(along_k)

    def _one_place(self, along_k: bool) -> bool:
        """True if a run's elements come from one place of a convolution's image."""
        scope = Scope()
        extents = [n for _, n in self._run_params(along_k)]
        b, i, k, lane = scope.variables((*extents, RUN))
        here, there = (self.product.source(*self._of_run(along_k, b, i, k, v)) for v in (0, lane))
        pairs = zip(here, there, strict=True)
        return all(scope.known(x - y == 0) is True for x, y in pairs)

    @staticmethod
    def _of_run(along_k: bool, b: Expr, i: Expr, k: Expr, lane: Expr) -> tuple[Expr, Expr, Expr]:
        """(batch, row or column, step of k) of a run's lane."""
        return (b, i, k * RUN + lane) if along_k else (b, i * RUN + lane, k)

    def _runs(self, along_k: bool) -> Callable[..., list[Expr]]:
        return lambda *at: self.index(*self._of_run(along_k, *at))

    def _run_params(self, along_k: bool) -> tuple[tuple[str, int], ...]:
        """Names and extents of a run: ``k4`` counts fours along k."""
        b, (own, size), (k, steps) = self.params
        if along_k:
            return b, (own, size), (f"{k}{RUN}", steps // RUN)
        return b, (f"{own}{RUN}", size // RUN), (k, steps)

    def runs_along_k(self) -> bool:
        """True if more loads follow each other in memory along k than along the operand's own
        axis.
        """
        p, scope = self.product, Scope()
        b, i, k = scope.variables((p.batch, self.own[1], p.k))
        gathered: dict[str, Expr] = {}  # neighbours of a gathered row are of one row

        def apart(index: Sequence[Expr], beside: Sequence[Expr]) -> int:
            probes = []
            for where in (index, beside):
                probe = Probe(self.stage, scope, rows=gathered)
                probe.follow(self.tensor, where)
                probes.append([(t, at) for t, at in probe.loads if t])
            pairs = zip(*probes, strict=False)
            size = self.stage.types
            near = (size[t].size for (t, x), (_, y) in pairs if scope.known(y - x == 1) is True)
            return sum(near)

        here = self.index(b, i, k)
        return apart(here, self.index(b, i, k + 1)) >= apart(here, self.index(b, i + 1, k))

    def _flat(self, scope: Scope, at: tuple[Expr, Expr, Expr]) -> Expr | None:
        """The flat place of the element in an input."""
        probe = Probe(self.stage, scope)
        probe.follow(self.tensor, self.index(*at))
        return probe.loads[0][1] if len(probe.loads) == 1 and not probe.conditions else None

    # the text -------------------------------------------------------------------------------------
    def lambdas(self, args: Arguments, reading: Reading) -> list[str]:
        """Statements that define the operand in the form that gemm.cuh takes, named by its
        letter.
        """
        if reading.way == "packed":
            batch = lambdas.write(
                args,
                f"{self.letter}_batch",
                (("b", self.product.batch),),
                lambda body: body.give(_expr(self.product.packed_batch(body.index[0]))),
                returns="int32",
            )
            name = args.pointer(self.tensor)
            return [batch, f"auto {self.letter} = gtco::packed({name}, {self.letter}_batch);"]
        along = "ALONG_K" if reading.along_k else "ALONG_ROWS"
        if reading.way == "computed" and reading.run > 1:
            return self._computed_runs(args, reading.along_k, along)
        printed = lambdas.address if reading.way == "in_place" else lambdas.value
        name = f"{self.letter}_at"
        found = [
            printed(args, self.stage, self.tensor, name, self.params, lambda i: self.index(*i))
        ]
        if self.padded:
            found += self._zeros(args, reading, name)
            name = f"{self.letter}_or_zero"
        return [*found, f"auto {self.letter} = gtco::{reading.way}<gtco::{along}>({name});"]

    def _computed_runs(self, args: Arguments, along_k: bool, along: str) -> list[str]:
        """The operand in the form of runs that gemm.cuh takes."""
        name, params = f"{self.letter}_at", self._run_params(along_k)
        index = self._runs(along_k)
        found = [neighbours.reading(args, self.stage, self.tensor, name, params, index, RUN)]
        if self.padded:
            found.append(self._inside(args))
            head = ", ".join(f"int {p}" for p, _ in params)
            given = ", ".join(p for p, _ in params)
            first = ", ".join(
                p if p == of else f"{p} * {RUN}"
                for (p, _), (of, _) in zip(params, self.params, strict=True)
            )
            found.append(
                f"auto {self.letter}_or_zero = [=]({head}, float (&x)[{RUN}]) {{\n"
                f"  if (inside({first})) return {name}({given}, x);\n"
                f"  for (int v = 0; v < {RUN}; ++v) x[v] = 0.0f;\n}};"
            )
            name = f"{self.letter}_or_zero"
        return [
            *found,
            f"auto {self.letter} = gtco::computed_runs<gtco::{along}, {RUN}>({name});",
        ]

    def _inside(self, args: Arguments) -> str:
        """The lambda that says whether an element lies inside the image."""
        view = self.product.view
        assert isinstance(view, ConvView)

        def inside(body: lambdas.Body) -> None:
            em = body.em
            found: Expr = True
            for at, size in zip(self.product.source(*body.index), view.image, strict=True):
                place = em.let_index(at)
                for condition in (place >= 0, place < size):
                    if em.known(condition) is not True:
                        found = condition if found is True else tirx.all(found, condition)
            body.give(_expr(found, "bool"))

        return lambdas.write(args, "inside", self.params, inside, returns="bool")

    def _zeros(self, args: Arguments, reading: Reading, name: str) -> list[str]:
        """The same lambda, with a result of zero if a tap lies outside the image."""
        head = ", ".join(f"int {p}" for p, _ in self.params)
        given = ", ".join(p for p, _ in self.params)
        none = "nullptr" if reading.way == "in_place" else "0.0f"
        return [
            self._inside(args),
            f"auto {self.letter}_or_zero = [=]({head}) -> decltype({name}({given})) "
            f"{{ return inside({given}) ? {name}({given}) : {none}; }};",
        ]


def _expr(value: Expr, dtype: str = "int32") -> Expr:
    return tirx.const(value, dtype) if isinstance(value, int | bool) else value

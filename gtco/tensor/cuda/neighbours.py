"""Lambdas that read or store neighbours at once, for device code that takes them one vector each.

::

    auto value = [=](int row, int q, float (&x)[4]) {      // elements 4 q ... 4 q + 3 of a row
      float near[4];
      gtco::load<4>(&in0[row * 768 + q * 4], &near[0]);    // one access of 16 bytes
      #pragma unroll
      for (int v = 0; v < 4; ++v) { x[v] = ...; }          // the prologue of each
    };

If a load's neighbours lie side by side and begin at a multiple of their number, they are one
access. Otherwise each is a load of its own, with the same result. The place that a gather reads is
bound ahead of the loop, where it is the same for all neighbours: then they lie side by side too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.sym import detect_linear_equation
from tvm.tirx.script.builder import ir as T

from gtco.tensor.analysis.chains import Epilogue
from gtco.tensor.analysis.probe import Probe, depends_on
from gtco.tensor.analysis.scope import Scope
from gtco.tensor.cuda.arguments import Arguments
from gtco.tensor.cuda.lambdas import Body, Parameters, printed
from gtco.tensor.cuda.spelling import CTYPES, indented
from gtco.tensor.emit.bfloat16 import convert
from gtco.tensor.emit.emitter import Array, Emitter, Expr
from gtco.tensor.emit.reader import Reader
from gtco.tensor.stage import Operator, Stage, TensorType

# The parameters, then the lane -> an index of the tensor.
LaneMap = Callable[..., Sequence[Expr]]
Load = tuple[str, Expr]  # a tensor, a flat position
HEADER = "vectors.cuh"  # the header that the text needs


@dataclass
class NearReader(Reader):
    """Reads elements that were loaded together from the arrays that hold them.

    - ``near``: for each, the tensor, the first lane's position and the array of its neighbours;
    - ``rows``: gathers whose places are bound ahead of the loop: the output, the index into the
      gather's indices, and the variable.
    """

    near: list[tuple[str, Expr, Array]] = field(default_factory=list)
    rows: list[tuple[str, list[Expr], Expr]] = field(default_factory=list)
    lane: Expr = 0

    def row(self, op: Operator, index: Sequence[Expr]) -> Expr:
        known, at = self.emitter.known, self.picked(op, index)
        for name, other, row in self.rows:
            if name != op.output:
                continue
            if all(known(a - b == 0) is True for a, b in zip(at, other, strict=True)):
                return row
        return super().row(op, index)

    def picked(self, op: Operator, index: Sequence[Expr]) -> list[Expr]:
        """The index into a gather's indices, for the element at ``index`` of its output."""
        return list(index[op["axis"] :][: len(self.shape(op.inputs[1]))])

    def load(self, tensor: str, index: Sequence[Expr]) -> Expr:
        at = self.emitter.index(self.inputs[tensor].flat(index))
        kept = self.kept(tensor, at)
        return super().load(tensor, index) if kept is None else self.emitter.load(kept, [self.lane])

    def kept(self, tensor: str, at: Expr) -> Array | None:
        """The array with this lane's element, for a tensor at a flat position; None if there is
        none.
        """
        equal = self.emitter.analyzer.can_prove_equal
        for name, first, array in self.near:
            if name == tensor and not isinstance(at, int) and equal(at, first + self.lane):
                return array
        return None


@dataclass
class BoundProbe(Probe):
    """A probe that emits the place that a gather reads, if it is the same for every ``lane``. The
    reader finds it in its ``rows``.
    """

    reader: NearReader = field(kw_only=True)
    lane: Expr = field(kw_only=True)

    def _row(self, op: Operator, index: Sequence[Expr]) -> Expr:
        picked = self.reader.picked(op, index)
        in_loop = (self.lane, *self.rows.values())
        if any(depends_on(i, var) for i in picked for var in in_loop):
            return super()._row(op, index)
        row = self.reader.row(op, index)
        self.reader.rows.append((op.output, picked, row))
        return row


def reading(
    args: Arguments,
    stage: Stage,
    tensor: str,
    name: str,
    params: Parameters,
    index: LaneMap,
    lanes: int,
) -> str:
    """``auto name = [=](params, float (&x)[lanes]) {...};``: reads the tensor's elements at
    ``index`` of the parameters and each lane, through its whole prologue.
    """
    own = stage.types[tensor].dtype

    def body(b: Body) -> None:
        def element(reader: NearReader, v: Expr) -> None:
            at = [b.em.index(i) for i in index(*b.index, v)]
            found = convert(b.em, reader.value(tensor, at), own, "float32")
            b.em.store(b.arrays["x"], [v], found)

        def follow(probe: Probe, v: Expr) -> None:
            probe.follow(tensor, [b.em.index(i) for i in index(*b.index, v)])

        each_lane(b, stage, lanes, follow, element)

    return function(args, name, params, body, {"float (&x)": TensorType((lanes,))})


def storing(
    args: Arguments,
    stage: Stage,
    tail: Epilogue,
    name: str,
    params: Parameters,
    index: LaneMap,
    lanes: int,
    valid: str = "",
) -> str:
    """``auto name = [=](params, const float (&y)[lanes]) {...};``: stores the result of the
    epilogue for the anchor's values ``y`` at ``index`` of the parameters and each lane in its
    place.

    ``valid`` is the name of one more parameter: values are stored only if it is true. It needs
    stores that are :func:`side_by_side`.
    """
    own = stage.types[tail.anchor].dtype
    given = "int" if own.startswith("int") else "float"

    def body(b: Body) -> None:
        def element(reader: NearReader, v: Expr) -> None:
            at = [b.em.index(i) for i in index(*b.index, v)]
            y = b.em.load(b.arrays["y"], [v])
            value = convert(b.em, y, "int32" if given == "int" else "float32", own)
            finish(b, reader, tail, at, value)

        def follow(probe: Probe, v: Expr) -> None:
            probe.through(tail, [b.em.index(i) for i in index(*b.index, v)])

        each_lane(b, stage, lanes, follow, element, valid=b.given[valid] if valid else None)

    dtype = "int32" if given == "int" else "float32"
    arrays = {f"const {given} (&y)": TensorType((lanes,), dtype)}
    return function(args, name, params, body, arrays, {valid: "bool"} if valid else None)


def finish(b: Body, reader: NearReader, tail: Epilogue, at: Sequence[Expr], value: Expr) -> None:
    """The epilogue of one value: kept if its neighbours are stored together, else stored."""
    result, where = reader.through(tail, at, value)
    kept = reader.kept(tail.stage.output.output, b.em.index(b.output.flat(where)))
    if kept is not None:
        b.em.store(kept, [reader.lane], result)
    else:
        b.em.store(b.output, where, result)


def each_lane(
    b: Body,
    stage: Stage,
    lanes: int,
    follow: Callable[[Probe, Expr], None],
    element: Callable[[NearReader, Expr], None],
    valid: Expr | None = None,
) -> None:
    """``element(reader, v)`` for every lane. The neighbours that ``follow`` finds are loaded
    together before, and stored together after it. If ``valid`` is given, they are stored only if it
    is true.
    """
    em, reader = b.em, NearReader(stage, b.em, b.inputs)
    if lanes == 1:
        element(reader, 0)
        return
    (lane,) = em.variables((lanes,), "v")
    probe = Probe(stage, em)
    follow(probe, lane)
    found: list[Load] = []
    if not probe.conditions:  # what a condition guards may lie outside, and is not read ahead of it
        if probe.picked:
            probe = BoundProbe(stage, em, reader=reader, lane=lane)
            follow(probe, lane)
        found = _together(em, probe.loads, lane, lanes)
        # the places of other gathers are known only in the loop
        free = probe.rows.values()
        found = [(t, at) for t, at in found if not any(depends_on(at, row) for row in free)]
    stored: list[tuple[Array, Expr]] = []
    for tensor, first in found:
        if tensor in reader.inputs:
            array = reader.inputs[tensor]
            near = _registers(em, lanes, array.dtype, "near")
            _call("load", lanes, _place(array, first), _place(near, 0))
        elif tensor == stage.output.output:
            near = _registers(em, lanes, b.output.dtype, "made")
            stored.append((near, first))
        else:
            continue
        reader.near.append((tensor, first, near))
    with em.loop(lanes, "v", T.unroll) as v:
        reader.lane = v
        element(reader, v)
    assert stored or valid is None
    for near, first in stored:
        to, made = _place(b.output, first), _place(near, 0)
        if valid is None:
            _call("store", lanes, to, made)
        else:
            _call("store_where", lanes, valid, to, made)


def _together(em: Scope, loads: Sequence[Load], lane: Expr, lanes: int) -> list[Load]:
    """The loads whose lanes lie side by side, from a multiple of their number on, each once: the
    tensor and the position of the first lane.
    """
    found: list[Load] = []
    for tensor, flat in loads:
        parts: Sequence[Expr] = (
            () if isinstance(flat, int) else detect_linear_equation(flat, [lane])
        )
        if len(parts) != 2 or not _is(parts[0], 1):
            continue
        first = em.index(parts[1])
        if any(t == tensor and em.analyzer.can_prove_equal(first, f) for t, f in found):
            continue
        if isinstance(first, int):
            aligned = first % lanes == 0
        else:
            known = em.analyzer.modular_set(first)
            aligned = int(known.coeff) % lanes == 0 and int(known.base) % lanes == 0
        if aligned:
            found.append((tensor, first))
    return found


def function(
    args: Arguments,
    name: str,
    params: Parameters,
    body: Callable[[Body], None],
    arrays: Mapping[str, TensorType],
    values: Mapping[str, str] | None = None,
) -> str:
    """A lambda over integers, ``values`` and ``arrays``. Arrays are named by their declaration,
    such as ``const float (&y)``.
    """
    places = {declared.split("&")[1].rstrip(")"): t for declared, t in arrays.items()}
    lines = printed(args, params, body, values=values, arrays=places)
    heads = [
        *(f"int {p}" for p, _ in params),
        *(f"{CTYPES[d]} {v}" for v, d in (values or {}).items()),
        *(f"{declared}[{t.size}]" for declared, t in arrays.items()),
    ]
    return "\n".join([f"auto {name} = [=]({', '.join(heads)}) {{", *indented(lines), "};"])


def _registers(em: Emitter, lanes: int, dtype: str, name: str) -> Array:
    made = em.registers(lanes, dtype)
    IRBuilder.name(name, made.buffer)
    return made


def _place(array: Array, flat: Expr) -> Expr:
    return tirx.address_of(array.buffer[flat])


def _call(what: str, lanes: int, *args: Expr) -> None:
    T.evaluate(tirx.call_extern("void", f"gtco::{what}<{lanes}>", *args))


def _is(x: Expr, number: int) -> bool:
    return isinstance(x, tirx.IntImm) and int(x.value) == number


def side_by_side(
    stage: Stage, extents: Sequence[int], follow: Callable[..., None], lanes: int
) -> bool:
    """True if all loads and stores of ``lanes`` neighbours are one access each, or are the same for
    all. ``follow(probe, *parameters, lane)`` records them; the parameters have these extents.
    """
    probe = Probe(stage)
    made = probe.scope.variables(extents)
    params = [v if n > 1 else 0 for v, n in zip(made, extents, strict=True)]
    (lane,) = probe.scope.variables((lanes,))
    follow(probe, *params, lane)
    if probe.conditions:
        return False
    moving = [(t, f) for t, f in probe.loads if depends_on(f, lane)]
    return all(_together(probe.scope, [load], lane, lanes) for load in moving)

"""Index maps of movement operators against numpy, backward and forward."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tvm import tirx

from gtco.tensor.analysis.chains import Epilogue, derived, epilogue, prologue_readable
from gtco.tensor.analysis.indices import broadcast_index, reshape_index
from gtco.tensor.emit.emitter import Emitter, KernelArguments, kernel
from gtco.tensor.emit.reader import Reader
from gtco.tensor.operators import REDUCTION, pattern
from gtco.tensor.reference import evaluate
from gtco.tensor.stage import Operator, TensorType, make_attrs, make_stage

sizes = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes of the same size: the same prime factors, grouped and ordered in two ways."""
    factors = draw(st.lists(st.sampled_from([1, 2, 3, 5, 7]), min_size=0, max_size=5))

    def grouped(order: list[int]) -> tuple[int, ...]:
        cuts = sorted(draw(st.lists(st.integers(0, len(order)), max_size=3)))
        parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]
        return tuple(prod(p) for p in parts)

    return grouped(factors), grouped(draw(st.permutations(factors)))


@given(reshapes())
def test_reshape_index(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    old, new = shapes
    for flat in range(prod(old)):
        index = [int(i) for i in np.unravel_index(flat, old)]
        wanted = [int(i) for i in np.unravel_index(flat, new)]
        assert reshape_index(index, old, new) == wanted


def test_reshape_divides_only_where_it_must() -> None:
    """[197, 768] -> [197, 12, 64]: the rows are passed on unchanged."""
    row = tirx.Var("row", "int32")
    first, *rest = reshape_index([row, 130], [197, 768], [197, 12, 64])
    assert Emitter(8).index(first).same_as(row)
    assert rest == [2, 2]


@given(sizes, st.data())
def test_broadcast_index(shape: tuple[int, ...], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(shape)))
    operand = tuple(data.draw(st.sampled_from([1, n])) for n in shape[cut:])
    values = np.arange(prod(operand)).reshape(operand)
    wide = np.broadcast_to(values, shape)
    for index in np.ndindex(*shape):
        assert values[tuple(broadcast_index(index, operand))] == wide[index]


@st.composite
def movements(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[str, dict[str, Any]]:
    kinds = ["permute", "roll", "slice", "pad"]
    kind = draw(st.sampled_from(kinds))
    if kind == "permute":
        return kind, {"axes": tuple(draw(st.permutations(range(len(shape)))))}
    if kind == "roll":
        return kind, {"shifts": tuple(draw(st.integers(-9, 9)) for _ in shape)}
    if kind == "slice":
        begin = tuple(draw(st.integers(0, n - 1)) for n in shape)
        return kind, {"begin": begin, "strides": tuple(draw(st.integers(1, 3)) for _ in shape)}
    return kind, {
        "before": tuple(draw(st.integers(0, 2)) for _ in shape),
        "after": tuple(draw(st.integers(0, 2)) for _ in shape),
        "value": 0.0,
    }


def output_shape(kind: str, shape: tuple[int, ...], attrs: dict[str, Any]) -> tuple[int, ...]:
    match kind:
        case "permute":
            return tuple(shape[a] for a in attrs["axes"])
        case "slice":
            ends = zip(shape, attrs["begin"], attrs["strides"], strict=True)
            return tuple(-(-(n - b) // s) for n, b, s in ends)
        case "pad":
            both = zip(shape, attrs["before"], attrs["after"], strict=True)
            return tuple(n + b + a for n, b, a in both)
    return shape


class Values(Reader):
    """Reads numbers, not expressions."""

    arrays: dict[str, np.ndarray]

    def load(self, tensor: str, index: Any) -> Any:
        return float(self.arrays[tensor][tuple(index)])


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), st.data())
def test_reader_agrees_with_the_reference(shape: tuple[int, ...], data: st.DataObject) -> None:
    """A chain of up to three movements, read element by element backward."""
    operators, at, here = [], "x", shape
    for n in range(data.draw(st.integers(1, 3))):
        kind, attrs = data.draw(movements(here))
        here = output_shape(kind, here, attrs)
        operators.append(Operator(kind, (at,), f"t{n}", TensorType(here), make_attrs(**attrs)))
        at = f"t{n}"
    stage = make_stage(operators, {"x": TensorType(shape)}, [])
    values = {"x": np.arange(1, prod(shape) + 1, dtype=np.float32).reshape(shape)}
    for op in operators:
        values[op.output] = evaluate(op, values[op.inputs[0]])
    reader = Values(stage, Emitter(8), {})
    reader.arrays = values
    for index in np.ndindex(*here):
        got = reader.value(at, list(index))
        assert float(getattr(got, "value", got)) == values[at][index]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), st.data())
def test_forward_and_backward_are_inverse(shape: tuple[int, ...], data: st.DataObject) -> None:
    """After an anchor, ``forward`` stores an element where the reference has it."""
    operators, at, here = [Operator("relu", ("x",), "anchor", TensorType(shape))], "anchor", shape
    for n in range(data.draw(st.integers(1, 3))):
        kind = data.draw(st.sampled_from(["permute", "roll", "reshape", "identity"]))
        attrs: dict[str, Any] = {}
        if kind == "permute":
            attrs = {"axes": tuple(data.draw(st.permutations(range(len(here)))))}
            here = tuple(here[a] for a in attrs["axes"])
        elif kind == "roll":
            attrs = {"shifts": tuple(data.draw(st.integers(-9, 9)) for _ in here)}
        elif kind == "reshape":
            here = tuple(data.draw(st.permutations([*here, 1])))
        operators.append(Operator(kind, (at,), f"t{n}", TensorType(here), make_attrs(**attrs)))
        at = f"t{n}"
    stage = make_stage(operators, {"x": TensorType(shape)}, [])
    tail = epilogue(stage, "anchor")
    assert isinstance(tail, Epilogue)
    values = {"anchor": np.arange(prod(shape), dtype=np.float32).reshape(shape)}
    for op in operators[1:]:
        values[op.output] = evaluate(op, values[op.inputs[0]])
    for index in np.ndindex(*shape):
        assert values[at][tuple(tail.forward(list(index)))] == values["anchor"][index]


def behind(*operators: tuple[str, tuple[str, ...], str]) -> Any:
    square = TensorType((4, 4))
    ops = [Operator("matmul", ("a", "b"), "c", square)]
    for kind, inputs, output in operators:
        attrs = make_attrs(axes=(1, 0)) if kind == "permute" else ()
        attrs = make_attrs(axis=1) if kind == "softmax" else attrs
        ops.append(Operator(kind, inputs, output, square, attrs))
    return make_stage(ops, dict.fromkeys("ab", square) | {"m": square}, [])


def test_what_is_an_epilogue() -> None:
    scaled = behind(("sigmoid", ("c",), "s"), ("multiply", ("c", "s"), "y"))
    assert epilogue(scaled, "c") is not None
    masked = behind(("permute", ("c",), "t"), ("add", ("t", "m"), "y"))
    assert epilogue(masked, "c") is not None
    crossed = behind(("permute", ("c",), "t"), ("add", ("c", "t"), "y"))
    assert epilogue(crossed, "c") is None  # it needs an element and its mirror image
    assert pattern("softmax") == REDUCTION
    assert epilogue(behind(("softmax", ("c",), "y")), "c") is None


def test_derived_and_readable() -> None:
    stage = behind(("exp", ("m",), "e"), ("add", ("c", "e"), "y"))
    assert [op.output for op in derived(stage, "c")] == ["y"]
    assert prologue_readable(stage, ["e"]) and not prologue_readable(stage, ["y"])
    assert prologue_readable(stage, ["y"], frozenset({"c"}))


def test_what_varies_from_lane_to_lane() -> None:
    """The lane varies, and so do values that are computed from it and bound. After the loop nothing
    varies.
    """
    seen: list[tuple[bool, ...]] = []

    def body(em: Emitter, args: KernelArguments) -> None:
        with em.loop(4, "i") as i:
            with em.vector(8) as lane:
                bound = em.let(em.load(args.inputs["x"], [i, lane]))
                place = em.let_index(tirx.floormod(lane, 2) + i)
                seen.append(tuple(map(em.varies, (i, 3, lane, lane + i, bound, place))))
                em.store(args.output, [i, lane], bound)
            seen.append((em.varies(lane), em.varies(i)))

    kind = TensorType((4, 8))
    kernel("f", {"x": kind}, kind, 0, 8, body)
    assert seen == [(False, False, True, True, True, True), (False, False)]


def test_a_choice_that_evaluates_both_sides_reads_inside_both() -> None:
    """A concatenation of arithmetic and plain movement. The movement is read wherever the choice is
    made, so its index must lie inside its tensor everywhere (deformable-detr read before a tensor).
    """
    rows, width = (6, 4, 3), 8
    operators = [
        Operator("relu", ("a",), "r", TensorType((rows[0], width))),
        Operator("relu", ("b",), "s", TensorType((rows[1], width))),
        Operator(
            "concat", ("r", "s", "c"), "y", TensorType((sum(rows), width)), make_attrs(axis=0)
        ),
    ]
    types = {n: TensorType((k, width)) for n, k in zip("abc", rows, strict=True)}
    stage = make_stage(operators, types, [])
    seen: dict[str, tuple[int, int]] = {}

    class Bounded(Reader):
        def load(self, tensor: str, index: Any) -> Any:
            known = self.emitter.analyzer.const_int_bound(index[0])
            seen[tensor] = (known.min_value, known.max_value)
            return super().load(tensor, index)

    def body(em: Emitter, args: KernelArguments) -> None:
        reader = Bounded(stage, em, args.inputs)
        with em.loop(sum(rows), "i") as i, em.loop(width, "j") as j:
            em.store(args.output, [i, j], reader.value("y", [i, j]))

    kernel("k", types, stage.output.type, 0, 8, body)
    assert seen == {n: (0, k - 1) for n, k in zip("abc", rows, strict=True)}

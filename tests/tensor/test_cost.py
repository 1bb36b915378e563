"""The cost of element-wise operators: the count of the emitted program against LLVM's own."""

from __future__ import annotations

import re

import pytest

from gtco.codegen.llvm import compile_functions
from gtco.tensor import cost
from gtco.tensor.elementwise import ELEMENTWISE_OPERATORS
from gtco.tensor.emit import scalar
from gtco.tensor.emit.arithmetic import LIBM
from gtco.tensor.emit.emitter import Emitter, KernelArguments, kernel
from gtco.tensor.operators import ELEMENTWISE, INJECTIVE, OPERATORS, pattern
from gtco.tensor.stage import Operator, TensorType, make_attrs, make_stage
from tests.kernels import runnable
from tests.tensor.test_scalar import ATTRIBUTES, FLOATS

MACHINE = runnable("x86-64-v3")
DTYPES = {"f": "float32", "i": "int32", "b": "bool"}
CALL = re.compile(r"\tcallq?\t\*?(?:\w+@GOTPCREL\(%rip\)|\w+|%\w+)")


def single(kind: str, dtype: str, lanes: int) -> tuple[Operator, list[str]]:
    row = ELEMENTWISE_OPERATORS[kind]
    names = tuple(f"x{i}" for i in range(row.inputs))
    dtypes = ["bool"] * row.conditions + [dtype] * (row.inputs - row.conditions)
    out = TensorType((lanes,), "bool" if row.tests else dtype)
    return Operator(kind, names, "y", out, make_attrs(**ATTRIBUTES.get(kind, {}))), dtypes


def assembly(op: Operator, dtypes: list[str]) -> list[str]:
    def body(em: Emitter, args: KernelArguments) -> None:
        given = [em.load_vector(x, [0]) for x in args.inputs.values()]
        em.store_vector(args.output, [0], scalar.apply(em, op, given, dtypes))

    types = {x: TensorType(op.type.shape, d) for x, d in zip(op.inputs, dtypes, strict=True)}
    function = kernel("k", types, op.type, 0, MACHINE.lanes, body)
    text = compile_functions([function], MACHINE).inspect_source("asm")
    return text[text.index("\nk:") : text.index(".Lfunc_end0")].splitlines()


@pytest.mark.parametrize("kind", [*FLOATS, "cast"])
def test_instructions_are_those_that_llvm_makes(kind: str) -> None:
    """Divisions and square roots have their own weights; libm is called once for each lane."""
    op, dtypes = single(kind, "float32", MACHINE.lanes)
    lines = assembly(op, dtypes)
    counted = cost.instructions(op, dtypes, MACHINE.lanes)
    calls = sum(bool(CALL.match(line)) for line in lines)
    names = [k for k in LIBM if k in ("pow" if kind == "power" else kind,)]
    if calls:
        assert calls == MACHINE.lanes and counted == MACHINE.lanes * LIBM[names[0]]
        return
    found = 0.0
    for line in lines:
        name = line.split()[0] if line.startswith("\tv") else ""
        if name.startswith("vdiv"):
            found += cost.DIVIDE
        elif name.startswith("vsqrt"):
            found += cost.SQUARE_ROOT
        elif name and not name.startswith(("vmov", "vbroadcast", "vzero", "vpbroadcast")):
            found += 1
    assert 0.6 * found - 3 <= counted <= 1.4 * found + 3, (counted, found, lines)


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("kind", ELEMENTWISE_OPERATORS)
def test_every_operator_has_a_cost_in_every_dtype(kind: str, lanes: int) -> None:
    row = ELEMENTWISE_OPERATORS[kind]
    for dtype in (*(DTYPES[k] for k in row.dtypes if k in DTYPES), *wide(row.dtypes)):
        op, dtypes = single(kind, dtype, lanes)
        counted = cost.instructions(op, dtypes, lanes)
        assert 0 <= counted < 100 * 16 * lanes, (kind, dtype, counted)


def wide(kinds: str) -> list[str]:
    return ["float64", "float16"] * ("f" in kinds) + ["int64"] * ("i" in kinds)


def test_movement_has_a_cost() -> None:
    assert set(cost.MOVEMENT) == {k for k, info in OPERATORS.items() if info.pattern == INJECTIVE}
    assert {k for k in OPERATORS if pattern(k) == ELEMENTWISE} == set(ELEMENTWISE_OPERATORS)


def test_what_has_no_cost_is_an_error() -> None:
    x = TensorType((4, 8))
    stage = make_stage([Operator("softmax", ("x",), "y", x, make_attrs(axis=1))], {"x": x}, [])
    with pytest.raises(KeyError, match="softmax"):
        cost.vectors(stage, stage.operators, 8)


def test_loads_of_operands_count() -> None:
    """The bias of a sum is loaded. The caller has the value that the chain begins with, and a
    number stays in a register.
    """
    x, bias, number = TensorType((4, 8)), TensorType((8,)), TensorType(())
    operators = [
        Operator("add", ("x", "b"), "s", x),
        Operator("multiply", ("s", "n"), "m", x),
        Operator("reshape", ("m",), "r", x),
        Operator("multiply", ("r", "s"), "y", x),
    ]
    stage = make_stage(operators, {"x": x, "b": bias, "n": number}, ["b", "n"])
    assert [cost.vectors(stage, [op], 8).vector for op in stage.operators] == [2, 1, 0, 1]
    assert cost.vectors(stage, stage.operators, 8) == (4, 0)


def test_chains_of_many_instructions_go_at_the_rate_of_exp() -> None:
    """A GELU goes at this rate; the loads of its operands count as other instructions. A single
    instruction does not, however expensive it is, and neither do calls for each lane.
    """
    x, bias = TensorType((4, 8)), TensorType((8,))
    operators = [
        Operator("add", ("x", "b"), "s", x),
        Operator("gelu", ("s",), "g", x, make_attrs(approximate="none")),
        Operator("divide", ("g", "x"), "d", x),
        Operator("sin", ("d",), "y", x),
    ]
    stage = make_stage(operators, {"x": x, "b": bias}, ["b"])
    each = [cost.vectors(stage, [op], 8) for op in stage.operators]
    gelu = cost.instructions(operators[1], ["float32"], 8)
    assert each[:2] == [(2, 0), (0, gelu)] and gelu > cost.DIVIDE
    assert each[2] == (cost.DIVIDE + 1, 0) and each[3].exp == 0 < each[3].vector
    whole = cost.vectors(stage, stage.operators, 8)
    assert whole == (sum(v.vector for v in each), gelu) and whole.total == sum(whole)


def test_a_call_for_each_lane_is_dear() -> None:
    """A sine costs more than a GELU, and a sum costs least."""
    sin, gelu, add = (
        cost.instructions(*single(kind, "float32", 16), 16) for kind in ("sin", "gelu", "add")
    )
    assert sin > 5 * gelu > 50 * add


@pytest.mark.parametrize("lanes", [8, 16])
def test_numbers_of_8_bytes_take_two_vectors(lanes: int) -> None:
    one, two = (cost.instructions(*single("add", d, lanes), lanes) for d in ("float32", "int64"))
    assert two == 2 * one
    assert cost.instructions(*single("divide", "float64", lanes), lanes) == 2 * cost.DIVIDE


@pytest.mark.parametrize("lanes", [8, 16])
def test_integers_are_divided_lane_by_lane(lanes: int) -> None:
    """No vector instruction divides them."""
    counted = cost.instructions(*single("divide", "int32", lanes), lanes)
    assert counted >= lanes * cost.INTEGER_DIVIDE


@pytest.mark.parametrize("kind", ["gelu", "relu", "add"])
def test_one_lane_costs_what_it_does(kind: str) -> None:
    """A thread of a GPU has one lane; a load is then not counted as a vector of one."""
    types = {"x": TensorType((4, 8)), "y": TensorType((4, 8))}
    inputs = ("x", "y") if kind == "add" else ("x",)
    stage = make_stage([Operator(kind, inputs, "z", TensorType((4, 8)))], types, [])
    one, eight = (cost.vectors(stage, stage.operators, lanes).total for lanes in (1, 8))
    assert 0 < one <= eight

"""The cost of element-wise and movement operators in a kernel: vector instructions, counted in the
program that each operator emits for one vector.

The unit is the time of one simple vector instruction: level 0's ``vector`` or, for operators that
are long chains, its ``exp``. A dtype wider than float32 takes as many instructions as its vector
has parts. A call of the C library (``LIBM`` of ``gtco.tensor.emit.arithmetic``) is made for each
lane.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import tvm
from tvm import tirx
from tvm.target.codegen import llvm_get_intrinsic_name

from gtco.tensor.analysis.chains import Epilogue
from gtco.tensor.emit import scalar
from gtco.tensor.emit.arithmetic import LIBM
from gtco.tensor.emit.bfloat16 import ROUND
from gtco.tensor.emit.emitter import Emitter, KernelArguments, kernel, lanes_of, operands
from gtco.tensor.emit.lookup import LOOKUP
from gtco.tensor.stage import ITEM_BYTES, Operator, Stage, TensorType

DIVIDE, SQUARE_ROOT = 8.0, 10.0  # their throughput on Zen 5; elsewhere it is about the same
INTEGER_DIVIDE = 10.0  # price of one lane: no vector instruction divides integers
# An operator with a number of instructions in this range is a chain of polynomials, as exp is. The
# range is above the price of any single instruction, and below that of a call for each lane.
CHAIN = (12.0, 100.0)
# Movement before or after a product changes only addresses; those with a cost also choose values.
MOVEMENT = {
    **dict.fromkeys(("identity", "reshape", "permute", "slice", "broadcast", "roll"), 0.0),
    "concat": 2.0,
    "pad": 2.0,
    "gather": 2.0,
}

# Prices, by the kind of TIR node or the operator that is called. A missing entry is an error.
_FREE = (
    "SeqStmt AllocBuffer DeclBuffer BufferStore Bind Var TensorLoad Broadcast FloatImm IntImm "
    "StringImm Not tirx.reinterpret copysign"  # copysign of constants alone
).split()
_ONE = (
    "Add Sub Mul Max Min Select Cast EQ NE LT LE GT GE BitwiseAnd BitwiseOr BitwiseXor BitwiseNot "
    "LShift RShift tirx.floor prim.ceil tirx.trunc tirx.fabs nearbyint fma"
).split()
PRICES = {
    **dict.fromkeys(_FREE, 0.0),
    **dict.fromkeys(_ONE, 1.0),
    "Div": DIVIDE,
    "tirx.sqrt": SQUARE_ROOT,
    "ldexp": 3.0,  # its conversion of integers to floats, and vscalefps, which is two on Intel
    ROUND: 2.0,  # vcvtneps2bf16 and moving its half of a vector
    LOOKUP: 4.0,  # two lookups of 128 places, the top bits and the choice by them
}


class Vectors(NamedTuple):
    """Vector instructions by the rate at which they run; the fields are rows of the table of
    rates.
    """

    vector: float = 0.0
    exp: float = 0.0

    @property
    def total(self) -> float:
        return self.vector + self.exp

    def plus(self, other: Vectors, times: float = 1.0) -> Vectors:
        return Vectors(self.vector + times * other.vector, self.exp + times * other.exp)


def vectors(stage: Stage, operators: Iterable[Operator], lanes: int) -> Vectors:
    """Vector instructions that these operators of the stage spend on one vector of ``lanes``.

    A load counts if an operand is combined with a value that is there (the bias of an addition).
    The load of the tensor with which a chain of operators begins does not count.
    """
    short = chain = 0.0
    rounded = scalar.rounded(stage)
    for op in operators:
        if op.kind in MOVEMENT:
            short += MOVEMENT[op.kind]
            continue
        dtypes = [stage.types[x].dtype for x in op.inputs]
        each = instructions(op, dtypes, lanes, op.output in rounded)
        if CHAIN[0] <= each <= CHAIN[1]:
            chain += each
        else:
            short += each
        read = [x for x in op.inputs if x not in stage.producers]
        short += sum(stage.types[x].size > 1 for x in read[len(read) == len(op.inputs) :])
    return Vectors(short, chain)


def epilogue_vectors(tail: Epilogue, lanes: int) -> Vectors:
    """Vector instructions an epilogue spends on one vector of the anchor's elements."""
    return vectors(tail.stage, tail.operators, lanes)


def instructions(
    op: Operator, dtypes: Sequence[str], lanes: int, is_rounded: bool = False
) -> float:
    """Vector instructions of one element-wise operator on one vector of ``lanes`` elements. What
    ``is_rounded`` says is in :func:`gtco.tensor.emit.scalar.apply`.
    """
    return _instructions(op.kind, op.attrs, op.type.dtype, tuple(dtypes), lanes, is_rounded)


def conversion(old: str, new: str, lanes: int) -> float:
    """Vector instructions that convert a vector from one dtype to another."""
    return 0.0 if old == new else _instructions("cast", (), new, (old,), lanes)


@lru_cache(maxsize=4096)
def _instructions(
    kind: str,
    attrs: tuple[tuple[str, Any], ...],
    out: str,
    dtypes: tuple[str, ...],
    lanes: int,
    is_rounded: bool = False,
) -> float:
    if kind == "byte_function":
        return PRICES[LOOKUP]
    names = tuple(f"x{i}" for i in range(len(dtypes)))
    op = Operator(kind, names, "y", TensorType((lanes,), out), attrs)

    def body(em: Emitter, args: KernelArguments) -> None:
        if scalar.vectorizable(op, dtypes):
            given = [em.load_vector(x, [0]) for x in args.inputs.values()]
            em.store_vector(args.output, [0], scalar.apply(em, op, given, dtypes, is_rounded))
            return
        given = [em.load(x, [0]) for x in args.inputs.values()]
        em.store(args.output, [0], scalar.apply(em, op, given, dtypes, is_rounded))

    types = {x: TensorType((lanes,), d) for x, d in zip(names, dtypes, strict=True)}
    counted = count(kernel("counted", types, op.type, 0, lanes, body).body)
    return counted if scalar.vectorizable(op, dtypes) else lanes * counted


def count(body: Any) -> float:
    """Vector instructions of a TIR statement without loops. Loads and stores do not count. Neither
    do nodes that LLVM folds into their neighbours: constants, and a product that is added to
    something.
    """
    nodes = _nodes(body)
    factors = {
        hash(part): part
        for node in nodes
        if isinstance(node, tirx.Add | tirx.Sub) and _dtype(node).startswith("float")
        for part in [next((x for x in (node.a, node.b) if isinstance(x, tirx.Mul)), None)]
        if part is not None
    }
    return sum(_price(node) for node in nodes) - sum(_price(node) for node in factors.values())


def _nodes(body: Any) -> list[Any]:
    """The nodes of a statement, each once even if it is used several times, without addresses."""
    found: dict[int, Any] = {}
    left = [body]
    while left:
        node = left.pop()
        if hash(node) in found:
            continue
        found[hash(node)] = node
        if isinstance(node, tirx.SeqStmt):
            left += list(node.seq)
        elif isinstance(node, tirx.Bind | tirx.BufferStore):
            left.append(node.value)
        elif isinstance(node, tvm.ir.Expr):
            left += [x for x in operands(node) if isinstance(x, tvm.ir.Expr)]
    return list(found.values())


def _dtype(node: Any) -> str:
    return str(node.ty).partition("x")[0]


def _price(node: Any) -> float:
    kind = type(node).__name__
    if kind == "Call":
        kind = node.op.name
        if kind == "tirx.call_llvm_pure_intrin":
            kind = llvm_get_intrinsic_name(int(node.args[0])).removeprefix("llvm.")
            if kind in LIBM:
                return lanes_of(node) * LIBM[kind]
        if kind == "tirx.call_pure_extern":
            return LIBM[node.args[0].value]
    if kind == "Div" and not _dtype(node).startswith("float"):
        return INTEGER_DIVIDE * lanes_of(node)
    price = PRICES[kind]
    if not price or lanes_of(node) == 1:
        return price
    return price * max(1.0, ITEM_BYTES[_dtype(node)] / 4)

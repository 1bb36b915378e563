"""The reads and stores of a stage as C++ lambdas: the functions that device templates call.

::

    auto a = [=](int m, int k) -> float { ...; return ...; };        # value: through a prologue
    auto a = [=](int m, int k) -> const half* { return in0 + ...; }; # address: movement alone
    auto store = [=](int m, int n, float value) { out[...] = ...; }; # through an epilogue

Each is a small TIR function, which the same Reader writes as on a CPU, and which is then printed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as T

from gtco.tensor.analysis.chains import Epilogue
from gtco.tensor.analysis.movement import CHOOSING, MOVEMENT
from gtco.tensor.cuda.arguments import Arguments
from gtco.tensor.cuda.printer import Printer
from gtco.tensor.cuda.spelling import BFLOAT16_ROUNDING, CTYPES, PrintError, indented
from gtco.tensor.emit.bfloat16 import convert
from gtco.tensor.emit.emitter import Array, Emitter, Expr, storage, view
from gtco.tensor.emit.reader import Reader
from gtco.tensor.emit.scalar import NARROW
from gtco.tensor.stage import Stage, TensorType

Parameters = Sequence[tuple[str, int]]  # name and extent of each index: 0 <= name < extent
IndexMap = Callable[[Sequence[Expr]], Sequence[Expr]]  # the parameters -> an index of the tensor
Known = Mapping[str, str]  # tensors whose value is a parameter, and its name


class TextEmitter(Emitter):
    """Writes code that is printed. C++ refers to a bound value by its name, however large it is, so
    no value needs an array.
    """

    bfloat16_rounding = BFLOAT16_ROUNDING

    def reread(self, value: Expr) -> Expr:
        return value

    def _unread(self, value: Expr) -> Expr:
        return value


@dataclass(frozen=True)
class Body:
    """The tools for writing a lambda's body: emitter, the kernel's arrays, the parameters."""

    em: Emitter
    inputs: Mapping[str, Array]
    output: Array
    index: tuple[Expr, ...]
    given: Mapping[str, Expr]  # values by the names of their parameters
    arrays: Mapping[str, Array]  # arrays by the names of their parameters
    result: Array | None  # a store at 0 returns

    def give(self, value: Expr) -> None:
        assert self.result is not None
        T.buffer_store(self.result.buffer, value, [0])


def value(
    args: Arguments,
    stage: Stage,
    tensor: str,
    name: str,
    params: Parameters,
    index: IndexMap,
    known: Known | None = None,
    dtype: str = "",
) -> str:
    """``auto name = [=](int i, int j) -> float {...};``: the tensor's element at ``index`` of the
    parameters, through its whole prologue. float16 and bfloat16 are returned as float32, other
    dtypes unchanged, or all as ``dtype``. Tensors in ``known`` are float32 parameters after the
    index.
    """
    own = stage.types[tensor].dtype
    wanted = dtype or computed(own)

    def body(b: Body) -> None:
        reader = _reader(stage, b, known or {})
        found = reader.value(tensor, [b.em.index(i) for i in index(b.index)])
        b.give(convert(b.em, found, own, wanted))

    return write(args, name, params, body, tuple((known or {}).values()), returns=wanted)


def computed(dtype: str) -> str:
    """The dtype in which a kernel computes for elements of this dtype."""
    return "float32" if dtype in NARROW else dtype


def addressable(stage: Stage, tensor: str) -> bool:
    """True if each element of ``tensor`` lies unchanged in one of the stage's inputs."""
    op = stage.producers.get(tensor)
    while op is not None:
        if op.kind not in MOVEMENT - CHOOSING:
            return False
        op = stage.producers.get(op.inputs[0])
    return True


def address(
    args: Arguments, stage: Stage, tensor: str, name: str, params: Parameters, index: IndexMap
) -> str:
    """``auto name = [=](int i, int j) -> const half* {...};``: the address of the tensor's element,
    for tensors that are :func:`addressable`.
    """
    if not addressable(stage, tensor):
        raise PrintError(f"the elements of '{tensor}' are computed, and lie nowhere")
    own = stage.types[tensor].dtype

    def body(b: Body) -> None:
        found = Reader(stage, b.em, b.inputs).value(tensor, [b.em.index(i) for i in index(b.index)])
        b.give(found)

    return write(args, name, params, body, returns=own, pointer=True)


def store(
    args: Arguments,
    stage: Stage,
    tail: Epilogue,
    name: str,
    params: Parameters,
    index: IndexMap,
    known: Known | None = None,
) -> str:
    """``auto name = [=](int m, int n, float value) {...};``: stores the result of the epilogue for
    the anchor's ``value`` at ``index`` of the parameters in its place. Tensors in ``known`` are
    float32 parameters after the value.
    """
    own = stage.types[tail.anchor].dtype

    def body(b: Body) -> None:
        given = convert(b.em, b.given["value"], computed(own), own)
        reader = _reader(stage, b, known or {})
        reader.finish(tail, [b.em.index(i) for i in index(b.index)], given, b.output)

    values = ("value", *(known or {}).values())
    return write(args, name, params, body, values, {"value": computed(own)})


def write(
    args: Arguments,
    name: str,
    params: Parameters,
    body: Callable[[Body], None],
    values: Sequence[str] = (),
    dtypes: Mapping[str, str] | None = None,
    returns: str = "",
    pointer: bool = False,
    outer: int = 0,
) -> str:
    """A lambda whose body ``body`` emits. Its parameters are the integers ``params``, then
    ``values`` (float32, or as ``dtypes`` says). It ``returns`` a dtype, or with ``pointer`` the
    address of an element. The first ``outer`` parameters are variables of the kernel, by their
    names.
    """
    kinds = [(dtypes or {}).get(v, "float32") for v in values]
    element = CTYPES.get(returns, "")
    returned = "" if not returns else f" -> const {element}*" if pointer else f" -> {element}"
    heads = [f"int {p}" for p, _ in params[outer:]]
    heads += [f"{CTYPES[d]} {v}" for v, d in zip(values, kinds, strict=True)]
    given = dict(zip(values, kinds, strict=True))
    lines = printed(args, params, body, given, returns, pointer=pointer)
    if len(lines) == 1 and len(lines[0]) < 60:
        return f"auto {name} = [=]({', '.join(heads)}){returned} {{ {lines[0]} }};"
    whole = [f"auto {name} = [=]({', '.join(heads)}){returned} {{", *indented(lines), "};"]
    return "\n".join(whole)


def printed(
    args: Arguments,
    params: Parameters,
    body: Callable[[Body], None],
    values: Mapping[str, str] | None = None,
    returns: str = "",
    arrays: Mapping[str, TensorType] | None = None,
    pointer: bool = False,
) -> list[str]:
    """The lines of a function's body over these parameters: integers, values and arrays. With
    ``pointer`` it returns the address of the element that ``body`` gives.
    """
    printer, function = traced(args, params, body, values, returns, arrays)
    printer.places = pointer
    return printer.lines(function)


def traced(
    args: Arguments,
    params: Parameters,
    body: Callable[[Body], None],
    values: Mapping[str, str] | None = None,
    returns: str = "",
    arrays: Mapping[str, TensorType] | None = None,
) -> tuple[Printer, Any]:
    """A function's body as TIR, and its printer, which knows the kernel's pointers and the
    parameters by name.
    """
    given, places = values or {}, arrays or {}
    with IRBuilder() as builder:
        with T.prim_func(s_tir=False):
            T.func_name("lambda_body")
            pointers = [
                T.arg(f"in{n}", T.handle(storage(t.dtype))) for n, (_, t) in enumerate(args.inputs)
            ]
            out = T.arg("out", T.handle(storage(args.output.dtype)))
            result = T.arg("result", T.handle(storage(returns or "float32")))
            index = [T.arg(p, T.int32()) for p, _ in params]
            handed = {v: T.arg(v, _made(d)) for v, d in given.items()}
            handles = {a: T.arg(a, T.handle(storage(t.dtype))) for a, t in places.items()}
            em = TextEmitter(1)
            for var, (_, extent) in zip(index, params, strict=True):
                em.bind(var, extent)
            inputs = {
                tensor: view(pointer, t, f"in{n}")
                for n, (pointer, (tensor, t)) in enumerate(zip(pointers, args.inputs, strict=True))
            }
            output = view(out, args.output, "out")
            returned = view(result, TensorType((1,), returns or "float32"), "result")
            # an index of extent 1 is always 0
            at = tuple(0 if n == 1 else v for v, (_, n) in zip(index, params, strict=True))
            held = {a: view(handles[a], t, a) for a, t in places.items()}
            body(Body(em, inputs, output, at, handed, held, returned if returns else None))
    function = builder.get()
    printer = Printer(em, returned=returned.buffer)
    for p in (*pointers, out, result, *index, *handed.values(), *handles.values()):
        printer.name(p, str(p.name))
    narrow = [p for p, (_, t) in zip(pointers, args.inputs, strict=True) if t.dtype == "bfloat16"]
    printer.bfloat16 |= {*narrow, *([out] if args.output.dtype == "bfloat16" else [])}
    printer.bfloat16 |= {returned.buffer} if returns == "bfloat16" else set()
    return printer, function.body


def _made(dtype: str) -> Expr:
    """A variable of elements of this dtype."""
    return T.boolean() if dtype == "bool" else getattr(T, storage(dtype))()


def _reader(stage: Stage, b: Body, known: Known) -> Reader:
    def handed(tensor: str, parameter: str) -> Callable[[Sequence[Expr]], Expr]:
        value = convert(b.em, b.given[parameter], "float32", stage.types[tensor].dtype)
        return lambda index: value

    return Reader(stage, b.em, b.inputs, {t: handed(t, p) for t, p in known.items()})

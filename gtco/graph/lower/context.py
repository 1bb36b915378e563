"""The state that the rules for Relax operators use: values, types, and the opaque form for calls
without a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy
import tvm
from tvm import relax

from gtco.graph.graph import Graph
from gtco.support.quiet import quiet_code
from gtco.tensor.operators import CONTRACTIONS
from gtco.tensor.stage import ITEM_BYTES, TensorType

MOST_JOINED = 64  # tensors that one concat puts together


class NoRule(Exception):
    """This call cannot be compiled; the message says why. ``lower`` collects these errors."""


class Lowering:
    """The graph under construction, and the value of each Relax variable in it.

    A tensor is the name of a graph tensor, a tuple is a Python tuple, a shape is a tuple of
    integers. None is a value that could not be made (the failure is already reported).
    """

    def __init__(self, graph: Graph, module: tvm.IRModule) -> None:
        self.graph = graph
        self.module = module
        self.env: dict[Any, Any] = {}
        self.label = ""
        self._interned: dict[int, tuple[Any, str]] = {}

    def value(self, expr: Any) -> Any:
        """The value of an argument: a tensor name, a tuple, or numbers."""
        if isinstance(expr, relax.Var):
            if expr not in self.env:
                raise NoRule(f"a shape that depends on data or on a symbolic size ('{expr.name}')")
            return self.env[expr]
        if isinstance(expr, relax.Tuple):
            return tuple(self.value(field) for field in expr.fields)
        if isinstance(expr, relax.TupleGetItem):
            whole = self.value(expr.tuple_value)
            return None if whole is None else whole[expr.index]
        if isinstance(expr, relax.ShapeExpr):
            return tuple(integer(d) for d in expr.values)
        if isinstance(expr, tvm.tirx.IntImm | tvm.tirx.FloatImm):
            return expr.value
        if isinstance(expr, tvm.ir.expr.GenericConst):
            return self._constant(expr)
        raise NoRule(f"{type(expr).__name__} expression")

    def _constant(self, expr: Any) -> str:
        known = self._interned.get(id(expr))
        if known is None:
            array = expr.value.numpy()
            known = self._interned[id(expr)] = (expr, self.graph.add_constant(array))
        return known[1]

    def array(self, tensor: str) -> numpy.ndarray | None:
        """The value of a constant tensor; None for any other."""
        return self.graph.constants.get(tensor)

    def computed(self, tensor: str) -> bool:
        """True if the tensor's value depends on an input of the model."""
        op = self.graph.producer(tensor)
        if op is None:
            return not self.graph.is_constant(tensor)
        return any(self.computed(source) for source in op.inputs)

    def type(self, tensor: str) -> TensorType:
        return self.graph.types[tensor]

    def emit(
        self, kind: str, inputs: tuple[str, ...], type: TensorType | None = None, **attrs: Any
    ) -> str:
        made = self.graph.add(kind, inputs, type, name=self.label, **attrs)
        known, first = self.type(made), self.type(inputs[0]).dtype if inputs else ""
        if kind in CONTRACTIONS and known.dtype != first:  # Relax's products have one dtype
            return self.emit("cast", (made,), TensorType(known.shape, first))
        return made

    def constant(self, value: Any, dtype: str) -> str:
        return self.graph.add_constant(numpy.asarray(value, dtype=dtype))

    def reshape(self, tensor: str, shape: tuple[Any, ...]) -> str:
        known = self.type(tensor)
        if known.shape == tuple(shape):
            return tensor
        return self.emit("reshape", (tensor,), TensorType(tuple(shape), known.dtype))

    def concat(self, tensors: Sequence[str], axis: int) -> str:
        """The tensors along an axis. Many are put together in groups first, because LLVM overflows
        its stack on a kernel that chooses among hundreds.
        """
        while len(tensors) > MOST_JOINED:
            groups = [
                tuple(tensors[n : n + MOST_JOINED]) for n in range(0, len(tensors), MOST_JOINED)
            ]
            tensors = [g[0] if len(g) == 1 else self.emit("concat", g, axis=axis) for g in groups]
        return self.emit("concat", tuple(tensors), axis=axis)

    def permute(self, tensor: str, axes: tuple[int, ...]) -> str:
        return (
            tensor
            if axes == tuple(range(len(axes)))
            else self.emit("permute", (tensor,), axes=axes)
        )

    def depends_on_failure(self, argument: Any) -> bool:
        if isinstance(argument, relax.Tuple):
            return any(self.depends_on_failure(field) for field in argument.fields)
        if isinstance(argument, relax.TupleGetItem):
            return self.depends_on_failure(argument.tuple_value)
        return isinstance(argument, relax.Var) and self.env.get(argument, "") is None

    def opaque(self, call: relax.Call, name: str) -> Any:
        """The call as ``relax`` operators that carry their own module, one for each result."""
        short = name.removeprefix("relax.")
        results = list(call.ty.fields) if isinstance(call.ty, relax.TupleType) else [call.ty]
        types = [tensor_type(result, short) for result in results]
        tensors: list[str] = []
        parameters: list[relax.Var] = []

        def swap(argument: Any) -> Any:
            if isinstance(argument, relax.Tuple):
                return relax.Tuple([swap(field) for field in argument.fields])
            if isinstance(argument, tvm.ir.GlobalVar):
                return argument
            value = self.value(argument)
            if not isinstance(value, str):
                return argument
            known = self.type(value)
            parameter = relax.Var(f"p{len(parameters)}", relax.TensorType(known.shape, known.dtype))
            parameters.append(parameter)
            tensors.append(value)
            return parameter

        arguments = [swap(argument) for argument in call.args]
        if isinstance(call.op, tvm.ir.Op) and call.op.name == "relax.call_tir":
            # the importer numbers its functions: einsum, einsum1, ...; the rest is equal
            short = call.args[0].name_hint.rstrip("0123456789")
            arguments[0] = call.args[0]
        body = relax.Call(call.op, arguments, call.attrs, call.ty_args)
        module = _module(body, parameters, self.module)
        _require_legal(module, short)
        text = tvm.ir.save_json(module)
        single = not isinstance(call.ty, relax.TupleType)
        made = tuple(
            self.emit(
                "relax", tuple(tensors), type, module=text, op=short, result=-1 if single else index
            )
            for index, type in enumerate(types)
        )
        return made[0] if single else made


def _module(body: relax.Call, parameters: list[relax.Var], source: tvm.IRModule) -> tvm.IRModule:
    builder = relax.BlockBuilder()
    target = (
        body.args[0]
        if isinstance(body.op, tvm.ir.Op) and body.op.name == "relax.call_tir"
        else None
    )
    if target is not None:
        primitive = builder.add_func(source[target], target.name_hint)
        body = relax.Call(body.op, [primitive, *body.args[1:]], body.attrs, body.ty_args)
    with builder.function("main", parameters):
        with builder.dataflow():
            result = builder.emit_output(builder.emit(body))
        builder.emit_func_output(result)
    return builder.get()


def _require_legal(module: tvm.IRModule, name: str) -> None:
    try:
        with tvm.target.Target("llvm"), quiet_code("BlockBuilder destroyed"):
            legal = relax.backend.DispatchSortScan()(module)
            legal = relax.transform.LegalizeOps()(legal)
    except Exception as error:
        raise NoRule(
            f"{name}: no kernel can be made for its types, shapes and constants"
        ) from error
    left: list[str] = []

    def visit(node: Any) -> None:
        if (
            isinstance(node, relax.Call)
            and isinstance(node.op, tvm.ir.Op)
            and node.op.name != "relax.call_tir"
        ):
            left.append(node.op.name)

    relax.analysis.post_order_visit(legal["main"], visit)
    if left:
        raise NoRule(f"{name}: there is no kernel for it")


def integer(value: Any) -> int:
    """A dimension or an attribute as an int. Raises NoRule if it is symbolic."""
    if isinstance(value, int):
        return value
    if isinstance(value, tvm.tirx.IntImm):
        return int(value.value)
    raise NoRule(f"a shape that depends on data or on a symbolic size ('{value}')")


def integers(values: Any) -> tuple[int, ...]:
    return tuple(integer(value) for value in values)


def tensor_type(ty: Any, name: str) -> TensorType:
    """Relax's tensor type as gtco's. Raises NoRule if the shape is not known or gtco has no such
    dtype.
    """
    if not isinstance(ty, relax.TensorType):
        raise NoRule(f"{name}: its result is not a tensor but {type(ty).__name__}")
    if ty.shape is None:
        raise NoRule(f"{name}: its output's shape depends on data")
    try:
        shape = integers(ty.shape)
    except NoRule as error:
        raise NoRule(f"{name}: its output has {error}") from error
    if str(ty.dtype) not in ITEM_BYTES:
        raise NoRule(f"{name}: dtype {ty.dtype}")
    return TensorType(shape, str(ty.dtype))


Rule = Callable[[Lowering, relax.Call], Any]


def result_type(call: relax.Call) -> TensorType:
    """The type of the single result of a call."""
    return tensor_type(call.ty, call.op.name.removeprefix("relax."))

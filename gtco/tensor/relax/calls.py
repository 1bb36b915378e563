"""Reads a Relax program as its calls of kernels, and the places of their tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax, tirx

from gtco.support.errors import BuildError
from gtco.tensor.relax.apart import APART
from gtco.tensor.relax.sort import SORTS
from gtco.tensor.stage import TensorType

CONSTANT_ELEMENTS = 4096  # a kernel cannot hold larger constants of an opaque operator


class BridgeError(BuildError):
    """The operator cannot become a plain function; the message names the obstacle."""


@dataclass
class Tensor:
    """A tensor of ``main``, and the place of its bytes. ``where`` is "input", "output" or
    "workspace".
    """

    type: TensorType
    where: str = "workspace"
    number: int = 0  # input's position
    value: Any = None  # a constant's array


@dataclass
class KernelCall:
    function: Any
    arguments: list[Tensor]  # the tensors that it reads, then the one that it makes
    made: int = 1


def legalize(module: Any, apart: bool = False) -> Any:
    """Every operator of ``main`` as a call of a PrimFunc; with ``apart`` in the form for threads of
    a GPU.
    """
    with tvm.target.Target("llvm"):
        module = relax.transform.LegalizeOps(APART if apart else SORTS)(module)
        module = relax.backend.DispatchSortScan()(module)
        return relax.transform.LegalizeOps()(module)


def _tensor_type(ty: Any, what: str) -> TensorType:
    if not isinstance(ty, relax.TensorType) or ty.shape is None:
        raise BridgeError(f"{what} is not a tensor of a known shape")
    shape = []
    for d in ty.shape:
        if not isinstance(d, int | tirx.IntImm):
            raise BridgeError(f"{what} has a symbolic dimension '{d}'")
        shape.append(int(d))
    return TensorType(tuple(shape), str(ty.dtype))


@dataclass
class CallReader:
    """Reads a legalized ``main`` into calls; tensors are followed through variables and tuples."""

    module: Any
    values: dict[Any, Any] = field(default_factory=dict)
    calls: list[KernelCall] = field(default_factory=list)

    def read(self, result: int) -> tuple[int, Tensor]:
        """The number of inputs, and the tensor that ``main`` returns (its field ``result``, if it
        is a tuple).
        """
        main = self.module["main"]
        for i, parameter in enumerate(main.params):
            self.values[parameter] = Tensor(_tensor_type(parameter.ty, f"input {i}"), "input", i)
        body = main.body
        if isinstance(body, relax.SeqExpr):
            for block in body.blocks:
                for binding in block.bindings:
                    if not isinstance(binding, relax.VarBinding):
                        raise BridgeError(f"a {type(binding).__name__} in the operator's program")
                    self.values[binding.var] = self.value(binding.value)
            body = body.body
        made = self.value(body)
        if result >= 0:
            made = made[result]
        if not isinstance(made, Tensor):
            raise BridgeError("the operator returns a tuple, and no field of it is named")
        self.calls = _needed(self.calls, made)
        return len(main.params), made

    def value(self, expr: Any) -> Any:
        if isinstance(expr, relax.Tuple):
            return [self.value(f) for f in expr.fields]
        if isinstance(expr, relax.TupleGetItem):
            return self.value(expr.tuple_value)[expr.index]
        if isinstance(expr, tvm.ir.expr.GenericConst):
            array = expr.value.numpy()
            if array.size > CONSTANT_ELEMENTS:
                raise BridgeError(f"a constant of {array.size} elements inside the operator")
            return Tensor(TensorType(tuple(array.shape), str(array.dtype)), value=array)
        if isinstance(expr, relax.Var):
            return self.values[expr]
        if isinstance(expr, relax.Call):
            return self.call(expr)
        raise BridgeError(f"a {type(expr).__name__} in the operator's program")

    def call(self, call: Any) -> Any:
        name = getattr(call.op, "name", "a function")
        if name != "relax.call_tir" or len(call.args) > 2:
            if name in ("relax.call_dps_packed", "relax.call_pure_packed"):
                name += f" of '{call.args[0].global_symbol}'"
            raise BridgeError(f"{name} has no kernel")
        made = call.ty
        fields = list(made.fields) if isinstance(made, relax.TupleType) else [made]
        outputs = [Tensor(_tensor_type(t, "a result")) for t in fields]
        arguments = self.value(call.args[1])
        arguments = arguments if isinstance(arguments, list) else [arguments]
        function = self.module[call.args[0]]
        self.calls.append(KernelCall(function, [*arguments, *outputs], len(outputs)))
        return outputs if isinstance(made, relax.TupleType) else outputs[0]


def _needed(calls: list[KernelCall], made: Tensor) -> list[KernelCall]:
    """The calls on which ``made`` depends."""
    wanted, kept = {id(made)}, []
    for call in reversed(calls):
        if any(id(t) in wanted for t in call.arguments[-call.made :]):
            wanted.update(id(t) for t in call.arguments)
            kept.append(call)
    return kept[::-1]

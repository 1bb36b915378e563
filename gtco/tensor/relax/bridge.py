"""Operators -> Relax -> TIR -> one plain C function: how :mod:`gtco.tensor.sketch.fallback.cpu`
computes an operator that has no other sketch.

::

    Operator --module_of--> Relax 'main'          spellings.py
    --LegalizeOps--> main calls PrimFuncs         calls.py
    --lower_module--> one TIR function: the PrimFuncs in order, intermediates in the workspace

The function has the ABI of ``gtco.runtime`` and calls nothing but libm: no TVM runtime is needed
where it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import tvm
from tvm import s_tir, te, tirx

from gtco.tensor.relax.calls import BridgeError, CallReader, KernelCall, Tensor, legalize
from gtco.tensor.relax.schedule import scheduled
from gtco.tensor.stage import ITEM_BYTES, TensorType

ALIGNMENT = 64
STACK_BYTES = 1024  # larger temporaries go to the workspace

LOWERING = (
    s_tir.transform.CanonicalizeLoop,
    s_tir.transform.LowerInitBlock,
    s_tir.transform.PlanAndUpdateBufferAllocationLocation,
    s_tir.transform.ConvertBlocksToOpaque,
    s_tir.transform.CompactBufferAllocation,
    s_tir.transform.LowerMatchBuffer,
    s_tir.transform.StmtSimplify,
    s_tir.transform.LowerOpaqueBlock,
    tirx.transform.FlattenBuffer,
    tirx.transform.BF16ComputeLegalize,
    lambda: tirx.transform.NarrowDataType(32),
    s_tir.transform.LoopPartition,
    tirx.transform.StmtSimplify,
    tirx.transform.RemoveNoOp,
    s_tir.transform.RewriteUnsafeSelect,
)


def lower_module(
    module: Any,
    symbol: str,
    inputs: Sequence[TensorType],
    order: Sequence[int],
    output: TensorType,
    result: int = -1,
    apart: bool = False,
) -> tuple[Any, int, int]:
    """One TIR function ``symbol(inputs..., output, workspace, begin, end)``, the bytes of workspace
    that it needs, and its number of tasks. With ``apart`` every independent iteration is a task.

    ``order`` says which of ``inputs`` each parameter of ``main`` is. Raises :class:`BridgeError`
    with the reason if the module needs more than plain code.
    """
    reader = CallReader(legalize(module, apart))
    count, made = reader.read(result)
    if count != len(order):
        raise BridgeError(
            f"the operator's program takes {count} inputs, the stage has {len(order)}"
        )
    if made.type.shape != output.shape or made.type.dtype != output.dtype:
        raise BridgeError(f"the operator's program yields {made.type}, the stage says {output}")
    return _Merger(symbol, inputs, order, output, apart).merge(reader.calls, made)


class PlainFunction:
    """A function of the runtime's ABI, made of lowered statements. Large allocations go to the
    workspace. A parallel loop that is the whole function becomes its tasks.
    """

    def __init__(self, symbol: str) -> None:
        self.symbol = symbol
        self.workspace = pointer("workspace", "uint8")
        self.scratch = tirx.decl_buffer((1 << 30,), "uint8", name="scratch", layout=None)
        self.begin, self.end = tirx.Var("begin", "int64"), tirx.Var("end", "int64")
        self.size = 0
        self.parallel: Any = None  # the last parallel loop found, which is serial in the body

    def function(self, buffers: Sequence[Any], statements: Sequence[Any]) -> Any:
        """``symbol(buffers..., workspace, begin, end)``."""
        body = tirx.IfThenElse(self.begin < self.end, tirx.SeqStmt(statements), None)
        whole = tirx.SeqStmt([tirx.DeclBuffer(self.scratch, data=self.workspace), body])
        # Without "noalias": steps hand tensors on in scratch under two names, and LLVM would load
        # by one before it stores by the other.
        attrs = tvm.ir.make_node("ir.DictAttrs", global_symbol=self.symbol)
        parameters = [*buffers, self.workspace, self.begin, self.end]
        function = tirx.PrimFunc(parameters, whole, attrs=attrs)
        module = tirx.transform.ConvertSSA()(tvm.IRModule({self.symbol: function}))
        return module[self.symbol]

    def cut(self, statements: list[Any]) -> tuple[list[Any], int]:
        """The statements and the number of tasks. If everything is one parallel loop, its
        iterations from ``begin`` to ``end`` are the tasks.
        """
        *before, loop = in_order(statements)
        plain = (tirx.Bind, tirx.DeclBuffer)
        alone = self.parallel is not None and loop.same_as(self.parallel)
        if not alone or not all(isinstance(s, plain) for s in before):
            return statements, 1
        if not isinstance(loop.extent, tirx.IntImm):
            return statements, 1
        dtype = str(loop.loop_var.ty.dtype)
        begin, end = (tirx.Cast(dtype, v) for v in (self.begin, self.end))
        # TVM's divisions need the bound, as in emit.kernel.
        begin = tirx.Max(begin, tirx.IntImm(dtype, 0))
        tasks = tirx.For(
            loop.loop_var, loop.min + begin, end - begin, tirx.ForKind.SERIAL, loop.body
        )
        return [*before, tasks], int(loop.extent)

    def allocate(self, nbytes: int) -> int:
        offset = self.size
        self.size += -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        return offset

    def at(self, offset: int) -> Any:
        return tirx.address_of(tirx.BufferLoad(self.scratch, [tirx.const(offset, "int32")]))

    def placed(self, statement: Any) -> Any:
        """The statement with large allocations in the workspace, with serial loops for parallel
        ones, and without anything that needs TVM.
        """
        if isinstance(statement, tirx.SeqStmt):
            return tirx.SeqStmt([self.placed(s) for s in statement.seq])
        if isinstance(statement, tirx.AllocBuffer):
            buffer = statement.buffer
            nbytes = prod(int(d) for d in buffer.shape) * ITEM_BYTES.get(str(buffer.dtype), 8)
            if nbytes <= STACK_BYTES:
                return tirx.AllocBuffer(buffer)
            return tirx.DeclBuffer(buffer, data=self.at(self.allocate(nbytes)))
        if isinstance(statement, tirx.For):
            kind = statement.kind
            parallel = kind == tirx.ForKind.PARALLEL
            loop = tirx.For(
                statement.loop_var,
                statement.min,
                statement.extent,
                tirx.ForKind.SERIAL if parallel else kind,
                self.placed(statement.body),
            )
            if parallel:
                self.parallel = loop
            return loop
        if isinstance(statement, tirx.IfThenElse):
            otherwise = statement.else_case
            return tirx.IfThenElse(
                statement.condition,
                self.placed(statement.then_case),
                None if otherwise is None else self.placed(otherwise),
            )
        if isinstance(statement, tirx.While):
            return tirx.While(statement.condition, self.placed(statement.body))
        if isinstance(statement, tirx.AttrStmt):  # marks for TVM's own passes
            return self.placed(statement.body)
        if isinstance(statement, tirx.AssertStmt):
            return tirx.Evaluate(0)
        if isinstance(statement, tirx.Evaluate):
            _require_plain(statement.value)
        return statement


class _Merger(PlainFunction):
    """Puts lowered PrimFuncs one after the other into one function."""

    def __init__(
        self,
        symbol: str,
        inputs: Sequence[TensorType],
        order: Sequence[int],
        output: TensorType,
        apart: bool,
    ) -> None:
        super().__init__(symbol)
        self.order, self.apart = order, apart
        self.inputs = [pointer(f"in{i}", t.dtype) for i, t in enumerate(inputs)]
        self.output = pointer("out", output.dtype)
        self.places: dict[int, int] = {}

    def merge(self, calls: Sequence[KernelCall], made: Tensor) -> tuple[Any, int, int]:
        statements: list[Any] = []
        if made.where == "workspace" and made.value is None:
            made.where = "output"
        else:  # an input or a constant, returned unchanged
            copy = Tensor(made.type, "output")
            calls = [*calls, KernelCall(_copy(made.type), [made, copy])]
        for call in calls:
            for tensor in call.arguments:
                if tensor.value is not None and id(tensor) not in self.places:
                    statements += self.fill(tensor)
            statements += self.inline(call)
        tasks = 1
        if len(calls) == 1 and not self.size:
            statements, tasks = self.cut(statements)
        return self.function([*self.inputs, self.output], statements), self.size, tasks

    def address(self, tensor: Tensor) -> Any:
        if tensor.where == "input":
            return self.inputs[self.order[tensor.number]]
        if tensor.where == "output":
            return self.output
        if id(tensor) not in self.places:
            self.places[id(tensor)] = self.allocate(tensor.type.nbytes)
        return self.at(self.places[id(tensor)])

    def fill(self, tensor: Tensor) -> list[Any]:
        """Stores of a constant's elements."""
        flat = tensor.value.reshape(-1)
        dtype = "int8" if tensor.type.dtype == "bool" else tensor.type.dtype
        buffer = tirx.decl_buffer((max(flat.size, 1),), dtype, name="constant", layout=None)
        stores = [
            tirx.BufferStore(buffer, tirx.const(flat[i].item(), dtype), [tirx.const(i, "int32")])
            for i in range(flat.size)
        ]
        return [tirx.DeclBuffer(buffer, data=self.address(tensor)), *stores]

    def inline(self, call: KernelCall) -> list[Any]:
        """The call's body, with its parameters bound to the places of the tensors."""
        function = _lowered(call.function, self.apart)
        if len(function.params) != len(call.arguments):
            raise BridgeError("a call whose arguments do not fit its function")
        bound = []
        for parameter, tensor in zip(function.params, call.arguments, strict=True):
            bound += declared(parameter, self.address(tensor))
        return [*bound, self.placed(function.body)]

def declared(parameter: Any, data: Any) -> list[Any]:
    """A lowered function's parameter as a buffer that lies at ``data``."""
    if not tirx.is_buffer_var(parameter):
        raise BridgeError(f"a kernel with the scalar parameter '{parameter}'")
    offset = parameter.elem_offset
    view = []
    if isinstance(offset, tirx.Var):  # te.extern's buffers may be views; ours never are
        view.append(tirx.Bind(offset, tirx.const(0, str(offset.ty))))
    return [*view, tirx.DeclBuffer(parameter, data=data)]


def in_order(statements: Sequence[Any]) -> list[Any]:
    """The statements, with sequences inside the sequence flattened."""
    inside = [s.seq if isinstance(s, tirx.SeqStmt) else [s] for s in statements]
    parts = [s for seq in inside for s in seq]
    return parts if len(parts) == len(statements) else in_order(parts)


def _require_plain(value: Any) -> None:
    name = getattr(getattr(value, "op", None), "name", "")
    if "packed" in name or name in ("tirx.call_extern", "tirx.tvm_throw_last_error"):
        called = value.args[0].value if value.args and hasattr(value.args[0], "value") else name
        raise BridgeError(f"it calls '{called}', a function of TVM's runtime")


def pointer(name: str, dtype: str) -> Any:
    return tirx.Var(name, tvm.ir.PointerType(tvm.ir.PrimType(dtype), "global"))


def _lowered(function: Any, apart: bool) -> Any:
    """A schedulable PrimFunc as loops over flat buffers; a fresh copy each time."""
    module = scheduled(tvm.IRModule({"f": function.with_attr("global_symbol", "f")}), apart)
    module = tvm.ir.transform.Sequential([make() for make in LOWERING])(module)
    return module["f"]


def _copy(type_: TensorType) -> Any:
    source = te.placeholder(type_.shape, type_.dtype)
    return te.create_prim_func([source, te.compute(type_.shape, lambda *i: source(*i))])

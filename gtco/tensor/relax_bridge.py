"""Operators -> Relax -> TIR -> one plain C function: how :mod:`gtco.tensor.sketch.fallback`
computes what has no sketch.

::

    Operator --module_of--> Relax 'main' --LegalizeOps--> main calls PrimFuncs
    --lower_module--> one TIR function: the PrimFuncs in order, intermediates in the workspace

The function has the ABI of ``gtco.runtime`` and calls nothing but libm: no TVM runtime is needed
where it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, prod
from typing import Any

import tvm
from tvm import relax, s_tir, te, tirx
from tvm.relax import op as R

from gtco.errors import BuildError
from gtco.tensor.relax_sort import SORTS
from gtco.tensor.stage import ITEM_BYTES, Operator, Stage, TensorType

ALIGNMENT = 64
STACK_BYTES = 1024  # larger temporaries go to the workspace
CONSTANT_ELEMENTS = 4096  # larger constants inside an opaque operator have no place in a kernel

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


class BridgeError(BuildError):
    """The operator cannot become a plain function; the message names what stands in the way."""


# operator -> Relax --------------------------------------------------------------------------------
def module_of(stage: Stage) -> Any:
    """The stage's one operator as a Relax module whose ``main`` takes the stage's inputs in the
    operator's order.

    Raises :class:`BridgeError` for a kind that has no Relax spelling here.
    """
    op = stage.output
    if op.kind == "relax":
        return tvm.ir.load_json(op["module"])
    spell = SPELLINGS.get(op.kind)
    if spell is None:
        raise BridgeError(f"operator '{op.kind}' has no Relax spelling")
    builder = relax.BlockBuilder()
    types = [stage.types[name] for name in op.inputs]
    parameters = [
        relax.Var(f"p{i}", relax.TensorType(t.shape, t.dtype)) for i, t in enumerate(types)
    ]
    with builder.function("main", parameters):
        with builder.dataflow():
            made = spell(builder, op, parameters, types)
            made = builder.emit(R.reshape(made, op.type.shape))
            if str(made.ty.dtype) != op.type.dtype:
                made = builder.emit(R.astype(made, op.type.dtype))
            result = builder.emit_output(made)
        builder.emit_func_output(result)
    return builder.get()


Spelling = Callable[[Any, Operator, Sequence[Any], Sequence[TensorType]], Any]


def _reduce(function: Callable[..., Any], wide: bool = False) -> Spelling:
    def spell(b: Any, op: Operator, x: Sequence[Any], types: Sequence[TensorType]) -> Any:
        value = x[0]
        narrow = types[0].dtype in ("bool", "float16", "bfloat16")
        if (wide and types[0].dtype != op.type.dtype) or narrow:
            value = b.emit(
                R.astype(
                    value,
                    "float32"
                    if types[0].dtype.endswith("float16")
                    else op.type.dtype
                    if op.type.dtype != "bool"
                    else "int32",
                )
            )
        return b.emit(function(value, axis=list(op["axes"]), keepdims=bool(op["keepdims"])))

    return spell


def _extreme(largest: bool) -> Spelling:
    """A maximum or minimum that is NaN where any element is; Relax's own drops NaN."""

    def spell(b: Any, op: Operator, x: Sequence[Any], types: Sequence[TensorType]) -> Any:
        dtype = types[0].dtype
        if not dtype.startswith("float"):
            return _reduce(R.max if largest else R.min)(b, op, x, types)

        def combine(a: Any, v: Any) -> Any:
            return tirx.Select(tirx.Or(a > v if largest else a < v, tirx.isnan(a)), a, v)

        reduced = tuple(op["axes"])
        if not reduced:
            return x[0]
        reducer = te.comm_reducer(combine, lambda t: tirx.const(-inf if largest else inf, t))
        kept = [i for i in range(len(types[0].shape)) if i not in reduced]

        def extreme(t: Any) -> Any:
            axes = [te.reduce_axis((0, t.shape[a])) for a in reduced]

            def element(*index: Any) -> Any:
                where = dict(zip(kept, index, strict=True)) | dict(zip(reduced, axes, strict=True))
                return reducer(t(*(where[i] for i in range(len(where)))), axis=axes)

            return te.compute([t.shape[i] for i in kept], element, name="extreme")

        return b.emit_te(extreme, x[0])

    return spell


def _softmax(function: Callable[..., Any]) -> Spelling:
    return lambda b, op, x, types: b.emit(function(x[0], axis=op["axis"]))


def _layer_norm(b: Any, op: Operator, x: Sequence[Any], types: Sequence[TensorType]) -> Any:
    """Two passes, the mean taken away before squaring: Relax's own takes E[x^2] - E[x]^2, which
    cancels.
    """
    mean = b.emit(R.mean(x[0], axis=[-1], keepdims=True))
    centred = b.emit(R.subtract(x[0], mean))
    variance = b.emit(R.mean(b.emit(R.multiply(centred, centred)), axis=[-1], keepdims=True))
    return _scaled(b, op, centred, variance, x[1:])


def _rms_norm(b: Any, op: Operator, x: Sequence[Any], types: Sequence[TensorType]) -> Any:
    square = b.emit(R.mean(b.emit(R.multiply(x[0], x[0])), axis=[-1], keepdims=True))
    return _scaled(b, op, x[0], square, x[1:])


def _scaled(b: Any, op: Operator, x: Any, variance: Any, weights: Sequence[Any]) -> Any:
    dtype = op.type.dtype
    deviation = b.emit(R.sqrt(b.emit(R.add(variance, relax.const(op["epsilon"], dtype)))))
    value = b.emit(R.multiply(b.emit(R.divide(x, deviation)), weights[0]))
    return b.emit(R.add(value, weights[1])) if len(weights) > 1 else value


def _centred(b: Any, x: Any, axes: list[int]) -> tuple[Any, Any, Any]:
    """Mean, deviations from it and their mean square over ``axes``, which stay as 1."""
    mean = b.emit(R.mean(x, axis=axes, keepdims=True))
    centred = b.emit(R.subtract(x, mean))
    square = b.emit(R.multiply(centred, centred))
    return mean, centred, b.emit(R.mean(square, axis=axes, keepdims=True))


def _group_norm(b: Any, op: Operator, x: Sequence[Any], types: Sequence[TensorType]) -> Any:
    shape, axis = [int(d) for d in types[0].shape], op["axis"]
    order = [a for a in range(len(shape)) if a != axis] + [axis]
    last = [shape[a] for a in order]
    grouped = [shape[0], prod(last[1:-1]), op["groups"], last[-1] // op["groups"]]
    value = b.emit(R.reshape(b.emit(R.permute_dims(x[0], order)), grouped))
    _, centred, variance = _centred(b, value, [1, 3])
    deviation = b.emit(R.sqrt(b.emit(R.add(variance, relax.const(op["epsilon"], op.type.dtype)))))
    value = b.emit(R.reshape(b.emit(R.divide(centred, deviation)), last))
    value = b.emit(R.add(b.emit(R.multiply(value, x[1])), x[2]))
    return b.emit(R.permute_dims(value, [order.index(a) for a in range(len(shape))]))


def _moments(b: Any, op: Operator, x: Sequence[Any], types: Sequence[TensorType]) -> Any:
    axis = len(types[0].shape) - 2
    mean, _, variance = _centred(b, x[0], [axis])
    return b.emit(R.concat([mean, variance], axis=axis))


def _merged_moments(b: Any, op: Operator, x: Sequence[Any], types: Sequence[TensorType]) -> Any:
    batch, parts, _, channels = (int(d) for d in types[0].shape)
    grouped = [batch, parts, op["groups"], channels // op["groups"]]
    means, inside = (
        b.emit(R.reshape(b.emit(R.strided_slice(x[0], [2], [k], [k + 1])), grouped))
        for k in range(2)
    )
    mean, _, between = _centred(b, means, [1, 3])
    variance = b.emit(R.add(b.emit(R.mean(inside, axis=[1, 3], keepdims=True)), between))
    deviation = b.emit(R.sqrt(b.emit(R.add(variance, relax.const(op["epsilon"], op.type.dtype)))))
    scale = b.emit(R.divide(relax.const(1.0, op.type.dtype), deviation))
    wide = [batch, 1, grouped[2], grouped[3]]
    both = [
        b.emit(R.reshape(b.emit(R.broadcast_to(v, wide)), [batch, 1, channels]))
        for v in (mean, scale)
    ]
    return b.emit(R.concat(both, axis=1))


def _matmul(b: Any, op: Operator, x: Sequence[Any], types: Sequence[TensorType]) -> Any:
    return b.emit(R.matmul(x[0], x[1]))


def _conv2d(b: Any, op: Operator, x: Sequence[Any], types: Sequence[TensorType]) -> Any:
    return b.emit(
        R.nn.conv2d(
            x[0],
            x[1],
            strides=list(op["strides"]),
            padding=list(op["padding"]),
            dilation=list(op["dilation"]),
            groups=op["groups"],
            data_layout=op["layout"],
            kernel_layout="OIHW",
        )
    )


def _conv_transpose2d(b: Any, op: Operator, x: Sequence[Any], types: Sequence[TensorType]) -> Any:
    """TVM has kernels for NCHW alone."""
    last = op["layout"] == "NHWC"
    data = b.emit(R.permute_dims(x[0], [0, 3, 1, 2])) if last else x[0]
    y = b.emit(
        R.nn.conv2d_transpose(
            data,
            x[1],
            strides=list(op["strides"]),
            padding=list(op["padding"]),
            output_padding=list(op["output_padding"]),
            groups=op["groups"],
            data_layout="NCHW",
            kernel_layout="IOHW",
        )
    )
    return b.emit(R.permute_dims(y, [0, 2, 3, 1])) if last else y


def _attention(b: Any, op: Operator, x: Sequence[Any], types: Sequence[TensorType]) -> Any:
    rank = len(types[1].shape)
    keys = b.emit(R.permute_dims(x[1], [*range(rank - 2), rank - 1, rank - 2]))
    scores = b.emit(R.matmul(x[0], keys))
    scores = b.emit(R.multiply(scores, relax.const(op["scale"], op.type.dtype)))
    if len(x) == 4:
        summed = b.emit(R.add(scores, x[3]))
        if op.get("hidden") is not None:
            low = relax.const(op["hidden"], op.type.dtype)
            summed = b.emit(R.where(b.emit(R.equal(x[3], low)), low, summed))
        scores = summed
    weights = b.emit(R.nn.softmax(scores, axis=-1))
    if op.get("guarded"):
        zero = relax.const(0, op.type.dtype)
        weights = b.emit(R.where(b.emit(R.isnan(weights)), zero, weights))
    return b.emit(R.matmul(weights, x[2]))


SPELLINGS: dict[str, Spelling] = {
    "sum": _reduce(R.sum, wide=True),
    "mean": _reduce(R.mean, wide=True),
    "prod": _reduce(R.prod, wide=True),
    "max": _extreme(True),
    "min": _extreme(False),
    "softmax": _softmax(R.nn.softmax),
    "log_softmax": _softmax(R.nn.log_softmax),
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "moments": _moments,
    "merged_moments": _merged_moments,
    "matmul": _matmul,
    "conv2d": _conv2d,
    "conv_transpose2d": _conv_transpose2d,
    "attention": _attention,
}


# Relax -> calls of PrimFuncs ----------------------------------------------------------------------
@dataclass
class _Tensor:
    """A tensor of ``main``: where its bytes are. ``where`` is "input", "output" or "workspace"."""

    type: TensorType
    where: str = "workspace"
    number: int = 0  # input's position
    value: Any = None  # a constant's array


@dataclass
class _Call:
    function: Any
    arguments: list[_Tensor]


def legalize(module: Any) -> Any:
    """Every operator of ``main`` as a call of a PrimFunc."""
    with tvm.target.Target("llvm"):
        module = relax.transform.LegalizeOps(SORTS)(module)
        module = relax.backend.DispatchSortScan()(module)
        return relax.transform.LegalizeOps()(module)


def _tensor_type(ty: Any, what: str) -> TensorType:
    if not isinstance(ty, relax.TensorType) or ty.shape is None:
        raise BridgeError(f"{what} is no tensor of a known shape")
    shape = []
    for d in ty.shape:
        if not isinstance(d, int | tirx.IntImm):
            raise BridgeError(f"{what} has a symbolic dimension '{d}'")
        shape.append(int(d))
    return TensorType(tuple(shape), str(ty.dtype))


@dataclass
class _Reader:
    """Reads a legalized ``main`` into calls; tensors are followed through variables and tuples."""

    module: Any
    values: dict[Any, Any] = field(default_factory=dict)
    calls: list[_Call] = field(default_factory=list)

    def read(self, result: int) -> tuple[int, _Tensor]:
        """The number of inputs, and the tensor that ``main`` returns (its field ``result`` of a
        tuple).
        """
        main = self.module["main"]
        for i, parameter in enumerate(main.params):
            self.values[parameter] = _Tensor(_tensor_type(parameter.ty, f"input {i}"), "input", i)
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
        if not isinstance(made, _Tensor):
            raise BridgeError("the operator returns a tuple, and no field of it is named")
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
            return _Tensor(TensorType(tuple(array.shape), str(array.dtype)), value=array)
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
        outputs = [_Tensor(_tensor_type(t, "a result")) for t in fields]
        arguments = self.value(call.args[1])
        arguments = arguments if isinstance(arguments, list) else [arguments]
        self.calls.append(_Call(self.module[call.args[0]], [*arguments, *outputs]))
        return outputs if isinstance(made, relax.TupleType) else outputs[0]


# calls -> one function ----------------------------------------------------------------------------
def lower_module(
    module: Any,
    symbol: str,
    inputs: Sequence[TensorType],
    order: Sequence[int],
    output: TensorType,
    result: int = -1,
) -> tuple[Any, int, int]:
    """One TIR function ``symbol(inputs..., output, workspace, begin, end)``, the bytes of workspace
    it needs, and into how many tasks it is cut.

    ``order`` says which of ``inputs`` each parameter of ``main`` is. Raises :class:`BridgeError`
    with the reason where the module needs more than plain code.
    """
    reader = _Reader(legalize(module))
    count, made = reader.read(result)
    if count != len(order):
        raise BridgeError(
            f"the operator's program takes {count} inputs, the stage has {len(order)}"
        )
    if made.type.shape != output.shape or made.type.dtype != output.dtype:
        raise BridgeError(f"the operator's program yields {made.type}, the stage says {output}")
    return _Merger(symbol, inputs, order, output).merge(reader.calls, made)


class _Merger:
    """Puts lowered PrimFuncs behind each other in one function."""

    def __init__(
        self, symbol: str, inputs: Sequence[TensorType], order: Sequence[int], output: TensorType
    ) -> None:
        self.symbol, self.order = symbol, order
        self.inputs = [_pointer(f"in{i}", t.dtype) for i, t in enumerate(inputs)]
        self.output = _pointer("out", output.dtype)
        self.workspace = _pointer("workspace", "uint8")
        self.scratch = tirx.decl_buffer((1 << 30,), "uint8", name="scratch", layout=None)
        self.begin, self.end = tirx.Var("begin", "int64"), tirx.Var("end", "int64")
        self.size = 0
        self.places: dict[int, int] = {}
        self.parallel: Any = None  # the last parallel loop met, serial as it stands in the body

    def merge(self, calls: Sequence[_Call], made: _Tensor) -> tuple[Any, int, int]:
        statements: list[Any] = []
        if made.where == "workspace" and made.value is None:
            made.where = "output"
        else:  # an input or a constant, returned as it is
            copy = _Tensor(made.type, "output")
            calls = [*calls, _Call(_copy(made.type), [made, copy])]
        for call in calls:
            for tensor in call.arguments:
                if tensor.value is not None and id(tensor) not in self.places:
                    statements += self.fill(tensor)
            statements += self.inline(call)
        tasks = 1
        if len(calls) == 1 and not self.size:
            statements, tasks = self.cut(statements)
        body = tirx.IfThenElse(self.begin < self.end, tirx.SeqStmt(statements), None)
        declared = tirx.SeqStmt([tirx.DeclBuffer(self.scratch, data=self.workspace), body])
        attrs = tvm.ir.make_node(
            "ir.DictAttrs", **{"tirx.noalias": True, "global_symbol": self.symbol}
        )
        parameters = [*self.inputs, self.output, self.workspace, self.begin, self.end]
        function = tirx.PrimFunc(parameters, declared, attrs=attrs)
        module = tirx.transform.ConvertSSA()(tvm.IRModule({self.symbol: function}))
        return module[self.symbol], self.size, tasks

    def cut(self, statements: list[Any]) -> tuple[list[Any], int]:
        """Where everything is one parallel loop, its iterations as tasks: from ``begin`` to
        ``end``.
        """
        *before, loop = _flat(statements)
        plain = (tirx.Bind, tirx.DeclBuffer)
        alone = self.parallel is not None and loop.same_as(self.parallel)
        if not alone or not all(isinstance(s, plain) for s in before):
            return statements, 1
        if not isinstance(loop.extent, tirx.IntImm):
            return statements, 1
        dtype = str(loop.loop_var.ty.dtype)
        begin, end = (tirx.Cast(dtype, v) for v in (self.begin, self.end))
        tasks = tirx.For(
            loop.loop_var, loop.min + begin, end - begin, tirx.ForKind.SERIAL, loop.body
        )
        return [*before, tasks], int(loop.extent)

    def allocate(self, nbytes: int) -> int:
        offset = self.size
        self.size += -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        return offset

    def address(self, tensor: _Tensor) -> Any:
        if tensor.where == "input":
            return self.inputs[self.order[tensor.number]]
        if tensor.where == "output":
            return self.output
        if id(tensor) not in self.places:
            self.places[id(tensor)] = self.allocate(tensor.type.nbytes)
        return self.at(self.places[id(tensor)])

    def at(self, offset: int) -> Any:
        return tirx.address_of(tirx.BufferLoad(self.scratch, [tirx.const(offset, "int32")]))

    def fill(self, tensor: _Tensor) -> list[Any]:
        """Stores of a constant's elements."""
        flat = tensor.value.reshape(-1)
        dtype = "int8" if tensor.type.dtype == "bool" else tensor.type.dtype
        buffer = tirx.decl_buffer((max(flat.size, 1),), dtype, name="constant", layout=None)
        stores = [
            tirx.BufferStore(buffer, tirx.const(flat[i].item(), dtype), [tirx.const(i, "int32")])
            for i in range(flat.size)
        ]
        return [tirx.DeclBuffer(buffer, data=self.address(tensor)), *stores]

    def inline(self, call: _Call) -> list[Any]:
        """The call's body, its parameters bound to where the tensors lie."""
        function = _lowered(call.function)
        if len(function.params) != len(call.arguments):
            raise BridgeError("a call whose arguments do not fit its function")
        bound = []
        for parameter, tensor in zip(function.params, call.arguments, strict=True):
            if not tirx.is_buffer_var(parameter):
                raise BridgeError(f"a kernel with the scalar parameter '{parameter}'")
            if isinstance(
                parameter.elem_offset, tirx.Var
            ):  # te.extern's buffers may be views; ours never are
                bound.append(
                    tirx.Bind(parameter.elem_offset, tirx.const(0, str(parameter.elem_offset.ty)))
                )
            bound.append(tirx.DeclBuffer(parameter, data=self.address(tensor)))
        return [*bound, self.placed(function.body)]

    def placed(self, statement: Any) -> Any:
        """The statement with large allocations in the workspace, parallel loops serial, and nothing
        in it that needs TVM.
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


def _flat(statements: Sequence[Any]) -> list[Any]:
    """Sequences inside the sequence taken apart."""
    inside = [s.seq if isinstance(s, tirx.SeqStmt) else [s] for s in statements]
    parts = [s for seq in inside for s in seq]
    return parts if len(parts) == len(statements) else _flat(parts)


def _require_plain(value: Any) -> None:
    name = getattr(getattr(value, "op", None), "name", "")
    if "packed" in name or name in ("tirx.call_extern", "tirx.tvm_throw_last_error"):
        called = value.args[0].value if value.args and hasattr(value.args[0], "value") else name
        raise BridgeError(f"it calls '{called}', a function of TVM's runtime")


def _pointer(name: str, dtype: str) -> Any:
    return tirx.Var(name, tvm.ir.PointerType(tvm.ir.PrimType(dtype), "global"))


def _lowered(function: Any) -> Any:
    """A schedulable PrimFunc as loops over flat buffers; a fresh copy each time."""
    from gtco.tensor.relax_schedule import scheduled

    module = scheduled(tvm.IRModule({"f": function.with_attr("global_symbol", "f")}))
    module = tvm.ir.transform.Sequential([make() for make in LOWERING])(module)
    return module["f"]


def _copy(type_: TensorType) -> Any:
    source = te.placeholder(type_.shape, type_.dtype)
    return te.create_prim_func([source, te.compute(type_.shape, lambda *i: source(*i))])

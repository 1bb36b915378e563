"""Sorting for opaque operators, as plain loops (a stable bottom-up merge sort). TVM's own sort
calls its runtime.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2
from typing import Any

from tvm import te, tirx, topi
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as T


def ahead(a: Any, b: Any, descending: bool, dtype: str, ties: bool = False) -> Any:
    """True if ``a`` comes before ``b``, or, with ``ties``, not after it. NaN is greater than any
    number, as in torch and numpy. (TVM turns ``not a < b`` into ``b <= a``, which is wrong for
    NaN.)
    """
    if dtype in ("float16", "bfloat16"):
        a, b = tirx.Cast("float32", a), tirx.Cast("float32", b)
    least, most = (b, a) if descending else (a, b)
    less = least <= most if ties else least < most
    if "float" not in dtype:
        return less
    beyond = tirx.isnan(most)
    return tirx.Or(less, beyond if ties else tirx.And(beyond, tirx.Not(tirx.isnan(least))))


def order(data: Any, descending: bool) -> Any:
    """int32 indices that sort each row of ``data`` [rows, n]; equal elements keep their order,
    NaN is the largest."""
    rows, n = (int(d) for d in data.shape)

    def sort(source: Any, out: Any) -> Any:
        with IRBuilder() as builder:
            with T.serial(0, rows) as row:
                merged = T.alloc_buffer((n,), "int32")
                left, right = T.alloc_buffer((1,), "int32"), T.alloc_buffer((1,), "int32")
                with T.serial(0, n) as i:
                    T.buffer_store(out, i, [row, i])
                with T.serial(0, ceil(log2(n)) if n > 1 else 0) as step:
                    width = T.Bind(tirx.shift_left(tirx.const(1, "int32"), step))
                    with T.serial(0, tirx.floordiv(n - 1, 2 * width) + 1) as block:
                        low = T.Bind(block * 2 * width)
                        middle = T.Bind(tirx.min(low + width, n))
                        high = T.Bind(tirx.min(low + 2 * width, n))
                        T.buffer_store(left, low, [0])
                        T.buffer_store(right, middle, [0])
                        with T.serial(0, high - low) as k:
                            i, j = T.Bind(left[0]), T.Bind(right[0])
                            a = T.Bind(out[row, tirx.min(i, n - 1)])
                            b = T.Bind(out[row, tirx.min(j, n - 1)])
                            x, y = source[row, a], source[row, b]
                            second = ahead(y, x, descending, str(data.dtype))
                            take = T.Bind(tirx.Or(i >= middle, tirx.And(j < high, second)))
                            T.buffer_store(merged, tirx.Select(take, b, a), [low + k])
                            with T.If(take):
                                with T.Then():
                                    T.buffer_store(right, j + 1, [0])
                                with T.Else():
                                    T.buffer_store(left, i + 1, [0])
                    with T.serial(0, n) as i:
                        T.buffer_store(out, merged[i], [row, i])
            return builder.get()

    return te.extern(
        (rows, n), [data], lambda ins, outs: sort(ins[0], outs[0]), dtype="int32", name="order"
    )


def _sorted(data: Any, axis: int, descending: bool) -> tuple[Any, Any, Callable[[Any, int], Any]]:
    """The rows of ``data`` along ``axis``, their order, and the function that brings the first k
    columns back.
    """
    shape = [int(d) for d in data.shape]
    axis %= len(shape)
    to = [i for i in range(len(shape)) if i != axis] + [axis]
    back = sorted(range(len(shape)), key=to.__getitem__)
    outer = [shape[i] for i in to[:-1]]
    count = 1
    for d in outer:
        count *= d
    rows = topi.reshape(topi.transpose(data, to), (count, shape[axis]))

    def restore(x: Any, k: int) -> Any:
        cut = te.compute((count, k), lambda i, j: x(i, j), name="first")
        return topi.transpose(topi.reshape(cut, (*outer, k)), back)

    return rows, order(rows, descending), restore


def _values(rows: Any, indices: Any) -> Any:
    return te.compute(rows.shape, lambda i, j: rows(i, indices(i, j)), name="values")


def sort(data: Any, axis: int, descending: bool) -> Any:
    rows, indices, restore = _sorted(data, axis, descending)
    return restore(_values(rows, indices), int(rows.shape[1]))


def argsort(data: Any, axis: int, descending: bool, dtype: str) -> Any:
    rows, indices, restore = _sorted(data, axis, descending)
    return topi.cast(restore(indices, int(rows.shape[1])), dtype)


def topk(data: Any, k: int, axis: int, ret_type: str, largest: bool, dtype: str) -> Any:
    rows, indices, restore = _sorted(data, axis, largest)
    k = min(k, int(rows.shape[1])) if k > 0 else int(rows.shape[1])
    results = []
    if ret_type in ("both", "values"):
        results.append(restore(_values(rows, indices), k))
    if ret_type in ("both", "indices"):
        results.append(topi.cast(restore(indices, k), dtype))
    return results if len(results) > 1 else results[0]


SORTS: dict[str, Callable[[Any, Any], Any]] = {
    "relax.sort": lambda b, call: b.call_te(
        sort, call.args[0], call.attrs.axis, bool(call.attrs.descending)
    ),
    "relax.argsort": lambda b, call: b.call_te(
        argsort, call.args[0], call.attrs.axis, bool(call.attrs.descending), str(call.attrs.dtype)
    ),
    "relax.topk": lambda b, call: b.call_te(
        topk,
        call.args[0],
        int(call.attrs.k),
        call.attrs.axis,
        str(call.attrs.ret_type),
        bool(call.attrs.largest),
        str(call.attrs.dtype),
    ),
}

"""Weights of a few bits that are packed in bytes, with scales of blocks.

    MatMulNBits(a, B, scales, zeros)  ->  MatMul(a, transpose((unpack(B) - zeros) * scales))
    GatherBlockQuantized(B, ids, scales, zeros)
        ->  (Gather(unpack(B), ids) - Gather(zeros, ids)) * Gather(scales, ids)

Small weights are unpacked here, large ones when they are read (:mod:`gtco.frontend.nbits`). Later
weights become a constant of a's type. Tables stay bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy
import onnx
from onnx import TensorProto

from gtco.frontend.expansion.control_flow import attributes
from gtco.frontend.expansion.quantized import BYTES, inputs
from gtco.frontend.expansion.walk import Unsuitable, Walk
from gtco.frontend.expansion.writer import Writer
from gtco.frontend.nbits import BITS, LEAST_BLOCK, UNPACKED, packed_in, split
from gtco.frontend.node_check import DTYPES


def matmul_nbits(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    w, attrs = walk.writer, attributes(node)
    a, packed, scales, zeros, order, bias = inputs(node, 6, (3, 4, 5))
    k, n, block = (int(attrs.get(name, 0)) for name in ("K", "N", "block_size"))
    bits = int(attrs.get("bits", 4))
    if bits not in BITS:
        raise Unsuitable(
            f"its weights have {bits} bits, and gtco reads {', '.join(map(str, BITS))}"
        )
    if block < LEAST_BLOCK or block & (block - 1) or min(k, n) < 1:
        raise Unsuitable(
            f"its K, N and block_size are {k}, {n} and {block}: the first two have to be positive, "
            f"and the block a power of two of {LEAST_BLOCK} or more"
        )
    if order:
        raise Unsuitable(
            f"its weights are in an order of their own (g_idx '{order}'), which ONNX Runtime "
            "dropped too: quantize the model again without it"
        )
    if attrs.get("weight_prepacked", 0):
        raise Unsuitable(
            "its weights are packed for one machine (weight_prepacked): save the model before"
        )
    if w.shape(a)[-1:] != (k,):
        raise Unsuitable(
            f"its input has the shape {list(w.shape(a))}, whose last axis has to be {k}"
        )
    blocks = -(-k // block)
    dtype = w.dtype(a)
    steps = packed
    if not attrs.get(UNPACKED, 0):
        small = _unpacked(w, packed, (n, blocks, block), bits)
        steps = w.constant(small, TensorProto.UINT8, "weights")
    values = w.cast(steps, dtype)
    weight = w.add("Sub", values, _zeros(w, zeros, (n, blocks), bits, dtype))
    if prod(w.shape(scales)) != n * blocks or w.dtype(scales) != dtype:
        raise Unsuitable(
            f"its scales '{scales}' are {DTYPES[w.dtype(scales)]}{list(w.shape(scales))}, and have "
            f"to be {DTYPES[dtype]}[{n}, {blocks}]"
        )
    weight = w.add("Mul", weight, w.reshape(scales, (n, blocks, 1)))
    weight = w.slice(w.reshape(weight, (n, blocks * block)), 1, 0, k)
    y = w.add("MatMul", a, w.transpose(weight, [1, 0]))
    if bias and w.shape(bias) != (n,):
        raise Unsuitable(f"its bias '{bias}' has the shape {list(w.shape(bias))}, not [{n}]")
    return [w.add("Add", y, bias) if bias else y]


def gather_block_quantized(walk: Walk, node: onnx.NodeProto) -> Sequence[str]:
    """Rows of a table, which are dequantized behind the gather. uint8 has the numbers of ``bits``
    along the last axis, the first in the lowest bits; int4 and uint4 are a byte each by now.
    """
    w, attrs = walk.writer, attributes(node)
    table, ids, scales, zeros = inputs(node, 4, (3,))
    shape, dtype, factors = w.shape(table), w.dtype(scales), w.shape(scales)
    bits, block = int(attrs.get("bits", 4)), int(attrs.get("block_size", 128))
    rank = len(shape)
    along, axis = (
        int(attrs.get(name, n)) % rank for name, n in (("quantize_axis", 1), ("gather_axis", 0))
    )
    if w.dtype(table) not in BYTES or bits not in BITS:
        raise Unsuitable(
            f"its table is {DTYPES[w.dtype(table)]} of {bits} bits: it may be int4, uint4, uint8"
        )
    if block < LEAST_BLOCK or block & (block - 1):
        raise Unsuitable(f"its block_size is {block}, and has to be a power of two of 16 or more")
    in_bytes = w.dtype(table) == TensorProto.UINT8
    unpacked = bool(attrs.get(UNPACKED, 0))
    several = 8 // bits if in_bytes and not unpacked else 1
    whole, packed = packed_in(shape, factors, along, block, 8 // several)
    if not (whole or packed) or (whole and packed and several > 1):
        raise Unsuitable(
            f"its table '{table}' has the shape {list(shape)} and its scales '{scales}' have "
            f"{list(factors)}: from these gtco cannot tell how its numbers are packed"
        )
    narrow = several > 1 and packed
    if narrow:
        table = w.constant(split(w.array(table), bits), TensorProto.UINT8, "table")
    middle = 2 ** (bits - 1) if in_bytes and (narrow or unpacked or bits == 8) else 0
    values = w.cast(w.add("Gather", table, ids, axis=axis), dtype)

    def rows(of_blocks: str) -> str:
        """What blocks have, for each number that is gathered."""
        return _of_rows(w, of_blocks, ids, w.shape(table), axis, along, block)

    if zeros:
        zero = w.array(zeros)
        if narrow or unpacked:
            zero = split(zero, bits)[..., : factors[-1]]
        if zero.shape not in ((), factors):
            raise Unsuitable(f"its zero points '{zeros}' have the shape {list(zero.shape)}")
        zeros = w.constant(zero, w.dtype(zeros), "zeros")
        values = w.add("Sub", values, w.cast(rows(zeros) if zero.shape else zeros, dtype))
    elif middle:
        values = w.add("Sub", values, w.constant(middle, dtype, "zero_point"))
    return [w.add("Mul", values, rows(scales))]


def _of_rows(
    w: Writer, of_blocks: str, ids: str, shape: Sequence[int], axis: int, along: int, block: int
) -> str:
    """What the blocks along an axis of a table of this shape have, for each element of its rows
    ``ids`` of ``axis``.
    """
    if axis == along:
        size, width = w.integers(shape[axis]), w.integers(block)
        counted = w.add("Mod", w.cast(ids, TensorProto.INT64), size)  # negative ones from the end
        return w.add("Gather", of_blocks, w.add("Div", counted, width), axis=axis)
    length, made = shape[along], w.add("Gather", of_blocks, ids, axis=axis)
    sizes = list(w.shape(made))
    if axis < along:  # the axes of ids stand in front of it
        along += len(w.shape(ids)) - 1
    made = w.reshape(made, (*sizes[: along + 1], 1, *sizes[along + 1 :]))
    wide = (*sizes[: along + 1], block, *sizes[along + 1 :])
    made = w.add("Expand", made, w.integers(wide))
    whole = sizes[along] * block
    made = w.reshape(made, (*sizes[:along], whole, *sizes[along + 1 :]))
    return w.slice(made, along, 0, length)


def _unpacked(w: Writer, packed: str, shape: tuple[int, int, int], bits: int) -> numpy.ndarray:
    """The weights [n, blocks, block] as uint8. The first of a byte is in its lowest bits."""
    n, blocks, block = shape
    array = w.array(packed)
    size = block * bits // 8
    if array.dtype != numpy.uint8 or array.size != n * blocks * size:
        raise Unsuitable(
            f"its weights '{packed}' are {array.dtype}{list(array.shape)}, and have to be "
            f"uint8[{n}, {blocks}, {size}]"
        )
    return split(array.reshape(n, blocks, size), bits)


def _zeros(w: Writer, zeros: str, shape: tuple[int, int], bits: int, dtype: int) -> str:
    """The zero points [n, blocks, 1] in a's type: packed ones, unpacked floats, or the middle."""
    n, blocks = shape
    if not zeros:
        return w.constant(2 ** (bits - 1), dtype, "zero_point")
    if w.dtype(zeros) == dtype:
        if prod(w.shape(zeros)) != n * blocks:
            raise Unsuitable(
                f"its zero points '{zeros}' have the shape {list(w.shape(zeros))}, not "
                f"[{n}, {blocks}]"
            )
        return w.reshape(zeros, (n, blocks, 1))
    array = w.array(zeros)
    row = -(-blocks * bits // 8)
    if array.dtype != numpy.uint8 or array.size != n * row:
        raise Unsuitable(
            f"its zero points '{zeros}' are {array.dtype}{list(array.shape)}, and have to be "
            f"uint8[{n}, {row}]"
        )
    unpacked = split(array.reshape(n, row), bits)[:, :blocks]
    return w.constant(unpacked[..., None], dtype, "zero_points")

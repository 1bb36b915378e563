"""The packed weights of MatMulNBits and tables of GatherBlockQuantized, outside the message as
other large weights are.

    before: y = MatMulNBits(a, B {uint8 [n, blocks, bytes]}, scales, ...)
    after:  y = MatMulNBits(a, B' {uint8 [n, blocks, block]}, scales, ...) {unpacked=1}

    before: y = GatherBlockQuantized(B {uint8 [rows, bytes]}, ids, scales, ...)
    after:  y = GatherBlockQuantized(B' {uint8 [rows, columns]}, ids, scales, ...) {unpacked=1}

B' is unpacked when it is read. :mod:`gtco.frontend.expansion.packed_weights` writes the nodes out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy
import onnx
from onnx import TensorProto, helper

from gtco.support.later import Later, read
from gtco.support.onnx_messages import nodes

BITS = (2, 4, 8)
LEAST_BLOCK = 16
UNPACKED = "unpacked"  # the attribute of a node whose weights are a number in each byte

Weights = Mapping[str, numpy.ndarray | Later]


@dataclass(frozen=True)
class Packed:
    """The sizes of packed weights: [n, blocks, block] numbers of so many bits."""

    n: int
    blocks: int
    block: int
    bits: int

    @staticmethod
    def of(node: onnx.NodeProto) -> Packed | None:
        """Those that a MatMulNBits has by its attributes; None if these are not sizes."""
        given = {a.name: a.i for a in node.attribute}
        k, n, block = (given.get(name, 0) for name in ("K", "N", "block_size"))
        bits = given.get("bits", 4)
        if bits not in BITS or block < LEAST_BLOCK or block & (block - 1) or min(k, n) < 1:
            return None
        return Packed(n, -(-k // block), block, bits)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.n, self.blocks, self.block

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.bits // 8


@dataclass(frozen=True)
class PackedTable:
    """The sizes of a packed table: numbers of so many bits, side by side along the last axis."""

    shape: tuple[int, ...]
    bits: int


def packed_in(
    shape: tuple[int, ...], scales: tuple[int, ...], along: int, block: int, bits: int
) -> tuple[bool, bool]:
    """Whether a table of uint8 or of 4 bits may have a number in each element, and whether it may
    have several, by the shape of its scales: one for a ``block`` of the axis ``along``.
    """

    def fits(last: int) -> bool:
        wanted = [*shape[:-1], last]
        wanted[along] = -(-wanted[along] // block)
        return scales == tuple(wanted)

    return fits(shape[-1]), fits(shape[-1] * (8 // bits))


def _tables(graph: onnx.GraphProto, weights: Weights) -> dict[str, PackedTable]:
    """The tables of uint8 among the weights that have several numbers in each byte. All of their
    readers have to agree.
    """
    sizes = {t.name: tuple(t.dims) for t in graph.initializer}
    sizes |= {name: array.shape for name, array in weights.items()}
    found: dict[str, set[PackedTable | None]] = {}
    for node in nodes(graph):
        if node.op_type != "GatherBlockQuantized" or len(node.input) < 3:
            continue
        table, scales = weights.get(node.input[0]), sizes.get(node.input[2])
        if table is None or table.dtype != numpy.uint8:
            continue
        given = {a.name: a.i for a in node.attribute}
        bits, block = given.get("bits", 4), given.get("block_size", 128)
        along, made = given.get("quantize_axis", 1), None
        rank = len(table.shape)
        if scales and bits in (2, 4) and block > 0 and -rank <= along < rank:
            whole, packed = packed_in(table.shape, scales, along, block, bits)
            if packed and not whole:
                shape = (*table.shape[:-1], table.shape[-1] * (8 // bits))
                made = PackedTable(shape, bits)
        found.setdefault(node.input[0], set()).add(made)
    alike = {name: next(iter(each)) for name, each in found.items() if len(each) == 1}
    return {name: made for name, made in alike.items() if made is not None}


def packed_weights(graph: onnx.GraphProto) -> dict[str, Packed]:
    """The tensors that are nothing but packed weights, all of one size."""
    found: dict[str, Packed] = {}
    others = {value.name for value in graph.output}
    for node in nodes(graph):
        packed = Packed.of(node) if node.op_type == "MatMulNBits" and len(node.input) > 1 else None
        name = node.input[1] if packed else ""
        others.update(x for i, x in enumerate(node.input) if not packed or i != 1)
        if packed and found.setdefault(name, packed) != packed:
            others.add(name)
    return {name: packed for name, packed in found.items() if name not in others}


def unpack(
    model: onnx.ModelProto, weights: Weights
) -> tuple[onnx.ModelProto, Weights]:
    """The model and its weights, which are inputs of it, with the packed ones unpacked when they
    are read; the same ones if there are none.
    """
    packed: dict[str, Packed | PackedTable] = {
        n: p for n, p in packed_weights(model.graph).items() if n in weights
    }
    packed |= _tables(model.graph, weights)
    if not packed:
        return model, weights
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for value in made.graph.input:
        if value.name in packed:
            kind = helper.make_tensor_type_proto(TensorProto.UINT8, packed[value.name].shape)
            value.type.CopyFrom(kind)
    for node in nodes(made.graph):
        at = {"MatMulNBits": 1, "GatherBlockQuantized": 0}.get(node.op_type)
        if at is not None and len(node.input) > at and node.input[at] in packed:
            node.attribute.append(helper.make_attribute(UNPACKED, 1))
    later = {
        name: Later(p.shape, numpy.dtype(numpy.uint8), partial(_unpacked, weights[name], p))
        for name, p in packed.items()
    }
    return made, {**weights, **later}


def _unpacked(packed: numpy.ndarray | Later, sizes: Packed | PackedTable) -> numpy.ndarray:
    return split(read(packed), sizes.bits).reshape(sizes.shape)


def split(array: numpy.ndarray, bits: int) -> numpy.ndarray:
    """The numbers of so many bits in each byte, side by side along the last axis. The first is in
    the lowest bits.
    """
    shifts = numpy.arange(0, 8, bits, dtype=numpy.uint8)
    parts = (array[..., None] >> shifts) & numpy.uint8(2**bits - 1)
    return parts.reshape(*array.shape[:-1], -1)

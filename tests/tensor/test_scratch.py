"""Pieces of a thread's scratch do not overlap, are aligned, and hold values of their dtype."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gtco.codegen.load import load
from gtco.tensor.emit.emitter import Emitter, KernelArguments, kernel
from gtco.tensor.emit.scratch import ALIGN, Piece, Scratch
from gtco.tensor.stage import ITEM_BYTES, TensorType
from tests.kernels import Built, runnable

DTYPES = ["float32", "uint16", "int8", "float64"]
PIECES = st.lists(
    st.tuples(st.lists(st.integers(1, 40), max_size=3), st.sampled_from(DTYPES)), max_size=6
)


@given(PIECES)
def test_pieces_are_aligned_and_apart(drawn: list[tuple[list[int], str]]) -> None:
    scratch = Scratch(tuple(Piece(f"p{i}", tuple(s), d) for i, (s, d) in enumerate(drawn)))
    end = 0
    for piece in scratch.pieces:
        start = scratch.offsets[piece.name]
        assert start % ALIGN == 0 and start % ITEM_BYTES[piece.dtype] == 0
        assert end <= start < end + ALIGN
        end = start + piece.nbytes
    assert scratch.nbytes == end


def test_a_name_stands_for_one_piece() -> None:
    with pytest.raises(AssertionError, match="two pieces"):
        Scratch((Piece("rows", (3,)), Piece("rows", (4,))))


def test_pieces_of_several_dtypes_in_one_kernel() -> None:
    """They are written one after the other and read back afterwards: none overlaps its
    neighbour.
    """
    machine = runnable("x86-64-v3")
    scratch = Scratch((Piece("a", (5,)), Piece("b", (9,), "uint16"), Piece("c", (3,), "int32")))
    x, y = TensorType((5,)), TensorType((17,))

    def body(em: Emitter, args: KernelArguments) -> None:
        places = scratch.arrays(args)
        for name, extent in (("a", 5), ("b", 9), ("c", 3)):
            with em.loop(extent, "i") as i:
                whole = em.load(args.inputs["x"], [i % 5]) * 100.0
                value = whole.astype(places[name].dtype) if name != "a" else whole
                em.store(places[name], [i], value)
        at = 0
        for name, extent in (("a", 5), ("b", 9), ("c", 3)):
            with em.loop(extent, "i") as i:
                em.store(args.output, [at + i], em.load(places[name], [i]).astype("float32"))
            at += extent

    program = kernel("kernel_under_test", {"x": x}, y, scratch.nbytes, machine.lanes, body)
    library = load([program], machine)
    built = Built(library, "kernel_under_test", (("x", x),), y, 1, scratch.nbytes, {})
    given_x = np.arange(1, 6, dtype=np.float32)
    wanted = [given_x[i % 5] * 100 for n in (5, 9, 3) for i in range(n)]
    np.testing.assert_array_equal(built(given_x), np.array(wanted, np.float32))

"""The arena planner: tensors that live at once never overlap, and memory is used again."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from gtco.runtime.plan import Batch, TensorSpec, plan_arena

lifetimes = st.lists(
    st.tuples(st.integers(0, 5000), st.integers(0, 20), st.integers(0, 6)).map(
        lambda t: (t[0], t[1], t[1] + t[2])
    ),
    max_size=30,
)


def aligned(nbytes: int) -> int:
    return (nbytes + 63) // 64 * 64


@given(lifetimes)
def test_live_tensors_never_overlap(tensors: list[tuple[int, int, int]]) -> None:
    offsets, total = plan_arena(tensors)
    assert len(offsets) == len(tensors)
    placed = list(zip(tensors, offsets, strict=True))
    for (nbytes, _, _), offset in placed:
        assert offset % 64 == 0 and 0 <= offset and offset + aligned(nbytes) <= total
    for ((one, first, last), at), ((other, made, read), there) in combinations(placed, 2):
        if first <= read and made <= last and one and other:  # both live at some step
            assert at + one <= there or there + other <= at


@given(lifetimes)
def test_total_lies_between_the_live_sum_and_the_sum_of_all(
    tensors: list[tuple[int, int, int]],
) -> None:
    _, total = plan_arena(tensors)
    live = [
        sum(aligned(nbytes) for nbytes, first, last in tensors if first <= step <= last)
        for step in range(30)
    ]
    assert max(live) <= total <= sum(aligned(nbytes) for nbytes, _, _ in tensors)


@given(st.integers(1, 10_000), st.integers(3, 40))
def test_a_chain_takes_the_room_of_two(nbytes: int, steps: int) -> None:
    """Tensor i is made at step i and read at step i + 1, so two tensors live at once."""
    _, total = plan_arena([(nbytes, step, step + 1) for step in range(steps)])
    assert total == 2 * aligned(nbytes)


def test_equal_tensors_that_live_at_once_get_places_of_their_own() -> None:
    offsets, total = plan_arena([(100, 0, 1)] * 3)
    assert sorted(offsets) == [0, 128, 256] and total == 384


def test_the_smallest_gap_that_fits_is_taken() -> None:
    """The short-lived tensors leave gaps of 256 and of 128 bytes. 100 bytes fit in both, and go
    into the gap of 128.
    """
    tensors = [(1024, 0, 9), (512, 0, 9), (256, 0, 1), (192, 0, 9), (128, 0, 1), (128, 0, 9)]
    offsets, total = plan_arena([*tensors, (100, 5, 6)])
    assert offsets[-1] == offsets[4]
    assert total == plan_arena(tensors)[1]


def test_large_tensors_are_placed_first() -> None:
    """If the small ones were, the large one would find no gap where the first of them was."""
    assert plan_arena([(128, 1, 1), (128, 1, 2), (192, 2, 3)])[1] == 128 + 192


def test_a_tensor_is_aligned_if_each_part_of_the_batch_is() -> None:
    """The last part ends with the batch, so it may begin anywhere."""
    batch = Batch(18, 16, {"x": 0})
    assert batch.firsts == [0, 2]
    assert not batch.aligned([TensorSpec("x", "float32", (18, 1))])
    assert batch.aligned([TensorSpec("x", "float32", (18, 16))])

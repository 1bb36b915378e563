"""The arena planner: tensors that live at once never overlap, memory is used again, and threads
write over what was theirs.
"""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gtco.driver.linking.arena import Lifetime, plan_arena

lifetimes = st.lists(
    st.tuples(st.integers(0, 5000), st.integers(0, 20), st.integers(0, 6)).map(
        lambda t: (t[0], t[1], t[1] + t[2])
    ),
    max_size=30,
)


def aligned(nbytes: int) -> int:
    return (nbytes + 63) // 64 * 64


@given(lifetimes, st.sampled_from([1, 2, 3, 64]))
def test_live_tensors_never_overlap(tensors: list[Lifetime], threads: int) -> None:
    offsets, total = plan_arena(tensors, threads)
    assert len(offsets) == len(tensors)
    placed = list(zip(tensors, offsets, strict=True))
    for (nbytes, _, _), offset in placed:
        assert offset % 64 == 0 and 0 <= offset and offset + aligned(nbytes) <= total
    for ((one, first, last), at), ((other, made, read), there) in combinations(placed, 2):
        if first <= read and made <= last and one and other:  # both live at some step
            assert at + one <= there or there + other <= at


@given(lifetimes)
def test_total_lies_between_the_live_sum_and_the_sum_of_all(tensors: list[Lifetime]) -> None:
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


@given(lifetimes, st.sampled_from([2, 3, 64]))
def test_owners_cost_a_third_of_the_memory_at_most(tensors: list[Lifetime], threads: int) -> None:
    assert plan_arena(tensors, threads)[1] <= 4 / 3 * plan_arena(tensors)[1]


def changing(tensors: list[Lifetime], offsets: list[int], threads: int) -> float:
    """The share of the written bytes that another thread wrote before, in the second of two runs of
    the model. Each thread writes the same part of every tensor.
    """
    owner: dict[int, int] = {}
    for _ in range(2):
        changed = written = 0
        for index in sorted(range(len(tensors)), key=lambda i: tensors[i][1]):
            lines = tensors[index][0] // 64
            for line in range(lines):
                thread, at = line * threads // lines, offsets[index] // 64 + line
                changed += owner.get(at, thread) != thread
                owner[at] = thread
            written += lines
    return changed / written


@pytest.mark.parametrize("threads", [2, 4])
def test_threads_write_over_their_own_parts(threads: int) -> None:
    """Layers of a transformer. For each: normalized tokens, q with k and v, the result of
    attention, tokens with the projection added, normalized ones, the hidden layer, and tokens
    again. Best fit puts small tensors where the halves of large ones meet.
    """
    tokens = 64 * 24
    tensors = [(tokens, 0, 4)]
    for start in range(1, 61, 6):
        for step, (factor, life) in enumerate([(1, 1), (3, 1), (1, 1), (1, 3), (1, 1), (4, 1)]):
            tensors.append((factor * tokens, start + step, start + step + life))
        tensors.append((tokens, start + 6, start + 10))
    tight, kept = plan_arena(tensors), plan_arena(tensors, threads)
    assert changing(tensors, tight[0], threads) > 0.1
    assert changing(tensors, kept[0], threads) < 0.25 * changing(tensors, tight[0], threads)

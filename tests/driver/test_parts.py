"""Which parts of a range are tried, at which sizes they are proven, and which are kept."""

from __future__ import annotations

from gtco.driver.sizes.parts import _costs, candidates, kept, proof_sizes
from gtco.support.sizes import Range


def test_candidates_and_what_is_kept() -> None:
    assert candidates(Range(1, 64), 2) == [1, 4, 16]
    assert candidates(Range(1, 64), 32) == [1, 4, 16, 64]
    assert candidates(Range(1, 8, weighted=(3,)), 2) == [1, 3, 4, 8]
    assert candidates(Range(4, 64, 4), 2) == [4, 16, 64]
    assert candidates(Range(6, 60, 3), 2) == [3, 12, 48]
    assert candidates(Range(5, 8), 2) == [1, 4, 8]
    assert candidates(Range(1000, 3000, 1000), 2) == [25, 100, 400]
    assert proof_sizes(Range(1, 40), [1, 4, 16]) == [11, 40]
    assert proof_sizes(Range(1, 8), [1, 4, 8]) == [7]
    assert proof_sizes(Range(6, 6000, 3), [3, 12, 48]) == [33, 6000]
    assert proof_sizes(Range(3, 1 << 20), [3, 12, 48]) == [33, 16383]
    images = {1: 600_000, 4: 4 * 600_000}  # bytes of a module's example inputs
    assert proof_sizes(Range(1, 2000), [1, 4, 16], images) == [11, 223]
    assert proof_sizes(Range(1, 2000), [1, 4], {1: 1 << 30, 4: 1 << 32}) == [11, 64]
    assert proof_sizes(Range(1, 2000), [1, 4], {1: 8, 4: 8}) == [11, 2000]
    assert proof_sizes(Range(1000, 3000, 1000), [25, 100, 400]) == [275, 3000]
    assert proof_sizes(Range(1, 1), [1]) == [2, 4] and proof_sizes(Range(3, 3), [3]) == [6]
    # the same price a sample: one part is enough, and a weighted one stays
    assert kept(Range(1, 64), {1: 1.0, 4: 4.0, 16: 16.0}) == [1]
    assert kept(Range(1, 64, weighted=(16,)), {1: 1.0, 4: 4.0, 16: 16.0}) == [1, 16]
    # starting costs as much as 20 samples
    prices = {n: 20.0 + n for n in (1, 4, 16)}
    assert kept(Range(1, 64), prices) == [1, 4, 16]
    # 5 is two of 4 or one of 16, 21 is two of 16, and so is 31, in which they overlap by one
    assert _costs([1, 5, 21, 31], [1, 4, 16], prices) == [21.0, 36.0, 72.0, 72.0]

"""A library of products of any size: right for sizes that are drawn, its choices, its refusals."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from gtco.machine.target import cpu_target
from gtco.runtime.products import Products
from gtco.support.errors import ArtifactError, OptionError, ShapeError
from gtco.tensor.nest.open import nests
from tests.driver.any_size import TARGET, TOLERANCE, compiled
from tests.nest.cuts import pack


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("products"))


@pytest.fixture
def library(path: Path) -> Iterator[Products]:
    with Products(path, threads=2) as opened:
        yield opened


def drawn(m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(m + 7 * n + 31 * k)
    a = random.standard_normal((m, k), dtype=np.float32)
    return a, random.standard_normal((k, n), dtype=np.float32)


def check(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    room = TOLERANCE * (np.abs(a) @ np.abs(b)).astype(np.float64)
    assert (np.abs(c - a.astype(np.float64) @ b) <= room).all(), (a.shape, b.shape)


def test_all_small_sizes(library: Products) -> None:
    for m, n, k in product(range(1, 18), (1, 2, 3, 4, 5, 16, 17), (1, 2, 15, 16, 33, 100)):
        a, b = drawn(m, n, k)
        check(a, b, library(a, library.pack(b)))


def test_drawn_sizes_with_one_packing_for_all_rows(library: Products) -> None:
    random = np.random.default_rng(5)
    for _ in range(25):
        n, k = (int(2**x) for x in random.uniform(0, 9.5, 2))
        weights = library.pack(drawn(1, n, k)[1])
        for m in (int(2**x) for x in random.uniform(0, 9, 4)):
            a, _ = drawn(m, n, k)
            check(a, drawn(1, n, k)[1], library(a, weights))


def test_a_result_larger_than_the_caches_lies_where_it_is_asked_for(library: Products) -> None:
    """Its vectors are written past the caches if they begin with lines, as that of a new array do,
    and not where they do not.
    """
    m, n, k = 400_001, 32, 3
    a, b = drawn(m, n, k)
    weights, made = library.pack(b), library(a, library.pack(b))
    assert made.nbytes > cpu_target(TARGET).memory[2].capacity and made.ctypes.data % 64 == 0
    apart = np.empty(made.size + 32, np.float32)
    start = -apart.ctypes.data % 64 // 4 + 4
    given = apart[start : start + made.size].reshape(m, n)
    given[:] = np.nan
    library(a, weights, given)
    check(a, b, made)
    np.testing.assert_array_equal(given, made)


@pytest.mark.parametrize("sizes", [(1, 300, 1100), (61, 130, 1100), (200, 17, 129), (50, 3, 400)])
def test_every_candidate_is_right_and_the_choice_is_one(
    library: Products, sizes: tuple[int, int, int]
) -> None:
    a, b = drawn(*sizes)
    weights = library.pack(b)
    found = library.candidates(*sizes)
    for config, seconds in found:
        out = np.full((sizes[0], sizes[1]), np.nan, np.float32)
        library.set(*sizes, config)
        library.runner(a, weights.data, out)()
        check(a, b, out)
        assert 0 < seconds < 1
    assert library.choose(*sizes) in found
    assert library.choose(*sizes)[1] == min(seconds for _, seconds in found)


def turned(array: np.ndarray) -> np.ndarray:
    """The same values, the first axis innermost in memory."""
    return np.asfortranarray(array)


def spread(array: np.ndarray) -> np.ndarray:
    """The same values, every second element of a larger array."""
    return np.repeat(array, 2, -1)[..., ::2]


@pytest.mark.parametrize("laid", [turned, spread])
def test_operands_may_lie_in_any_layout(
    library: Products, laid: Callable[[np.ndarray], np.ndarray]
) -> None:
    a, b = drawn(7, 40, 33)
    check(a, b, library(laid(a), library.pack(b)))
    check(a, b, library(a, library.pack(laid(b))))


def test_candidates_do_not_grow_with_the_sizes(library: Products) -> None:
    assert len(library.candidates(10**6, 10**5, 10**5)) <= 512


def test_weights_are_packed_as_kernels_read_them(library: Products) -> None:
    target = cpu_target(TARGET)
    widths = tuple(sorted({nest.row.vectors for nest in nests(target)}))
    for n, k in ((1, 100), (4, 8), (5, 3), (80, 10), (113, 7), (4, 300)):
        _, b = drawn(1, n, k)
        mine = pack(b, target.lanes, widths).reshape(-1)
        assert mine.tobytes() == library.pack(b).data[: mine.size].tobytes()


def test_threads_with_a_handle_each(path: Path) -> None:
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            random = np.random.default_rng(seed)
            with Products(path, threads=seed) as mine:
                for _ in range(30):
                    a, b = drawn(*(int(x) for x in random.integers(1, 90, 3)))
                    check(a, b, mine(a, mine.pack(b)))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


def test_scratch_is_known_before(library: Products) -> None:
    assert library.workspace_bytes(1, 5, 5) == 0
    assert 0 <= library.workspace_bytes(100_000, 4096, 4096) <= 2 * (16 << 20)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (3, 3, -1), (2**41, 1, 1), (2**40,) * 3])
def test_sizes_that_are_none_are_refused(library: Products, sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ShapeError, match="no product"):
        library.set(*sizes)
    with pytest.raises(ShapeError, match="no product"):
        library.choose(*sizes)
    with pytest.raises(ShapeError):
        library.workspace_bytes(*sizes)
    a, b = drawn(3, 4, 5)
    weights = library.pack(b)
    with pytest.raises(ArtifactError, match="gtco_products_set"):
        library.runner(a, weights.data, np.empty((3, 4), np.float32))()


def test_arrays_that_do_not_fit_are_refused(library: Products) -> None:
    a, b = drawn(3, 4, 5)
    weights = library.pack(b)
    with pytest.raises(ShapeError, match="4 columns"):
        library(a[:, :4].copy(), weights)
    with pytest.raises(ShapeError, match="float32"):
        library(a.astype(np.float64), weights)
    with pytest.raises(ShapeError, match="at least one row"):
        library(a[:0], weights)
    full = np.empty((3, 4), np.float32)
    for wrong in (np.empty((4, 3), np.float32), np.empty((3, 4)), turned(full), spread(full)):
        with pytest.raises(ShapeError, match=r"dense float32 array of shape \(3, 4\)"):
            library(a, weights, wrong)


def test_a_config_that_does_not_fit_is_refused(library: Products) -> None:
    wide = library.choose(64, 300, 64)[0]
    with pytest.raises(ShapeError, match="does not fit"):
        library.set(64, 2, 400, wide)
    a, b = drawn(64, 2, 400)
    check(a, b, library(a, library.pack(b)))  # what was refused is not what is set


@pytest.mark.parametrize(
    "wrong",
    [{"kernel": -1}, {"kernel": 10**6}, {"kc": 0}, {"held": 0}, {"chunks_m": 0}, {"chunks_n": -1}],
    ids=str,
)
def test_numbers_that_no_config_has_are_refused(library: Products, wrong: dict[str, int]) -> None:
    config = library.choose(64, 64, 64)[0]._replace(**wrong)
    with pytest.raises(ShapeError, match="a kernel that does not exist, or a number below 1"):
        library.set(64, 64, 64, config)


def test_a_closed_library_and_another_file_are_refused(path: Path, tmp_path: Path) -> None:
    opened = Products(path)
    opened.close()
    with pytest.raises(ArtifactError, match="closed"):
        opened.set(1, 1, 1)
    other = tmp_path / "other.so"
    other.write_bytes(b"none")
    with pytest.raises(ArtifactError, match="compile_products"):
        Products(other)


def test_an_output_that_cannot_be_written_is_refused(library: Products) -> None:
    a, b = drawn(16, 16, 16)
    weights, kept, out = library.pack(b), a.copy(), np.empty_like(a)
    out.flags.writeable = False
    for given, said in ((out, "read-only"), (a, "overlaps"), (a.T[::-1].T, "dense")):
        with pytest.raises(ShapeError, match=said):
            library(a, weights, out=given)
    assert (a == kept).all()


def test_the_child_of_a_fork_has_threads_of_its_own(library: Products) -> None:
    a, b = drawn(200, 300, 100)
    weights = library.pack(b)
    check(a, b, library(a, weights))
    if (child := os.fork()) == 0:
        status = 1
        try:
            check(a, b, library(a, weights))
            status = int(len(os.listdir("/proc/self/task")) != 2)
            library.close()
            status += 2 * int(len(os.listdir("/proc/self/task")) != 1)
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    check(a, b, library(a, weights))


@pytest.mark.parametrize("threads", [-1, 10**6, 1.5])
def test_a_number_of_threads_that_is_none(path: Path, threads: float) -> None:
    with pytest.raises(OptionError, match="threads="):
        Products(path, threads=threads)  # type: ignore[arg-type]

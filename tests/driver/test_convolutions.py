"""Convolutions of any size by a library of products: right for sizes that are drawn, in every
config, on images that end before an inaccessible page; its refusals.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from gtco.runtime.convolutions import Convolution, Convolutions
from gtco.runtime.products import Products
from gtco.support.errors import ShapeError
from tests.driver.any_size import TOLERANCE, compiled
from tests.fences import before_fence, fenced
from tests.kernels import runnable

# With minimal filtering, of the largest such sum in a channel of an image: values of a whole tile
# are added and subtracted for each output.
FILTERED = 8e-6


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("convolutions"))


@pytest.fixture
def library(path: Path) -> Iterator[Convolutions]:
    with Convolutions(path, threads=2) as opened:
        yield opened


def drawn(c: Convolution, n: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(sum(map(hash, (c.batch, c.height, c.channels, c.kernel_w, n))))
    x = random.standard_normal((c.batch, c.height, c.width, c.channels), dtype=np.float32)
    w = random.standard_normal((c.kernel_h, c.kernel_w, c.channels, n), dtype=np.float32)
    return fenced(x), w


def exact(c: Convolution, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """In float64, by the definition."""
    p, s = c.padding, c.stride
    padded = np.pad(x.astype(np.float64), ((0, 0), (p, p), (p, p), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (c.kernel_h, c.kernel_w), (1, 2))
    return np.einsum("bhwcij,ijcn->bhwn", windows[:, ::s, ::s], w.astype(np.float64))


def check(c: Convolution, x: np.ndarray, w: np.ndarray, y: np.ndarray, kernel: str) -> None:
    room = TOLERANCE * exact(c, np.abs(x), np.abs(w))
    if "filtered" in kernel:
        room = np.broadcast_to(room.max((1, 2), keepdims=True) * FILTERED / TOLERANCE, room.shape)
    assert y.shape == room.shape and (np.abs(y - exact(c, x, w)) <= room).all(), c


def sizes(random: np.random.Generator) -> tuple[Convolution, int]:
    batch, height, width, stride = (int(v) for v in random.integers(1, [4, 14, 14, 4]))
    channels, n = (int(2**v) for v in random.uniform(0, 6.2, 2))
    padding = int(random.integers(0, 4))
    most = (min(7, height + 2 * padding), min(7, width + 2 * padding))
    kernel_h, kernel_w = (int(random.integers(1, size + 1)) for size in most)
    return Convolution(batch, height, width, channels, kernel_h, kernel_w, stride, padding), n


def test_drawn_convolutions_are_right(library: Convolutions) -> None:
    random = np.random.default_rng(11)
    for _ in range(150):
        c, n = sizes(random)
        x, w = drawn(c, n)
        y = library(x, library.pack(w, c.stride), padding=c.padding)
        check(c, x, w, y, library.choose(c, n)[0].name)


def test_one_filter_serves_all_images(library: Convolutions) -> None:
    first = Convolution(1, 8, 8, 24, 3, 3, 1, 1)
    _, w = drawn(first, 40)
    for stride in (1, 2):
        packed = library.pack(w, stride)
        for batch, side, padding in ((1, 8, 1), (2, 13, 0), (3, 3, 2), (1, 30, 1)):
            c = Convolution(batch, side, side + 1, 24, 3, 3, stride, padding)
            x, _ = drawn(c, 40)
            y = library(x, packed, padding=padding)
            check(c, x, w, y, library.choose(c, 40)[0].name)


def test_few_columns_of_a_filter_are_packed_inside_their_room(tmp_path: Path) -> None:
    """Vectors of 8 lanes, so that two of one step are a cache line. The memory behind the packed
    filter is not accessible.
    """
    runnable("x86-64-v3")
    with Convolutions(compiled(tmp_path, "x86-64-v3"), threads=1) as library:
        c_library = library._library
        for n, (kernel, channels) in product((1, 6, 8, 9, 24), ((3, 64), (5, 7))):
            w = np.ones((kernel, kernel, channels, n), np.float32)
            sizes = Convolution(1, kernel, kernel, channels, kernel, kernel).fields
            nbytes = c_library.gtco_convolutions_packed_bytes(sizes, n)
            packed = before_fence(nbytes)
            assert nbytes % 64 == 0
            assert not c_library.gtco_convolutions_pack(
                w.ctypes.data, sizes, n, packed.ctypes.data
            )


def test_images_and_filters_may_lie_in_any_layout(library: Convolutions) -> None:
    c = Convolution(2, 9, 8, 5, 3, 3, 1, 1)
    x, w = drawn(c, 6)
    kernel = library.choose(c, 6)[0].name
    check(c, x, w, library(np.asfortranarray(x), library.pack(w), padding=1), kernel)
    check(c, x, w, library(x, library.pack(np.asfortranarray(w)), padding=1), kernel)


@pytest.mark.parametrize(
    ("c", "n"),
    [
        (Convolution(2, 9, 11, 5, 3, 3, 1, 1), 70),
        (Convolution(1, 20, 20, 64, 5, 4, 2, 2), 33),  # k = 1280: blocks of k end inside runs
        (Convolution(2, 7, 5, 200, 1, 1), 48),  # the windows are the pixels
        (Convolution(1, 9, 9, 40, 1, 1, 2), 20),
        (Convolution(1, 2, 2, 3, 7, 7, 1, 3), 2),  # most of each window is padding
        (Convolution(1, 6, 6, 700, 6, 6), 20),  # one pixel, and k larger than L2 holds
        (Convolution(2, 9, 14, 20, 5, 5, 1, 2), 50),  # tiles of 2 x 2 outputs
        (Convolution(3, 29, 30, 17, 3, 3, 1, 0), 33),  # tiles of 4 x 4, of which some end outside
        (Convolution(1, 3, 3, 600, 3, 3, 1, 1), 100),
    ],
    ids=str,
)
def test_every_candidate_is_right_and_the_choice_is_one(
    library: Convolutions, c: Convolution, n: int
) -> None:
    x, w = drawn(c, n)
    packed, found = library.pack(w, c.stride), library.candidates(c, n)
    for config, seconds in found:
        out = np.full((c.batch, *c.output, n), np.nan, np.float32)
        library.set(c, n, config)
        library.runner(x, packed.data, out)()
        check(c, x, w, out, config.name)
        assert 0 < seconds < 1
    assert library.choose(c, n) in found
    assert library.choose(c, n)[1] == min(seconds for _, seconds in found)


@pytest.mark.parametrize(
    "c",
    [
        Convolution(1, 4, 4, 3, 5, 5),
        Convolution(0, 4, 4, 3, 3, 3),
        Convolution(1, 4, 4, 3, 3, 3, 0),
        Convolution(1, 4, 4, 3, 3, 3, 1, -1),
        Convolution(1, 2**21, 2**21, 1, 1, 1),
        Convolution(2**62, 2**62, 4, 3, 3, 3),
        Convolution(1, 1, 1, 1, 2**23, 2, 2**37, 2**38),  # a window's lines have 3 * 2^60 elements
        Convolution(1, 1, 1, 2**24, 1, 1, 2**40, 2**40),  # padding of 2^64 elements
    ],
    ids=str,
)
def test_sizes_that_are_none_are_refused(library: Convolutions, c: Convolution) -> None:
    library.set(Convolution(1, 4, 4, 3, 3, 3), 8)
    with pytest.raises(ShapeError, match="no convolution of images"):
        library.set(c, 8)
    assert library._library.gtco_products_run(library._open, None, None, None) == -1
    assert "no sizes are set" in library._error()
    with pytest.raises(ShapeError, match="no convolution"):
        library.choose(c, 8)
    with pytest.raises(ShapeError, match="no convolution"):
        library.candidates(c, 8)


def test_arrays_that_do_not_fit_are_refused(library: Convolutions) -> None:
    c = Convolution(1, 5, 5, 4, 3, 3)
    x, w = drawn(c, 6)
    packed = library.pack(w)
    with pytest.raises(ShapeError, match="3 channels, and the filter was packed with 4"):
        library(x[..., :3].copy(), packed)
    with pytest.raises(ShapeError, match="four axes"):
        library(x[0], packed)
    with pytest.raises(ShapeError, match="four axes"):
        library.pack(w[0])
    with pytest.raises(ShapeError, match="dense float32"):
        library(x, packed, out=np.empty((1, 5, 5, 6), np.float32))
    with pytest.raises(ShapeError, match="a stride is 1 or more"):
        library.pack(w, 0)
    with pytest.raises(ShapeError, match="no convolution of images"):
        library(x, packed, padding=-1)


def test_a_kernel_of_matrices_does_not_take_windows(path: Path, library: Convolutions) -> None:
    with Products(path, threads=1) as products:
        direct = next(one for one, _ in products.candidates(50, 64, 36) if "direct" in one.name)
    with pytest.raises(ShapeError, match="does not fit"):
        library.set(Convolution(1, 8, 8, 4, 3, 3), 64, direct)

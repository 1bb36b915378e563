"""A library of products and convolutions of any size for AArch64, run by qemu-user on a CPU without
extensions, and compared with float64: the choice for each drawn size, and candidates from all.
"""

from __future__ import annotations

import struct
import subprocess
from collections import Counter
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np

from gtco.runtime.convolutions import Convolution
from gtco.tensor.nest.open import FEEDS
from tests.arm.emulation import emulated, tools
from tests.driver import test_convolutions, test_products
from tests.driver.any_size import compiled

PROGRAM = Path(__file__).with_name("run_products.c")
NAME = 32  # bytes of a kernel's name
PRODUCTS = [(1, 1, 1), (3, 2, 40), (29, 23, 72), (7, 64, 33), (61, 130, 500), (2, 300, 400)]
IMAGES = [  # with their columns
    (Convolution(1, 14, 14, 24, 3, 3, 1, 1), 40),  # by minimal filtering too
    (Convolution(2, 9, 11, 8, 5, 5, 1, 2), 17),
    (Convolution(1, 13, 10, 3, 7, 7, 2, 3), 33),
    (Convolution(3, 8, 5, 30, 1, 1, 1, 0), 16),
]


def run(folder: Path, jobs: bytes) -> BytesIO:
    """The program's answer to the jobs."""
    compiler, emulator = tools()
    library = compiled(folder, "aarch64")
    (folder / "jobs").write_bytes(jobs)
    link = [compiler, "-O1", "-I.", str(PROGRAM), library.name, "-Wl,-rpath,$ORIGIN", "-o", "run"]
    subprocess.run(link, cwd=folder, check=True)
    emulated([emulator, "-cpu", "cortex-a53"], ["./run", "jobs", "results"], folder)
    return BytesIO((folder / "results").read_bytes())


def outputs(results: BytesIO, shape: tuple[int, ...]) -> Iterator[tuple[str, np.ndarray]]:
    """A job's results with their kernels' names."""
    (count,) = struct.unpack("<q", results.read(8))
    for _ in range(count):
        name = results.read(NAME).rstrip(b"\0").decode()
        data = results.read(4 * int(np.prod(shape)))
        yield name, np.frombuffer(data, np.float32).reshape(shape)


def test_products_and_convolutions_of_any_size_are_right(tmp_path: Path) -> None:
    random = np.random.default_rng(7)
    images = [*IMAGES, *(test_convolutions.sizes(random) for _ in range(5))]
    jobs = []
    for m, n, k in PRODUCTS:
        a, b = test_products.drawn(m, n, k)
        jobs.append(struct.pack("<10q", 0, n, m, 0, 0, k, 0, 0, 0, 0) + a.tobytes() + b.tobytes())
    for c, n in images:
        x, w = test_convolutions.drawn(c, n)
        fields = (c.batch, c.height, c.width, c.channels, c.kernel_h, c.kernel_w)
        head = struct.pack("<10q", 1, n, *fields, c.stride, c.padding)
        jobs.append(head + x.tobytes() + w.tobytes())
    results, names = run(tmp_path, b"".join(jobs)), Counter[str]()
    for m, n, k in PRODUCTS:
        for name, out in outputs(results, (m, n)):
            test_products.check(*test_products.drawn(m, n, k), out)
            names[name] += 1
    for c, n in images:
        x, w = test_convolutions.drawn(c, n)
        shape = test_convolutions.exact(c, x, w).shape
        for name, out in outputs(results, shape):
            test_convolutions.check(c, x, w, out, name)
            names[name] += 1
    assert not results.read()
    for feed in (*FEEDS, "columns"):
        assert any(feed in name for name in names), (feed, names)

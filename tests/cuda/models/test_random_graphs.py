"""Random graphs of the family's operators (``tests/random``), compiled for GPUs, run under the
emulator and compared with ONNX Runtime. They test importers, rewrites, sketches and the fallback on
graphs that nobody wrote by hand, with NaN and infinities among the inputs. ``pytest -m scheduled
-s`` of this file makes a long run with a new seed.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
import pytest

from gtco.machine.gpu import ARCHITECTURES
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.whole import emulated, outputs
from tests.kernels import fresh_seed
from tests.random.draw import OPSETS, SPECIAL, draw
from tests.random.engine import Arrays, Tally, check, in_process

BATCH = 6  # graphs in one library


def compare(
    driver: FakeDriver, first: int, opset: int, arch: str, precision: str, tally: Tally
) -> None:
    """Compares a batch of graphs, from this seed on."""

    def run(model: onnx.ModelProto, feeds: Arrays, precision: str) -> dict[str, np.ndarray]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            onnx.save(model, path)
            simplify = opset not in SPECIAL
            options = {"precision": precision, "simplify": simplify, "strict": True}
            _, loaded, workers = emulated(driver, Path(folder), path, None, arch, **options)
            with loaded:
                return outputs(loaded, workers, dict(feeds))

    with in_process():
        check([draw(seed, opset) for seed in range(first, first + BATCH)], tally, precision, run)


@pytest.mark.parametrize(
    ("first", "opset", "arch", "precision"),
    [
        (1302, 18, "sm_80", "fp32"),  # 1307 has a guarded attention of a V with NaN
        (1602, 21, "sm_90a", "bf16"),
        (0, 17, "sm_75", "fp32"),
        (300, 20, "sm_89", "bf16"),
    ],
)
def test_random_graphs(
    driver: FakeDriver, first: int, opset: int, arch: str, precision: str
) -> None:
    tally = Tally()
    compare(driver, first, opset, arch, precision, tally)
    assert not tally.found, "\n".join(map(str, tally.found))
    assert tally.compared == BATCH


@pytest.mark.scheduled
def test_many_random_graphs(driver: FakeDriver) -> None:
    seed, until, tally = fresh_seed() // BATCH * BATCH, time.monotonic() + 600, Tally()
    while time.monotonic() < until:
        batch, known = seed // BATCH, len(tally.found)
        arch = ARCHITECTURES[batch // len(OPSETS) % len(ARCHITECTURES)]
        precision = "bf16" if batch % 3 == 2 else "fp32"
        compare(driver, seed, OPSETS[batch % len(OPSETS)], arch, precision, tally)
        for found in tally.found[known:]:
            print(f"{found}, {arch}, {precision}", flush=True)
        seed += BATCH
    print(f"{tally.compared} graphs compared")
    assert not tally.found

"""The library of products and convolutions of any size that tests open."""

from __future__ import annotations

from pathlib import Path

from gtco.driver.products import compile_products
from gtco.machine.target import cpu_target, detect
from gtco.search.calibration.rates import RateTable

TOLERANCE = 2e-6  # of the sum of the products' magnitudes
TARGET = "x86-64-v4" if detect().lanes == 16 else "x86-64-v3"


def compiled(folder: Path, target: str = TARGET) -> Path:
    """The library, with the rates of the target's constants, so that choices are the same here and
    elsewhere.
    """
    return compile_products(folder / "products.so", target, RateTable(cpu_target(target)))

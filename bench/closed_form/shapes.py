"""Products by name: those of DeepBench, which judge, and others, which train.

``deepbench-gemm.csv`` has the 248 products of DeepBench's public lists (Baidu Research, Apache
License 2.0, ``code/kernels/gemm_problems.h``), of 166 different sizes. There C[m, n] = A[m, k] x
B[k, n] is stored by columns, A is the weights and n the batch. gtco multiplies rows of activations
by constant columns, so its rows are DeepBench's n, and its columns DeepBench's m.
"""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator
from math import log2
from pathlib import Path
from random import Random

from gtco.search.closed_form.products import Product
from gtco.support.errors import OptionError
from gtco.tensor.stage import Operator, Stage, TensorType, make_stage

from ..harness.readings import PRODUCTS

DEEPBENCH = Path(__file__).parent / "deepbench-gemm.csv"
KINDS = ("float32 weights", "bfloat16 weights", "float32", "bfloat16")
LEAST = 8  # candidates of a product that is timed
ATTENTION = ((197, 197, 64), (197, 64, 197), (49, 49, 32), (49, 32, 49), (1024, 1024, 64))


def name_of(product: Product) -> str:
    """As "float32 weights 1x197x768x768": batch, m, n, k."""
    return f"{product.kind} {product.batch}x{product.m}x{product.n}x{product.k}"


def named(name: str) -> Product:
    """The product that the name describes. Raises :class:`OptionError` if it describes none."""
    kind, _, sizes = name.rpartition(" ")
    try:
        batch, m, n, k = map(int, sizes.split("x"))
    except ValueError:
        batch = m = n = k = 0
    if kind not in KINDS or min(batch, m, n, k) < 1:
        raise OptionError(
            f"'{name}' is not a product: write one as '{KINDS[0]} 1x197x768x768', with batch, "
            f"rows, columns and depth; the classes are {', '.join(KINDS)}"
        )
    return Product(kind, batch, m, n, k)


def stage_of(product: Product) -> Stage:
    """The product alone, with a float32 result, in its canonical form."""
    dtype, *weights = product.kind.split()
    lead = (product.batch,) if product.batch > 1 else ()
    types = {
        "x": TensorType((*lead, product.m, product.k), dtype),
        "w": TensorType((*lead, product.k, product.n), dtype),
    }
    out = TensorType((*lead, product.m, product.n), "float32")
    multiply = Operator("matmul", ("x", "w"), "y", out)
    return make_stage([multiply], types, ["w"] if weights else []).canonical


def flops(product: Product) -> float:
    return 2.0 * product.batch * product.m * product.n * product.k


def copies(product: Product, most: float) -> int:
    """How many copies of a product's weights and results fit ``most`` bytes; each candidate that is
    timed has its own.
    """
    p, item = product, product.nbytes
    own = p.batch * (item * p.k * p.n + 4 * p.m * p.n)
    return int((most - item * p.batch * p.m * p.k) / own)


# what judges --------------------------------------------------------------------------------------
def deepbench(kind: str = KINDS[0]) -> list[Product]:
    """DeepBench's different products, by rows, columns and depth."""
    with DEEPBENCH.open(newline="") as file:
        sizes = {(int(row["n"]), int(row["m"]), int(row["k"])) for row in csv.DictReader(file)}
    return [Product(kind, 1, *size) for size in sorted(sizes)]


def held_out(kind: str, step: int, most_flops: float, most_bytes: float) -> list[Product]:
    """Every ``step``-th of DeepBench's products of at most so many FLOPs, of which :data:`LEAST`
    copies fit so many bytes.
    """
    every = deepbench(kind)
    fitting = [p for p in every if flops(p) <= most_flops and copies(p, most_bytes) >= LEAST]
    return fitting[::step]


# what trains --------------------------------------------------------------------------------------
def training(kind: str, count: int, seed: int = 0) -> list[Product]:
    """``count`` products that are none of DeepBench's: those of layers of vision transformers, and
    draws, more than half of which have few rows, as recurrent layers at small batches do.
    """
    random = Random(f"{kind} {seed}")
    judged = {(p.m, p.n, p.k) for p in deepbench()}
    found = [p for p in layers(kind) if (p.m, p.n, p.k) not in judged][:count]
    for drawn in _draws(kind, random):
        if len(found) == count:
            return found
        if (drawn.m, drawn.n, drawn.k) not in judged:
            found.append(drawn)
    raise AssertionError("draws do not end")


def layers(kind: str) -> list[Product]:
    """Dense layers of vision transformers, or the products of attention."""
    if kind.endswith("weights"):
        return [Product(kind, 1, m, n, k) for m, k, n in PRODUCTS]
    return [Product(kind, b, *sizes) for b in (1, 3, 12) for sizes in ATTENTION]


def _draws(kind: str, random: Random, least: float = 1e4, most: float = 2e10) -> Iterator[Product]:
    while True:
        m, n, k = (_size(random, most_of) for most_of in (10752, 8448, 4096))
        batch = 1
        if kind.endswith("weights"):
            if random.random() < 0.6:
                m = random.choice((1, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 28, 32))
        elif random.random() < 0.6:
            batch = random.choice((2, 3, 6, 12, 16, 64))
        drawn = Product(kind, batch, m, n, k)
        if least <= flops(drawn) <= most:
            yield drawn


def _size(random: Random, most: int) -> int:
    """A size up to ``most``, all magnitudes alike, often a multiple of a power of two."""
    size = 2 ** random.uniform(0 if random.random() < 0.15 else 4, log2(most))
    step = random.choice((1, 1, 16, 32, 64, 128))
    return max(1, min(most, round(size / step) * step)) or step


def chosen(products: Collection[Product], texts: Collection[str]) -> list[Product]:
    """The products whose names contain one of the texts; all without texts."""
    return [p for p in products if not texts or any(text in name_of(p) for text in texts)]

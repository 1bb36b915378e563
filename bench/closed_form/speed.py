"""How long a prediction takes: the policy's own in Python, and the same in C (``predict.c``), which
is what configuring a kernel costs when sizes become known at run time.
"""

from __future__ import annotations

import ctypes
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import lcm, log2
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from gtco.codegen.jobs import Failure, Job
from gtco.codegen.workers import Workers
from gtco.search.analytic import AnalyticPolicy
from gtco.search.closed_form.coefficients import load
from gtco.search.closed_form.form import ClassForm, Machine
from gtco.search.closed_form.policy import facts_of, nearest
from gtco.search.closed_form.products import FEW, Product, features
from gtco.support.environment import c_compiler
from gtco.support.errors import OptionError
from gtco.support.toolchain import run_compiler
from gtco.tensor.intrinsics.table import KINDS, kinds, micro_kernels
from gtco.tensor.space import Config, Sketch
from gtco.tensor.stage import ITEM_BYTES

from . import shapes
from .examples import DECISIONS, sketch_of

SOURCE = Path(__file__).with_name("predict.c")
MOST, HEIGHTS, WIDTHS, OF_ROWS = 128, 33, 7, 4  # as in predict.c
ROUNDS, REPEATS = 2, 200  # short runs, of which other processes leave some alone
FLAGS = ("-O3", "-march=native", "-shared", "-fPIC")
SEARCHES = 12
WORDS = {name: words for name, (_, words, _) in DECISIONS.items() if words}


class _Tile(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("kind", "rows", "vectors")]


class _Machine(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_int) for n in ("cores", "lanes", "tiles", "kinds", "item", "out", "unit")),
        ("step", ctypes.c_int * OF_ROWS),
        ("products", ctypes.c_double * OF_ROWS),
        ("bandwidth", ctypes.c_double),
        ("capacity", ctypes.c_double),
        ("tile", _Tile * MOST),
        ("rate", ((ctypes.c_double * WIDTHS) * HEIGHTS) * OF_ROWS),
        ("log", ctypes.c_double * HEIGHTS),
    ]


class Predictor:
    """The closed form of products with constant weights, in C, for a machine without a tile unit.
    Raises :class:`OptionError` for another.
    """

    def __init__(
        self, folder: Path, policy: AnalyticPolicy, classes: Mapping[str, ClassForm], dtype: str
    ) -> None:
        library = folder / "predict.so"
        if not library.exists():
            command = [c_compiler(), *FLAGS, str(SOURCE), "-o", str(library), "-lm"]
            run_compiler(command, folder)
        self.library = ctypes.CDLL(str(library))
        self.library.seconds.restype = ctypes.c_double
        self.tiles = micro_kernels(policy.target, dtype)
        self.machine = _machine(policy, dtype)
        sizes = [Product(f"{dtype} weights", 1, m, 1, 1) for m in (FEW, FEW + 1)]
        forms = [classes[product.operator_class] for product in sizes]
        weights = [np.concatenate([d.weights.ravel() for d in one.decisions]) for one in forms]
        self.weights = np.ascontiguousarray(np.stack(weights))

    def config(self, product: Product) -> Config:
        chosen = (ctypes.c_long * len(DECISIONS))()
        self.library.closed_form(
            ctypes.byref(self.machine),
            *self._pointers(),
            *map(ctypes.c_long, (product.m, product.n, product.k)),
            chosen,
        )
        found: list[tuple[str, int | str]] = []
        for name, value in zip(DECISIONS, chosen, strict=True):
            if name == "tile":
                found.append((name, self.tiles[value].name))
            elif value >= 0:
                found.append((name, WORDS[name][value] if name in WORDS else value))
        return Config("gemm", tuple(found))

    def _pointers(self) -> list[ctypes.c_void_p]:
        """The coefficients of few rows and of more."""
        return [ctypes.c_void_p(row.ctypes.data) for row in self.weights]

    def seconds(self, products: Sequence[Product]) -> float:
        """Of one prediction, the mean over the products."""
        sizes = np.array([(p.m, p.n, p.k) for p in products], np.int64)
        return float(
            self.library.seconds(
                ctypes.byref(self.machine),
                *self._pointers(),
                sizes.ctypes.data_as(ctypes.c_void_p),
                len(products),
                ROUNDS,
            )
        )


def _machine(policy: AnalyticPolicy, dtype: str) -> _Machine:
    target, facts, rows = policy.target, facts_of(policy), kinds(policy.target, dtype)
    tiles = micro_kernels(target, dtype)
    assert facts is not None
    if any(kind.height > 1 for kind in rows) or len(tiles) > MOST or len(rows) > OF_ROWS:
        raise OptionError(f"predict.c knows no rows of {target.mcpu}, which multiply in tiles")
    made = _Machine(target.cores, target.lanes, len(tiles), len(rows), ITEM_BYTES[dtype], 4)
    made.unit = lcm(target.lanes, *(kind.step for kind in rows))
    made.bandwidth, made.capacity = facts.bandwidth, target.level("L2").capacity
    for small in range(1, HEIGHTS):
        made.log[small] = log2(small)
    for number, kind in enumerate(rows):
        made.step[number], made.products[number] = kind.step, kind.products
        assert KINDS[kind.name] is kind
    for number, tile in enumerate(tiles):
        which = rows.index(tile.kind)
        made.tile[number] = _Tile(which, tile.rows, tile.vectors)
        for height in range(1, tile.rows + 1):
            made.rate[which][height][tile.vectors] = facts.rate(tile.kernel_of(height))
    return made


def report(policy: AnalyticPolicy, file: Path, say: Callable[[str], None]) -> int:
    """The step ``speed``: microseconds of a prediction over DeepBench's products."""
    trained, _ = nearest(load(file), policy.target)
    say(f"{file.name}: {file.stat().st_size} bytes")
    for kind in (k for k in shapes.KINDS if k.endswith("weights")):
        products = shapes.deepbench(kind)
        terms = [np.array(features(p.sizes(policy.target.cores))) for p in products]
        classes = trained.classes
        facts = facts_of(policy)
        assert facts is not None
        known = [(p, sketch) for p in products if (sketch := sketch_of(p, policy)) is not None]
        whole = _micro(partial(_whole, classes, facts), known)
        points = _micro(partial(_points, classes[kind]), terms)
        with tempfile.TemporaryDirectory(prefix="gtco-closed-form-") as folder:
            inside = Predictor(Path(folder), policy, classes, kind.split()[0])
            in_c = min(inside.seconds(products) for _ in range(REPEATS)) * 1e6
        say(
            f"{kind}, {len(products)} products: {in_c:.2f} us in C; in Python {whole:.0f} us with "
            f"the options of the space, of which numpy's polynomials take {points:.0f} us"
        )
    known = known[:: max(1, len(known) // SEARCHES)]
    with Workers(1) as workers:
        kernels = [_kernel_seconds(workers, policy, classes, *one) for one in known]
    say(
        f"a kernel for a product that was not seen: {median(kernels[1:]):.2f} s in the median of "
        f"{len(kernels) - 1}, predicted and built"
    )
    some = products[:: max(1, len(products) // SEARCHES)]
    slow = _micro(lambda p: _fresh(policy).choose(shapes.stage_of(p)), some)
    say(f"the analytic policy's search: {slow / 1e3:.0f} ms in the mean of {len(some)} of them")
    return 0


def _micro(call: Callable[[Any], object], over: Sequence[Any]) -> float:
    """Mean microseconds of the call over these, each once before the clock starts."""
    call(over[0])
    begin = time.perf_counter()
    for one in over:
        call(one)
    return (time.perf_counter() - begin) / len(over) * 1e6


def _fresh(policy: AnalyticPolicy) -> AnalyticPolicy:
    """The same policy, which remembers no search."""
    return AnalyticPolicy(policy.target, policy.rates)


def _whole(classes: Mapping[str, ClassForm], facts: Machine, one: tuple[Product, Sketch]) -> Config:
    """A prediction as the policy makes it."""
    return classes[one[0].operator_class].choose(*one, facts)


def _kernel_seconds(
    workers: Workers,
    policy: AnalyticPolicy,
    classes: Mapping[str, ClassForm],
    product: Product,
    sketch: Sketch,
) -> float:
    facts, begin = facts_of(policy), time.perf_counter()
    assert facts is not None
    config = classes[product.operator_class].choose(product, sketch, facts)
    (built,) = workers.build([Job("kernel", shapes.stage_of(product), config, policy.target)])
    if isinstance(built, Failure):
        raise OptionError(f"{shapes.name_of(product)} could not be built: {built.reason}")
    return time.perf_counter() - begin


def _points(form: ClassForm, terms: np.ndarray) -> None:
    """What the polynomials of all decisions take, without the options."""
    for one in form.decisions:
        one.weights[:, : len(terms)] @ terms

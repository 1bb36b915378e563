"""A nest, its price and its code say the same: what the emitted loops load, store and multiply is
what the workload counts.

Products of drawn sizes with drawn loops are executed by :mod:`tests.nest.executed`. The workload
describes the largest task, which is the first, so that one is executed and compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np
import pytest

from gtco.machine.target import cpu_target
from gtco.tensor.nest.nest import Nest
from gtco.tensor.sketch.gemm import cpu as gemm
from gtco.tensor.sketch.gemm.loops import GemmLoops
from gtco.tensor.space import Config, Program, configs
from gtco.tensor.stage import Operator, Stage, TensorType, make_stage
from tests.kernels import fresh_seed, targets
from tests.nest.executed import Counts, Region, execute

FLOAT = 4  # bytes
DRAWS = 12


@dataclass(frozen=True)
class Case:
    """A product with loops that were drawn for it."""

    sketch: gemm.Gemm
    config: Config
    nest: Nest


def product(m: int, k: int, n: int, constant: bool) -> Stage:
    op = Operator("matmul", ("a", "b"), "c", TensorType((m, n)))
    types = {"a": TensorType((m, k)), "b": TensorType((k, n))}
    return make_stage([op], types, ["b"] if constant else [])


def draw(random: Random, name: str) -> Case:
    """A case whose blocks of k are equal: the workload counts whole blocks."""
    kc, kblocks = random.randint(1, 12), random.choice([1, 1, 2, 3])
    k, m, n = kc * kblocks, random.randint(1, 30), random.randint(1, 50)
    if 1 in (m * k, k * n, m * n):  # TVM prints a buffer of one element as a scalar
        return draw(random, name)
    stage = product(m, k, n, constant=random.random() < 0.6)
    sketch = gemm.match(stage, cpu_target(name))
    assert sketch is not None
    chosen = dict(random.choice(list(configs(sketch))).choices)
    if "kc" in chosen:
        chosen["kc"] = kc
    if chosen.get("order") == "panels":
        chosen["mc"] = random.choice([None, 1, 2, 3])
    if chosen.get("mc", 0) is None:
        del chosen["mc"]
    config = Config("gemm", tuple(chosen.items()))
    try:
        return Case(sketch, config, sketch.nest(config))
    except ValueError:  # rows whose blocks would pack B again: not in the space either
        return draw(random, name)


def executed(case: Case, tasks: int) -> tuple[Counts, np.ndarray, np.ndarray]:
    """What the first tasks do, the output, and the product."""
    program = case.sketch.build(case.config, "kernel_under_test")
    assert isinstance(program, Program)
    scratch = GemmLoops(case.sketch, case.config).scratch
    pieces = [
        Region(p.name, start := scratch.offsets[p.name] // FLOAT, start + p.nbytes // FLOAT)
        for p in scratch.pieces
    ]
    _, m, n, k = case.nest.extents
    random = np.random.default_rng()
    a, b = (random.standard_normal(s).astype(np.float32) for s in ((m, k), (k, n)))
    packed = program.packings["b"].apply(b) if "b" in program.packings else b
    out = np.full(m * n, np.nan, np.float32)
    counts = execute(program, [a.ravel(), packed.ravel()], out, pieces, 0, tasks)
    return counts, out.reshape(m, n), a.astype(float) @ b


@pytest.mark.parametrize("name", targets())
def test_the_workload_counts_what_the_loops_do(name: str) -> None:
    random = Random(fresh_seed())
    for _ in range(DRAWS):
        case = draw(random, name)
        nest, work = case.nest, case.sketch.workload(case.config)
        counts, _, _ = executed(case, 1)
        micro, panels, block, task = work.layers
        blocks = block.iterations
        kernels = micro.iterations * panels.iterations * blocks
        a_stream, b_stream = (s.nbytes * kernels / FLOAT for s in micro.loads)
        packed_a, packed_b = nest.a.how == "packed", nest.b.how == "packed"
        rows, columns = nest.shape.task_rows, nest.shape.task_panels * nest.row.columns
        stored = task.stores[1].nbytes / FLOAT  # the first is what is fetched before

        said = {
            "products": work.work * nest.row.lanes * kernels,
            "A, as the row reads it": a_stream,
            "B, as the row reads it": b_stream,
            "partial sums": sum(s.nbytes for s in micro.stores) * kernels / FLOAT,
            "A, out of memory": sum(s.nbytes for s in block.loads) * blocks / FLOAT,
            "A, packed": sum(s.nbytes for s in block.stores) * blocks / FLOAT,
            "output": stored,
        }
        again = counts.loads["tiles"] - stored + counts.stores["tiles"] - rows * columns
        done = {
            "products": counts.products,
            "A, as the row reads it": counts.loads["rows" if packed_a else "input 0"],
            "B, as the row reads it": counts.loads["panels" if packed_b else "input 1"],
            "partial sums": again,
            "A, out of memory": counts.loads["input 0"] / (1 if packed_a else panels.iterations),
            "A, packed": counts.stores["rows"],
            "output": counts.stores["output"],
        }
        assert done == pytest.approx(said), f"{nest}"


@pytest.mark.parametrize("name", targets())
def test_all_tasks_compute_the_product(name: str) -> None:
    """The executed loops are the real ones. The tolerance is that of sums of 36 float32 terms."""
    random = Random(fresh_seed())
    for _ in range(DRAWS // 2):
        case = draw(random, name)
        counts, got, wanted = executed(case, case.nest.shape.tasks)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4, err_msg=f"{case.nest}")
        assert counts.stores["output"] == got.size

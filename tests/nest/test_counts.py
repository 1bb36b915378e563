"""A nest, its price and its code say the same: what the emitted loops load, store and multiply is
what the workload counts.

Products, convolutions and attention of drawn sizes with drawn loops are executed by
:mod:`tests.nest.executed`. The workload describes the largest task, which is the first, so that one
is executed and compared; of attention all tasks are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from random import Random
from typing import Any

import numpy as np
import pytest

from gtco.graph.infer import infer_type
from gtco.machine.target import cpu_target
from gtco.tensor.nest.nest import Nest
from gtco.tensor.sketch.attention import cpu as attention
from gtco.tensor.sketch.attention.loops import AttentionLoops
from gtco.tensor.sketch.convolution import cpu as convolution
from gtco.tensor.sketch.convolution.loops import ConvolutionLoops
from gtco.tensor.sketch.gemm import cpu as gemm
from gtco.tensor.sketch.gemm.loops import GemmLoops
from gtco.tensor.sketch.strassen import cpu as strassen
from gtco.tensor.sketch.strassen.loops import StrassenLoops
from gtco.tensor.sketch.winograd import cpu as winograd
from gtco.tensor.sketch.winograd.loops import WinogradLoops
from gtco.tensor.space import Config, Program, Sketch, configs
from gtco.tensor.stage import Operator, Stage, TensorType, make_attrs, make_stage
from tests.kernels import fresh_seed, reference, targets
from tests.nest.executed import Counts, Region, execute

FLOAT = 4  # bytes
DRAWS = 12
Pair = tuple[int, int]
LOOPS = {
    "gemm": GemmLoops,
    "convolution": ConvolutionLoops,
    "winograd": WinogradLoops,
    "strassen": StrassenLoops,
    "attention": AttentionLoops,
}


@dataclass(frozen=True)
class Case:
    """A stage with loops that were drawn for it."""

    sketch: gemm.Gemm | convolution.Convolution | winograd.Winograd | strassen.Strassen
    config: Config
    nest: Nest


def product(m: int, k: int, n: int, constant: bool, samples: tuple[int, ...] = ()) -> Stage:
    op = Operator("matmul", ("a", "b"), "c", TensorType((*samples, m, n)))
    types = {"a": TensorType((*samples, m, k)), "b": TensorType((k, n))}
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
    if chosen.get("order") == "panels" and chosen["a"] == "direct" and stage.constants:
        if random.random() < 0.4:  # the space has it for tiles
            chosen["order"] = "k"
            chosen.pop("mc", None)
    config = Config("gemm", tuple(chosen.items()))
    try:
        return Case(sketch, config, sketch.nest(config))
    except ValueError:  # rows whose blocks would pack B again: not in the space either
        return draw(random, name)


def windows(c: int, n: int, size: Pair, kernel: Pair, stride: int, pad: int, turned: bool) -> Stage:
    """A convolution of an image that lies channels last, or ``turned`` from channels first."""
    given, image = TensorType((1, c, *size)), TensorType((1, *size, c))
    attrs: dict[str, Any] = {"strides": (stride,) * 2, "padding": (pad,) * 4, "dilation": (1, 1)}
    attrs |= {"groups": 1, "layout": "NHWC"}
    w = TensorType((n, c, *kernel))
    out = infer_type("conv2d", [image, w], attrs)
    turn = Operator("permute", ("x",), "t", image, make_attrs(axes=(0, 2, 3, 1)))
    conv = Operator("conv2d", ("t" if turned else "x", "w"), "y", out, make_attrs(**attrs))
    types = {"x": given if turned else image, "w": w}
    return make_stage([turn, conv] if turned else [conv], types, ["w"])


def draw_convolution(random: Random, name: str) -> Case:
    """All windows lie in the image, so that everything that is copied is loaded. They overlap."""
    kernel = random.randint(1, 3), random.randint(2, 4)
    stride = random.randint(1, 2)
    height, width = (k + stride * random.randint(0, 5) for k in kernel)
    c, n, turned = random.randint(1, 9), random.randint(1, 40), random.random() < 0.4
    stage = windows(c, n, (height, width), kernel, stride, 0, turned)
    sketch = convolution.match(stage, cpu_target(name))
    # windows that do not overlap; or TVM prints the output, which is one element, as a scalar
    if sketch is None or stage.output.type.sizes == (1, 1, 1, 1):
        return draw_convolution(random, name)
    config = random.choice(list(configs(sketch)))
    return Case(sketch, config, sketch.nest(config))


def draw_winograd(random: Random, name: str) -> Case:
    """A convolution of whole tiles."""
    height, width = (4 * random.randint(1, 3) for _ in range(2))
    c, n = random.randint(1, 5), random.randint(1, 20)
    stage = windows(c, n, (height, width), (3, 3), 1, 1, turned=False)
    sketch = winograd.match(stage, cpu_target(name))
    assert sketch is not None
    chosen = dict(random.choice(list(configs(sketch))).choices)
    chosen["mc"] = random.randint(1, sketch.nest(Config("winograd", tuple(chosen.items()))).held)
    config = Config("winograd", tuple(chosen.items()))
    return Case(sketch, config, sketch.nest(config))


def draw_strassen(random: Random, name: str) -> Case:
    """A product of halves that are whole vectors, and of pairs of rows that are whole."""
    machine = cpu_target(name)
    m = 2 * random.randint(1, 15)
    k, n = (2 * machine.lanes * random.randint(1, 2) for _ in range(2))
    with pytest.MonkeyPatch.context() as small:
        small.setattr(strassen, "LEAST", (1, 1, 1))
        sketch = strassen.match(product(m, k, n, True, (1,)), machine)
    assert sketch is not None
    config = random.choice(list(configs(sketch)))
    return Case(sketch, config, sketch.nest(config))


DRAWN: dict[str, Callable[[Random, str], Case]] = {
    "gemm": draw,
    "convolution": draw_convolution,
    "winograd": draw_winograd,
    "strassen": draw_strassen,
}


def executed(sketch: Sketch, config: Config, tasks: int) -> tuple[Counts, np.ndarray, np.ndarray]:
    """What the first tasks do, the output, and what it should be."""
    program, stage = sketch.build(config, "kernel_under_test"), sketch.stage
    assert isinstance(program, Program)
    scratch = LOOPS[config.sketch](sketch, config).scratch  # type: ignore[operator]
    pieces = [
        Region(p.name, start := scratch.offsets[p.name] // FLOAT, start + p.nbytes // FLOAT)
        for p in scratch.pieces
    ]
    random = np.random.default_rng()
    arrays = [random.standard_normal(i.type.shape).astype(np.float32) for i in stage.inputs]
    packed = [
        program.packings[i.name].apply(a) if i.name in program.packings else a
        for i, a in zip(stage.inputs, arrays, strict=True)
    ]
    wanted = reference(stage, arrays)
    out = np.full(wanted.size, np.nan, np.float32)
    counts = execute(program, [a.ravel() for a in packed], out, pieces, 0, tasks)
    return counts, out.reshape(wanted.shape), wanted


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("family", DRAWN)
def test_the_workload_counts_what_the_loops_do(family: str, name: str) -> None:
    random = Random(fresh_seed())
    for _ in range(DRAWS):
        case = DRAWN[family](random, name)
        nest, work = case.nest, case.sketch.workload(case.config)
        counts, _, _ = executed(case.sketch, case.config, 1)
        micro, panels, block, task = work.layers
        blocks = block.iterations
        kernels = micro.iterations * panels.iterations * blocks
        a_stream, b_stream = (s.nbytes * kernels / FLOAT for s in micro.loads)
        copy = {"direct": "input 0", "packed": "rows", "windows": "image"}[nest.a.how]
        direct = nest.a.how == "direct"
        copy_b = {"packed": "panels", "widened": "panel"}.get(nest.b.how, "input 1")
        rows, columns = nest.shape.task_rows, nest.shape.task_panels * nest.row.columns
        stored = task.stores[1].nbytes / FLOAT  # the first is what is fetched before
        again = sum(counts.loads[x] + counts.stores[x] for x in ("tiles", "sums"))
        through = LOOPS[family](case.sketch, case.config)  # type: ignore[operator]
        if nest.positions == 1 and not through.from_registers:  # sums that are not kept for later
            again -= stored + rows * columns
        memory = counts.loads["input 0"] / (nest.shape.task_panels if direct else 1)
        if nest.positions > 1:  # tiles overlap, and the caches have what was loaded before
            memory = len(counts.touched["input 0"])

        said = {
            "products": work.work * nest.row.lanes * kernels,
            "A, as the row reads it": a_stream,
            "B, as the row reads it": b_stream,
            "partial sums": sum(s.nbytes for s in micro.stores) * kernels / FLOAT,
            "A, out of memory": sum(s.nbytes for s in block.loads) * blocks / FLOAT,
            "A, packed": sum(s.nbytes for s in block.stores) * blocks / FLOAT,
            "output": stored,
        }
        done = {
            "products": counts.products,
            "A, as the row reads it": counts.different[copy],
            "B, as the row reads it": counts.different[copy_b],
            "partial sums": again,
            "A, out of memory": memory,
            "A, packed": 0 if direct else counts.stores[copy],
            "output": counts.stores["output"],
        }
        if nest.positions > 1 and nest.shape.chunks_m > 1:  # a task reads its neighbours' borders
            del said["A, out of memory"], done["A, out of memory"]
        assert done == pytest.approx(said), f"{nest}"


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("family", DRAWN)
def test_all_tasks_compute_the_product(family: str, name: str) -> None:
    """The executed loops are the real ones. The tolerance is that of sums of 108 float32 terms."""
    random = Random(fresh_seed())
    for _ in range(DRAWS // 2):
        case = DRAWN[family](random, name)
        counts, got, wanted = executed(case.sketch, case.config, case.nest.shape.tasks)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4, err_msg=f"{case.nest}")
        assert counts.stores["output"] == got.size


@pytest.mark.parametrize("name", targets())
def test_the_workload_of_attention_counts_what_its_loops_do(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tasks of attention, which is not a nest. They have equally many blocks, some of which
    share passes.
    """
    monkeypatch.setattr(attention, "LARGE", 0)
    random, machine = Random(fresh_seed()), cpu_target(name)
    for _ in range(DRAWS // 2):
        b, m, d = random.randint(1, 3), random.randint(1, 20), random.randint(2, 24)
        n, e = random.randint(1, 60), random.randint(2, 40)  # TVM prints one element as a scalar
        q, k, v, y = (TensorType((b, *size)) for size in ((m, d), (n, d), (n, e), (m, e)))
        op = Operator("attention", ("q", "k", "v"), "y", y, make_attrs(scale=d**-0.5))
        sketch = attention.match(make_stage([op], {"q": q, "k": k, "v": v}, []), machine)
        assert sketch is not None
        shapes = {config: sketch.shape(config) for config in configs(sketch)}
        even = [c for c, s in shapes.items() if s.task_blocks * s.chunks_m == s.blocks]
        config = random.choice(even)
        shape, work = shapes[config], sketch.workload(config)
        counts, got, wanted = executed(sketch, config, shape.tasks)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4, err_msg=str(config))
        block, *passes, task = work.layers
        blocks = block.iterations * prod(layer.iterations for layer in passes) * task.parallel
        said = {
            "products": work.work * machine.lanes * blocks,
            "K and V, as the rows read them": block.loads[0].nbytes * blocks / FLOAT,
            "K and V, out of memory": task.loads[0].nbytes * task.parallel / FLOAT,
            "output": block.stores[0].nbytes * blocks / FLOAT,
        }
        done = {
            "products": counts.products,
            "K and V, as the rows read them": counts.loads["keys"] + counts.loads["values"],
            "K and V, out of memory": counts.loads["input 1"] + counts.loads["input 2"],
            "output": counts.stores["output"],
        }
        assert done == pytest.approx(said), f"{config} of {b}x{m}x{n}, {d} and {e} wide"

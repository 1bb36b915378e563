"""Element-wise and movement stages on GPUs: random chains, every movement in every dtype, and
transposes through tiles. They are emulated and compared with numpy's float64.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from gtco.codegen.nvrtc import compile_cuda
from gtco.codegen.sass import machine_code
from gtco.machine.gpu import ARCHITECTURES, gpu_target
from gtco.tensor.cuda.program import CudaProgram
from gtco.tensor.reference import evaluate
from gtco.tensor.sketch.elementwise.cuda import CudaElementwise, match
from gtco.tensor.space import Config, configs
from gtco.tensor.stage import Operator, Stage, TensorType, make_attrs, make_stage
from tests.cuda.batch import emulate_all
from tests.cuda.emulate import run_reported
from tests.kernels import assert_close, fresh_seed
from tests.sketch.fallback.test_fallback import MOVEMENT, single
from tests.stages import LEAST, drawn, elementwise

GPU = gpu_target("cuda:sm_80")
# Relative to the largest element: float32's polynomials, and a rounding to 11 or 8 bits after each
# operator.
TOLERANCES = {"float32": 1e-5, "float64": 1e-11, "float16": 1e-2, "bfloat16": 8e-2}


def in_dtype(stage: Stage, dtype: str) -> Stage:
    """The stage with its float32 tensors in another dtype."""

    def changed(t: TensorType) -> TensorType:
        return TensorType(t.shape, dtype if t.dtype == "float32" else t.dtype)

    return Stage(
        tuple(replace(i, type=changed(i.type)) for i in stage.inputs),
        tuple(replace(op, type=changed(op.type)) for op in stage.operators),
    )


def inputs(stage: Stage, seed: int, special: bool = False) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    found = []
    indices = {op.inputs[1] for op in stage.operators if op.kind == "gather"}
    for i in stage.inputs:
        dtype = np.dtype(i.type.dtype)
        if i.name in indices:
            found.append(rng.integers(-LEAST, LEAST, i.type.sizes).astype(dtype))
            continue
        x = rng.standard_normal(i.type.sizes) * (30 if dtype.kind in "iu" else 1)
        if special and x.size > 8:
            x.reshape(-1)[rng.integers(0, x.size, 3)] = (np.inf, -np.inf, np.nan)
        found.append(np.abs(x).astype(dtype) if dtype.kind == "u" else x.astype(dtype))
    return found


def wanted(stage: Stage, arrays: list[np.ndarray]) -> np.ndarray:
    """The result with floats widened to float64."""
    narrow = ("float32", "float16", "bfloat16")
    values = {
        i.name: a.astype(np.float64) if i.type.dtype in narrow else a
        for i, a in zip(stage.inputs, arrays, strict=True)
    }
    for op in stage.operators:
        values[op.output] = evaluate(op, *(values[x] for x in op.inputs))
    return values[stage.output.output]


def some(sketch: CudaElementwise) -> list[Config]:
    """A config of each kind: tiles of each side, and each number of neighbours."""
    return [c for c in configs(sketch) if c.by_name.get("threads", 128) == 128]


def sketch_of(stage: Stage) -> CudaElementwise:
    sketch = match(stage, GPU)
    assert sketch is not None
    return sketch


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_random_chains(dtype: str) -> None:
    """Any operators before and after an element-wise one, with NaN and infinities among the
    inputs.
    """
    seed = fresh_seed()
    random = Random(seed)
    cases = []
    for n in range(6):
        sizes = random.choice(((), (3, 8, 16, 40), (7, 33, 64)))
        stage = in_dtype(drawn(elementwise, random, random, 3, sizes), dtype)
        print(f"seed {seed}, {n}: {stage.label}")
        if match(stage, GPU) is None:  # an empty tensor
            continue
        sketch, arrays = sketch_of(stage), inputs(stage, seed + n, special=n % 2 == 0)
        cases += [(sketch, config, arrays) for config in some(sketch)]
    for (sketch, config, arrays), got in zip(cases, emulate_all(cases), strict=True):
        with np.errstate(all="ignore"):
            exact = wanted(sketch.stage, arrays)
        print(f"{sketch.stage.label} {config}")
        assert_close(got, exact, TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "uint16", "int64", "bool"])
def test_movement_keeps_every_bit(dtype: str) -> None:
    seed = fresh_seed()
    cases = []
    for kind, shapes, out, attrs in MOVEMENT:
        if kind == "pad":
            attrs = {**attrs, "value": 1}
        stage = single(kind, [TensorType(s, dtype) for s in shapes], TensorType(out, dtype),
                       **attrs)  # fmt: skip
        if stage.output.type.size:
            sketch, arrays = sketch_of(stage), inputs(stage, seed)
            cases += [(sketch, config, arrays) for config in some(sketch)[:2]]
    for (sketch, _, arrays), got in zip(cases, emulate_all(cases), strict=True):
        exact = evaluate(sketch.stage.output, *arrays)
        np.testing.assert_array_equal(got, exact.astype(got.dtype))


def transposed(shape: tuple[int, ...], axes: tuple[int, ...], dtype: str) -> Stage:
    turned = TensorType(tuple(shape[a] for a in axes), dtype)
    return make_stage(
        [
            Operator("permute", ("a",), "t", turned, make_attrs(axes=axes)),
            Operator("add", ("t", "b"), "u", turned),
            Operator("relu", ("u",), "v", turned),
        ],
        {"a": TensorType(shape, dtype), "b": TensorType(turned.shape[-1:], dtype)},
        (),
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "int8"])
def test_transposes_through_tiles(dtype: str) -> None:
    seed = fresh_seed()
    cases = []
    for shape, axes in (
        ((3, 33, 70), (0, 2, 1)),
        ((2, 5, 9, 34), (0, 3, 1, 2)),
        ((65, 64), (1, 0)),
        ((13, 2, 40), (2, 1, 0)),
    ):
        sketch = sketch_of(transposed(shape, axes, dtype))
        assert sketch.turning is not None
        arrays = inputs(sketch.stage, seed)
        cases += [(sketch, c, arrays) for c in some(sketch) if c["tile"]]
    for (sketch, _, arrays), got in zip(cases, emulate_all(cases), strict=True):
        exact = wanted(sketch.stage, arrays)
        tolerance = TOLERANCES.get(dtype, 0)
        assert_close(got, exact, tolerance)


def test_transposes_one_behind_the_other_read_what_is_theirs() -> None:
    """The emulator refuses reads outside of an input. A tile that reads the other part would make
    one.
    """
    whole, part = TensorType((3, 9, 8, 16), "float32"), TensorType((1, 8, 9, 16), "float32")
    turned = TensorType((1, 9, 8, 16), "float32")
    stage = make_stage(
        [
            Operator("permute", ("a",), "t", turned, make_attrs(axes=(0, 2, 1, 3))),
            Operator("concat", ("t", "b"), "u", whole, make_attrs(axis=0)),
            Operator("permute", ("u",), "v", TensorType((3, 8, 16, 9), "float32"),
                     make_attrs(axes=(0, 2, 3, 1))),
        ],
        {"a": part, "b": TensorType((2, 9, 8, 16), "float32")},
        (),
    )  # fmt: skip
    sketch = sketch_of(stage)
    arrays = inputs(stage, 1)
    cases = [(sketch, config, arrays) for config in some(sketch)]
    for got in emulate_all(cases):
        np.testing.assert_array_equal(got, wanted(stage, arrays).astype(np.float32))


def test_tiles_meet_no_bank_twice_and_read_whole_sectors() -> None:
    sketch = sketch_of(transposed((128, 128), (1, 0), "float32"))
    arrays = inputs(sketch.stage, 1)
    tiled, plain = (
        run_reported(sketch, Config("elementwise", choices), arrays)[1]
        for choices in (
            (("tile", 32),),
            (("tile", 0), ("neighbours", 1), ("threads", 128)),
        )
    )
    assert tiled.bank_conflicts == 0
    assert tiled.sector_ratio == 1.0
    assert plain.sector_ratio > 3


def test_neighbours_are_one_access() -> None:
    """Rows of a multiple of 8: every access has at least 16 bytes."""
    type_ = TensorType((5, 48), "float16")
    stage = make_stage(
        [Operator("relu", ("a",), "t", type_), Operator("add", ("t", "b"), "u", type_)],
        {"a": type_, "b": TensorType((48,), "float16")},
        (),
    )
    sketch = sketch_of(stage)
    config = Config("elementwise", (("neighbours", 8), ("threads", 128)))
    _, report = run_reported(sketch, config, inputs(stage, 1))
    assert {s.bytes for s in report.sites} == {16}


def test_odd_rows_are_read_one_by_one() -> None:
    """Rows of 769 elements begin at any address, so neighbouring threads read neighbours."""
    type_ = TensorType((3, 769))
    stage = make_stage(
        [Operator("relu", ("a",), "t", type_), Operator("add", ("t", "b"), "u", type_)],
        {"a": type_, "b": TensorType((769,))},
        (),
    )
    assert sketch_of(stage).neighbours == ()


def test_tokens_are_joined_by_whole_accesses() -> None:
    """A class token before the patches: only the row decides which tensor is read."""
    type_ = TensorType((2, 9, 32))
    stage = make_stage(
        [
            Operator("concat", ("a", "b"), "t", type_, make_attrs(axis=1)),
            Operator("add", ("t", "p"), "u", type_),
        ],
        {
            "a": TensorType((2, 1, 32)),
            "b": TensorType((2, 8, 32)),
            "p": TensorType((1, 9, 32)),
        },
        (),
    )
    sketch, arrays = sketch_of(stage), inputs(stage, fresh_seed())
    config = Config("elementwise", (("neighbours", 4), ("threads", 128)))
    got, report = run_reported(sketch, config, arrays)
    assert_close(got, wanted(stage, arrays), 1e-6)
    assert {s.bytes for s in report.sites} == {16}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles(arch: str) -> None:
    """For each architecture, without spills."""
    half = TensorType((197, 768), "float16")
    gelu = make_stage(
        [Operator("gelu", ("a",), "t", half), Operator("add", ("t", "b"), "u", half)],
        {"a": half, "b": TensorType((768,), "float16")},
        (),
    )
    for stage in (gelu, transposed((3, 197, 64), (0, 2, 1), "bfloat16")):
        sketch = sketch_of(stage)
        program = sketch.build(some(sketch)[0], "gtco_test")
        assert isinstance(program, CudaProgram)
        image = compile_cuda(program.source, arch)
        assert image.spills == 0 and image.registers <= 64


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_machine_code_has_the_whole_accesses(arch: str) -> None:
    """Eight float16 are one load and one store of 16 bytes in SASS as well."""
    type_ = TensorType((64, 64), "float16")
    sketch = sketch_of(make_stage([Operator("relu", ("a",), "t", type_)], {"a": type_}, ()))
    config = Config("elementwise", (("neighbours", 8), ("threads", 128)))
    program = sketch.build(config, "gtco_test")
    assert isinstance(program, CudaProgram)
    code = machine_code(compile_cuda(program.source, arch).cubin)["gtco_test"]
    for stem in ("LDG", "STG"):
        moved = {name for name in code.instructions if name.split(".")[0] == stem}
        assert moved and all("128" in name for name in moved), (stem, moved)

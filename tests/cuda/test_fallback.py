"""The fallback on GPUs: every kind of operator alone, emulated, against numpy's float64; what TVM
lowers as well as what has a thread for each element.
"""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import tvm

from gtco.codegen.nvrtc import compile_cuda
from gtco.gpu import ARCHITECTURES, gpu_target
from gtco.tensor.cuda.program import CudaProgram
from gtco.tensor.operators import OPERATORS
from gtco.tensor.sketch import fallback as cpu
from gtco.tensor.sketch.cuda.fallback import Fallback, match
from gtco.tensor.space import Config, Rejection
from gtco.tensor.stage import Stage, TensorType
from tests.cuda.batch import emulate_all
from tests.cuda.test_elementwise import in_dtype, inputs, wanted
from tests.kernels import assert_close, fresh_seed, random_inputs, reference
from tests.stages import CORES, drawn
from tests.unit.test_sketch_fallback import single
from tests.unit.test_sketch_fallback_opaque import OPAQUE, _nonzero

GPU = gpu_target("cuda:sm_80")
ONLY = Config("fallback")
T = TensorType


def sketch_of(stage: Stage) -> Fallback:
    sketch = match(stage, GPU)
    assert sketch is not None
    return sketch


def check(stages: list[Stage], tolerance: float, seed: int) -> None:
    cases = [(sketch_of(stage), ONLY, inputs(stage, seed)) for stage in stages]
    for stage, (_, _, arrays), got in zip(stages, cases, emulate_all(cases), strict=True):
        with np.errstate(all="ignore"):
            exact = wanted(stage, arrays)
        print(f"seed {seed}: {stage.label} {[str(i.type) for i in stage.inputs]}")
        if got.dtype.kind in "biu":
            np.testing.assert_array_equal(got, exact)
        else:
            assert_close(got, exact, tolerance)


def test_every_core_alone() -> None:
    """Sizes that divide nothing; the kinds that have sketches of their own as well."""
    seed = fresh_seed()
    random = Random(seed)
    stages = [drawn(core, random, random, 0, (1, 3, 5, 8)) for core in CORES for _ in range(2)]
    check([s for s in stages if len(s.operators) == 1], 1e-5, seed)


def test_reductions_and_places() -> None:
    stages = []
    for kind in ("sum", "mean", "max", "min", "prod"):
        stages.append(single(kind, [T((3, 5, 4))], T((3, 4)), axes=(1,), keepdims=False))
    for kind in ("argmax", "argmin"):
        out = T((3, 4), "int64")
        stages.append(single(kind, [T((3, 5, 4))], out, axis=1, keepdims=False, last=True))
    check(stages, 1e-5, fresh_seed())


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float16", 2e-2), ("bfloat16", 1e-1), ("float64", 1e-11)]
)
def test_other_floats(dtype: str, tolerance: float) -> None:
    shape = (3, 6, 5)
    stages = [
        single("softmax", [T(shape)], T(shape), axis=1),
        single("matmul", [T((4, 6)), T((6, 5))], T((4, 5))),
        single("gelu", [T(shape)], T(shape)),
        single("max", [T(shape)], T((3, 5)), axes=(1,), keepdims=False),
    ]
    check([in_dtype(s, dtype) for s in stages], tolerance, fresh_seed())


def test_what_only_relax_knows() -> None:
    """Sorting, scans, scatters of every kind that the CPU's fallback is tested with."""
    stages = list(OPAQUE.values())
    seed = fresh_seed()
    cases = []
    for stage in stages:
        arrays = random_inputs(stage, seed)
        cases.append((sketch_of(stage), ONLY, arrays))
    for stage, (_, _, arrays), got in zip(stages, cases, emulate_all(cases), strict=True):
        exact = reference(stage, arrays)
        if got.dtype.kind in "biu":
            np.testing.assert_array_equal(got, exact)
        else:
            assert_close(got, exact, 1e-5)


def test_what_tvm_lowers_in_several_loops_keeps_its_values_in_global_memory() -> None:
    """A softmax of several loops: what one leaves to the next does not fit a thread's own array."""
    stage = single("log_softmax", [T((40, 30))], T((40, 30)), axis=1)
    program = sketch_of(stage).build(ONLY, "gtco_test")
    assert isinstance(program, CudaProgram)
    assert program.threads == 1 and "__device__ alignas(64) unsigned char" in program.source
    check([stage], 1e-5, fresh_seed())


def test_independent_iterations_have_a_thread_each() -> None:
    """All axes, the last one too: there are no vectors to leave it to."""
    for name, count in (("grid_sample", 2 * 3 * 5 * 7), ("tril", 5 * 7), ("group_norm", 1)):
        program = sketch_of(OPAQUE[name]).build(ONLY, "gtco_test")
        assert isinstance(program, CudaProgram)
        assert program.grid[0] == -(-count // program.threads)
        assert f"begin >= {count}" in program.source or count == 1


def test_what_only_the_fallback_computes_is_priced_as_it_is_launched() -> None:
    """One thread was assumed of all: GatherND of some images seemed to take seconds."""
    for name in ("grid_sample", "tril", "group_norm"):
        sketch = sketch_of(OPAQUE[name])
        program, launch = sketch.build(ONLY, "gtco_test"), sketch.workload(ONLY)
        assert isinstance(program, CudaProgram)
        assert (launch.blocks, launch.threads) == (program.grid[0], program.threads)
    assert sketch_of(OPAQUE["grid_sample"]).tasks == 2 * 3 * 5 * 7


def test_an_empty_output_is_a_kernel_that_does_nothing() -> None:
    stage = single("relu", [T((0, 3))], T((0, 3)))
    program = sketch_of(stage).build(ONLY, "gtco_test")
    assert isinstance(program, CudaProgram) and "out[" not in program.source


def test_what_needs_a_runtime_is_rejected_with_a_reason() -> None:
    module = tvm.ir.save_json(_nonzero())
    out = T((2, 5), "int64")
    stage = single("relax", [T((3, 4), "bool")], out, module=module, op="nonzero", result=-1)
    answer = sketch_of(stage).build(ONLY, "gtco_test")
    assert isinstance(answer, Rejection) and answer.detail.startswith("nonzero: ")


def test_it_takes_whatever_a_cpus_takes() -> None:
    """Both match one operator of known shapes, and read the same kinds element by element."""
    stage = single("relu", [T(("n", 3))], T(("n", 3)))
    assert match(stage, GPU) is None
    assert set(cpu.IMAGE) <= set(OPERATORS)
    for kind in cpu.IMAGE:
        assert sketch_of(single(kind, [T((1, 2, 2, 1))], T((1, 2, 2, 1)))).by_elements


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles(arch: str) -> None:
    for stage in (
        single("softmax", [T((3, 17))], T((3, 17)), axis=1),
        in_dtype(single("matmul", [T((4, 6)), T((6, 5))], T((4, 5))), "bfloat16"),
    ):
        program = sketch_of(stage).build(ONLY, "gtco_test")
        assert isinstance(program, CudaProgram)
        assert compile_cuda(program.source, arch).cubin

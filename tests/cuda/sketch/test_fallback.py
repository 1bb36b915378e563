"""The fallback on GPUs: every kind of operator alone, emulated, against numpy's float64. Some kinds
are lowered by TVM, and the others have a thread for each element.
"""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import numpy as np
import onnx
import onnxruntime
import pytest
import tvm
from onnx import helper
from tvm.relax import op as R

from gtco.codegen.nvrtc import compile_cuda
from gtco.machine.gpu import ARCHITECTURES, gpu_target
from gtco.tensor import cuda
from gtco.tensor.cuda.program import CudaProgram
from gtco.tensor.operators import OPERATORS
from gtco.tensor.sketch import sketches
from gtco.tensor.sketch.fallback import cpu
from gtco.tensor.sketch.fallback.cuda import CudaFallback, match
from gtco.tensor.space import Config, Rejection
from gtco.tensor.stage import Stage, TensorType
from tests.cuda.batch import emulate_all
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.sketch.test_elementwise import in_dtype, inputs, wanted
from tests.cuda.whole import emulated, outputs
from tests.kernels import assert_close, fresh_seed, random_inputs, reference
from tests.sketch.fallback.test_fallback import of_nothing, single
from tests.sketch.fallback.test_opaque import OPAQUE, _nonzero, opaque
from tests.sketch.test_scatter import drawn as written
from tests.sketch.test_scatter import writing
from tests.sketch.test_topk import best, rows
from tests.stages import CORES, drawn

GPU = gpu_target("cuda:sm_80")
ONLY = Config("fallback")
T = TensorType


def sketch_of(stage: Stage) -> CudaFallback:
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
    """Sizes that no tile divides; this includes the kinds that have their own sketches."""
    seed = fresh_seed()
    random = Random(seed)
    stages = [drawn(core, random, random, 0, (1, 3, 5, 8)) for core in CORES for _ in range(2)]
    alone = [s for s in stages if len(s.operators) == 1 and match(s, GPU) is not None]
    fit = [s for s in alone if min(s.output.type.sizes, default=1) > 0]  # windows into their images
    check(fit, 1e-5, seed)


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
    """Sorting, scans and scatters of every kind with which the CPU's fallback is tested."""
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
    """A softmax of several loops: the values that one loop leaves to the next do not fit in a
    thread's own array.
    """
    stage = single("log_softmax", [T((40, 30))], T((40, 30)), axis=1)
    program = sketch_of(stage).build(ONLY, "gtco_test")
    assert isinstance(program, CudaProgram)
    assert program.threads == 1 and program.scratch >= 4 * 40
    check([stage], 1e-5, fresh_seed())


def test_no_kernel_has_memory_of_its_own() -> None:
    """All handles of a device would share such memory, and their runs may overlap."""
    variable = re.compile(r"^(?:static )?__(?:device|constant|managed)__ [^(]*[;=]", re.MULTILINE)
    assert variable.search("__device__ alignas64 unsigned char kept[12];")
    headers = sorted((Path(cuda.__file__).parent / "device" / "gtco").glob("*.cuh"))
    texts = {path.name: path.read_text() for path in headers}
    for name, stage in OPAQUE.items():
        program = sketch_of(stage).build(ONLY, "gtco_test")
        assert isinstance(program, CudaProgram)
        texts[name] = program.source
    assert len(texts) > 30
    assert not [name for name, text in texts.items() if variable.search(text)]


def test_independent_iterations_have_a_thread_each() -> None:
    """All axes have threads, also the last one, because there are no vectors for it."""
    for name, count in (("grid_sample", 2 * 3 * 5 * 7), ("tril", 5 * 7), ("group_norm", 1)):
        program = sketch_of(OPAQUE[name]).build(ONLY, "gtco_test")
        assert isinstance(program, CudaProgram)
        assert program.grid[0] == -(-count // program.threads)
        assert f"begin >= {count}" in program.source or count == 1


def test_what_only_the_fallback_computes_is_priced_as_it_is_launched() -> None:
    """The price once assumed one thread for all of them: GatherND of some images seemed to take
    seconds.
    """
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


def test_operators_of_nothing() -> None:
    """No other sketch takes them."""
    stages = of_nothing()
    check(stages, 1e-6, 0)
    for stage in stages:
        assert [sketch.name for sketch in sketches(stage, GPU)] == ["fallback"]


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


# sorts and scatters: each element a thread's ------------------------------------------------------
def sorts(dtype: str, axis: int, descending: bool) -> list[Stage]:
    """The first places and values, all places and all values of 7 x 45 x 3 elements."""
    types, k = [T((7, 45, 3), dtype)], {0: 7, 1: 20, 2: 2}[axis]
    first = {"k": k, "axis": axis, "largest": descending, "dtype": "int64"}
    every = {"axis": axis, "descending": descending}
    return [
        opaque(lambda x: R.topk(x, **first), types, 0),
        opaque(lambda x: R.topk(x, **first), types, 1),
        opaque(lambda x: R.argsort(x, dtype="int32", **every), types),
        opaque(lambda x: R.sort(x, **every), types),
    ]


def in_order(x: np.ndarray, axis: int, descending: bool) -> np.ndarray:
    """The places of a stable sort in which NaN is above all numbers."""
    unknown = np.isnan(x) if x.dtype.kind == "f" else np.zeros(x.shape, bool)
    number = np.where(unknown, 0, x).astype("float64")
    sign = -1 if descending else 1
    return np.lexsort((sign * number, sign * unknown.astype(int)), axis=axis)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int64"])
def test_sorts_with_ties_and_nan(dtype: str, descending: bool) -> None:
    """NaN once had no place in the order: it stayed where the merge met it."""
    random = np.random.default_rng(fresh_seed())
    x = random.integers(-4, 4, (7, 45, 3)).astype(dtype)
    if dtype != "int64":
        x[random.random(x.shape) < 0.2] = np.nan
        x[0, :, 0], x[1, 3, 1], x[1, 4, 1] = np.nan, np.inf, -np.inf
    axes = (0, 1, 2)
    cases = [(sketch_of(s), ONLY, [x]) for a in axes for s in sorts(dtype, a, descending)]
    for (sketch, _, _), got, n in zip(cases, emulate_all(cases), range(99), strict=False):
        places = in_order(x, n // 4, descending)
        first = np.take(places, range(got.shape[n // 4]), n // 4)
        wanted = first if n % 4 in (1, 2) else np.take_along_axis(x, first, n // 4)
        np.testing.assert_array_equal(got, wanted)
        assert sketch.tasks == x.size


REDUCTIONS = ("update", "add", "mul", "min", "max")


@pytest.mark.parametrize("shape", [(5, 7, 6), (1, 40, 3)])
def test_scatters_keep_the_order_of_what_collides(shape: tuple[int, ...]) -> None:
    """Some indices name the same place, and some count from the end; there are fewer updates than
    places.
    """
    random = np.random.default_rng(fresh_seed())
    x = random.standard_normal(shape).astype("float32")
    cases, wanted = [], []
    for reduction in REDUCTIONS:
        combine = {
            "update": lambda old, new: new, "add": np.add, "mul": np.multiply,
            "min": np.minimum, "max": np.maximum,
        }[reduction]  # fmt: skip
        for depth in (1, 2, 3):
            where = random.integers(-1, min(shape), (4, 5, depth)) % shape[:depth]
            where[0, 0], where[3, 4] = -1, -1
            if depth > 1:
                where[1] = where[2]
            new = random.standard_normal((4, 5, *shape[depth:])).astype("float32")
            exact = x.copy()
            for u in np.ndindex(4, 5):
                at = tuple(where[u])
                exact[at] = combine(exact[at], new[u])
            stage = opaque(
                lambda x, i, u, how=reduction: R.scatter_nd(x, i, u, how),
                [T(shape), T(where.shape, "int64"), T(new.shape)],
            )
            cases.append((sketch_of(stage), ONLY, [x, where, new]))
            wanted.append(exact)
        for axis in range(3):
            few = [max(1, n - (a != axis)) for a, n in enumerate(shape)]
            where = random.integers(-shape[axis], min(shape[axis], 3), few)
            new = random.standard_normal(few).astype("float32")
            exact = x.copy()
            for u in np.ndindex(*few):
                at = (*u[:axis], where[u], *u[axis + 1 :])
                exact[at] = combine(exact[at], new[u])
            stage = opaque(
                lambda x, i, u, a=axis, how=reduction: R.scatter_elements(x, i, u, a, how),
                [T(shape), T(where.shape, "int64"), T(new.shape)],
            )
            cases.append((sketch_of(stage), ONLY, [x, where, new]))
            wanted.append(exact)
    for (sketch, _, _), got, exact in zip(cases, emulate_all(cases), wanted, strict=True):
        np.testing.assert_array_equal(got, exact)  # the same roundings in the same order
        assert sketch.tasks == x.size


@pytest.mark.parametrize("largest", [True, False])
def test_the_best_of_rows(largest: bool) -> None:
    """The canonical ``topk``, whose kernel once had a single thread: all or some elements of each
    row, with ties and NaN.
    """
    cases = []
    for dtype in ("float32", "float64", "float16", "int64", "int32", "int8", "uint8"):
        for shape, k in (((3, 5, 67), 5), ((2, 131), 131), ((257,), 1)):
            stage = best(shape, k, largest, dtype)
            kind = "special" if dtype.startswith("float") else "few"
            with np.errstate(over="ignore"):
                cases.append((sketch_of(stage), ONLY, [rows(shape, dtype, kind)]))
    for (sketch, _, arrays), got in zip(cases, emulate_all(cases), strict=True):
        np.testing.assert_array_equal(got, reference(sketch.stage, arrays, precise=False))
        spread(sketch, arrays[0].size)


@pytest.mark.parametrize("reduction", ["update", "add", "mul", "max", "min"])
def test_rows_that_are_written(reduction: str) -> None:
    """The canonical ``scatter``, whose kernel once had a single thread: rows of any length, several
    updates of a row in order, indices that name no row, and NaN.
    """
    cases = []
    for shape, names, count in (((7, 45), 315, 90), ((3, 100), 3, 5), ((2, 30, 9), 60, 41)):
        for dtype in ("float32", "float16", "bfloat16", "int64", "int8", "bool"):
            if dtype == "bool" and reduction != "update":
                continue
            stage = writing(shape, names, count, reduction, dtype, "int32")
            x, i, u = written(stage)
            if "float" in dtype:
                x.flat[::7], u.flat[::5] = np.nan, np.nan
            if "float16" in dtype and reduction == "mul":
                x, u = np.sign(x), np.sign(u)  # the products of more would be rounded
            cases.append((sketch_of(stage), ONLY, [x, i, u]))
    for (sketch, _, arrays), got in zip(cases, emulate_all(cases), strict=True):
        exact = reference(sketch.stage, arrays, precise=False)
        np.testing.assert_array_equal(got.astype("float64"), exact.astype("float64"))
        spread(sketch, got.size)


def test_an_element_reads_the_updates_of_its_own_line(driver: FakeDriver, tmp_path: Path) -> None:
    """ScatterElements as a model has it, along each axis, with fewer updates than elements: the
    kernel of an element compared the indices of all updates.
    """
    random, shape = np.random.default_rng(fresh_seed()), (4, 6, 5)
    x = random.standard_normal(shape).astype("float32")
    nodes, feeds, results, taken = [], {"x": x}, [], []
    each = ((0, 3, 6, 5), (1, 4, 3, 5), (1, 2, 3, 5), (2, 3, 6, 2), (1, 4, 6, 3), (0, 7, 2, 1))
    for n, (axis, *sizes) in enumerate(each):
        feeds[f"i{n}"] = random.integers(-shape[axis], shape[axis], sizes)
        feeds[f"u{n}"] = random.integers(-3, 4, sizes).astype("float32")
        names = ["x", f"i{n}", f"u{n}"]
        results.append(f"y{n}")
        how = {"axis": axis, "reduction": ("add", "max", "mul")[n % 3]}
        nodes.append(helper.make_node("ScatterElements", names, results[-1:], **how))
        whole = all(sizes[a] == shape[a] for a in (1, 2) if a != axis)
        taken.append(sizes[axis] if whole else int(np.prod(sizes)))
    given = [
        helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
        for k, v in feeds.items()
    ]
    made = [helper.make_tensor_value_info(y, onnx.TensorProto.FLOAT, shape) for y in results]
    graph = helper.make_graph(nodes, "scatters", given, made)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, tmp_path / "model.onnx")
    exact = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    _, loaded, workers = emulated(driver, tmp_path, tmp_path / "model.onnx", None, "sm_80")
    with loaded:
        got = outputs(loaded, workers, feeds)
    for name, theirs in zip(results, exact, strict=True):
        np.testing.assert_allclose(got[name], theirs, rtol=1e-5, atol=1e-6, err_msg=name)
    texts = [program.source for program, _ in workers.programs.values()]
    counts = [re.findall(r"; \w+ < (\d+); ", text) for text in texts if "// scatter" in text]
    assert sorted(counts) == sorted([str(n)] for n in taken)


def spread(sketch: CudaFallback, count: int) -> None:
    """The kernel has a thread for each of ``count`` elements, and is priced as it is launched."""
    program, launch = sketch.build(ONLY, "gtco_test"), sketch.workload(ONLY)
    assert isinstance(program, CudaProgram)
    assert program.threads > 1 and program.grid[0] == -(-count // program.threads) > 1
    assert (launch.blocks, launch.threads) == (program.grid[0], program.threads)
    assert program.scratch == 0


def test_a_sort_is_priced_by_its_comparisons() -> None:
    """Twice the elements need four times the comparisons, by twice the threads."""
    work = []
    for n in (2000, 4000):
        stage = opaque(lambda x: R.argsort(x, axis=0, dtype="int64"), [T((n,))])
        launch = sketch_of(stage).workload(ONLY)
        work.append((launch.vector, launch.steps))
    assert 3.9 < work[1][0] / work[0][0] < 4.1 and 1.9 < work[1][1] / work[0][1] < 2.1


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles(arch: str) -> None:
    types = [T((6, 300)), T((4, 300), "int64"), T((4, 300))]
    for stage in (
        *sorts("float16", 1, True)[:2],
        sorts("bfloat16", 1, False)[0],
        opaque(lambda x, i, u: R.scatter_elements(x, i, u, 0, "add"), types),
        single("softmax", [T((3, 17))], T((3, 17)), axis=1),
        in_dtype(single("matmul", [T((4, 6)), T((6, 5))], T((4, 5))), "bfloat16"),
    ):
        program = sketch_of(stage).build(ONLY, "gtco_test")
        assert isinstance(program, CudaProgram)
        assert compile_cuda(program.source, arch).cubin

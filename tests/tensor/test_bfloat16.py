"""bfloat16: all its values, the rounding of float32 to it, data movement, and contractions."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from gtco.codegen.load import load
from gtco.graph.graph import Graph
from gtco.graph.infer import infer_type
from gtco.graph.rewrites.fold_constants import fold_constants
from gtco.tensor.emit import scalar
from gtco.tensor.emit.emitter import Emitter, KernelArguments, kernel
from gtco.tensor.reference import evaluate
from gtco.tensor.sketch import sketches
from gtco.tensor.sketch.elementwise import cpu as elementwise
from gtco.tensor.sketch.fallback import cpu as fallback
from gtco.tensor.space import configs
from gtco.tensor.stage import Operator, Stage, StageInput, TensorType, make_attrs
from tests.kernels import Built, build, fresh_seed, runnable, targets

BF16 = np.dtype(ml_dtypes.bfloat16)
TINY = 2.0**-126  # kernels read denormals as zero: nothing below is compared


def cast(arrays: np.ndarray, new: str, name: str, vectors: str) -> np.ndarray:
    """A kernel that casts a whole number of vectors."""
    machine = runnable(name)
    given = TensorType(arrays.shape, arrays.dtype.name)
    op = Operator("cast", ("x",), "out", TensorType(arrays.shape, new))

    def body(em: Emitter, args: KernelArguments) -> None:
        x = args.inputs["x"]
        with em.loop(arrays.size // em.lanes, "block") as block:
            at = block * em.lanes
            if vectors == "explicit":
                value = scalar.apply(em, op, [em.load_vector(x, [at])], [given.dtype])
                em.store_vector(args.output, [at], value)
                return
            with em.vector(em.lanes) if vectors == "loop" else em.loop(em.lanes) as lane:
                value = scalar.apply(em, op, [em.load(x, [at + lane])], [given.dtype])
                em.store(args.output, [at + lane], value)

    function = kernel("kernel_under_test", {"x": given}, op.type, 0, machine.lanes, body)
    library = load([function], machine)
    return Built(library, "kernel_under_test", (("x", given),), op.type, 1, 0, {})(arrays)


def every_bfloat16() -> np.ndarray:
    return np.arange(1 << 16, dtype=np.uint16).view(BF16)


def boundaries() -> np.ndarray:
    """Float32 values at, between and beside all neighbouring bfloat16 values: every upper half,
    with the lower halves near which the rounding changes.
    """
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    words = (np.arange(1 << 16, dtype=np.uint32) << 16)[:, None] | low
    return np.ascontiguousarray(words.reshape(-1)).view(np.float32)


def same(got: np.ndarray, wanted: np.ndarray) -> None:
    """Compares bit for bit; any NaN equals any other NaN."""
    nan = np.isnan(wanted.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    bits = f"u{got.dtype.itemsize}"
    np.testing.assert_array_equal(got.view(bits)[~nan], wanted.view(bits)[~nan])


@pytest.mark.parametrize("vectors", ["loop", "explicit", "serial"])
@pytest.mark.parametrize("name", targets())
def test_every_bfloat16_widens_exactly(name: str, vectors: str) -> None:
    same(cast(every_bfloat16(), "float32", name, vectors), every_bfloat16().astype(np.float32))


@pytest.mark.parametrize("vectors", ["loop", "explicit", "serial"])
@pytest.mark.parametrize("name", [*targets(), "native"])
def test_float32_rounds_to_the_nearest_even(name: str, vectors: str) -> None:
    """By integer arithmetic, and by the instruction if this CPU has it."""
    x = boundaries()
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = x.astype(BF16)
    kept = (np.abs(x) >= TINY) | (x == 0) | np.isnan(x)
    got = cast(x, "bfloat16", name, vectors)
    same(got[kept], wanted[kept])
    assert np.isinf(got[x == np.finfo(np.float32).max]).all()  # beyond the largest bfloat16
    assert not np.isinf(got[np.isnan(x)].astype(np.float32)).any()


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32", "int64", "bool", "uint8"])
@pytest.mark.parametrize("name", targets())
def test_other_dtypes_pass_through_float32(name: str, dtype: str) -> None:
    rng = np.random.default_rng(fresh_seed())
    x = (rng.standard_normal(64) * 40).astype(np.float32)
    given = x.astype(np.int32).astype(dtype) if dtype[0] in "iub" else x.astype(dtype)
    same(cast(given, "bfloat16", name, "loop"), given.astype(np.float32).astype(BF16))
    back = np.abs(x).astype(BF16)
    np.testing.assert_array_equal(
        cast(back, dtype, name, "loop"), back.astype(np.float32).astype(dtype)
    )


def stage_of(op: Operator, **inputs: TensorType) -> Stage:
    return Stage(tuple(StageInput(name, type_) for name, type_ in inputs.items()), (op,))


MOVES: list[tuple[str, tuple[int, ...], dict[str, object]]] = [
    ("permute", (7, 3, 5), {"axes": (1, 2, 0)}),
    ("pad", (6, 8, 7), {"before": (1, 2, 0), "after": (0, 1, 2), "value": -1.5}),
    ("slice", (3, 4, 3), {"begin": (2, 1, 0), "strides": (1, 1, 1)}),
    ("roll", (5, 7, 3), {"shifts": (2, 0, 1)}),
    ("relu", (5, 7, 3), {}),
    ("gelu", (5, 7, 3), {}),
]


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize(("kind", "shape", "attrs"), MOVES)
def test_movement_and_arithmetic(
    kind: str, shape: tuple[int, ...], attrs: dict[str, object], name: str
) -> None:
    machine = runnable(name)
    rng = np.random.default_rng(fresh_seed())
    x = rng.standard_normal((5, 7, 3) if kind != "pad" else (5, 5, 5)).astype(BF16)
    op = Operator(kind, ("x",), "y", TensorType(shape, "bfloat16"), make_attrs(**attrs))
    stage = stage_of(op, x=TensorType(x.shape, "bfloat16"))
    wanted = evaluate(op, x.astype(np.float64) if kind == "gelu" else x).astype(np.float64)
    for rule in (elementwise, fallback):
        sketch = rule.match(stage, machine)
        assert sketch is not None
        got = build(sketch, next(iter(configs(sketch))), machine)(x).astype(np.float64)
        near = np.zeros(())
        if kind == "gelu":  # rounding, and what gelu_rounded states: far below 0 it is more
            near = 2.0**-8 * np.abs(wanted) + 3.2e-5 * np.abs(x.astype(np.float64)) + 1e-30
        assert (np.abs(got - wanted) <= near).all()


def _types(*shapes: tuple[int, ...], dtype: str = "bfloat16") -> list[TensorType]:
    return [TensorType(shape, dtype) for shape in shapes]


CONTRACTED = {
    "matmul": (_types((2, 5, 7), (7, 9)), {}),
    "conv2d": (
        _types((1, 6, 5, 4), (3, 4, 3, 3)),
        {
            "strides": (1, 1),
            "padding": (1, 1, 1, 1),
            "dilation": (1, 1),
            "groups": 1,
            "layout": "NHWC",
        },
    ),
    "attention": (_types((2, 5, 8), (2, 7, 8), (2, 7, 6)), {"scale": 0.4}),
}


@pytest.mark.parametrize("kind", CONTRACTED)
def test_contractions_of_bfloat16_give_float32(kind: str) -> None:
    """The reference is compared with plain float64 on the rounded operands. Every sketch that takes
    the stage (at least the fallback) is compared with the reference.
    """
    types, attrs = CONTRACTED[kind]
    rng = np.random.default_rng(fresh_seed())
    arrays = [rng.standard_normal(tuple(map(int, t.shape))).astype(BF16) for t in types]
    out = infer_type(kind, types, attrs)
    assert out.dtype == "float32"
    names = tuple(f"x{i}" for i in range(len(types)))
    op = Operator(kind, names, "y", out, make_attrs(**attrs))
    wanted = evaluate(op, *arrays, dtype="float64")
    wide = evaluate(op, *(a.astype(np.float64) for a in arrays))
    bound = 2.0**-8 if kind == "attention" else 0.0  # the softmax is rounded
    assert np.abs(wanted - wide).max() <= bound * np.abs(wide).max() + 1e-12
    assert kind != "attention" or np.abs(wanted - wide).max() > 1e-5
    machine = runnable("x86-64-v3")
    stage = stage_of(op, **dict(zip(names, types, strict=True)))
    found = sketches(stage, machine)
    assert found
    for sketch in found:
        got = build(sketch, next(iter(configs(sketch))), machine)(*arrays)
        assert got.dtype == np.float32
        near = 2.0**-8 if kind == "attention" else 1e-5
        assert np.abs(got - wanted).max() <= near * np.abs(wanted).max()


def test_casts_of_constants_are_folded() -> None:
    """The weights take half as many bytes."""
    graph = Graph(("x",), (), {"x": TensorType((3, 8), "bfloat16")})
    weight = np.random.default_rng(1).standard_normal((8, 8)).astype(np.float32)
    w = graph.add_constant(weight, "w")
    half = graph.add("cast", (w,), TensorType((8, 8), "bfloat16"))
    y = graph.add("matmul", ("x", half))
    graph.outputs = (y,)
    folded = fold_constants(graph).check()
    assert [op.kind for op in folded.operators.values()] == ["matmul"]
    (constant,) = folded.constants.values()
    assert constant.dtype == BF16 and constant.nbytes == weight.nbytes // 2
    x = np.ones((3, 8), BF16)
    np.testing.assert_array_equal(
        folded.evaluate({"x": x})[y], graph.evaluate({"x": x})[y]
    )


WINDOW = {"strides": (1, 1), "padding": (1, 1, 1, 1), "layout": "NHWC"}
POOL = {"kernel": (3, 3), "dilation": (1, 1)}
STORED: dict[str, tuple[str, list[tuple[int, ...]], tuple[int, ...], dict[str, object]]] = {
    "rows": ("layer_norm", [(5, 40), (40,), (40,)], (5, 40), {"epsilon": 1e-5}),
    "columns": ("softmax", [(5, 37)], (5, 37), {"axis": 0}),
    "depthwise": (
        "conv2d",
        [(1, 6, 7, 20), (20, 1, 3, 3)],
        (1, 6, 7, 20),
        {**WINDOW, "dilation": (1, 1), "groups": 20},
    ),
    "pool": ("max_pool2d", [(1, 6, 7, 20)], (1, 6, 7, 20), {**WINDOW, **POOL}),
    "resize": (
        "resize2d",
        [(1, 6, 8, 20)],
        (1, 12, 16, 20),
        {
            "method": "linear",
            "coordinates": "half_pixel",
            "rounding": "round",
            "cubic_alpha": -0.75,
            "layout": "NHWC",
        },
    ),
}


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("case", STORED)
def test_other_sketches_store_and_read_bfloat16(case: str, name: str) -> None:
    """One cast follows the computation, and one comes before it."""
    machine = runnable(name)
    kind, shapes, out, attrs = STORED[case]
    rng = np.random.default_rng(fresh_seed())
    arrays = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    names = tuple(f"x{i}" for i in range(len(shapes)))
    op = Operator(kind, names, "y", TensorType(out), make_attrs(**attrs))
    given = tuple(StageInput(n, TensorType(s)) for n, s in zip(names, shapes, strict=True))
    behind = Operator("cast", ("y",), "z", TensorType(out, "bfloat16"))
    front = Operator("cast", ("h",), "x0", TensorType(shapes[0]))
    half = StageInput("h", TensorType(shapes[0], "bfloat16"))

    def run(stage: Stage, first: np.ndarray) -> np.ndarray:
        sketch = next(s for s in sketches(stage, machine) if s.name != "fallback")
        return build(sketch, next(iter(configs(sketch))), machine)(first, *arrays[1:])

    wide = [a.astype(np.float64) for a in arrays]
    wanted = evaluate(op, *wide)
    got = run(Stage(given, (op, behind)), arrays[0])
    assert got.dtype == BF16
    assert (np.abs(got.astype(np.float64) - wanted) <= 2.0**-8 * np.abs(wanted) + 1e-6).all()
    narrow = arrays[0].astype(BF16)
    wanted = evaluate(op, narrow.astype(np.float64), *wide[1:])
    got = run(Stage((half, *given[1:]), (front, op)), narrow)
    assert got.dtype == np.float32
    assert np.abs(got - wanted).max() <= 1e-5 * np.abs(wanted).max()

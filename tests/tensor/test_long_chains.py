"""Long element-wise chains before and after every kernel that computes them in registers: they
compile at once (see ``MOST_NODES`` of ``gtco.tensor.emit.emitter``) and are right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from gtco.tensor.sketch import sketches
from gtco.tensor.stage import Operator, Stage, TensorType, make_attrs, make_stage
from tests.kernels import (
    assert_close,
    build,
    first_config,
    fresh_seed,
    random_inputs,
    reference,
    runnable,
    targets,
)

T = TensorType


def op(kind: str, inputs: str, output: str, shape: Sequence[int], **attrs: object) -> Operator:
    return Operator(kind, tuple(inputs.split()), output, T(tuple(shape)), make_attrs(**attrs))


def mish_twice(x: str, y: str, shape: Sequence[int]) -> list[Operator]:
    """x tanh(softplus(x)) twice, as ONNX's importer writes it."""
    made = []
    for k, (a, b) in enumerate(((x, f"{y}_half"), (f"{y}_half", y))):
        made += [
            op("softplus", a, f"{y}{k}s", shape),
            op("tanh", f"{y}{k}s", f"{y}{k}t", shape),
            op("multiply", f"{a} {y}{k}t", b, shape),
        ]
    return made


def dense() -> Stage:
    x, y = (13, 24), (13, 40)
    ops = [*mish_twice("x", "p", x), op("matmul", "p w", "c", y), *mish_twice("c", "y", y)]
    return make_stage(ops, {"x": T(x), "w": T((24, 40))}, ["w"])


def narrow() -> Stage:
    ops = [op("matmul", "x w", "c", (13, 3)), *mish_twice("c", "y", (13, 3))]
    return make_stage(ops, {"x": T((13, 24)), "w": T((24, 3))}, ["w"])


def heads() -> Stage:
    shape = (1, 2, 17, 16)
    ops = [op("attention", "q k v", "o", shape, scale=0.25), *mish_twice("o", "y", shape)]
    return make_stage(ops, dict.fromkeys("qkv", T(shape)), [])


def softmax() -> Stage:
    shape = (5, 37)
    ops = [*mish_twice("x", "p", shape), op("softmax", "p", "s", shape, axis=1)]
    return make_stage([*ops, *mish_twice("s", "y", shape)], {"x": T(shape)}, [])


def plain() -> Stage:
    return make_stage(mish_twice("x", "y", (5, 37)), {"x": T((5, 37))}, [])


def turned() -> Stage:
    ops = [*mish_twice("x", "p", (40, 56)), op("permute", "p", "y", (56, 40), axes=(1, 0))]
    return make_stage(ops, {"x": T((40, 56))}, [])


def moments() -> Stage:
    shape = (1, 5, 49, 20)
    ops = [*mish_twice("x", "p", shape), op("moments", "p", "y", (1, 5, 2, 20))]
    return make_stage(ops, {"x": T(shape)}, [])


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize(
    "make, sketch",
    [
        (dense, "gemm"),
        (narrow, "dot"),
        (heads, "attention"),
        (softmax, "rows"),
        (plain, "elementwise"),
        (turned, "elementwise"),
        (moments, "moments"),
    ],
)
def test_kernel(make: Callable[[], Stage], sketch: str, name: str) -> None:
    machine, stage = runnable(name), make()
    found = next(s for s in sketches(stage, machine) if s.name == sketch)
    inputs = random_inputs(stage, fresh_seed())
    got = build(found, first_config(found), machine)(*inputs)
    assert_close(got, reference(stage, inputs), 2e-5)

"""Long element-wise chains before and after every kernel that computes them in registers: they
compile at once (see ``MOST_NODES`` of ``gtco.tensor.emit.emitter``, and
``gtco.tensor.emit.choices``) and are right.
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


def choosing(x: str, y: str, shape: tuple[int, ...]) -> list[Operator]:
    """Choices whose conditions follow from choices, as ``torch.bucketize`` is exported."""
    whole, truth = T(shape, "int64"), T(shape, "bool")
    made = []
    for k in range(2):
        here, after = (x if k == 0 else f"{y}{k}"), (y if k == 1 else f"{y}{k + 1}")
        for kind, inputs, output, kept in (
            ("less", f"{here} limit", f"{y}{k}l", truth),
            ("floor_mod", f"{here} size", f"{y}{k}m", whole),
            ("equal", f"{y}{k}m limit", f"{y}{k}e", truth),
            ("logical_and", f"{y}{k}l {y}{k}e", f"{y}{k}b", truth),
            ("add", f"{here} size", f"{y}{k}a", whole),
            ("where", f"{y}{k}b {y}{k}m {y}{k}a", after, whole),
        ):
            made.append(Operator(kind, tuple(inputs.split()), output, kept))
    return made


def searched() -> Stage:
    shape = (5, 37)
    types = {"x": T(shape, "int64"), "limit": T((), "int64"), "size": T((), "int64")}
    return make_stage(choosing("x", "y", shape), types, [])


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
        (searched, "elementwise"),
    ],
)
def test_kernel(make: Callable[[], Stage], sketch: str, name: str) -> None:
    machine, stage = runnable(name), make()
    found = next(s for s in sketches(stage, machine) if s.name == sketch)
    inputs = random_inputs(stage, fresh_seed())
    got = build(found, first_config(found), machine)(*inputs)
    assert_close(got, reference(stage, inputs), 2e-5)

"""The lowered TIR of three small kernels, for 8 and 16 lanes, and of one for the tile unit, under
configs that are written here.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gtco.codegen.llvm import lower
from gtco.machine.target import target
from gtco.tensor.sketch.attention import cpu as attention
from gtco.tensor.sketch.gemm import cpu as gemm
from gtco.tensor.sketch.rows import cpu as rows
from gtco.tensor.space import Program, Sketch, build, configs
from gtco.tensor.stage import Operator, Stage, TensorType, make_attrs, make_stage

Match = Callable[..., Sketch | None]
T = TensorType
TILES = "dense_in_tiles"


def op(
    kind: str, inputs: tuple[str, ...], output: str, shape: tuple[int, ...], **attrs: object
) -> Operator:
    return Operator(kind, inputs, output, T(shape), make_attrs(**attrs))


def dense_gelu() -> Stage:
    """13 rows, which no tile has; 40 columns, 8 more than the vectors of 16 lanes hold."""
    operators = [
        op("matmul", ("x", "w"), "c", (1, 13, 40)),
        op("add", ("c", "b"), "d", (1, 13, 40)),
        op("gelu", ("d",), "y", (1, 13, 40)),
    ]
    return make_stage(
        operators,
        {"x": T((1, 13, 24)), "w": T((24, 40)), "b": T((40,)), **outputs(operators)},
        ["w", "b"],
    )


def dense_of_pairs() -> Stage:
    """37 rows, the last five of which take tiles of their own configuration."""
    product = op("matmul", ("x", "w"), "y", (37, 32))
    types = {"x": T((37, 64), "bfloat16"), "w": T((64, 32), "bfloat16")}
    return make_stage([product], {**types, **outputs([product])}, ["w"])


def one_attention() -> Stage:
    heads = T((1, 2, 17, 16))
    operators = [op("attention", ("q", "k", "v"), "y", heads.shape, scale=0.25)]
    return make_stage(operators, {"q": heads, "k": heads, "v": heads}, [])


def one_layer_norm() -> Stage:
    operators = [op("layer_norm", ("x", "g", "b"), "y", (5, 40), epsilon=1e-6)]
    return make_stage(operators, {"x": T((5, 40)), "g": T((40,)), "b": T((40,))}, ["g", "b"])


def outputs(operators: list[Operator]) -> dict[str, TensorType]:
    return {o.output: o.type for o in operators}


KERNELS: dict[str, tuple[Callable[[], Stage], Match, dict[str, object]]] = {
    "dense_gelu": (dense_gelu, gemm.match, {"tile": "4x2", "a": "packed"}),
    "attention": (one_attention, attention.match, {"chunks_m": 1}),
    "layer_norm": (one_layer_norm, rows.match, {}),
    TILES: (dense_of_pairs, gemm.match, {"tile": "tiles:32x2", "a": "direct", "prefetch": "none"}),
}


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        *((k, n) for n in ("x86-64-v3", "x86-64-v4") for k in KERNELS if k != TILES),
        (TILES, "graniterapids"),
    ],
)
def test_kernel(kernel: str, name: str, golden: Callable[[str, str], None]) -> None:
    make, match, wanted = KERNELS[kernel]
    machine = target(name)
    sketch = match(make(), machine)
    assert sketch is not None
    *_, config = (c for c in configs(sketch) if wanted.items() <= dict(c.choices).items())
    program = build(sketch, config, "kernel")
    assert isinstance(program, Program)
    text = [
        f"# {sketch.stage.label} on {name}: {sketch.structure}, {config.to_json()}",
        f"# tasks {program.tasks}, workspace {program.workspace} bytes",
        *(f"# {input} packed: {packing}" for input, packing in sorted(program.packings.items())),
        lower([program.function], machine).script(),
    ]
    golden(f"{kernel}.{name}.txt", "\n".join(text))

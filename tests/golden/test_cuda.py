"""The CUDA text of an element-wise stage, and a check that docs/cuda.md shows the same text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gtco.machine.gpu import gpu_target
from gtco.tensor.cuda.program import CudaProgram
from gtco.tensor.sketch.elementwise import cuda as elementwise
from gtco.tensor.space import Config, build
from gtco.tensor.stage import Operator, Stage, TensorType, make_stage

DOCS = Path(__file__).parents[2] / "docs" / "cuda.md"


def bias_gelu() -> Stage:
    wide, half = TensorType((197, 3072)), TensorType((197, 3072), "float16")
    return make_stage(
        [
            Operator("add", ("x", "b"), "s", wide),
            Operator("gelu", ("s",), "g", wide),
            Operator("cast", ("g",), "y", half),
        ],
        {"x": wide, "b": TensorType((3072,))},
        ["b"],
    )


def test_elementwise(golden: Callable[[str, str], None]) -> None:
    sketch = elementwise.match(bias_gelu(), gpu_target("cuda:sm_80"))
    assert sketch is not None
    config = Config("elementwise", (("neighbours", 4), ("threads", 256)))
    program = build(sketch, config, "gtco_bias_gelu")
    assert isinstance(program, CudaProgram)
    golden("bias_gelu.cu", program.source)
    assert program.source in DOCS.read_text(), "docs/cuda.md shows what is printed no more"

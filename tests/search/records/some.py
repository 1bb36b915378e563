"""Records and stages for tests."""

from __future__ import annotations

import json

from gtco.machine.target import target
from gtco.search.records.records import Outcome, Record, circumstances, now
from gtco.tensor.space import Config
from gtco.tensor.stage import Operator, Stage, StageInput, TensorType

MACHINE = target("x86-64-v3")
HERE = circumstances(MACHINE)
MOMENT = now()


def record(
    config: Config,
    stage: str = "s",
    outcome: Outcome = "taken",
    seconds: float | None = 1e-3,
    known: str = HERE,
) -> Record:
    text = json.dumps(config.to_json())
    return Record(stage, "matmul", known, text, outcome, 2e-3, seconds, 0.5, 0.01, "", MOMENT)


def some(n: int) -> list[Record]:
    return [record(Config("gemm", (("tile", f"{i}x2"), ("kc", 7))), f"s{i % 3}") for i in range(n)]


def matmul_stage(n: int) -> Stage:
    given = StageInput("x", TensorType((n, 8))), StageInput("w", TensorType((8, 8)), True)
    return Stage(given, (Operator("matmul", ("x", "w"), "y", TensorType((n, 8))),))

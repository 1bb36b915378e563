"""The sketch rules, in the order they are asked; each answers None or a sketch for a stage."""

from __future__ import annotations

from collections.abc import Callable

from gtco.target import Target
from gtco.tensor.sketch import attention, depthwise, elementwise, fallback, gemm, pool, resize, rows
from gtco.tensor.space import Sketch
from gtco.tensor.stage import Stage

Rule = Callable[[Stage, Target], Sketch | None]

RULES: tuple[Rule, ...] = (
    gemm.match,
    attention.match,
    depthwise.match,
    rows.match,
    pool.match,
    resize.match,
    elementwise.match,
    fallback.match,
)


def sketches(stage: Stage, target: Target) -> list[Sketch]:
    """Every structure that some rule derives for the stage; empty where none does."""
    return [sketch for rule in RULES if (sketch := rule(stage, target)) is not None]

"""The sketch rules, in the order they are asked; each answers None or a sketch for a stage."""

from __future__ import annotations

from collections.abc import Callable

from gtco.target import Target
from gtco.tensor.sketch import (
    attention,
    convolution,
    depthwise,
    dot,
    elementwise,
    fallback,
    gemm,
    grid_sample,
    moments,
    pool,
    resize,
    rows,
)
from gtco.tensor.space import Sketch
from gtco.tensor.stage import Stage

Rule = Callable[[Stage, Target], Sketch | None]
Failed = Callable[[str, Exception], None]

RULES: tuple[Rule, ...] = (
    gemm.match,
    convolution.match,
    dot.match,
    attention.match,
    depthwise.match,
    rows.match,
    moments.match,
    pool.match,
    resize.match,
    grid_sample.match,
    elementwise.match,
    fallback.match,
)


def _nobody(rule: str, error: Exception) -> None:
    """Takes note of nothing."""


def sketches(stage: Stage, target: Target, failed: Failed = _nobody) -> list[Sketch]:
    """Every structure that some rule derives for the stage; empty where none does.

    A rule that raises is a bug, and no reason to give up the stage: ``failed(rule, error)`` is
    told, and the other rules are asked.
    """
    found = []
    for rule in RULES:
        try:
            sketch = rule(stage, target)
        except Exception as error:
            failed(rule.__module__.rpartition(".")[2], error)
            continue
        if sketch is not None:
            found.append(sketch)
    return found

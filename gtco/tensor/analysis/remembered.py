"""The last answer of a rule that other rules ask about the same stage."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from gtco.machine.target import Target
from gtco.tensor.stage import Stage

T = TypeVar("T")


def remembered(rule: Callable[[Stage, Target], T]) -> Callable[[Stage, Target], T]:
    """The rule; asked again about the very stage and target, it gives the same answer."""
    last: list[tuple[Stage, Target, T]] = []

    @wraps(rule)
    def asked(stage: Stage, target: Target) -> T:
        known = last[0] if last else None
        if known is not None and known[0] is stage and known[1] is target:
            return known[2]
        answer = rule(stage, target)
        last[:] = [(stage, target, answer)]
        return answer

    return asked

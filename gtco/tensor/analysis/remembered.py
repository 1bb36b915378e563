"""The last answer to a question that several rules ask about the same stage."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from operator import is_
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def remembered(rule: Callable[P, T]) -> Callable[P, T]:
    """The rule; asked again about the very same objects, it gives the same answer."""
    last: list[tuple[tuple[object, ...], T]] = []

    @wraps(rule)
    def asked(*args: P.args, **kwargs: P.kwargs) -> T:
        assert not kwargs, "it is asked by place"
        for known, answer in last:
            if len(known) == len(args) and all(map(is_, known, args)):
                return answer
        answer = rule(*args, **kwargs)
        last[:] = [(args, answer)]
        return answer

    return asked

"""What runs on a machine of a farm: it reads a library in a process that may be killed, and says
who it is. Requests and answers are JSON, and a library is its bytes: no Python object travels
between gtco here and gtco there. This module needs numpy and no compiler.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import inf

import numpy as np

from gtco.machine.identity import Identity, identity
from gtco.runtime.publish import temporary
from gtco.support.errors import GtcoError, OptionError
from gtco.tuning.local import LocalRunner
from gtco.tuning.runner import Budget, Readings

RESOURCE = "gtco:"  # what the custom resource of a machine begins with: gtco:KIND:NAME


def resource(kind: str, name: str) -> str:
    """The custom resource of a machine. It has one of it, and who measures there holds it."""
    return f"{RESOURCE}{kind}:{name}"


def parts(name: str) -> tuple[str, str] | None:
    """The kind and the name of a machine with this resource; None for another resource."""
    if not name.startswith(RESOURCE) or name.count(":") != 2:
        return None
    _, kind, machine = name.split(":")
    return kind, machine


def request(kind: str, budget: Budget) -> str:
    """What a machine is asked: to read the libraries that come with it, if it is of this kind."""
    limit = None if budget.limit == inf else budget.limit
    return json.dumps(
        {"kind": kind, "rounds": budget.rounds, "seconds": budget.seconds, "limit": limit}
    )


def answer(asked: str, *libraries: bytes) -> str:
    """Runs on the machine. Without libraries it only says who it is. A machine of another kind than
    is wanted runs nothing.
    """
    try:
        me = identity()
    except GtcoError as error:
        return json.dumps({"failed": str(error)})
    wanted = json.loads(asked)
    said: dict[str, object] = {"machine": me.to_json()}
    if not libraries or wanted["kind"] != me.kind:
        return json.dumps(said)
    limit = inf if wanted["limit"] is None else wanted["limit"]
    with temporary("farm") as folder:
        paths = [folder / f"{number}.so" for number in range(len(libraries))]
        for path, content in zip(paths, libraries, strict=True):
            path.write_bytes(content)
        read = LocalRunner().read(paths, Budget(wanted["rounds"], wanted["seconds"], limit))
    if read.failed:
        return json.dumps({**said, "failed": read.failed})
    seconds = [of.tolist() for of in read.seconds]
    return json.dumps({**said, "seconds": seconds, "wrong": sorted(read.wrong)})


def understood(text: object, libraries: int) -> tuple[Identity, Readings | None]:
    """Who answered, and what it read; None if it read nothing. Everything is checked, as the answer
    comes from another machine. Raises :class:`OptionError` for what is not an answer.
    """
    try:
        if not isinstance(text, str):
            raise ValueError("it is not text")
        said = json.loads(text)
        if "machine" not in said:
            raise ValueError(said.get("failed", "it does not say who it is"))
        who = Identity.from_json(said["machine"])
        if "failed" in said:
            return who, Readings(machine=who.to_json(), failed=str(said["failed"]))
        if "seconds" not in said:
            return who, None
        wrong = frozenset(said["wrong"])
        if not all(type(step) is int for step in wrong):
            raise ValueError("wrong steps are numbers")
        return who, Readings(_rounds(said["seconds"], libraries), wrong, who.to_json())
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise OptionError(f"it answered nothing that gtco understands ({error})") from error


def _rounds(seconds: Sequence[Sequence[Sequence[float]]], libraries: int) -> tuple[np.ndarray, ...]:
    found = tuple(np.array(one, dtype=np.float64) for one in seconds)
    right = len(found) == libraries and all(
        one.ndim == 2 and np.isfinite(one).all() and (one >= 0).all() for one in found
    )
    if not right:
        raise ValueError("readings are seconds by round and step")
    return found

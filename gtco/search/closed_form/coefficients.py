"""The file of the closed form: coefficients by machine and operator class.

It is JSON: a few hundred numbers of four digits. The machines on which they were trained are named
in it, and the terms of the polynomials, so that a file of other terms is not taken by mistake.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from gtco.search.closed_form.form import ClassForm, DecisionForm
from gtco.search.closed_form.products import feature_names
from gtco.support.errors import OptionError

VERSION = 1  # version of the file: raised where terms, rules or coordinates change
SHIPPED = Path(__file__).parent / "trained.json"
DIGITS = 5  # digits of a coefficient


@dataclass(frozen=True)
class Trained:
    """The coefficients for one kind of machine.

    - ``mcpu``: the machine's name as LLVM spells it (:attr:`Target.mcpu`);
    - ``about``: the machine in words, and what was measured on it;
    - ``classes``: the polynomials of each operator class.
    """

    mcpu: str
    about: str
    classes: Mapping[str, ClassForm]


def to_json(machines: tuple[Trained, ...]) -> dict[str, Any]:
    return {
        "version": VERSION,
        "terms": feature_names(),
        "machines": [
            {
                "mcpu": one.mcpu,
                "about": one.about,
                "classes": {kind: _class_json(form) for kind, form in one.classes.items()},
            }
            for one in machines
        ],
    }


def text(machines: tuple[Trained, ...]) -> str:
    """The file, with a line for each decision."""
    said = to_json(machines)
    lines = json.dumps(said, indent=1)
    # numbers of one polynomial stand in one line
    out: list[str] = []
    depth = 0
    for line in lines.split("\n"):
        inner = line.strip()
        if depth:
            ends = depth == 1 and inner.rstrip(",") == "]"
            out[-1] += inner + (" " if inner.endswith(",") and not ends else "")
        else:
            out.append(line)
        opened = inner.endswith("[") and ('"weights"' in inner or '"words"' in inner or depth > 0)
        depth += opened or (depth > 0 and inner == "[")
        depth -= depth > 0 and inner.rstrip(",") == "]"
    return "\n".join(out) + "\n"


def _class_json(form: ClassForm) -> dict[str, Any]:
    return {
        "sketch": form.sketch,
        "decisions": [
            {
                "name": one.name,
                **({"words": list(one.words)} if one.words else {}),
                **({"axis": one.axis} if one.axis else {}),
                "weights": [[float(f"{w:.{DIGITS}g}") for w in row] for row in one.weights],
            }
            for one in form.decisions
        ],
    }


def load(file: Path) -> tuple[Trained, ...]:
    """The machines of a file, the first one first. Raises :class:`OptionError` if it is not such a
    file, or one of another version.
    """
    try:
        data = json.loads(file.read_text())
        if data["version"] != VERSION or data["terms"] != feature_names():
            raise OptionError(
                f"{file} has coefficients of version {data['version']}, and this gtco reads "
                f"version {VERSION} with its own terms: train them again with python -m gtco.bench "
                "closed_form train"
            )
        found = tuple(
            Trained(
                str(one["mcpu"]),
                str(one["about"]),
                {kind: _class(form) for kind, form in one["classes"].items()},
            )
            for one in data["machines"]
        )
        if not found:
            raise ValueError("it names no machine")
    except OptionError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise OptionError(
            f"{file} is not a file of coefficients ({error}): make one with python -m gtco.bench "
            "closed_form train"
        ) from error
    return found


@lru_cache(maxsize=4)
def loaded(file: Path) -> tuple[Trained, ...]:
    """:func:`load`, once for each file of this process."""
    return load(file)


def _class(data: Mapping[str, Any]) -> ClassForm:
    decisions = []
    before = len(feature_names())
    for one in data["decisions"]:
        weights = np.array(one["weights"], float)
        if weights.ndim != 2 or weights.shape[1] != before or not np.isfinite(weights).all():
            raise ValueError(f"decision {one['name']} needs rows of {before} finite numbers")
        words = tuple(map(str, one.get("words", ())))
        if words and len(words) != len(weights):
            raise ValueError(f"decision {one['name']} needs a row for each of its words")
        axis = str(one.get("axis", ""))
        if axis not in ("", "m", "n"):
            raise ValueError(f"decision {one['name']} cuts {axis!r}, which is neither m nor n")
        decisions.append(DecisionForm(str(one["name"]), weights, words, axis))
        before += len(weights)
    return ClassForm(str(data["sketch"]), tuple(decisions))

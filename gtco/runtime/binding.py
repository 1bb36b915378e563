"""Binds the arguments of a call to the model's inputs, and finds where its outputs go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gtco.runtime.plan import TensorSpec
from gtco.support.counting import counted
from gtco.support.errors import InputError


def bind(
    specs: Sequence[TensorSpec], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Sequence[Any]:
    """One value per input, in order, from the values given by position and by name. A single
    dictionary by position holds inputs by name. Raises :class:`InputError` if an input is missing,
    unknown or given twice.
    """
    if len(args) == 1 and isinstance(args[0], Mapping):
        args, kwargs = [], _merged(args[0], kwargs)
    if not kwargs and len(args) == len(specs):
        return args
    if not args and len(kwargs) == len(specs):
        try:
            return [kwargs[spec.name] for spec in specs]
        except KeyError:
            pass  # what follows says which
    names = [spec.name for spec in specs]
    if len(args) > len(names):
        got = counted(len(args), "input")
        raise InputError(f"got {got}, expected {len(names)}: {', '.join(names)}")
    values = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        if name not in names:
            raise InputError(f"there is no input '{name}'; the inputs are {', '.join(names)}")
        if name in values:
            raise InputError(f"input '{name}' is given twice, by position and by name")
        values[name] = value
    if missing := [repr(name) for name in names if name not in values]:
        raise InputError(
            f"missing input {', '.join(missing)}; expected {', '.join(map(str, specs))}"
        )
    return [values[name] for name in names]


def _merged(given: Mapping[Any, Any], kwargs: Mapping[str, Any]) -> dict[Any, Any]:
    if twice := [name for name in given if name in kwargs]:
        raise InputError(f"input '{twice[0]}' is given twice, in the dictionary and by name")
    return {**given, **kwargs}


def feeds_of(feeds: Any) -> Mapping[str, Any]:
    """The inputs by name that were given to ``run``. Raises :class:`InputError` if they are no
    mapping.
    """
    if isinstance(feeds, Mapping):
        return feeds
    raise InputError(
        f"run takes a dictionary of inputs by name, and got a {type(feeds).__name__}: "
        "model.run({'x': x}); arrays by position go to the model itself: model(x)"
    )


def given_outputs(specs: Sequence[TensorSpec], out: Any) -> list[Any]:
    """The tensors of ``out=``, one for each output. Raises :class:`InputError` if their number is
    wrong.
    """
    given = list(out) if isinstance(out, (tuple, list)) else [out]
    if len(given) != len(specs):
        names = ", ".join(spec.name for spec in specs)
        raise InputError(
            f"out has {counted(len(given), 'tensor')}; the model has {len(specs)}, in this order: "
            f"{names}"
        )
    return given


def output_names(specs: Sequence[TensorSpec], names: Any) -> list[str]:
    """The names of the outputs that ``run`` was asked for. Raises :class:`InputError` if the model
    has no output of a name.
    """
    if isinstance(names, str):
        raise InputError(f"the names of outputs are a list: [{names!r}], or None for all")
    known = [spec.name for spec in specs]
    wanted = list(names)
    if unknown := [name for name in wanted if name not in known]:
        raise InputError(f"there is no output '{unknown[0]}'; the outputs are {', '.join(known)}")
    return wanted

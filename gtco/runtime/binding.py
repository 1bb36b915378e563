"""A call's arguments: which value is which input, and where the outputs go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gtco.errors import InputError
from gtco.runtime.plan import TensorSpec


def bind(
    specs: Sequence[TensorSpec], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Any]:
    """One value per input, in order, from those given by position and by name. Raises
    :class:`InputError` where one is missing, unknown or given twice.
    """
    names = [spec.name for spec in specs]
    if len(args) > len(names):
        raise InputError(f"got {len(args)} inputs, expected {len(names)}: {', '.join(names)}")
    values = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        if name not in names:
            raise InputError(f"there is no input '{name}'; the inputs are {', '.join(names)}")
        if name in values:
            raise InputError(f"input '{name}' is given twice, by position and by name")
        values[name] = value
    missing = [name for name in names if name not in values]
    if missing:
        raise InputError(
            f"missing input {', '.join(repr(name) for name in missing)}; expected "
            f"{', '.join(map(str, specs))}"
        )
    return [values[name] for name in names]


def by_name(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """``model({"x": x})`` is ``model(x=x)``: a dictionary alone by position holds inputs by name.
    """
    if len(args) != 1 or not isinstance(args[0], Mapping):
        return args, dict(kwargs)
    given = dict(args[0])
    if unnamed := [name for name in given if not isinstance(name, str)]:
        raise InputError(f"a dictionary of inputs has names as its keys, not {unnamed[0]!r}")
    if twice := sorted(given.keys() & kwargs.keys()):
        raise InputError(f"input '{twice[0]}' is given twice, in the dictionary and by name")
    return (), {**given, **kwargs}


def feeds_of(feeds: Any) -> Mapping[str, Any]:
    """What was given to ``run`` as its inputs by name; :class:`InputError` where it is something
    else.
    """
    if isinstance(feeds, Mapping):
        return feeds
    raise InputError(
        f"run takes a dictionary of inputs by name, and got a {type(feeds).__name__}: "
        "model.run({'x': x}); arrays by position go to the model itself: model(x)"
    )


def given_outputs(specs: Sequence[TensorSpec], out: Any) -> list[Any]:
    """The tensors of ``out=``, one for each output. Raises :class:`InputError` where the number is
    wrong.
    """
    given = list(out) if isinstance(out, (tuple, list)) else [out]
    if len(given) != len(specs):
        raise InputError(f"out has {len(given)} tensors; the model has {len(specs)}")
    return given


def named(specs: Sequence[TensorSpec], values: Sequence[Any], names: Any) -> list[Any]:
    """The outputs of these names, in their order; all for None."""
    if names is None:
        return list(values)
    if isinstance(names, str):
        raise InputError(f"the names of outputs are a list: [{names!r}], or None for all")
    known = {spec.name: value for spec, value in zip(specs, values, strict=True)}
    if unknown := [name for name in names if name not in known]:
        raise InputError(f"there is no output '{unknown[0]}'; the outputs are {', '.join(known)}")
    return [known[name] for name in names]

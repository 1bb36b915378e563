"""The samples that a model is quantized by, from wherever they come: files, a folder, arrays, or
an iterator such as a PyTorch DataLoader. Everything wrong with them is said here, before anything
is compiled.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from gtco.support.errors import GtcoError, InputError

Array = NDArray[Any]
Run = Mapping[str, Array]

LEAST, MOST = 32, 256  # samples
_LEAST_RUNS = 4  # one of these runs is held out
_EVERY = 4  # each so-many-th run is held out
_FILES = (".npy", ".npz")


@dataclass(frozen=True)
class Spec:
    """An input of the model. An axis without a size is None."""

    name: str
    dtype: numpy.dtype[Any]
    shape: tuple[int | None, ...]

    @property
    def batch(self) -> int:
        """How many samples a run takes."""
        return (self.shape[0] or 1) if self.shape else 1

    def __str__(self) -> str:
        sizes = ", ".join("?" if d is None else str(d) for d in self.shape)
        return f"'{self.name}' {self.dtype} [{sizes}]"


@dataclass(frozen=True)
class Samples:
    """The inputs of each run. Every fourth run is held out: nothing is chosen by it but what
    ``max_drop`` keeps in float, and the verdict is found on it.
    """

    runs: tuple[Run, ...]
    batch: int

    @property
    def chosen_by(self) -> list[Run]:
        return [run for n, run in enumerate(self.runs) if n % _EVERY != _EVERY - 1]

    @property
    def held_out(self) -> list[Run]:
        return list(self.runs[_EVERY - 1 :: _EVERY])

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each input."""
        return {name: array.shape for name, array in self.runs[0].items()}

    def __len__(self) -> int:
        return len(self.runs) * self.batch


def samples_of(data: Any, specs: Sequence[Spec]) -> Samples:
    """The samples in ``data`` for a model with these inputs:

    - the path of a ``.npz`` (an array by input), of a ``.npy``, or of a folder of both
    - an array for a model of one input, or a mapping of arrays by input
    - an iterable of these; of a tuple, which a DataLoader gives, the first entries are the inputs,
      in order, and the rest, such as labels, is left out

    The first axis counts samples. If the model takes several at once, so many of them are a run. An
    array of one axis more than the input has one run after the other. At most 256 samples are
    taken: evenly spaced ones of arrays, the first ones of everything else. Raises
    :class:`InputError`.
    """
    if not specs:
        raise InputError("the model has no inputs, so that no samples can tell its ranges")
    batch = min((spec.batch for spec in specs if spec.shape), default=1)
    most = max(_LEAST_RUNS, MOST // batch)
    single = _single(data)
    if single is not None:
        runs = list(_runs(single, specs, "the data"))
        if len(runs) > most:
            kept = numpy.linspace(0, len(runs) - 1, most).round().astype(int)
            runs = [runs[n] for n in kept]
    else:
        runs = list(islice(_all_runs(data, specs), most))
    _check(runs, specs, batch)
    return Samples(tuple(runs), batch)


def _single(data: Any) -> Any:
    """The arrays, if ``data`` is not a sequence of them; else None."""
    if isinstance(data, str | os.PathLike):
        path = Path(data)
        return None if path.is_dir() else _read(path)
    if isinstance(data, Mapping) or _is_array(data):
        return data
    if not isinstance(data, bytes | bytearray) and (
        isinstance(data, Iterable) or _is_indexed(data)
    ):
        return None
    raise InputError(
        f"data is a {type(data).__name__}: give the path of a .npz, .npy or a folder of them, an "
        "array, arrays by input name, or an iterable of these such as a DataLoader"
    )


def _is_indexed(data: Any) -> bool:
    """True for what has items by number, as PyTorch's Dataset."""
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


def _all_runs(data: Any, specs: Sequence[Spec]) -> Iterator[Run]:
    if isinstance(data, str | os.PathLike):
        folder = Path(data)
        files = sorted(path for path in folder.iterdir() if path.suffix in _FILES)
        if not files:
            raise InputError(f"the folder '{folder}' has no .npy and no .npz file")
        for path in files:
            yield from _runs(_read(path), specs, f"'{path.name}'")
        return
    items, end = _items(data), object()
    for number in count():
        where = f"item {number} of the data"
        with _reading(where):
            item = next(items, end)
        if item is end:
            return
        yield from _runs(item, specs, where)


def _items(data: Any) -> Iterator[Any]:
    if isinstance(data, Iterable):
        yield from data
    else:
        for n in range(len(data)):
            yield data[n]


@contextmanager
def _reading(where: str) -> Iterator[None]:
    """Names ``where`` in what the user's own code raises: that of a loader, or of a tensor that
    shall become numpy's.
    """
    try:
        yield
    except (GtcoError, MemoryError):
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}".strip().removesuffix(":")
        raise InputError(f"{where} cannot be read: {said}") from error


def _read(path: Path) -> Any:
    """What the file holds."""
    if path.suffix not in _FILES:
        raise InputError(f"cannot read samples from '{path}': give a .npz, a .npy or a folder")
    try:
        found = numpy.load(path, allow_pickle=False)
        if path.suffix == ".npz":
            with found:
                return {name: found[name] for name in found.files}
        return found
    except Exception as error:  # zip files are broken in many ways
        said = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read samples from '{path}': {said}") from error


def _is_array(value: Any) -> bool:
    return isinstance(value, numpy.ndarray | numpy.generic) or hasattr(value, "__dlpack__")


def _array(value: Any) -> Array:
    """The value as numpy has it; a tensor of PyTorch may be on a GPU or need gradients."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":
            value = value.float()
        return numpy.asarray(value)
    return numpy.asarray(value)


def _runs(item: Any, specs: Sequence[Spec], where: str) -> Iterator[Run]:
    """The runs in one item: arrays by name, a tuple of arrays, or one array."""
    found = {}
    for spec, value in zip(specs, _values(item, specs, where), strict=True):
        with _reading(where):
            array = _array(value)
        found[spec.name] = _split(array, spec, where)
    counts = {name: len(pieces) for name, pieces in found.items()}
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{count} for '{name}'" for name, count in counts.items())
        raise InputError(f"{where} has different numbers of samples: {said}")
    for n in range(next(iter(counts.values()))):
        yield {name: pieces[n] for name, pieces in found.items()}


def _values(item: Any, specs: Sequence[Spec], where: str) -> list[Any]:
    """The item's array for each input."""
    if isinstance(item, Mapping):
        names = list(item)
        if len(specs) == len(names) == 1:
            return [item[names[0]]]
        if missing := [spec.name for spec in specs if spec.name not in item]:
            raise InputError(
                f"{where} has no array for the input {', '.join(map(repr, missing))}; it has "
                f"{', '.join(map(repr, names)) or 'nothing'}, and the model takes "
                f"{', '.join(map(str, specs))}"
            )
        return [item[spec.name] for spec in specs]
    if isinstance(item, tuple | list):
        if len(item) < len(specs):
            raise InputError(
                f"{where} has {len(item)} values, and the model takes {', '.join(map(str, specs))}"
            )
        return list(item[: len(specs)])
    if len(specs) > 1:
        raise InputError(
            f"{where} is one array, and the model takes {', '.join(map(str, specs))}: give arrays "
            "by name"
        )
    return [item]


def _split(array: Array, spec: Spec, where: str) -> list[Array]:
    """The array's part for each run."""
    if array.dtype.kind not in "fiub" or array.dtype.kind != spec.dtype.kind:
        advice = ""
        if array.dtype.kind in "iu" and spec.dtype.kind == "f":
            advice = ": give what the model is called with, after scaling and normalizing"
        elif array.dtype.kind == "O":
            advice = ": arrays of one shape are needed"
        if {array.dtype.kind, spec.dtype.kind} != {"i", "u"}:
            raise InputError(f"{where} is {array.dtype} for the input {spec}{advice}")
    if spec.dtype.kind in "iu" and array.size:
        least, most = numpy.iinfo(spec.dtype).min, numpy.iinfo(spec.dtype).max
        if int(array.min()) < least or int(array.max()) > most:
            raise InputError(
                f"{where} has {array.min()} to {array.max()} for the input {spec}, which holds "
                f"{least} to {most}"
            )
    rank = len(spec.shape)
    if array.ndim == rank - 1 and spec.batch == 1:
        array = array[None]
    if array.ndim == rank + 1:
        pieces = list(array)
    elif array.ndim == rank == 0:
        pieces = [array]
    elif array.ndim == rank and array.shape[0] % spec.batch == 0:
        step = spec.batch
        pieces = [array[n : n + step] for n in range(0, array.shape[0], step)]
    else:
        raise _misfit(array, spec, where)
    if not pieces:
        return []
    found = pieces[0].shape
    if not all(want in (None, size) for want, size in zip(spec.shape, found, strict=True)):
        raise _misfit(array, spec, where)
    with numpy.errstate(over="ignore"):  # an infinity is found later
        # not ascontiguousarray, which makes a vector of a scalar
        return [numpy.asarray(piece, spec.dtype, order="C") for piece in pieces]


def _misfit(array: Array, spec: Spec, where: str) -> InputError:
    each = f", {spec.batch} a run" if spec.batch > 1 else ""
    return InputError(
        f"{where} has the shape {list(array.shape)} for the input {spec}; its first axis counts "
        f"samples{each}, and the others are the input's"
    )


def _check(runs: Sequence[Run], specs: Sequence[Spec], batch: int) -> None:
    """Raises :class:`InputError` for samples that say nothing, or too little."""
    if len(runs) * batch < LEAST or len(runs) < _LEAST_RUNS:
        samples = len(runs) * batch
        few = f"{samples or 'no'} sample{'' if samples == 1 else 's'}"
        takes = f", which are {len(runs)} runs of {batch}" if batch > 1 else ""
        least = max(LEAST, _LEAST_RUNS * batch)
        raise InputError(
            f"the data has {few}{takes}: give {least} or more, of the kind that the model will see"
        )
    for spec in specs:
        arrays = [run[spec.name] for run in runs]
        for n, array in enumerate(arrays):
            if array.shape != arrays[0].shape:
                raise InputError(
                    f"sample {n * batch} has the shape {list(array.shape)} for '{spec.name}', and "
                    f"the first one {list(arrays[0].shape)}: bring all to one size"
                )
            if spec.dtype.kind == "f" and not bool(numpy.isfinite(array).all()):
                raise InputError(
                    f"sample {n * batch} has NaN or infinity in '{spec.name}': look at how the "
                    "data is read and normalized"
                )
    floats = [spec for spec in specs if spec.dtype.kind == "f"]
    for spec in floats:
        first = runs[0][spec.name]
        if first.size and len(floats) == 1:
            value = first.flat[0]
            if all(bool((run[spec.name] == value).all()) for run in runs):
                raise InputError(
                    f"every element of '{spec.name}' is {value:g} in all samples: constant data "
                    "says nothing of the ranges"
                )
    if all(numpy.array_equal(run[s.name], runs[0][s.name]) for run in runs for s in specs):
        raise InputError(
            f"all {len(runs) * batch} samples are the same: give different ones, of the kind that "
            "the model will see"
        )

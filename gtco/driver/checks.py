"""Checks a compile's arguments, so that mistakes are reported before the work is done."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtco.support.errors import (
    ModelError,
    OptionError,
    ShapeError,
    UnknownDimension,
    UnsupportedError,
)
from gtco.support.options import check_apart, check_place
from gtco.support.sizes import sizes_text

if TYPE_CHECKING:
    from gtco.graph.graph import Graph

LARGEST = 1 << 37  # bytes of one tensor: no machine runs a model of larger ones


def check_output(path: Path) -> None:
    if path.suffix != ".so":
        raise OptionError(f"the output '{path}' must end in .so")
    check_place(path)


def check_bundle(path: Path, model: Any) -> None:
    """Checks the file that candidates are written to, so that a slip does not overwrite the model.
    """
    if path.suffix != ".bundle":
        raise OptionError(
            f"the output '{path}' must end in .bundle, as what gtco measure takes is called"
        )
    check_place(path)
    if isinstance(model, Path):
        check_apart(path, model)


def check_sizes(graph: Graph) -> None:
    for name, kind in graph.types.items():
        if kind.nbytes > LARGEST:
            raise ShapeError(
                f"the tensor '{name}' ({kind}) would take {kind.nbytes / 1e9:.0f} GB: look at the "
                "sizes of the inputs and at those that operators such as Pad, Tile, Expand and "
                "Resize are given"
            )


def check_dump(folder: Path | None) -> None:
    """Makes the folder and raises :class:`OptionError` if it cannot be written."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OptionError(
            f"--dump: cannot write in the folder '{folder}': {error.strerror or error}. Choose "
            "another one"
        ) from error


@contextmanager
def at_sizes(sizes: Mapping[str, int]) -> Iterator[None]:
    """Says at which sizes the model is wrong or not supported, if it is."""
    try:
        yield
    except (ModelError, ShapeError, UnsupportedError) as error:
        if not sizes or isinstance(error, UnknownDimension):
            raise
        raise type(error)(f"at {sizes_text(sizes)}: {error}") from error

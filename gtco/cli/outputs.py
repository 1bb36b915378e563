"""The default places of results, and the files that results do not overwrite."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from gtco.frontend.source import is_program
from gtco.runtime.library import read_metadata
from gtco.support.errors import GtcoError, OptionError
from gtco.support.pipes import standard_stream

FREE = "Give another name with -o, or --force to write over it"


def here(file: Path, suffix: str) -> Path:
    """The default name of a file made from ``file``: the same name with ``suffix``, in the current
    folder.
    """
    if not file.name:
        raise OptionError(f"'{file}' is a folder: give the name of a file")
    return Path(file.with_suffix(suffix).name)


def libraries(models: Sequence[Path], output: Path | None) -> list[Path]:
    """The library of each model. ``output`` names the library if there is only one model."""
    for model in models:
        if output is None and model.suffix == ".so":
            raise OptionError(
                f"'{model}' is named as a library: this command takes models, such as an ONNX "
                "file; gtco run, inspect, report and bench take libraries"
            )
    found = [output or here(model, ".so") for model in models]
    for path in found:
        if path.suffix != ".so":
            raise OptionError(f"--output {path}: the library's name must end in .so")
        if found.count(path) > 1:
            both = " and ".join(str(m) for m, p in zip(models, found, strict=True) if p == path)
            raise OptionError(f"{both} would both become {path}: compile them in two folders")
    return found


def check_free(model: Path, library: Path) -> None:
    """Raises :class:`OptionError` if writing ``library`` and its header would replace anything
    except an earlier library of this model and a header of gtco's.
    """
    header = library.with_suffix(".h")
    if os.path.isfile(header) and not _is_ours(header):
        raise OptionError(
            f"'{header}' is there already and is not a header that gtco made, and the library's "
            f"header gets this name. {FREE}"
        )
    if not os.path.isfile(library):
        return  # others check whether it can be made
    if not os.access(library, os.R_OK):
        raise OptionError(f"'{library}' is there already and may not be read. {FREE}")
    try:
        known = read_metadata(library)
    except GtcoError:
        raise OptionError(
            f"'{library}' is there already and is not a library that gtco made. {FREE}"
        ) from None
    identity = _identity(model)
    if identity is not None and known.get("model") != identity:
        raise OptionError(
            f"'{library}' is there already, and gtco made it of another model than '{model}'. "
            f"{FREE}"
        )


def add_force(parser: argparse.ArgumentParser) -> None:
    """Adds the option that leaves :func:`check_ours` out."""
    parser.add_argument(
        "--force", action="store_true", help="also overwrite a file that gtco did not make"
    )


def check_ours(
    path: Path | None, force: bool, ours: Callable[[bytes], bool], what: str
) -> None:
    """Raises :class:`OptionError` if writing ``path`` would replace a file that gtco did not make.
    ``ours`` gets the file's first bytes, and says whether gtco made it. ``what`` names what gtco
    makes there. Pipes and devices have no content to lose, so they are not checked; nothing is with
    ``force``.
    """
    if path is None or force:
        return
    if not os.path.isfile(path) or standard_stream(path) is not None:
        return
    try:
        with path.open("rb") as file:
            first = file.read(4096)
    except OSError:
        raise OptionError(f"'{path}' is there already and may not be read. {FREE}") from None
    if first and not ours(first):
        raise OptionError(f"'{path}' is there already and is not {what} that gtco made. {FREE}")


def _is_ours(header: Path) -> bool:
    try:
        with header.open(errors="replace") as file:
            first = file.readline()
    except OSError:
        return False
    return first.startswith("/* Model ") and ", compiled by gtco to " in first


def _identity(model: Path) -> str | None:
    """The model's identity as its library has it; a PyTorch program has none. None if the model
    cannot be read, which the compile says with its reason.
    """
    if is_program(model):
        return ""
    from gtco.frontend.identity import identity
    from gtco.frontend.onnx import read_message

    try:
        return identity(read_message(model)[0])
    except GtcoError:
        return None

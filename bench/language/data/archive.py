"""Files of arrays that hold words by their numbers: each is whole or not there, and knows the
vocabulary that it was written with.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from gtco.search.language.words import Vocabulary
from gtco.support.errors import OptionError

FORMAT = 1  # of corpora and of rankings
T = TypeVar("T")


def mark(vocabulary: Vocabulary) -> str:
    """What tells vocabularies apart."""
    return sha256("\n".join(vocabulary.words).encode()).hexdigest()[:16]


def write(file: Path, vocabulary: Vocabulary, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes the file under another name, and renames it when it is whole."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.stem}.new.npz")
    head: dict[str, Any] = {
        "format": np.array([FORMAT]),
        "vocabulary": np.array([mark(vocabulary)]),
    }
    np.savez_compressed(new, **(head | dict(arrays)))
    new.replace(file)


def read(
    file: Path, vocabulary: Vocabulary, what: str, made_of: Callable[[Mapping[str, Any]], T]
) -> T | None:
    """What ``made_of`` makes of the arrays; None where there is no file or where it is damaged.
    Raises :class:`OptionError`, which calls the contents ``what``, if they were written with
    another vocabulary.
    """
    try:
        with np.load(file, allow_pickle=False) as data:
            if data["vocabulary"][0] != mark(vocabulary) or data["format"][0] != FORMAT:
                raise OptionError(
                    f"the {what} in {file} have another vocabulary or format than "
                    f"{file.parents[1] / 'vocabulary.json'}: give an empty --folder"
                )
            return made_of(data)
    except OptionError:
        raise
    except (OSError, EOFError, ValueError, LookupError, zipfile.BadZipFile, zlib.error):
        return None


def files_of(folder: Path) -> list[Path]:
    """The files of a folder that are whole, in order of their names."""
    return sorted(file for file in folder.glob("*.npz") if not file.name.endswith(".new.npz"))

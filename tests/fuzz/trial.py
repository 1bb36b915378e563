"""``python -m tests.fuzz.trial`` reads lines of JSON on standard input, each with a file's ``path``
and whether to ``simplify``. It answers each with a line of JSON: ``outcome`` (works, refused,
traceback) and ``text``.

It is a separate process, since a file may crash it; its caller sees that.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import traceback
from pathlib import Path

import numpy as np

from gtco import compiler
from gtco.driver import making
from gtco.runtime.library import read_metadata
from gtco.runtime.module import load
from gtco.support.errors import GtcoError, InternalError
from tests.one_set_of_workers import OneSetOfWorkers

MEMORY = 16 << 30  # bytes of address space: a model that asks for more gets a MemoryError


def run(library: Path) -> None:
    with load(library, threads=1) as model:
        inputs = {s.name: np.zeros(s.shape, s.dtype) for s in model.inputs}
        if sum(array.nbytes for array in inputs.values()) < 1 << 30:
            model.run(inputs)


def attempt(path: Path, simplify: bool) -> None:
    if path.suffix == ".so":
        read_metadata(path)
        run(path)
        return
    library = path.with_name("out.so")
    compiler.compile_to_file(path, library, simplify=simplify, target="x86-64-v3", threads=1)
    run(library)


def answer(path: Path, simplify: bool) -> dict[str, str]:
    try:
        attempt(path, simplify)
    except InternalError as error:  # a good message, but still a fault of ours
        return {"outcome": "internal", "text": str(error)}
    except GtcoError as error:
        return {"outcome": "refused", "text": str(error)}
    except Exception:
        return {"outcome": "traceback", "text": traceback.format_exc()}
    return {"outcome": "works", "text": ""}


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    making.Workers = OneSetOfWorkers  # type: ignore[misc]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # text that libraries print is not an answer
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(answer(Path(asked["path"]), asked["simplify"])), file=answers, flush=True)


if __name__ == "__main__":
    main()

"""Runs node tests in this process, one JSON line a test.

``python -m tests.end_to_end.node_runner`` takes names on standard input. Each model goes the whole
way: ``compile_to_file`` writes a library, ``load`` opens it, and its outputs are compared with the
test's. Two things differ, to fit over a thousand compiles in minutes. Kernels are built in this
process and not in workers (the process that reads the lines starts another one if this one dies).
onnxsim also runs in this process.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxsim

import gtco.compiler
import gtco.frontend.onnx
from gtco.codegen.build import Failure, Job, Kernel
from gtco.codegen.serve import answer
from gtco.frontend.simplify import SKIPPED
from gtco.runtime.module import load
from gtco.support.errors import GtcoError
from gtco.verification.compare import is_float
from tests.end_to_end.node_cases import NodeCase, cases


class InProcess:
    """The interface of :class:`gtco.codegen.workers.Workers`, without processes."""

    def __init__(self, count: int) -> None:
        pass

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def build(self, jobs: Iterable[Job]) -> Iterator[Kernel | Failure]:
        return map(answer, jobs)


def run(case: NodeCase) -> str:
    """Why the test fails; "" if it passes."""
    with tempfile.TemporaryDirectory(prefix="gtco-node-") as folder:
        library = Path(folder, "node.so")
        try:
            gtco.compiler.compile_to_file(case.model, library)
        except GtcoError as error:
            return f"{type(error).__name__}: {error}"
        with load(library, threads=2) as model:
            results = list(model.run(case.inputs).values())
    return "; ".join(compare(results, case))


def simplify(model: onnx.ModelProto, timeout: float) -> tuple[onnx.ModelProto, str]:
    """Does what :func:`gtco.frontend.simplify.simplify` does, in this process."""
    try:
        return onnxsim.simplify(model, skipped_optimizers=SKIPPED)[0], ""
    except Exception as error:
        return model, f"onnxsim failed ({error}); the model is compiled unsimplified"


def compare(results: list[np.ndarray], case: NodeCase) -> Iterator[str]:
    for number, (got, wanted) in enumerate(zip(results, case.outputs, strict=True)):
        if not isinstance(wanted, np.ndarray | np.generic):
            yield f"output {number} is expected as {type(wanted).__name__}"
        elif got.dtype != wanted.dtype or got.shape != wanted.shape:
            yield f"output {number} is {got.dtype}{got.shape}, not {wanted.dtype}{wanted.shape}"
        elif not np.allclose(*map(widened, (got, wanted)), rtol(case, wanted), case.atol, True):
            wide = np.abs(widened(got) - widened(wanted))
            yield f"output {number} is wrong by {np.nanmax(wide):.3g}"


def rtol(case: NodeCase, wanted: np.ndarray) -> float:
    """The test's own tolerance, or four roundings of a half-precision type if that is more.

    ONNX's 1e-3 is an eighth of a rounding of bfloat16. Its own expected values are rounded after
    every operator, and differ by up to 1.2 roundings from the same attention in float32.
    """
    half = wanted.dtype.itemsize == 2 and is_float(wanted.dtype)
    return max(case.rtol, 4 * float(ml_dtypes.finfo(wanted.dtype).eps) if half else 0.0)


def widened(array: np.ndarray) -> np.ndarray:
    """Half precision as float64; other arrays are unchanged."""
    return array.astype(np.float64) if is_float(array.dtype) else np.asarray(array)


def main(names: Iterable[str]) -> None:
    gtco.compiler.Workers = InProcess  # type: ignore[assignment, misc]
    gtco.frontend.onnx.run_onnxsim = simplify
    known = cases()
    for name in names:
        start = time.perf_counter()
        try:
            failure = run(known[name])
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        seconds = round(time.perf_counter() - start, 3)
        print(json.dumps({"name": name, "failure": failure, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main(line.strip() for line in sys.stdin)

"""Runs node tests in this process, one JSON line a test.

``python -m tests.end_to_end.nodes.runner FILE`` takes the pickled tests in the file, and names of
some of them on standard input. Each model goes the whole
way: ``compile_to_file`` writes a library, ``load`` opens it, and its outputs are compared with the
test's. Three things differ, to fit over a thousand tests in minutes. Kernels are built in this
process and not in workers (the process that reads the lines starts another one if this one dies).
onnxsim also runs in this process. The tests of one line stand side by side in one model, which
shares nothing between them but kernels that are the same. If that model cannot be compiled or run,
each of them is compiled alone.
"""

from __future__ import annotations

import itertools
import json
import pickle
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.compose
import onnxsim

import gtco.compiler
import gtco.driver.making
import gtco.frontend.onnx
from gtco.codegen.jobs import Failure, Job, Kernel
from gtco.codegen.serve import answer
from gtco.frontend.simplify import SKIPPED
from gtco.runtime.module import load
from gtco.verification.compare import is_float
from tests.end_to_end.nodes.cases import NodeCase
from tests.garbage import seldom_collected


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

    def ahead(self) -> AheadInProcess:
        return AheadInProcess()


class AheadInProcess:
    """The interface of :class:`gtco.codegen.workers.Ahead`: jobs are built at once, no guess is."""

    def __init__(self) -> None:
        self.built: list[Kernel | Failure] = []

    def __enter__(self) -> AheadInProcess:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def add(self, jobs: Iterable[Job]) -> None:
        self.built += map(answer, jobs)

    def guess(self, jobs: Iterable[Job]) -> None:
        pass

    def so_far(self) -> list[Kernel | Failure]:
        return self.built

    def answers(self) -> list[Kernel | Failure]:
        return self.built

    def guessed(self) -> dict[str, Any]:
        return {}


def run(cases: Sequence[NodeCase]) -> dict[str, str]:
    """Why each of these tests fails, by name; "" if it passes."""
    try:
        results = compiled_and_run(cases)
    except Exception as error:
        if len(cases) == 1:
            return {cases[0].name: f"{type(error).__name__}: {error}"}
        return {name: failure for case in cases for name, failure in run([case]).items()}
    return {case.name: "; ".join(compare(results[case.name], case)) for case in cases}


def compiled_and_run(cases: Sequence[NodeCase]) -> dict[str, list[np.ndarray]]:
    """The outputs of each test, by name, from one library."""
    prefixes = [f"n{i}_" for i in range(len(cases))] if len(cases) > 1 else [""]
    inputs = {
        prefix + name: array
        for prefix, case in zip(prefixes, cases, strict=True)
        for name, array in case.inputs.items()
    }
    with tempfile.TemporaryDirectory(prefix="gtco-node-") as folder:
        library = Path(folder, "node.so")
        gtco.compiler.compile_to_file(side_by_side(cases, prefixes), library)
        with load(library, threads=2) as model:
            results = iter(model.run(inputs).values())
    return {case.name: list(itertools.islice(results, len(case.outputs))) for case in cases}


def side_by_side(cases: Sequence[NodeCase], prefixes: Sequence[str]) -> onnx.ModelProto:
    """One model of all tests; all names of a test's model get its prefix."""
    if len(cases) == 1:
        return cases[0].model
    parts = zip(cases, prefixes, strict=True)
    models = [onnx.compose.add_prefix(case.model, prefix) for case, prefix in parts]
    merged = onnx.ModelProto()
    merged.CopyFrom(models[0])
    for model in models[1:]:
        assert (model.ir_version, model.opset_import) == (merged.ir_version, merged.opset_import)
        for field in ("node", "initializer", "input", "output", "value_info"):
            getattr(merged.graph, field).extend(getattr(model.graph, field))
    return merged


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


def main(known: Mapping[str, NodeCase], lines: Iterable[str]) -> None:
    gtco.driver.making.Workers = InProcess  # type: ignore[assignment, misc]
    gtco.frontend.onnx.run_onnxsim = simplify
    seldom_collected()
    for line in lines:
        for name, failure in run([known[name] for name in line.split()]).items():
            print(json.dumps({"name": name, "failure": failure}), flush=True)


if __name__ == "__main__":
    main(pickle.loads(Path(sys.argv[1]).read_bytes()), (line.strip() for line in sys.stdin))

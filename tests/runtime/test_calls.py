"""The ways to call a model: with a dictionary, as ONNX Runtime is called, and into the caller's
arrays.
"""
# ruff: noqa: F401, F811 (fixtures are imported, and arguments of the same name)

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gtco.runtime.module import Model, load
from gtco.runtime.plan import BufferRef, Step, TensorSpec
from gtco.runtime.writing.linking import write_artifact
from gtco.support.errors import ArtifactError, InputError, OptionError
from tests.runtime.test_models import (
    COLUMNS,
    ROWS,
    check,
    compile_kernels,
    example_inputs,
    kernels,
    small,
    small_artifact,
)


def given_outputs() -> tuple[np.ndarray, np.ndarray]:
    """Arrays for ``out=`` with values that no run writes."""
    return np.full((ROWS, COLUMNS), np.nan, np.float32), np.full(COLUMNS, np.nan, np.float32)


def test_a_dictionary_by_position(small: Path) -> None:
    x, mask = example_inputs()
    with load(small) as model:
        check(model({"mask": mask, "x": x}), x, mask)
        check(model({"x": x}, mask=mask), x, mask)
        with pytest.raises(InputError, match="'x' is given twice, in the dictionary and by name"):
            model({"x": x}, x=x, mask=mask)
        with pytest.raises(InputError, match=r"no input 'y'; the inputs are x, mask"):
            model({"x": x, "y": mask})
        with pytest.raises(InputError, match="missing input 'mask'"):
            model({"x": x})
        assert model.profile({"mask": mask, "x": x})


def test_onnx_runtimes_call(small: Path) -> None:
    x, mask = example_inputs()
    feeds = {"mask": mask, "x": x}
    with load(small) as model:
        results = model.run(None, feeds)
        assert isinstance(results, list)
        check(tuple(results), x, mask)
        total, y = model.run(["total", "y"], feeds)
        check((y, total), x, mask)
        assert model.run([], feeds) == []
        assert list(model.run(feeds)) == ["y", "total"]
        with pytest.raises(InputError, match="no output 'z'; the outputs are y, total"):
            model.run(["z"], feeds)
        with pytest.raises(InputError, match=r"names of outputs are a list: \['y'\]"):
            model.run("y", feeds)
        with pytest.raises(InputError, match=r"dictionary of inputs.* model\(x\)"):
            model.run(x)  # type: ignore[call-overload]
        with pytest.raises(InputError, match="got 0 arguments"):
            model.run()  # type: ignore[call-overload]


def test_an_input_may_be_called_out(tmp_path: Path, kernels: bytes) -> None:
    """``out=`` is then this input."""
    spec = (TensorSpec("out", "float32", (ROWS, COLUMNS)), TensorSpec("mask", "int8", (ROWS,)))
    path = write_artifact(small_artifact(kernels, inputs=spec), tmp_path / "named.so")
    x, mask = example_inputs()
    with load(path) as model:
        check(model(out=x, mask=mask), x, mask)
        check(model({"out": x, "mask": mask}), x, mask)


@pytest.mark.parametrize("by", [0, 4])
def test_results_in_the_callers_arrays(small: Path, by: int) -> None:
    """The arrays are ``by`` bytes off the alignment that the kernels need; if it is not 0, a run
    writes elsewhere and copies.
    """
    x, mask = example_inputs()
    y, total = (
        np.frombuffer(bytearray(array.nbytes + by), np.uint8)[by:]
        .view(array.dtype)
        .reshape(array.shape)
        for array in given_outputs()
    )
    with load(small, 2) as model:
        results = model(x, mask, out=(y, total))
        assert results[0] is y and results[1] is total
        check((y, total), x, mask)
        y[...], total[...] = given_outputs()
        assert model(mask=mask, x=x[::-1].copy(), out=[y, total])[1] is total
        check((y, total), x[::-1], mask)
        y[...], total[...] = given_outputs()
        model(np.asfortranarray(x), mask, out=(y, total))
        check((y, total), x, mask)


def test_results_in_torchs_tensors(small: Path) -> None:
    torch = pytest.importorskip("torch")
    x, mask = example_inputs()
    y, total = torch.empty(ROWS, COLUMNS), torch.empty(COLUMNS)
    with load(small) as model:
        for inputs in ((x, mask), (torch.from_numpy(x), torch.from_numpy(mask))):
            y.fill_(torch.nan), total.fill_(torch.nan)
            assert model(*inputs, out=(y, total))[0] is y
            check((y.numpy(), total.numpy()), x, mask)
        with pytest.raises(InputError, match=r"output 'y' .*x\.detach\(\)"):
            model(x, mask, out=(y.clone().requires_grad_(), total))
        with pytest.raises(InputError, match="output 'y' is not dense"):
            model(x, mask, out=(torch.empty(COLUMNS, ROWS).T, total))
        with pytest.raises(InputError, match="output 'total' has dtype float64"):
            model(x, mask, out=(y, total.double()))


def test_one_output_takes_one_array(tmp_path: Path) -> None:
    source = "void one(float* x, float* y, void* w, long begin, long end) { y[0] = x[0] + 1; }"
    path = write_artifact(
        small_artifact(
            compile_kernels(source, tmp_path),
            inputs=(TensorSpec("x", "float32", ()),),
            outputs=(TensorSpec("y", "float32", ()),),
            steps=(Step("one", (BufferRef("input", 0), BufferRef("output", 0))),),
            weights=(),
            arena_bytes=0,
        ),
        tmp_path / "one.so",
    )
    out = np.empty((), np.float32)
    with load(path) as model:
        assert model(np.float32(2), out=out) is out and out == 3
        assert model(np.float32(3), out=[out]) is out and out == 4
        with pytest.raises(InputError, match="output 'y' is a float32"):
            model(np.float32(2), out=np.float32(0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda y, total: y, "out has 1 tensor; the model has 2, in this order: y, "),
        (
            lambda y, total: (y, total[:-1]),
            r"'total' has shape \(39,\), expected \(40,\); make it with np.empty",
        ),
        (lambda y, total: (y.astype(np.float64), total), "output 'y' has dtype float64"),
        (lambda y, total: (np.asfortranarray(y), total), "output 'y' is not dense and row-major"),
        (lambda y, total: (y, np.broadcast_to(total[:1], 40)), "output 'total' is not dense"),
        (lambda y, total: (frozen(y), total), "output 'y' is read-only"),
        (lambda y, total: (y.tolist(), total), "output 'y' is a list"),
    ],
)
def test_wrong_arrays_for_results(
    small: Path, change: Callable[[np.ndarray, np.ndarray], Any], message: str
) -> None:
    x, mask = example_inputs()
    with load(small) as model:
        for inputs in ((x, mask), (np.asfortranarray(x), mask)):
            with pytest.raises(InputError, match=message):
                model(*inputs, out=change(*given_outputs()))
        with pytest.raises(ArtifactError, match="output 'y' overlaps 'x'"):
            model(x, mask, out=(x, given_outputs()[1]))
        check(model(x, mask), x, mask)


def frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def test_read_only_empty_and_converted_inputs_take_the_same_way(small: Path) -> None:
    """A call first tries a quick check of the arrays, which these arrays do not pass."""
    x, mask = example_inputs()
    with load(small) as model:
        check(model(frozen(x.copy()), mask), x, mask)
        check(model(np.ma.masked_array(x), mask), x, mask)
        check(model(x.astype(">f4").astype("f4"), mask), x, mask)
        with pytest.raises(InputError, match="dtype >f4, expected float32"):
            model(x.astype(">f4"), mask)


def test_how_long_threads_spin(small: Path) -> None:
    x, mask = example_inputs()
    for spin in (None, 0, 1, 10**9):
        with load(small, 2, spin_microseconds=spin) as model:
            check(model(x, mask), x, mask)
            check(model(x, mask), x, mask)
    for wrong in (-1, 1.5, "3", 10**9 + 1):
        with pytest.raises(OptionError, match=r"spin_microseconds=.* a whole number from 0 to"):
            load(small, spin_microseconds=wrong)  # type: ignore[arg-type]


def test_a_model_without_inputs(tmp_path: Path) -> None:
    source = "void one(float* y, void* w, long begin, long end) { y[0] = 1; }"
    path = write_artifact(
        small_artifact(
            compile_kernels(source, tmp_path),
            inputs=(),
            outputs=(TensorSpec("y", "float32", (1,)),),
            steps=(Step("one", (BufferRef("output", 0),)),),
            weights=(),
            arena_bytes=0,
        ),
        tmp_path / "one.so",
    )
    with load(path) as model:
        assert isinstance(model, Model)
        assert model() == 1 and model({}) == 1 and model.run({})["y"] == 1

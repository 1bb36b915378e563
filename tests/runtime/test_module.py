"""gtco.load and Model: tensors as inputs and outputs, and errors that name the fix."""
# ruff: noqa: F401, F811 (fixtures are imported, and arguments of the same name)

from __future__ import annotations

import ctypes
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gtco.runtime.library import read_metadata
from gtco.runtime.module import load
from gtco.runtime.plan import BufferRef, Step, TensorSpec
from gtco.runtime.tensors import dense, like, to_numpy
from gtco.runtime.writing.linking import write_artifact
from gtco.support.dtypes import numpy_dtype
from gtco.support.errors import ArtifactError, InputError
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

REPOSITORY = Path(__file__).parents[2]


def unaligned(array: np.ndarray, by: int) -> np.ndarray:
    """A copy whose data begins ``by`` bytes after a multiple of 64."""
    buffer = np.empty(array.nbytes + 128, np.uint8)
    start = -buffer.ctypes.data % 64 + by
    copy = buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def test_describes_itself(small: Path) -> None:
    with load(small) as model:
        assert model.inputs == (
            TensorSpec("x", "float32", (96, 40)),
            TensorSpec("mask", "int8", (96,)),
        )
        assert [spec.name for spec in model.outputs] == ["y", "total"]
        assert [stage["kernel"] for stage in model.stages] == ["scale_rows", "mask_relu", "total"]
        assert model.stages[0]["operators"] == ["multiply"] and model.stages[0]["tasks"] == ROWS
        assert model.metadata["target"] == "test" and model.metadata["cpu_features"] == ["sse2"]
        assert "x: float32[96, 40]" in repr(model)
    assert read_metadata(small)["steps"] == model.stages


def test_by_position_and_by_name(small: Path) -> None:
    x, mask = example_inputs()
    with load(small) as model:
        check(model(x, mask), x, mask)
        check(model(x, mask=mask), x, mask)
        result = model.run({"mask": mask, "x": x})
        assert list(result) == ["y", "total"]
        check((result["y"], result["total"]), x, mask)
        assert all(array.ctypes.data % 64 == 0 for array in result.values())


def test_strided_unaligned_and_read_only_inputs(small: Path) -> None:
    x, mask = example_inputs()
    wide = np.zeros((ROWS, 2 * COLUMNS), np.float32)
    wide[:, ::2] = x
    frozen = unaligned(x, 4)
    frozen.flags.writeable = False
    with load(small, 2) as model:
        for other in (wide[:, ::2], np.asfortranarray(x), frozen, unaligned(x, 32)):
            check(model(other, unaligned(mask, 1)), x, mask)
        np.testing.assert_array_equal(frozen, x)


def c_run(model, inputs: list[int | None], outputs: list[int | None]) -> tuple[int, str]:  # type: ignore[no-untyped-def]
    """Calls gtco_run with these addresses; gives the status and the message."""
    library, handle = model._library, model._handle
    arrays = [(ctypes.c_void_p * len(a))(*a) for a in (inputs, outputs)]
    status = library.run(handle, *arrays)
    return status, library.last_error(handle).decode()


@pytest.mark.parametrize("by", [0, 1, 4, 16, 48, 63])
def test_c_pointers_of_any_alignment(small: Path, by: int) -> None:
    x, mask = (unaligned(a, by) for a in example_inputs())
    y, total = unaligned(np.zeros_like(x), by), unaligned(np.zeros(COLUMNS, np.float32), by)
    guard = y.base
    before = guard.copy()
    with load(small, 2) as model:
        assert c_run(
            model, [x.ctypes.data, mask.ctypes.data], [y.ctypes.data, total.ctypes.data]
        ) == (0, "")
    check((y, total), x, mask)
    start = y.ctypes.data - guard.ctypes.data
    np.testing.assert_array_equal(guard[:start], before[:start])  # nothing is written around it
    np.testing.assert_array_equal(guard[start + y.nbytes :], before[start + y.nbytes :])


def test_c_bad_pointers_are_errors(small: Path) -> None:
    x, mask = example_inputs()
    y, total = np.zeros_like(x), np.zeros(COLUMNS, np.float32)
    with load(small, 2) as model:
        good = [x.ctypes.data, mask.ctypes.data]
        status, message = c_run(model, good, [y.ctypes.data, None])
        assert status == 1 and "output 1 ('total', 160 bytes) is NULL" in message
        status, message = c_run(model, [None, good[1]], [y.ctypes.data, total.ctypes.data])
        assert status == 1 and "input 0 ('x', 15360 bytes) is NULL" in message
        status, message = c_run(model, good, [x.ctypes.data + 64, total.ctypes.data])
        assert status == 1 and "output 'y' overlaps 'x'" in message
        status, message = c_run(model, good, [y.ctypes.data, y.ctypes.data + 640])
        assert status == 1 and "output 'total' overlaps 'y'" in message
        assert c_run(model, good, [y.ctypes.data, total.ctypes.data]) == (0, "")  # still usable
        assert model._library.run(model._handle, None, None) == 1


def test_tensors_side_by_side_do_not_overlap(small: Path) -> None:
    """All of them lie in one block of the caller's memory, each directly behind another."""
    given = example_inputs()
    sizes = {"x": 4 * ROWS * COLUMNS, "y": 4 * ROWS * COLUMNS, "total": 4 * COLUMNS, "mask": ROWS}
    block = unaligned(np.zeros(sum(sizes.values()), np.uint8), 0)
    ends = np.cumsum([*sizes.values()])[:-1]
    x, y, total, mask = np.split(block, ends)
    x[:], mask[:] = (array.reshape(-1).view(np.uint8) for array in given)
    inputs, outputs = [x.ctypes.data, mask.ctypes.data], [y.ctypes.data, total.ctypes.data]
    with load(small, 2) as model:
        assert c_run(model, inputs, outputs) == (0, "")
    check((y.view(np.float32).reshape(ROWS, COLUMNS), total.view(np.float32)), *given)


def test_an_empty_tensor_needs_no_pointer(kernels: bytes, tmp_path: Path) -> None:
    made = small_artifact(kernels)
    empty = TensorSpec("empty", "float32", (0, 3))
    path = write_artifact(replace(made, inputs=(*made.inputs, empty)), tmp_path / "m.so")
    x, mask = example_inputs()
    y, total = np.zeros_like(x), np.zeros(COLUMNS, np.float32)
    with load(path, 2) as model:
        pointers = [x.ctypes.data, mask.ctypes.data, None]
        assert c_run(model, pointers, [y.ctypes.data, total.ctypes.data]) == (0, "")
    check((y, total), x, mask)


def test_a_number_needs_no_shape_in_c(kernels: bytes, tmp_path: Path) -> None:
    """It has no axes, so its shape may be NULL. That of any other tensor may not."""
    made = small_artifact(kernels)
    number = TensorSpec("number", "float32", ())
    path = write_artifact(replace(made, inputs=(*made.inputs, number)), tmp_path / "m.so")
    shapes = [(ctypes.c_int64 * 2)(ROWS, COLUMNS), (ctypes.c_int64 * 1)(ROWS)]
    x, mask = map(ctypes.addressof, shapes)
    with load(path, 2) as model:
        for given, status in (((x, mask, None), 0), ((x, None, None), 1), ((None, mask, None), 1)):
            pointers = (ctypes.c_void_p * 3)(*given)
            assert model._library.set_shapes(model._handle, pointers) == status


def test_torch_in_torch_out(small: Path) -> None:
    torch = pytest.importorskip("torch")
    x, mask = example_inputs()
    with load(small) as model:
        results = model(torch.from_numpy(x), torch.from_numpy(mask))
        assert all(isinstance(result, torch.Tensor) for result in results)
        check(tuple(result.numpy() for result in results), x, mask)
        mixed = model(x, torch.from_numpy(mask))
        assert isinstance(mixed[0], torch.Tensor)
        transposed = torch.from_numpy(np.ascontiguousarray(x.T)).T
        check(tuple(r.numpy() for r in model(transposed, mask=torch.from_numpy(mask))), x, mask)
        with pytest.raises(InputError, match="detach"):
            model(torch.from_numpy(x).requires_grad_(), mask)
        with pytest.raises(
            InputError, match=r"dtype float64, expected float32.*x\.to\(torch\.float32\)"
        ):
            model(torch.from_numpy(x).double(), mask)
        with pytest.raises(InputError, match=r"dtype bfloat16, .*x\.to\(torch\.float32\)"):
            model(torch.from_numpy(x).bfloat16(), mask)
        with pytest.raises(InputError, match=r"'x' .*cannot be read"):
            model(torch.from_numpy(x).to("meta"), mask)


def test_a_tensor_that_stands_for_the_negative_of_its_memory(small: Path) -> None:
    """DLPack does not know torch's negative bit, which ``z.conj().imag`` has."""
    torch = pytest.importorskip("torch")
    x, mask = example_inputs()
    given = torch.complex(torch.zeros(x.shape), -torch.from_numpy(x)).conj().imag
    assert given.is_neg() and np.array_equal(given.numpy(force=True), x)
    with load(small) as model:
        results = model(given, torch.from_numpy(mask))
        check(tuple(result.numpy() for result in results), x, mask)


def test_tensors_of_a_class_made_of_torchs(small: Path) -> None:
    """Such as torchvision's images."""
    torch = pytest.importorskip("torch")

    class Image(torch.Tensor):  # type: ignore[misc]
        pass

    x, mask = example_inputs()
    negative = torch.complex(torch.zeros(x.shape), -torch.from_numpy(x)).conj().imag
    with load(small) as model:
        for given in (torch.from_numpy(x), negative):
            results = model(given.as_subclass(Image), torch.from_numpy(mask))
            assert all(isinstance(result, torch.Tensor) for result in results)
            check(tuple(result.numpy() for result in results), x, mask)


def test_torchs_bfloat16_in_and_out() -> None:
    torch = pytest.importorskip("torch")
    spec = TensorSpec("x", "bfloat16", (5, 3))
    given = torch.linspace(-9, 9, 15).bfloat16().reshape(3, 5).T
    array = dense(to_numpy(spec, given))
    assert array.dtype.name == "bfloat16" and array.flags.c_contiguous
    np.testing.assert_array_equal(array.astype(np.float32), given.float().numpy())
    back = like(given, array)
    assert back.dtype == torch.bfloat16 and torch.equal(back, given)
    with pytest.raises(InputError, match="detach"):
        to_numpy(spec, given.clone().requires_grad_())
    with pytest.raises(InputError, match=r"dtype float32, expected bfloat16.*torch\.bfloat16"):
        to_numpy(spec, given.float())


def test_dlpack_of_another_library(small: Path) -> None:
    class Tensor:
        def __init__(self, array: np.ndarray) -> None:
            self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__

    x, mask = example_inputs()
    with load(small) as model:
        check(model(Tensor(x), Tensor(mask)), x, mask)


def test_tensors_of_an_array_namespace_come_back_as_such(small: Path) -> None:
    """As jax's, whose class is of another module than the one that converts."""

    class Space:
        @staticmethod
        def from_dlpack(value: Any) -> Tensor:
            return Tensor(np.from_dlpack(value))

    class Tensor:
        def __init__(self, array: np.ndarray) -> None:
            self.array = array

        def __dlpack__(self, **asked: Any) -> Any:
            return self.array.__dlpack__(**asked)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.array.__dlpack_device__()

        def __array_namespace__(self) -> type[Space]:
            return Space

    x, mask = example_inputs()
    with load(small) as model:
        results = model(Tensor(x), mask)
        assert all(isinstance(result, Tensor) for result in results)
        check(tuple(result.array for result in results), x, mask)
    wide = np.zeros(4, numpy_dtype("bfloat16"))
    assert like(Tensor(x), wide) is wide  # numpy exports none by DLPack


def test_what_has_array_alone_is_for_numpy(small: Path) -> None:
    class Table:
        shape = (1,)

        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            return np.zeros((1,))

    _, mask = example_inputs()
    with load(small) as model, pytest.raises(InputError, match=r"is a Table, .*np\.asarray\(x"):
        model(Table(), mask)


@pytest.mark.parametrize("dtype", ["bool", "int64", "int32", "uint8", "float64", "float16"])
def test_other_dtypes_and_scalars(tmp_path: Path, dtype: str) -> None:
    source = """
    #include <stdint.h>
    #include <string.h>
    void copy(void* x, void* y, void* w, int64_t b, int64_t e) { memcpy(y, x, BYTES); }
    """
    for shape in ((3, 5), (), (0, 4)):
        spec, out = TensorSpec("x", dtype, shape), TensorSpec("y", dtype, shape)
        code = compile_kernels(source.replace("BYTES", str(spec.nbytes)), tmp_path)
        step = Step("copy", (BufferRef("input", 0), BufferRef("output", 0)))
        artifact = small_artifact(
            code, inputs=(spec,), outputs=(out,), steps=(step,), weights=(), arena_bytes=0
        )
        x = (np.arange(np.prod(shape, dtype=int)) % 2).astype(dtype).reshape(shape)
        with load(
            write_artifact(artifact, tmp_path / f"{dtype}{len(shape)}{spec.nbytes}.so")
        ) as model:
            y = model(x)
            assert y.dtype == x.dtype and y.shape == x.shape
            np.testing.assert_array_equal(y, x)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "missing input 'x', 'mask'"),
        ((), {"self": "x"}, "no input 'self'; the inputs are x, mask"),
        (("x",), {}, "missing input 'mask'"),
        (("x", "mask", "mask"), {}, "got 3 inputs, expected 2: x, mask"),
        (("x", "mask"), {"masq": "mask"}, "no input 'masq'; the inputs are x, mask"),
        (("x", "mask"), {"mask": "mask"}, "given twice"),
        (("mask", "mask"), {}, r'\'x\' has dtype int8, expected float32; .*x\.astype\("float32"\)'),
        (("x", "short"), {}, r"'mask' has shape \(95,\), expected \(96,\)"),
        (("list", "mask"), {}, "'x' is a list, expected a numpy array.*np.asarray"),
    ],
)
def test_wrong_inputs(small: Path, args: tuple, kwargs: dict, message: str) -> None:
    x, mask = example_inputs()
    values = {"x": x, "mask": mask, "short": mask[1:], "list": x.tolist()}
    with load(small) as model:
        with pytest.raises(InputError, match=message):
            model(*(values[a] for a in args), **{k: values[v] for k, v in kwargs.items()})
        check(model(x, mask), x, mask)


def test_closed_and_pickled(small: Path) -> None:
    model = load(small)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(model)
    model.close()
    model.close()
    with pytest.raises(ArtifactError, match="is closed"):
        model(*example_inputs())


def test_imports_nothing_heavy(small: Path) -> None:
    script = (
        "import sys, numpy, gtco.runtime.module\n"
        f"gtco.runtime.module.load({str(small)!r}).close()\n"
        "print(sorted({m.partition('.')[0] for m in sys.modules} & "
        "{'tvm', 'torch', 'onnx', 'networkx', 'rich', 'onnxruntime', 'psutil', 'scipy'}))"
    )
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert result.stdout.strip() == "[]"


def test_bfloat16_tensors_need_nothing_imported_before() -> None:
    """numpy knows the type's name only after ml_dtypes is imported."""
    code = (
        "from gtco.runtime.plan import TensorSpec; from gtco.runtime.tensors import aligned_empty\n"
        "x = aligned_empty(TensorSpec('x', 'bfloat16', (2, 3)))\n"
        "assert str(x.dtype) == 'bfloat16' and x.shape == (2, 3)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


WITH_NUMPY_ALONE = """
import importlib.machinery, sys

class NothingElse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names or top in ("numpy", "gtco"):
            return None
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NothingElse())
import numpy as np
import gtco

model = gtco.load(PATH, 2)
x, mask = np.ones((96, 40), np.float32), np.zeros(96, np.int8)
y, total = model(x, mask)
assert model.run(None, {"x": x, "mask": mask})[0].shape == y.shape
assert len(model.profile(x, mask)) == 3 and "small" in repr(model)
try:
    model(x)
except gtco.GtcoError as error:
    assert "missing input 'mask'" in str(error)
model.save(PATH.replace(".so", "-copy.so"))
model.close()
try:
    from gtco.support.dtypes import numpy_dtype
    numpy_dtype("bfloat16")
except gtco.GtcoError as error:
    assert "pip install ml_dtypes" in str(error)
else:
    raise AssertionError("bfloat16 needs ml_dtypes")
for compiling in (lambda: gtco.compile_model, lambda: gtco.InferenceSession(b"an ONNX model")):
    try:
        compiling()
    except gtco.GtcoError as error:
        assert "which is not installed" in str(error), error
    else:
        raise AssertionError("compiling needs more")
print("done")
"""


def test_the_run_time_half_needs_numpy_alone(small: Path) -> None:
    """The state after ``pip install --no-deps gtco numpy``."""
    script = WITH_NUMPY_ALONE.replace("PATH", repr(str(small)))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=REPOSITORY
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")

"""A library of several shapes: its variants, the choice among them from Python and from C."""
# ruff: noqa: F401, F811 (fixtures are imported, and arguments of the same name)

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from gtco.runtime.artifact import Artifact
from gtco.runtime.library import OK, TensorInfo
from gtco.runtime.module import Model, load
from gtco.runtime.plan import BufferRef, Step, TensorSpec, Variant
from gtco.runtime.writing.linking import write_artifact
from gtco.support.errors import ArtifactError, BuildError, InputError, OptionError
from tests.runtime.test_models import COLUMNS, SCALE, kernels

REPOSITORY = Path(__file__).parents[2]
ROWS = (4, 1, 96)


def refs(*texts: str) -> tuple[BufferRef, ...]:
    pairs = (text.split() for text in texts)
    return tuple(BufferRef(kind, int(index)) for kind, index in pairs)  # type: ignore[arg-type]


def variant(rows: int) -> Variant:
    """y = relu(x * scale + mask), for so many rows. Of one row it is done in a single step more."""
    scale = Step("scale_rows", refs("input 0", "weight 64", "arena 0"), rows, COLUMNS * 4)
    relu = Step("mask_relu", refs("arena 0", "input 1", "output 0"), rows)
    again = (Step("mask_relu", refs("arena 0", "input 1", "output 0"), rows),) if rows == 1 else ()
    return Variant(
        (
            TensorSpec("x", "float32", (rows, COLUMNS)),
            TensorSpec("mask", "int8", (rows,)),
        ),
        (TensorSpec("y", "float32", (rows, COLUMNS)),),
        (scale, relu, *again),
        rows * COLUMNS * 4 // 64 * 64 + 64,
        {"rows": rows},
    )


def artifact(kernels: bytes, variants: Sequence[Variant]) -> Artifact:
    return Artifact(
        "several",
        (TensorSpec("x", "float32", ("rows", COLUMNS)), TensorSpec("mask", "int8", ("rows",))),
        (TensorSpec("y", "float32", ("rows", COLUMNS)),),
        (),
        max(v.arena_bytes for v in variants),
        {"kernels.o": kernels},
        ((0, np.arange(3, dtype=np.int64)), (64, SCALE)),
        ("sse2",),
        0,
        {"target": "test"},
        tuple(variants),
    )


@pytest.fixture(scope="module")
def several(kernels: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of a library of 4, 1 and 96 rows."""
    folder = tmp_path_factory.mktemp("several")
    return write_artifact(artifact(kernels, list(map(variant, ROWS))), folder / "several.so")


def inputs(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return (
        rng.standard_normal((rows, COLUMNS)).astype(np.float32),
        rng.integers(-2, 3, rows).astype(np.int8),
    )


def check(y: np.ndarray, x: np.ndarray, mask: np.ndarray) -> None:
    assert y.shape == x.shape
    np.testing.assert_allclose(y, np.maximum(x * SCALE + mask[:, None], 0), rtol=1e-6)


# from Python --------------------------------------------------------------------------------------
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_shapes_change_between_calls(several: Path, threads: int) -> None:
    with load(several, threads) as model:
        order = np.random.default_rng(threads).choice(ROWS, 300)
        for seed, rows in enumerate(order):
            x, mask = inputs(int(rows), seed)
            check(model(x, mask), x, mask)


def test_every_way_to_call_it(several: Path) -> None:
    with load(several, 2) as model:
        for rows in ROWS:
            x, mask = inputs(rows)
            check(model(x=x, mask=mask), x, mask)
            check(model({"mask": mask, "x": x}), x, mask)
            check(model.run({"x": x, "mask": mask})["y"], x, mask)
            check(model(np.asfortranarray(x), mask), x, mask)  # is made dense
            out = np.full_like(x, np.nan)
            assert model(x, mask, out=out) is out
            check(out, x, mask)
            assert len(model.profile(x, mask, repeat=1)) == (3 if rows == 1 else 2)


def test_torch_tensors_choose_the_variant_too(several: Path) -> None:
    torch = pytest.importorskip("torch")
    with load(several, 2) as model:
        for rows in ROWS:
            x, mask = inputs(rows)
            y = model(torch.from_numpy(x), torch.from_numpy(mask))
            assert isinstance(y, torch.Tensor)
            check(y.numpy(), x, mask)


def test_it_says_what_it_was_compiled_for(several: Path) -> None:
    with load(several) as model:
        assert model.dims == {"rows": list(ROWS)}
        assert [str(spec) for spec in model.inputs] == [
            f"x: float32[rows, {COLUMNS}]",
            "mask: int8[rows]",
        ]
        assert [v.sizes for v in model.variants] == [{"rows": rows} for rows in ROWS]
        assert [len(v.stages) for v in model.variants] == [2, 3, 2]
        assert "rows" in repr(model)
        with pytest.raises(OptionError, match=r"3 variants.*dims=\{'rows': 4\}"):
            _ = model.stages
    header = several.with_suffix(".h").read_text()
    assert f"x: float32[rows, {COLUMNS}]" in header and " *   rows=96" in header


@pytest.mark.parametrize("size", [0, 2, 3, 97, 2**40])
def test_a_size_that_is_not_listed(several: Path, size: int) -> None:
    check_refused(several, size)


def check_refused(several: Path, size: int) -> None:
    """The library says so of this number of rows, and goes on."""
    with load(several) as model:
        x = np.broadcast_to(np.float32(1), (size, COLUMNS))
        mask = np.broadcast_to(np.int8(1), (size,))
        with pytest.raises(InputError) as error:
            model(x, mask)
        said = str(error.value)
        assert f"'rows' (axis 0) is {size}" in said and "compiled for rows of 4, 1, 96" in said
        assert f"--dim rows=4,1,96,{size}" in said and "dims={'rows': [4, 1, 96" in said
        x, mask = inputs(4)
        check(model(x, mask), x, mask)  # it goes on


def test_shapes_that_fit_no_variant(several: Path) -> None:
    with load(several) as model:
        x, mask = inputs(4)
        with pytest.raises(InputError, match="of 3 axes; expected x: float32"):
            model(x[None], mask)
        with pytest.raises(InputError, match="of 0 axes"):
            model(np.float32(3), mask)
        with pytest.raises(InputError, match="axis 1 is 40 in every call"):
            model(x[:, :-1], mask)
        with pytest.raises(InputError, match=r"do not go together.*'x' \(4, 40\), 'mask' \(1,\)"):
            model(x, mask[:1])
        with pytest.raises(InputError, match="has dtype float64"):
            model(x.astype(float), mask)
        with pytest.raises(InputError, match="expected a numpy array"):
            model([[1.0]], mask)
        with pytest.raises(InputError, match="missing input 'mask'"):
            model(x)
        with pytest.raises(InputError, match="out has 2 tensors"):
            model(x, mask, out=[x, x])
        with pytest.raises(InputError, match=r"output 'y' has shape \(1, 40\), expected"):
            model(x, mask, out=np.empty((1, COLUMNS), np.float32))


def test_one_variant_alone(several: Path) -> None:
    """With ``dims`` the model is as one of that shape."""
    with load(several, 2, dims={"rows": 1}) as model:
        assert model.dims == {} and model.inputs[0].shape == (1, COLUMNS)
        assert len(model.stages) == 3 == len(model.profile(*inputs(1), repeat=1))
        check(model(*inputs(1)), *inputs(1))
        with pytest.raises(InputError, match=r"has shape \(4, 40\), expected \(1, 40\)"):
            model(*inputs(4))
    for dims, said in (
        ({"rows": 3}, r"rows=3: .* was compiled for rows=4,1,96"),
        ({"batch": 1}, "no dimension 'batch' of several sizes: it has 'rows'"),
        ({"rows": 4.0}, r"dims: rows=4.0: give a whole number"),
    ):
        with pytest.raises(OptionError, match=said):
            load(several, dims=dims)


def in_threads(*works: Callable[[], None]) -> None:
    """Does all of them at once. Raises what one of them raised."""
    with ThreadPoolExecutor(len(works)) as pool:
        for done in [pool.submit(work) for work in works]:
            done.result()


def many_calls(model: Model, rows: int) -> None:
    for seed in range(300):
        x, mask = inputs(rows, seed)
        check(model(x, mask), x, mask)


def test_two_handles_in_two_threads(several: Path) -> None:
    barrier = threading.Barrier(2)

    def work(rows: int) -> None:
        with load(several, 2) as model:
            barrier.wait()
            many_calls(model, rows)

    in_threads(*(partial(work, rows) for rows in (4, 96)))


def test_one_handle_in_two_threads(several: Path) -> None:
    """Each call sees its own shapes, although another thread sets others in between."""
    with load(several, 2) as model:
        in_threads(*(partial(many_calls, model, rows) for rows in ROWS))


GROWTH = f"""\
import sys
import numpy as np
import gtco

def mapped():
    ends = (line.split()[0].split("-") for line in open("/proc/self/maps"))
    return sum(int(end, 16) - int(start, 16) for start, end in ends)

with gtco.load(sys.argv[1], 2) as model:
    made = [
        (np.ones((rows, {COLUMNS}), np.float32), np.ones(rows, np.int8),
         np.empty((rows, {COLUMNS}), np.float32))
        for rows in {ROWS}
    ]

    def run(times):
        for _ in range(times):
            for x, mask, y in made:
                model(x, mask, out=y)
        return mapped()

    before = run(2000)  # Python takes its own memory by the MiB, and has what such calls need
    print(run(2000) - before)
"""


def test_changing_shapes_takes_no_memory(several: Path) -> None:
    """In a process of its own, where nothing else takes memory. A page a call would be 24 MB."""
    command = [sys.executable, "-c", GROWTH, several]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) <= 2 << 20  # Python may take an arena of a MiB in between


# from C -------------------------------------------------------------------------------------------
def handle_of(path: Path) -> tuple[Model, ctypes.CDLL, ctypes.c_void_p]:
    model = load(path, 2)
    dll = ctypes.CDLL(str(path))
    dll.gtco_last_error.restype = ctypes.c_char_p
    for name in ("gtco_input", "gtco_output", "gtco_sized_input", "gtco_sized_output"):
        getattr(dll, name).restype = ctypes.POINTER(TensorInfo)
    handle = ctypes.c_void_p()
    assert dll.gtco_open(None, ctypes.byref(handle)) == OK
    return model, dll, handle


def pointers(*arrays: np.ndarray) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))


def shapes(*given: Sequence[int]) -> list[np.ndarray]:
    return [np.array(shape, np.int64) for shape in given]


def test_the_c_interface(several: Path) -> None:
    model, dll, handle = handle_of(several)
    info = dll.gtco_input(handle, 0).contents
    assert list(info.dims[:2]) == [-1, COLUMNS] and info.nbytes == -1
    assert info.symbols[0] == b"rows" and info.symbols[1] is None
    assert not dll.gtco_sized_output(handle, 0) and dll.gtco_num_steps(handle) == 0
    x, mask = inputs(4)
    y = np.empty_like(x)
    assert dll.gtco_run(handle, pointers(x, mask), pointers(y)) == 1
    assert b"compiled for 3 shapes; gtco_set_shapes" in dll.gtco_last_error(handle)
    for rows in (4, 96, 1, 4):
        x, mask = inputs(rows)
        wanted = shapes(x.shape, mask.shape)
        assert dll.gtco_set_shapes(handle, pointers(*wanted)) == OK
        sized = dll.gtco_sized_output(handle, 0).contents
        assert list(sized.dims[:2]) == [rows, COLUMNS] and sized.nbytes == rows * COLUMNS * 4
        assert dll.gtco_sized_input(handle, 1).contents.nbytes == rows
        assert not dll.gtco_sized_input(handle, 2) and not dll.gtco_sized_output(handle, -1)
        steps = dll.gtco_num_steps(handle)
        assert steps == (3 if rows == 1 else 2)
        y = np.empty((rows, COLUMNS), np.float32)
        assert dll.gtco_run(handle, pointers(x, mask), pointers(y)) == OK
        check(y, x, mask)
        seconds = np.full(4, -1.0)
        assert (
            dll.gtco_profile(
                handle, pointers(x, mask), pointers(y), seconds.ctypes.data_as(ctypes.c_void_p)
            )
            == OK
        )
        assert (seconds[:steps] >= 0).all() and (seconds[steps:] == -1).all()
    dll.gtco_close(handle)
    model.close()


def test_wrong_shapes_in_c(several: Path) -> None:
    model, dll, handle = handle_of(several)
    good = shapes((4, COLUMNS), (4,))
    assert dll.gtco_set_shapes(handle, pointers(*good)) == OK
    huge = 2**63 - 1
    for wrong, said in (
        (
            shapes((3, COLUMNS), (3,)),
            "'rows' (axis 0 of input 'x') is 3, and this model was compil",
        ),
        (shapes((0, COLUMNS), (0,)), "is 0"),
        (shapes((-1, COLUMNS), (-1,)), "is -1"),
        (shapes((huge, COLUMNS), (huge,)), f"is {huge}"),
        (shapes((4, huge), (4,)), f"axis 1 of input 'x' has size {huge}, and this model was"),
        (shapes((4, COLUMNS), (96,)), "not for all of them at once: 'x' [4, 40], 'mask' [96]"),
    ):
        assert dll.gtco_set_shapes(handle, pointers(*wrong)) == 1
        assert said in dll.gtco_last_error(handle).decode()
    assert "--dim 'rows=4,1,96,...'" in _refused(dll, handle, shapes((7, COLUMNS), (7,)))
    assert dll.gtco_set_shapes(handle, None) == 1
    assert "the shape of input 0 ('x') is NULL" in dll.gtco_last_error(handle).decode()
    assert dll.gtco_set_shapes(handle, (ctypes.c_void_p * 2)(good[0].ctypes.data, None)) == 1
    assert dll.gtco_set_shapes(None, pointers(*good)) == 1
    # what was set is still set
    assert dll.gtco_sized_input(handle, 1).contents.nbytes == 4
    x, mask = inputs(4)
    y = np.empty_like(x)
    assert dll.gtco_run(handle, pointers(x, mask), pointers(y)) == OK
    check(y, x, mask)
    dll.gtco_close(handle)
    model.close()


def _refused(dll: ctypes.CDLL, handle: ctypes.c_void_p, wrong: list[np.ndarray]) -> str:
    assert dll.gtco_set_shapes(handle, pointers(*wrong)) == 1
    return str(dll.gtco_last_error(handle).decode())


def test_a_model_of_one_shape_takes_its_shapes_and_needs_none(
    kernels: bytes, tmp_path: Path
) -> None:
    one = variant(4)
    alone = Artifact(
        *("one", one.inputs, one.outputs, one.steps, one.arena_bytes, {"kernels.o": kernels}),
        ((64, SCALE),),
    )
    model, dll, handle = handle_of(write_artifact(alone, tmp_path / "one.so"))
    assert model.dims == {} and len(model.variants) == 1
    assert dll.gtco_sized_output(handle, 0).contents.nbytes == 4 * COLUMNS * 4
    assert dll.gtco_num_steps(handle) == 2
    x, mask = inputs(4)
    y = np.empty_like(x)
    assert dll.gtco_run(handle, pointers(x, mask), pointers(y)) == OK
    check(y, x, mask)
    assert dll.gtco_set_shapes(handle, pointers(*shapes((4, COLUMNS), (4,)))) == OK
    assert "axis 0 of input 'x' has size 5" in _refused(dll, handle, shapes((5, COLUMNS), (5,)))
    dll.gtco_close(handle)
    model.close()
    with pytest.raises(OptionError, match="give the sizes by name"):
        load(tmp_path / "one.so", dims=[4])  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="it was compiled for one shape"):
        load(tmp_path / "one.so", dims={"rows": 4})


def test_the_c_example_takes_shapes(several: Path, tmp_path: Path) -> None:
    program = tmp_path / "run"
    folder = str(REPOSITORY / "examples/c")
    subprocess.run(["make", "-s", "-C", folder, f"MODEL={several}", f"OUT={program}"], check=True)
    ran = subprocess.run([program, "4x40", "4"], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[:3] == [
        "input x: float32[4, 40], 640 bytes",
        "input mask: int8[4], 4 bytes",
        "output y: float32[4, 40], 640 bytes",
    ]
    for arguments, said in (
        (["3x40", "3"], "'rows' (axis 0 of input 'x') is 3"),
        (["3"], "usage"),
        (["4x40x1", "4"], "'x' has 2 axes"),
        ([], "gtco_set_shapes"),
    ):
        ran = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
        assert ran.returncode == 1 and said in ran.stderr, ran.stderr


# the artifact -------------------------------------------------------------------------------------
def test_weights_in_a_file_beside_it(kernels: bytes, tmp_path: Path) -> None:
    made = artifact(kernels, list(map(variant, ROWS)))
    path = write_artifact(made, tmp_path / "m.so", weights_inside_limit=0)
    assert len(list(tmp_path.glob("m.so.weights-*"))) == 1
    with load(path) as model:
        for rows in ROWS:
            check(model(*inputs(rows)), *inputs(rows))
        saved = model.save(tmp_path / "copy.so")
    with load(saved) as model:
        check(model(*inputs(96)), *inputs(96))


def test_a_wrong_variant_is_refused(kernels: bytes, tmp_path: Path) -> None:
    good = variant(4)
    for wrong, said in (
        (Variant(good.inputs, good.outputs, good.steps[:1], 640), "no step writes output 0"),
        (Variant(good.inputs, good.outputs, good.steps, -1), "refers to arena 0"),
        (Variant(good.inputs[:1], good.outputs, good.steps, 640), "refers to input 1"),
    ):
        with pytest.raises(BuildError, match=said):
            write_artifact(artifact(kernels, [good, wrong]), tmp_path / "m.so")
    assert not list(tmp_path.iterdir())


def test_a_closed_model_says_so(several: Path) -> None:
    model = load(several)
    model.close()
    with pytest.raises(ArtifactError, match="is closed"):
        model(*inputs(4))

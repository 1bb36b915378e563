"""A library for GPUs of several shapes: a plan for each, chosen by a call's shapes, from Python and
from C. Two fake GPUs of sm_80.
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import POINTER, c_char_p, c_void_p
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from gtco.cli import main
from gtco.runtime.library import OK, TensorInfo
from gtco.runtime.module import Model, load
from gtco.runtime.writing.linking import write_artifact
from gtco.support.errors import ArtifactError, BuildError, InputError, OptionError
from gtco.support.sizes import Range
from tests.cuda.device_tensor import Tensor
from tests.cuda.fake_driver import NON_BLOCKING, FakeDriver, persistent_kernel
from tests.cuda.fake_torch import FakeTorch
from tests.cuda.runtime.rows import on_device, ranged_artifact, rows_artifact
from tests.runtime.test_models import COLUMNS
from tests.runtime.test_variants import ROWS, check, check_refused, inputs

MOST = 40  # rows of the library with a range
PRICES = {1: 10, 4: 20, 16: 50}
DEVICE = 8  # GTCO_ERROR_DEVICE


@pytest.fixture(scope="module")
def several(gpu_kernels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of a library of 4, 1 and 96 rows."""
    folder = tmp_path_factory.mktemp("rows")
    return write_artifact(rows_artifact(gpu_kernels), folder / "rows.so")


@pytest.fixture(scope="module")
def ranged(gpu_kernels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of a library of 1 to 40 rows, in parts of 1, 4 and 16."""
    folder = tmp_path_factory.mktemp("ranged")
    return write_artifact(ranged_artifact(gpu_kernels, MOST, PRICES), folder / "ranged.so")


@pytest.fixture(params=["several", "ranged"])
def library(request: pytest.FixtureRequest) -> tuple[Path, list[int]]:
    """Both libraries, each with the numbers of rows that it runs."""
    rows = list(ROWS) if request.param == "several" else list(range(1, MOST + 1))
    return request.getfixturevalue(request.param), rows


def drawn(rows: Sequence[int], seed: int, count: int) -> list[int]:
    return [int(n) for n in np.random.default_rng(seed).choice(rows, count)]


# from Python --------------------------------------------------------------------------------------
def test_shapes_change_between_calls(driver: FakeDriver, library: tuple[Path, list[int]]) -> None:
    """Everything is allocated and built when the model is opened."""
    path, rows = library
    with load(path) as model:
        live = driver.live()
        for seed, n in enumerate(drawn(rows, 0, 200)):
            x, mask = inputs(n, seed)
            check(model(x, mask), x, mask)
        assert driver.live() == live
    driver.check()


def test_every_way_to_call_it(driver: FakeDriver, library: tuple[Path, list[int]]) -> None:
    path, rows = library
    with load(path) as model:
        for n in rows[:5]:
            x, mask = inputs(n)
            check(model(x=x, mask=mask), x, mask)
            check(model.run({"x": x, "mask": mask})["y"], x, mask)
            check(model(np.asfortranarray(x), mask), x, mask)  # is made dense
            out = np.full_like(x, np.nan)
            assert model(x, mask, out=out) is out
            check(out, x, mask)
            seconds = model.profile(x, mask, repeat=1)
            assert all(s > 0 for s in seconds)
            if path.name == "rows.so":
                assert len(seconds) == (4 if n == 1 else 3)
    driver.check()


@pytest.mark.parametrize("offset", [0, 4])
def test_tensors_of_the_device(
    driver: FakeDriver, library: tuple[Path, list[int]], offset: int
) -> None:
    """On several streams, in place or from memory that is not aligned; nothing waits in between."""
    path, rows = library
    streams = [driver.stream(0, NON_BLOCKING) for _ in range(3)]
    with load(path) as model:
        live = driver.live()
        runs = []
        for seed, n in enumerate(drawn(rows, 1, 24)):
            given, made, arrays = on_device(driver, n, seed, offset=offset)
            assert model(*given, out=made, stream=streams[seed % 3]) is made
            runs.append((made, arrays))
            if seed % 5 == 4:  # a run of the host in between
                check(model(*arrays), *arrays)
        for stream in streams:
            driver.sync(stream, 0)
        for made, arrays in runs:
            check(made.numpy(), *arrays)
        assert driver.live() == live
    driver.check()


def test_tensors_in_place_are_not_copied(driver: FakeDriver, several: Path) -> None:
    with load(several) as model:
        copies = driver.copies()
        for n in (4, 96, 4, 1):
            given, made, arrays = on_device(driver, n)
            model(*given, out=made)
            driver.sync(None, 0)
            check(made.numpy(), *arrays)
        assert driver.copies() == copies
    driver.check()


def test_outputs_are_made_of_the_shape_of_the_call(
    driver: FakeDriver, several: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = FakeTorch(driver, 0)
    monkeypatch.setitem(__import__("sys").modules, "torch", torch)
    with load(several) as model:
        for n in (4, 96):
            x, mask = inputs(n)
            y = model(torch.Tensor(driver, x), torch.Tensor(driver, mask))
            driver.sync(None, 0)
            assert (n, COLUMNS) in torch.made
            check(y.numpy(), x, mask)
    driver.check()


def test_two_handles_at_two_shapes(driver: FakeDriver, library: tuple[Path, list[int]]) -> None:
    path, rows = library
    barrier = threading.Barrier(2)

    def work(own: Sequence[int], device: int) -> None:
        with load(path, device=device) as model:
            barrier.wait()
            many_calls(model, own)

    for devices in ((0, 0), (0, 1)):
        in_threads(
            *(
                partial(work, own, n)
                for own, n in zip((rows[:1], rows[-1:]), devices, strict=True)
            )
        )
    driver.check()


def test_one_handle_in_two_threads(driver: FakeDriver, library: tuple[Path, list[int]]) -> None:
    """Each call has its own shapes, although another thread sets others in between."""
    path, rows = library
    with load(path) as model:
        in_threads(*(partial(many_calls, model, rows[n::3]) for n in range(3)))
    driver.check()


def many_calls(model: Model, rows: Sequence[int]) -> None:
    for seed in range(40):
        x, mask = inputs(rows[seed % len(rows)], seed)
        check(model(x, mask), x, mask)


def in_threads(*works: Callable[[], None]) -> None:
    """Does all of them at once. Raises what one of them raised."""
    with ThreadPoolExecutor(len(works)) as pool:
        for done in [pool.submit(work) for work in works]:
            done.result()


def test_a_captured_run_keeps_its_shape(
    driver: FakeDriver, library: tuple[Path, list[int]]
) -> None:
    """Replays do what was captured, whatever shapes the handle ran since."""
    path, rows = library
    stream = driver.stream(0, NON_BLOCKING)
    with load(path) as model:
        given, made, _ = on_device(driver, rows[0])
        driver.capture(stream, 1)
        model(*given, out=made, stream=stream)
        driver.capture(stream, 0)
        for seed, n in enumerate((rows[-1], rows[1], rows[0])):
            others = inputs(n, seed)
            check(model(*others), *others)
            arrays = inputs(rows[0], seed + 7)
            for tensor, array in zip(given, arrays, strict=True):
                driver.write(tensor.pointer, array.ctypes.data, array.nbytes)
            driver.replay(stream)
            driver.sync(stream, 0)
            check(made.numpy(), *arrays)
    driver.check()


def test_it_says_what_it_was_compiled_for(driver: FakeDriver, several: Path) -> None:
    with load(several) as model:
        assert model.dims == {"rows": list(ROWS)} and model.device == 0
        assert model.launches == "graph: 10 kernels in 3 graphs, one for each of the model's plans"
        assert [str(spec) for spec in model.inputs] == [
            f"x: float32[rows, {COLUMNS}]",
            "mask: int8[rows]",
        ]
        assert [len(v.stages) for v in model.variants] == [3, 4, 3]
        with pytest.raises(OptionError, match=r"3 variants.*dims=\{'rows': 4\}"):
            _ = model.stages
    header = several.with_suffix(".h").read_text()
    assert f"x: float32[rows, {COLUMNS}]" in header and " *   rows=96" in header


def test_one_shape_alone(driver: FakeDriver, several: Path, ranged: Path) -> None:
    """With ``dims`` the model is as one of that shape."""
    with load(several, dims={"rows": 1}) as model:
        assert model.dims == {} and model.inputs[0].shape == (1, COLUMNS)
        assert len(model.stages) == 4 == len(model.profile(*inputs(1), repeat=1))
        check(model(*inputs(1)), *inputs(1))
        with pytest.raises(InputError, match=r"has shape \(4, 40\), expected \(1, 40\)"):
            model(*inputs(4))
    with load(ranged, dims={"rows": 7}) as model:
        check(model(*inputs(7)), *inputs(7))
    with pytest.raises(OptionError, match=r"rows=3: .* was compiled for rows=4,1,96"):
        load(several, dims={"rows": 3})
    driver.check()


@pytest.mark.parametrize("size", [0, 2, 3, 97, 2**40])
def test_a_size_that_is_not_listed(driver: FakeDriver, several: Path, size: int) -> None:
    check_refused(several, size)
    driver.check()


def test_wrong_shapes(driver: FakeDriver, several: Path, ranged: Path) -> None:
    """On the host and on the device."""
    (x, mask), made, _ = on_device(driver, 4)
    other = Tensor(driver, np.zeros(1, np.int8))
    flat = Tensor(driver, np.zeros((4, COLUMNS - 1), np.float32))
    with load(several) as model:
        for given, said in (
            ((x, other), r"do not go together.*'x' \(4, 40\), 'mask' \(1,\)"),
            ((flat, mask), "axis 1 is 40 in every call"),
            ((mask, mask), "of 1 axes; expected x: float32"),
        ):
            with pytest.raises(InputError, match=said):
                model(*given, out=made)
            with pytest.raises(InputError, match=said):
                model(*(tensor.array for tensor in given))
        with pytest.raises(InputError, match=r"'y' has shape \(4, 40\), expected \(96, 40\)"):
            model(*on_device(driver, 96)[0], out=made)
    with load(ranged) as model:
        assert model.dims == {"rows": Range(1, MOST)}
        with pytest.raises(InputError, match=r"'rows' \(axis 0\) is 41, .* rows of 1 to 40.*--dim"):
            model(*on_device(driver, 41)[0], out=made)
        with pytest.raises(InputError, match="'rows' is 4 in input 'x' and 1 in input 'mask'"):
            model(x, other, out=made)
    driver.check()


# the parts of a range -----------------------------------------------------------------------------
def test_every_size_of_a_range(driver: FakeDriver, ranged: Path) -> None:
    """The steps that the library runs are those that Python says; masks begin at any byte."""
    with load(ranged) as model:
        for n in range(1, MOST + 1):
            given, made, arrays = on_device(driver, n, n)
            model(*given, out=made)
            driver.sync(None, 0)
            check(made.numpy(), *arrays)
            check(model(*arrays), *arrays)
            with load(ranged, dims={"rows": n}) as one:
                assert len(one.stages) == len(one.profile(*arrays, repeat=1))
    driver.check()


# from C -------------------------------------------------------------------------------------------
class Handle:
    """The interface of C on a library."""

    def __init__(self, path: Path) -> None:
        self.dll = ctypes.CDLL(str(path))
        self.dll.gtco_last_error.restype = c_char_p
        for name in ("gtco_input", "gtco_sized_input", "gtco_sized_output"):
            getattr(self.dll, name).restype = POINTER(TensorInfo)
        self.handle = c_void_p()
        assert self.dll.gtco_open(None, ctypes.byref(self.handle)) == OK

    def call(self, name: str, *arguments: object) -> int:
        return int(getattr(self.dll, f"gtco_{name}")(self.handle, *arguments))

    def error(self) -> str:
        return str(self.dll.gtco_last_error(self.handle).decode())


def pointers(*arrays: np.ndarray) -> ctypes.Array[c_void_p]:
    return (c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))


def shapes(rows: int, masks: int | None = None) -> list[np.ndarray]:
    given = ((rows, COLUMNS), (rows if masks is None else masks,))
    return [np.array(shape, np.int64) for shape in given]


def test_the_c_interface(driver: FakeDriver, several: Path) -> None:
    with load(several):  # the driver is found
        c = Handle(several)
    info = c.dll.gtco_input(c.handle, 0).contents
    assert list(info.dims[:2]) == [-1, COLUMNS] and info.nbytes == -1
    assert info.symbols[0] == b"rows" and info.symbols[1] is None
    assert not c.dll.gtco_sized_output(c.handle, 0) and c.call("num_steps") == 0
    x, mask = inputs(4)
    y = np.empty_like(x)
    for name in ("run", "run_on"):
        last = [] if name == "run" else [None]
        assert c.call(name, pointers(x, mask), pointers(y), *last) == 1
        assert "compiled for 3 shapes; gtco_set_shapes" in c.error()
    for n in (4, 96, 1, 4):
        x, mask = inputs(n, n)
        y, wanted = np.empty_like(x), shapes(n)
        assert c.call("set_shapes", pointers(*wanted)) == OK
        sized = c.dll.gtco_sized_output(c.handle, 0).contents
        assert list(sized.dims[:2]) == [n, COLUMNS] and sized.nbytes == n * COLUMNS * 4
        assert c.dll.gtco_sized_input(c.handle, 1).contents.nbytes == n
        steps = c.call("num_steps")
        assert steps == (4 if n == 1 else 3)
        assert c.call("run", pointers(x, mask), pointers(y)) == OK
        check(y, x, mask)
        seconds = np.full(5, -1.0)
        given = c_void_p(seconds.ctypes.data)
        assert c.call("profile", pointers(x, mask), pointers(y), given) == OK
        assert (seconds[:steps] > 0).all() and (seconds[steps:] == -1).all()
    tensors, made, arrays = on_device(driver, 96)
    assert c.call("run_shapes", pointers(*shapes(96)), *_places(tensors, made)) == OK
    check(made.numpy(), *arrays)
    c.call("close")
    driver.check()


def _places(given: Sequence[Tensor], made: Tensor) -> tuple[object, object]:
    return (c_void_p * 2)(*(tensor.pointer for tensor in given)), (c_void_p * 1)(made.pointer)


def test_wrong_shapes_in_c(driver: FakeDriver, several: Path) -> None:
    c = Handle(several)
    assert c.call("set_shapes", pointers(*shapes(4))) == OK
    x, mask = inputs(4)
    y = np.empty_like(x)
    for name in ("set_shapes", "run_shapes"):
        more = () if name == "set_shapes" else (pointers(x, mask), pointers(y))
        for wrong, said in (
            (shapes(3), "'rows' (axis 0 of input 'x') is 3, and this model was compiled for 4,1"),
            (shapes(-1), "is -1"),
            (shapes(4, 96), "not for all of them at once: 'x' [4, 40], 'mask' [96]"),
        ):
            assert c.call(name, pointers(*wrong), *more) == 1
            assert said in c.error()
        assert c.call(name, None, *more) == 1
        assert "the shape of input 0 ('x') is NULL" in c.error()
    assert "--dim 'rows=4,1,96,...'" in _refused(c, shapes(7))
    # what was set is still set
    assert c.call("run", pointers(x, mask), pointers(y)) == OK
    check(y, x, mask)
    c.call("close")
    driver.check()


def test_a_forked_child_sets_no_shapes(driver: FakeDriver, several: Path) -> None:
    """As every call of a handle that it inherited, also if the fork came in the middle of one."""
    c = Handle(several)
    if not (child := os.fork()):
        status, text = c.call("set_shapes", pointers(*shapes(4))), c.error()
        os._exit(0 if status == DEVICE and "CUDA does not survive a fork" in text else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert c.call("set_shapes", pointers(*shapes(4))) == OK
    c.call("close")
    driver.check()


def _refused(c: Handle, wrong: list[np.ndarray]) -> str:
    assert c.call("set_shapes", pointers(*wrong)) == 1
    return c.error()


# failures -----------------------------------------------------------------------------------------
def test_every_call_may_fail(driver: FakeDriver, library: tuple[Path, list[int]]) -> None:
    """The n-th call of the driver fails, for every n, while a model is opened, run at several
    shapes and closed. A handle that ran before gives right results afterwards.
    """
    path, rows = library
    shapes_of_runs = (rows[1], rows[-1], rows[0])
    for n in range(1, 1000):
        driver.reset(2, 8, 0, n)
        other = load(path)
        check(other(*inputs(rows[0])), *inputs(rows[0]))
        with driver.failing(n):
            failed = ""
            try:
                with load(path, device=1) as model:
                    for size in shapes_of_runs:
                        model(*inputs(size))
                        given, made, _ = on_device(driver, size, ordinal=1)
                        model(*given, out=made)
                        driver.sync(None, 1)
                for size in shapes_of_runs:
                    other(*inputs(size))
            except ArtifactError as error:
                failed = str(error)
            name = driver.failed().decode()
        for size in (rows[-1], rows[0]):
            check(other(*inputs(size)), *inputs(size))
        other.close()
        if not name:
            break
        assert not failed or "CUDA_ERROR_UNKNOWN" in failed
        if name != "cuCtxPushCurrent_v2":  # an unavailable context takes its resources with it
            driver.check()
    assert n > 60


def test_memory_is_asked_for_once(driver: FakeDriver, several: Path) -> None:
    """The arena and the staging of the largest shape, beside the weights."""
    with load(several) as one, load(several) as two:
        lines = driver.live().decode().splitlines()
        assert lines[0] == "3 pieces of memory" and "6 graphs" in "\n".join(lines)
        for model in (one, two):
            check(model(*inputs(96)), *inputs(96))
    driver.check()


# the artifact -------------------------------------------------------------------------------------
def test_one_kernel_has_the_steps_of_one_shape(gpu_kernels: Path, tmp_path: Path) -> None:
    artifact = rows_artifact(gpu_kernels, persistent=persistent_kernel(gpu_kernels))
    with pytest.raises(BuildError, match="does the steps of one shape, and the model has several"):
        write_artifact(artifact, tmp_path / "m.so")


def test_a_handle_cannot_ask_for_one_kernel(driver: FakeDriver, several: Path) -> None:
    with pytest.raises(ArtifactError, match="compiled without the persistent kernel"):
        load(several, launches="persistent")
    driver.check()


def test_the_command_line(
    driver: FakeDriver,
    several: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["inspect", str(several), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["variants"]) == [f"rows={rows}" for rows in ROWS]
    for one in found["variants"].values():
        assert all(stage["measured_seconds"] > 0 for stage in one["stages"])
    assert main(["inspect", str(several), "--dim", "rows=1"]) == 0
    assert "launched as graph" in capsys.readouterr().out
    assert main(["inspect", str(several)]) == 0
    assert "rows=96" in capsys.readouterr().out
    x, mask = inputs(96)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "mask.npy", mask)
    files = [f"x={tmp_path}/x.npy", f"mask={tmp_path}/mask.npy"]
    command = ["run", str(several), *(part for f in files for part in ("--input", f))]
    assert main([*command, "--output", str(tmp_path)]) == 0
    check(np.load(tmp_path / "y.npy"), x, mask)
    driver.check()

"""A model for GPUs with tensors of the device: in place, on the caller's stream, and wrong ones.
Two fake GPUs of sm_80.
"""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gtco.runtime.gpu.plan import GpuStep
from gtco.runtime.gpu.tensors import stream_handle
from gtco.runtime.module import HELD_RUNS, load
from gtco.runtime.plan import BufferRef, TensorSpec
from gtco.runtime.writing.linking import write_artifact
from gtco.support.errors import ArtifactError, InputError
from tests.cuda.device_tensor import TOTAL, Tensor, Y, check_replays, tensors
from tests.cuda.fake_driver import (
    BLOCKING,
    NON_BLOCKING,
    FakeDriver,
    compile_kernels,
    image,
    small_gpu_artifact,
)
from tests.cuda.fake_torch import FakeTorch
from tests.runtime.test_models import COLUMNS, ROWS, check, example_inputs


def test_tensors_of_the_device_are_used_in_place(driver: FakeDriver, small_gpu: Path) -> None:
    with load(small_gpu) as model:
        copies = driver.copies()  # of weights
        for seed in range(3):  # the pointers differ each time: nodes of the graph get new ones
            inputs, outputs, arrays = tensors(driver, seed=seed)
            given = model(*inputs, out=outputs)
            assert given == outputs and inputs[0].asked == outputs[1].asked == [1]
            # nothing was copied, and nothing was waited for
            assert driver.pending(None, 0) >= 3 and driver.copies() == copies
            driver.sync(None, 0)
            check(tuple(t.numpy() for t in outputs), *arrays)
    driver.check()


def test_runs_on_the_callers_stream(driver: FakeDriver, small_gpu: Path) -> None:
    """A run reads what earlier work of the stream writes. Runs of one handle on two streams wait
    for each other, in whatever order the streams run.
    """
    streams = [driver.stream(0, NON_BLOCKING) for _ in range(3)]
    with load(small_gpu) as model:
        for turn in range(4):
            runs = []
            for number, stream in enumerate(streams):
                inputs, outputs, _ = tensors(driver, seed=0)
                x, mask = example_inputs(3 * turn + number + 1)
                size = x.nbytes
                driver.write_later(stream, 0, inputs[0].pointer, x.ctypes.data, size)
                driver.write_later(stream, 0, inputs[1].pointer, mask.ctypes.data, mask.nbytes)
                model(*inputs, out=outputs, stream=stream)
                assert inputs[0].asked == [stream]
                runs.append((outputs, (x, mask)))
            host = example_inputs(99)
            check(model(*host), *host)  # on its own stream, after them
            for stream in streams:
                driver.sync(stream, 0)
            for outputs, arrays in runs:
                check(tuple(t.numpy() for t in outputs), *arrays)
    driver.check()


def test_weights_are_there_before_the_first_run(driver: FakeDriver, small_gpu: Path) -> None:
    """The run's stream does not wait for the legacy stream, in which weights are copied."""
    stream = driver.stream(0, NON_BLOCKING)
    inputs, outputs, arrays = tensors(driver)
    with load(small_gpu) as model:
        assert driver.pending(None, 0) == 0
        model(*inputs, out=outputs, stream=stream)
        driver.sync(stream, 0)
        check(tuple(t.numpy() for t in outputs), *arrays)
    driver.check()


def test_closing_waits_for_what_is_under_way(driver: FakeDriver, small_gpu: Path) -> None:
    stream = driver.stream(0, NON_BLOCKING)
    inputs, outputs, arrays = tensors(driver)
    with load(small_gpu) as model:
        model(*inputs, out=outputs, stream=stream)
        assert driver.pending(stream, 0)
    check(tuple(t.numpy() for t in outputs), *arrays)
    driver.check()


def test_becomes_part_of_a_captured_graph(driver: FakeDriver, small_gpu: Path) -> None:
    stream = driver.stream(0, NON_BLOCKING)
    inputs, outputs, _ = tensors(driver)
    with load(small_gpu) as model:
        model(
            *inputs, out=outputs, stream=stream
        )  # the event of this run is outside of the capture
        driver.sync(stream, 0)
        driver.capture(stream, 1)
        model(*inputs, out=outputs, stream=stream)
        driver.capture(stream, 0)
        assert driver.pending(stream, 0) == 0
        check_replays(driver, stream, inputs, outputs)
    driver.check()


COUNTING = """
int counting_count = 3;
void counting(void** a, const unsigned* grid, unsigned threads, unsigned shared) {
  const float* x = a[0];
  unsigned* counter = a[1];
  *(float*)a[2] = *x + *counter;
  if (*x == 99) *counter = 5; /* as where two runs overlap */
}
"""


def test_overlapping_replays_do_not_spoil_later_runs(driver: FakeDriver, tmp_path: Path) -> None:
    """Blocks count in memory of the handle: an input of 99 leaves the counts as two overlapping
    runs do.
    """
    kernels = compile_kernels(COUNTING, tmp_path)
    x, y, counter = BufferRef("input", 0), BufferRef("output", 0), BufferRef("arena", 64)
    artifact = small_gpu_artifact(
        kernels,
        inputs=(TensorSpec("x", "float32", (1,)),),
        outputs=(TensorSpec("y", "float32", (1,)),),
        steps=(GpuStep("counting", (x, counter, y), (1, 1, 1), 32, 0, {}),),
        arena_bytes=128,
        counter_bytes=64,
        images={"sm_80": {"counting": image("sm_80", kernels)}},
        weights=(),
    )
    stream = driver.stream(0, NON_BLOCKING)
    given, made = (Tensor(driver, np.zeros(1, np.float32)) for _ in range(2))
    with load(write_artifact(artifact, tmp_path / "counting.so")) as model:
        driver.capture(stream, 1)
        model(given, out=made, stream=stream)
        driver.capture(stream, 0)
        for value in (99, 1, 99):
            array = np.full(1, value, np.float32)
            driver.write(given.pointer, array.ctypes.data, array.nbytes)
            driver.replay(stream)
            driver.sync(stream, 0)
            assert made.numpy() == value
        assert model(np.ones(1, np.float32)) == 1
    driver.check()


@pytest.mark.parametrize("flags", [BLOCKING, NON_BLOCKING])
def test_others_captures_are_left_alone(driver: FakeDriver, small_gpu: Path, flags: int) -> None:
    """A model is opened, run, timed and closed while another thread captures a stream. By default
    torch captures in a mode that forbids every other thread calls that may be unsafe, and forbids
    all threads the legacy stream if the captured stream waits for it.
    """
    captured, own = driver.stream(0, flags), driver.stream(0, NON_BLOCKING)
    inputs, outputs, arrays = tensors(driver)
    driver.capture(captured, 1)
    with load(small_gpu) as model:
        check(model(*arrays), *arrays)
        assert all(s > 0 for s in model.timed(arrays))
        for _ in range(HELD_RUNS + 1):
            model(*inputs, out=outputs, stream=own)
    driver.capture(captured, 0)
    check(tuple(t.numpy() for t in outputs), *arrays)
    driver.check()


def test_tensors_are_held_until_their_run_is_over(driver: FakeDriver, small_gpu: Path) -> None:
    """The run is on a stream that the owner of the tensors does not know. The number of tensors
    held is bounded.
    """
    stream = driver.stream(0, NON_BLOCKING)
    alive: list[Any] = []
    runs: list[Any] = []

    def run(model: Any, seed: int) -> None:
        inputs, outputs, arrays = tensors(driver, seed=seed)
        for tensor in inputs:
            weakref.finalize(tensor, driver.free, tensor.pointer)  # a fault while work reads it
            alive.append(weakref.ref(tensor))
        model(*inputs, out=outputs, stream=stream)
        runs.append((outputs, arrays))

    with load(small_gpu) as model:
        for seed in range(HELD_RUNS):
            run(model, seed)
        gc.collect()
        assert all(tensor() is not None for tensor in alive) and driver.pending(stream, 0)
        run(model, 50)  # waits for the runs before it
        gc.collect()
        assert [tensor() is not None for tensor in alive[-3:]] == [False, True, True]
        host = example_inputs(99)
        check(model(*host), *host)  # comes after all of them
        gc.collect()
        assert all(tensor() is None for tensor in alive)
        run(model, 51)
    gc.collect()
    assert all(tensor() is None for tensor in alive)
    for outputs, arrays in runs:
        check(tuple(t.numpy() for t in outputs), *arrays)
    driver.check()


def test_memory_of_another_context_is_named(driver: FakeDriver, small_gpu: Path) -> None:
    inputs, outputs, arrays = tensors(driver)
    own = inputs[0].pointer
    inputs[0].pointer = driver.alloc_foreign(0, arrays[0].nbytes)
    with load(small_gpu) as model:
        text = r"'x' is of another context than the primary one"
        with pytest.raises(ArtifactError, match=text) as it:
            model(*inputs, out=outputs)
        assert "gtco_run:" not in str(it.value)  # it was gtco_run_on
        inputs[0].pointer = own
        model(*inputs, out=outputs)
        driver.sync(None, 0)
        check(tuple(t.numpy() for t in outputs), *arrays)
    driver.check()


def test_pointers_that_are_not_aligned_cost_a_copy(driver: FakeDriver, small_gpu: Path) -> None:
    x, mask = example_inputs()
    with load(small_gpu) as model:
        inputs = (Tensor(driver, x, offset=4), Tensor(driver, mask, offset=3, byte_offset=3))
        outputs = (Tensor(driver, Y, offset=8), Tensor(driver, TOTAL))
        copies = driver.copies()
        model(*inputs, out=list(outputs))
        assert driver.copies() == copies + 3
        driver.sync(None, 0)
        check(tuple(t.numpy() for t in outputs), x, mask)
    driver.check()


def test_torch_gets_torch_back(
    driver: FakeDriver, small_gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a torch that has the fake GPU: its current stream, and outputs in its memory. DLPack is
    only asked if there is work of another stream to wait for.
    """
    stream, other = driver.stream(0, NON_BLOCKING), driver.stream(0, NON_BLOCKING)
    torch = FakeTorch(driver, stream)
    monkeypatch.setitem(sys.modules, "torch", torch)
    x, mask = example_inputs()
    with load(small_gpu) as model:
        for handle, given in (
            (stream, {}),
            (other, {"stream": SimpleNamespace(cuda_stream=other)}),
            (0, {"stream": SimpleNamespace(cuda_stream=0)}),
        ):
            torch.used_on.clear()
            inputs = (torch.Tensor(driver, x), torch.Tensor(driver, mask))
            y, total = model(*inputs, **given)
            assert torch.made == {s: (handle, ("cuda", 0)) for s in (Y.shape, TOTAL.shape)}
            every = (*inputs, y, total)
            assert {tuple(t.asked) for t in every} == {() if handle == stream else (handle or 1,)}
            assert torch.used_on == ([] if handle == stream else [(t, handle) for t in every])
            assert not model._held
            driver.sync(handle or None, 0)
            check((y.numpy(), total.numpy()), x, mask)
    # on a device that is not torch's current one, and beside a torch tensor of the host
    torch.streams.append(driver.stream(1, NON_BLOCKING))
    with load(small_gpu, device=1) as model:
        on = [torch.Tensor(driver, array, ordinal=1) for array in (x, mask)]
        for given in ({}, {"stream": driver.stream(1, NON_BLOCKING)}):
            y, total = model(*on, **given)
            assert torch.devices == [0]
            driver.sync(given.get("stream", torch.streams[-1]), 1)
            check((y.numpy(), total.numpy()), x, mask)
        host = torch.Tensor(driver, x)
        monkeypatch.setattr(host, "is_cuda", False)
        with pytest.raises(InputError, match="'x' is not on a GPU, and this model runs on cuda:1"):
            model(host, on[1])
    driver.check()


def test_what_is_wrong_with_torch_tensors_is_dlpacks_to_say(
    driver: FakeDriver, small_gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = driver.stream(0, NON_BLOCKING)
    torch = FakeTorch(driver, stream)
    monkeypatch.setitem(sys.modules, "torch", torch)
    x, mask = example_inputs()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"array": x[:5]}, r"'x' has shape \(5, 40\), expected \(96, 40\)"),
        ({"array": x.astype(np.float16)}, "'x' has dtype float16, expected float32"),
        ({"strides": (1, ROWS)}, "'x' is not dense and row-major"),
        ({"requires_grad": True}, r"'x' cannot be read: Can't export.*x\.detach"),
        ({"layout": "sparse_coo"}, "'x' cannot be read: Can't export"),
        ({"memory": False}, "'x' cannot be read: Can't export"),  # as a tensor that vmap wraps
    ]
    with load(small_gpu) as model:
        for changes, text in wrong:
            odd = torch.Tensor(driver, x)
            vars(odd).update(changes)
            with pytest.raises(InputError, match=text):
                model(odd, torch.Tensor(driver, mask))
            assert odd.asked == [stream]
    driver.check()


def test_spellings_of_a_stream() -> None:
    class Protocol:
        def __init__(self, handle: int) -> None:
            self.handle = handle

        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, self.handle)

    def spellings(handle: int) -> list[Any]:
        named = SimpleNamespace(ptr=handle), SimpleNamespace(cuda_stream=handle)
        return [handle, Protocol(handle), *named]

    for handle, expected in ((70, 70), (0, 0), (1, 0)):  # the legacy default stream has two numbers
        assert {stream_handle(stream) for stream in spellings(handle)} == {expected}
    for stream in spellings(-1):  # DLPack's "no stream", which is a pointer to nowhere here
        with pytest.raises(InputError, match="stream is -1; give the number"):
            stream_handle(stream)
    with pytest.raises(InputError, match="stream is a str; give a"):
        stream_handle("first")


def test_wrong_tensors_are_named(driver: FakeDriver, small_gpu: Path) -> None:
    x, mask = example_inputs()
    with load(small_gpu) as model:
        (on_x, on_mask), out, arrays = tensors(driver)
        wrong: list[tuple[Any, dict[str, Any], str]] = [
            ((on_x, mask), {"out": out}, r"'mask' is not on a GPU, and this model runs on cuda:0"),
            ((on_x, Tensor(driver, mask, ordinal=1)), {"out": out}, r"'mask' is on cuda:1, and"),
            ((Tensor(driver, x.astype(np.float16)), on_mask), {"out": out}, "dtype float16, expec"),
            ((Tensor(driver, x[:5]), on_mask), {"out": out}, r"shape \(5, 40\), expected \(96, 40"),
            (
                (Tensor(driver, x, strides=(1, 96)), on_mask),
                {"out": out},
                "not dense and row-major",
            ),
            ((on_x, on_mask), {}, "gtco makes outputs for torch alone: pass tensors of your own"),
            ((on_x, on_mask), {"out": out[0]}, "out has 1 tensor; the model has 2"),
            ((on_x, on_mask), {"out": (Y, TOTAL)}, "output 'y' is not on a GPU"),
            ((on_x, on_mask), {"out": out, "stream": "main"}, "stream is a str"),
            ((x, mask), {"out": out}, "cannot be read"),
            ((x, mask), {"stream": 0}, "stream is for inputs on the device"),
        ]
        for inputs, options, text in wrong:
            with pytest.raises(InputError, match=text):
                model(*inputs, **options)
        on_x.__class__.__dlpack__, ask = refuse, on_x.__class__.__dlpack__
        try:
            with pytest.raises(InputError, match=r"'x' cannot be read: Can't export.*x\.detach"):
                on_x.requires_grad = True
                model(on_x, on_mask, out=out)
        finally:
            on_x.__class__.__dlpack__ = ask
        with pytest.raises(ArtifactError, match="stream is not of the primary context of device 0"):
            model(on_x, on_mask, out=out, stream=driver.stream(1, NON_BLOCKING))
        with pytest.raises(ArtifactError, match="output 'total' overlaps 'y' in memory"):
            model(on_x, on_mask, out=(out[0], SubTensor(out[0])))
        dense = Tensor(driver, x, strides=(COLUMNS, 1))
        model(dense, on_mask, out=out)
        driver.sync(None, 0)
        check(tuple(t.numpy() for t in out), *arrays)
    driver.check()


def refuse(self: Any, *, stream: Any = None) -> Any:
    raise BufferError("Can't export tensors that require gradient")


class SubTensor(Tensor):
    """The first elements of another tensor."""

    def __init__(self, other: Tensor) -> None:
        vars(self).update(vars(other))
        self.array = TOTAL


def test_inputs_may_be_named_like_options(
    driver: FakeDriver, gpu_kernels: Path, tmp_path: Path
) -> None:
    inputs = (TensorSpec("out", "float32", (ROWS, COLUMNS)), TensorSpec("stream", "int8", (ROWS,)))
    path = write_artifact(small_gpu_artifact(gpu_kernels, inputs=inputs), tmp_path / "m.so")
    x, mask = example_inputs()
    with load(path) as model:
        check(model(out=x, stream=mask), x, mask)

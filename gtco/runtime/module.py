"""``gtco.load``: a compiled model in Python. Imports numpy and nothing heavier."""

from __future__ import annotations

import os
import shutil
import statistics
import threading
import weakref
from collections.abc import Mapping, Sequence
from ctypes import c_double, c_void_p
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np

from gtco.runtime.device_tensors import Caller, device_of
from gtco.runtime.elf import read_contents
from gtco.runtime.library import BUSY, OK, Library, check_model, file_identity, tensor_specs
from gtco.runtime.publish import publish, staging, weights_name, write_error
from gtco.runtime.tensors import aligned_empty, as_stored, like, to_numpy
from gtco.support.errors import ArtifactError, BuildError, InputError, OptionError
from gtco.support.options import MOST_THREADS, check_whole


def load(
    path: str | os.PathLike[str],
    threads: int = 0,
    *,
    device: int | None = None,
    launches: Literal["graph", "persistent"] | None = None,
    temporary: bool = False,
) -> Model:
    """Opens the ``.so`` that gtco wrote.

    ``threads``: how many a run uses; 0 means ``GTCO_NUM_THREADS``, else the number given at compile
    time, else all cores that this process may use. ``device``: number of the GPU, for a model that
    was compiled for GPUs; None is the first. ``launches``: how such a model is launched, None as
    the compile chose (:attr:`Model.launches`). ``temporary``: the model owns the folder of the file
    and removes it when it is closed. Raises :class:`ArtifactError` where the file is not gtco's, is
    damaged, lacks its weights file, needs instructions that this CPU has not got, or a GPU or a
    driver that is not here.
    """
    return Model(Path(path), threads, device=device, launches=launches, temporary=temporary)


LAUNCHES = {None: 0, "graph": 1, "persistent": 2}  # gtco_launches_option
MOST_DEVICES = 1 << 16  # more than there are, and an int of C
HELD_RUNS = 8  # under way in callers' streams, whose tensors a model holds; one more waits for them
_models: weakref.WeakSet[Model] = weakref.WeakSet()


def _renew_locks() -> None:
    """In the child of a fork: nobody is left there to release what another thread held. The C
    runtime does the same for its handles.
    """
    for model in _models:
        model._lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)


def _open(
    path: Path, threads: int, device: int | None, launches: str | None, candidates: bool
) -> tuple[Library, int]:
    """The library and a handle. Where a compile publishes another one at this moment, the first
    look may find a library whose weights have just gone: the new one is taken then."""
    while True:
        before = file_identity(path)
        library = Library(path)
        try:
            if not candidates:
                check_model(path, library.metadata)
            asked = f"device={device}" if device is not None else f"launches={launches!r}"
            if asked != "launches=None" and "images" not in library.metadata:
                raise ArtifactError(
                    f"{path} was compiled for a CPU, and {asked} asks for a GPU; compile "
                    "the model with --target cuda:ARCHITECTURE"
                )
            return library, library.open(threads, device or 0, LAUNCHES[launches])
        except ArtifactError:
            library.unload()
            if file_identity(path) == before:
                raise


def _release(library: Library, handle: int, folder: Path | None, owner: int) -> None:
    library.close(handle)
    library.unload()
    # a forked child lets go of its copy, not of the file
    if folder is not None and os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


class Model:
    """A compiled model: ``y = model(x)``.

    Calls from several threads are safe but wait for each other; for parallel calls give each thread
    its own ``gtco.load``. After a fork, whatever other threads were doing, the child can use the
    model, or load its own. Close it, or use it as a context manager, to free its memory and threads
    early.
    """

    def __init__(
        self,
        path: Path,
        threads: int = 0,
        *,
        device: int | None = None,
        launches: Literal["graph", "persistent"] | None = None,
        temporary: bool = False,
        candidates: bool = False,
    ) -> None:
        """As :func:`load`; ``candidates``: the file may be a bundle of these, to time them."""
        if launches not in LAUNCHES:
            raise OptionError(f"launches is {launches!r}; choose from graph, persistent")
        check_whole("threads", threads, 0, MOST_THREADS)
        if device is not None:
            check_whole("device", device, 0, MOST_DEVICES)
        self.path = path.absolute()
        library, handle = _open(self.path, threads, device, launches, candidates)
        self._library, self._handle = library, handle
        self._lock = threading.Lock()
        _models.add(self)
        folder = self.path.parent if temporary else None
        self._close = weakref.finalize(self, _release, library, handle, folder, os.getpid())
        self.metadata: dict[str, Any] = library.metadata
        self.inputs = tensor_specs(self.metadata, "inputs")
        self.outputs = tensor_specs(self.metadata, "outputs")
        self._input_names = [spec.name for spec in self.inputs]
        self.threads: int = library.num_threads(handle)
        # Number of the GPU that the model runs on; None for a model of the CPU.
        self.device = (device or 0) if "images" in self.metadata else None
        self._held: list[Any] = []  # what each run under way in a caller's stream reads and writes
        # How a run is launched on the GPU, in words; "" for a model of the CPU.
        self.launches: str = library.launch_mode(handle).decode() if self.device is not None else ""
        self._input_pointers = (c_void_p * max(1, len(self.inputs)))()
        self._output_pointers = (c_void_p * max(1, len(self.outputs)))()

    @property
    def stages(self) -> list[dict[str, Any]]:
        """One dictionary per stage, in order of execution: what ``gtco inspect`` shows."""
        steps: list[dict[str, Any]] = self.metadata["steps"]
        return steps

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Runs the model on inputs by position or by name.

        Takes numpy arrays or anything with ``__dlpack__`` (torch tensors included) of exactly the
        dtypes and shapes in :attr:`inputs`; they may be strided. Returns the same kind: one tensor,
        or a tuple where there are several outputs. Raises :class:`InputError` for a wrong name,
        dtype or shape.

        A model for GPUs takes arrays of the host, which are copied, and tensors on its device,
        which are not: then results are on the device, of torch or in ``out=`` (one tensor or a
        sequence), and the call returns as soon as the work is in the stream: ``stream=``, or
        torch's current one, or the legacy default stream.
        """
        options = {
            name: kwargs.pop(name)
            for name in ("stream", "out")
            if self.device is not None and name in kwargs and name not in self._input_names
        }
        values = self._bind(args, kwargs)
        if self.device is not None and any(device_of(value) is not None for value in values):
            given = self._run_on_device(values, self.device, **options)
            return given[0] if len(given) == 1 else tuple(given)
        if options:
            raise InputError(
                f"{' and '.join(options)} is for inputs on the device, and these are on the host"
            )
        results = self._execute(values)
        kind = next((v for v in values if not isinstance(v, np.ndarray)), np.empty(0))
        converted = tuple(like(kind, result) for result in results)
        return converted[0] if len(converted) == 1 else converted

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Runs the model on inputs by name; outputs by name."""
        result = self(**inputs)
        values = result if len(self.outputs) != 1 else (result,)
        return {spec.name: value for spec, value in zip(self.outputs, values, strict=True)}

    def profile(self, *args: Any, repeat: int = 5, **kwargs: Any) -> list[float]:
        """Seconds of each stage, the median of ``repeat`` runs after one to warm up."""
        values = self._bind(args, kwargs)
        rounds = [self.timed(values) for _ in range(repeat + 1)]
        return [statistics.median(times) for times in zip(*rounds[1:], strict=True)]

    def _run_on_device(
        self, values: Sequence[Any], device: int, stream: Any = None, out: Any = None
    ) -> list[Any]:
        """The outputs of a run that is under way on the stream."""
        caller = Caller(values, device, stream)
        inputs = [
            caller.borrow("input", spec, value)
            for spec, value in zip(self.inputs, values, strict=True)
        ]
        if out is None:
            given = caller.outputs(self.outputs)
        else:
            given = list(out) if isinstance(out, (tuple, list)) else [out]
        if len(given) != len(self.outputs):
            raise InputError(f"out has {len(given)} tensors; the model has {len(self.outputs)}")
        outputs = [
            caller.borrow("output", spec, value)
            for spec, value in zip(self.outputs, given, strict=True)
        ]
        held = caller.held([*values, *given])
        held += [holder for _, holder in (*inputs, *outputs)] if held else []
        self._call(
            [pointer for pointer, _ in inputs],
            [pointer for pointer, _ in outputs],
            stream=caller.stream,
            held=held,
        )
        return given

    def timed(
        self, values: Sequence[Any], results: Sequence[np.ndarray] | None = None
    ) -> list[float]:
        """Seconds of each stage in one run on these inputs, in order; ``results``, dense arrays of
        the outputs' shapes and dtypes at multiples of 64 bytes, take the outputs where they are
        given.
        """
        seconds = (c_double * max(1, len(self.stages)))()
        self._execute(values, seconds, results)
        return list(seconds)[: len(self.stages)]

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Copies the library, its header and its weights file (where it has one) to ``path``, which
        ends in .so.

        Nothing half-written appears under the final names; raises :class:`BuildError` where they
        cannot be written.
        """
        target = Path(path).absolute()
        if target.suffix != ".so":
            raise BuildError(f"{target} must end in .so; write to {target.name}.so for example")
        if target == self.path:
            return target
        with staging(target) as folder:
            try:
                shutil.copy(self.path, folder / target.name)
                identity = read_contents(folder / target.name).id
                for source, copy in (
                    (self.path.with_suffix(".h").name, target.with_suffix(".h").name),
                    (weights_name(self.path.name, identity), weights_name(target.name, identity)),
                ):
                    if self.path.with_name(source).exists():
                        shutil.copy(self.path.with_name(source), folder / copy)
            except OSError as error:
                raise write_error(target, error) from error
            publish(folder, target)
        return target

    def close(self) -> None:
        """Frees the memory and the threads; later calls raise :class:`ArtifactError`."""
        with self._lock:
            self._close()
            self._held.clear()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a gtco model cannot be pickled: it holds memory and threads of this process. Send "
            "its path and call gtco.load(path) on the other side"
        )

    def __repr__(self) -> str:
        inputs, outputs = (", ".join(map(str, specs)) for specs in (self.inputs, self.outputs))
        name = self.metadata["name"]
        on = f"{self.threads} threads" if self.device is None else f"cuda:{self.device}"
        return f"<gtco.Model {name!r} ({inputs}) -> ({outputs}), {on}>"

    def _bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """One value per input, in order."""
        names = self._input_names
        if len(args) > len(names):
            raise InputError(f"got {len(args)} inputs, expected {len(names)}: {', '.join(names)}")
        values = dict(zip(names, args, strict=False))
        for name, value in kwargs.items():
            if name not in names:
                raise InputError(f"there is no input '{name}'; the inputs are {', '.join(names)}")
            if name in values:
                raise InputError(f"input '{name}' is given twice, by position and by name")
            values[name] = value
        missing = [name for name in names if name not in values]
        if missing:
            raise InputError(
                f"missing input {', '.join(repr(name) for name in missing)}; expected "
                f"{', '.join(map(str, self.inputs))}"
            )
        return [as_stored(values[name]) for name in names]

    def _execute(
        self,
        values: Sequence[Any],
        seconds: Any = None,
        results: Sequence[np.ndarray] | None = None,
    ) -> Sequence[np.ndarray]:
        arrays = [to_numpy(spec, value) for spec, value in zip(self.inputs, values, strict=True)]
        if results is None:
            results = [aligned_empty(spec) for spec in self.outputs]
        self._call([a.ctypes.data for a in arrays], [a.ctypes.data for a in results], seconds)
        return results

    def _call(
        self,
        inputs: Sequence[int],
        outputs: Sequence[int],
        seconds: Any = None,
        stream: int | None = None,
        held: Sequence[Any] = (),
    ) -> None:
        """One run with these pointers, on ``stream`` where it is given, and with ``held`` kept
        until it is over; raises :class:`ArtifactError` with the library's message."""
        with self._lock:
            if not self._close.alive:
                raise ArtifactError(
                    f"the model {self.path} is closed; open it again with gtco.load"
                )
            self._input_pointers[: len(inputs)] = list(inputs)
            self._output_pointers[: len(outputs)] = list(outputs)
            library, pointers = self._library, (self._input_pointers, self._output_pointers)
            if len(self._held) >= HELD_RUNS:
                status = library.wait(self._handle)
                self._held.clear()
                self._check(status)
            if stream is not None:
                if held:
                    self._held.append(held)
                self._check(library.run_on(self._handle, *pointers, stream))
                return
            if seconds is not None:
                status = library.profile(self._handle, *pointers, seconds)
            else:
                status = library.run(self._handle, *pointers)
            self._check(status)
            self._held.clear()  # this run came behind those

    def _check(self, status: int) -> None:
        if status != OK:
            text = (
                self._library.status_string(status)
                if status == BUSY
                else self._library.last_error(self._handle)
            )
            raise ArtifactError(f"running {self.path} failed: {text.decode(errors='replace')}")

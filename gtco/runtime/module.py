"""``gtco.load``: a compiled model in Python. Imports numpy and nothing heavier."""

from __future__ import annotations

import os
import shutil
import statistics
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_double, c_void_p
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, overload

import numpy as np

from gtco.runtime.binding import bind, feeds_of, given_outputs, output_names
from gtco.runtime.gpu.tensors import Caller, device_of
from gtco.runtime.library import BUSY, LAUNCHES, OK, open_library, release, tensor_specs
from gtco.runtime.plan import TensorSpec
from gtco.runtime.publish import TemporaryFolder, copy_published
from gtco.runtime.tensors import Place, address_of, as_stored, like
from gtco.runtime.variants import SizedModel, Variants, choose_some, open_sizes
from gtco.support.errors import ArtifactError, BuildError, InputError, OptionError
from gtco.support.options import MOST_THREADS, check_place, check_whole
from gtco.support.sizes import Range


def load(
    path: str | os.PathLike[str],
    threads: int = 0,
    *,
    spin_microseconds: int | None = None,
    device: int | None = None,
    launches: Literal["graph", "persistent"] | None = None,
    dims: Mapping[str, int] | None = None,
    temporary: bool = False,
) -> Model:
    """Opens the ``.so`` that gtco wrote.

    - ``threads``: the number of threads of a run; 0 means ``GTCO_NUM_THREADS``, else the number
      given at compile time, else all cores that this process may use
    - ``spin_microseconds``: how long an idle thread looks for work before it sleeps and takes no
      CPU. 0 means not at all; None means 500, or 50 if there are more threads than CPUs. While
      threads are awake, the next run starts earlier
    - ``device``: the number of the GPU, for a model that was compiled for GPUs; None means the
      first
    - ``launches``: how such a model is launched; None means as the compile chose
      (:attr:`Model.launches`)
    - ``dims``: of a model that was compiled for several shapes or a range, sizes that this model
      shall have in every call, such as ``{"batch": 4}``. The inputs of a call decide the others
    - ``temporary``: the model owns the folder of the file and removes it when it is closed

    Raises :class:`ArtifactError` if the file is not gtco's, is damaged, lacks its weights file, or
    needs instructions, a GPU or a driver that this machine does not have. Raises
    :class:`OptionError` for what is not a path.
    """
    if not isinstance(path, str | os.PathLike):
        raise OptionError(
            f"gtco.load takes the path of the .so that 'gtco compile' writes, not a "
            f"{type(path).__name__}: a library that is in memory has to be written to a file first"
        )
    return Model(
        Path(path),
        threads,
        spin_microseconds=spin_microseconds,
        device=device,
        launches=launches,
        dims=dims,
        temporary=temporary,
    )


MOST_DEVICES = 1 << 16  # more than there are, and an int of C
MOST_SPINNING = 1_000_000_000  # microseconds, an int of C
NEVER = -1  # gtco_options.spin_microseconds, where 0 is the default
HELD_RUNS = 8  # runs in callers' streams whose tensors a model holds; one more run waits for them
_models: weakref.WeakSet[Model] = weakref.WeakSet()


def _renew_locks() -> None:
    """Makes new locks in the child of a fork, where no thread is left that could release a lock
    that another thread held. The C runtime does the same for its handles.
    """
    for model in _models:
        model._lock = model._locks[0] = threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)


class Model:
    """A compiled model: ``y = model(x)``.

    - ``inputs`` and ``outputs``: name, dtype and shape of each. If the model was compiled for
      several shapes, sizes that differ between them are the names of dimensions
    - ``dims``: the sizes of each of these dimensions, a list or a range; empty for a model of one
      shape. Every choice of these sizes runs
    - ``threads``: the number of threads of a run
    - ``device``: the number of the GPU that it runs on; None for a model of the CPU
    - ``launches``: how a run is launched on the GPU, in words; "" for a model of the CPU

    Calls from several threads are safe but wait for each other; for parallel calls give each thread
    its own ``gtco.load``. A process may fork at any time: the child can use the model, or load its
    own. Close the model, or use it as a context manager, to free its memory and threads early.
    """

    def __init__(
        self,
        path: Path,
        threads: int = 0,
        *,
        spin_microseconds: int | None = None,
        device: int | None = None,
        launches: Literal["graph", "persistent"] | None = None,
        dims: Mapping[str, int] | None = None,
        temporary: bool | TemporaryFolder = False,
        candidates: bool = False,
    ) -> None:
        """Opens the model as :func:`load` does. With a folder, it owns that one. With
        ``candidates``, the file may be a bundle of candidates to time.
        """
        if launches not in LAUNCHES:
            raise OptionError(f"launches is {launches!r}; choose from graph, persistent")
        check_whole("threads", threads, 0, MOST_THREADS)
        if device is not None:
            check_whole("device", device, 0, MOST_DEVICES)
        if spin_microseconds is not None:
            check_whole("spin_microseconds", spin_microseconds, 0, MOST_SPINNING)
        spin = 0 if spin_microseconds is None else spin_microseconds or NEVER
        self.path = path.absolute()
        library, handle = open_library(self.path, threads, spin, device, launches, candidates)
        self._library, self._handle, self._run = library, handle, library.run
        self._lock = threading.Lock()
        self._locks = [self._lock]  # the same lock, for the end of a model that is gone
        _models.add(self)
        remove: Callable[[], object] | None = None
        if isinstance(temporary, TemporaryFolder):
            remove = temporary.remove
        elif temporary:
            remove = partial(shutil.rmtree, self.path.parent, ignore_errors=True)
        self._close = weakref.finalize(
            self, release, self._locks, library, handle, remove, os.getpid()
        )
        self.metadata: dict[str, Any] = library.metadata
        chosen = choose_some(self.metadata, dims or {}, self.path)
        self.inputs = tensor_specs(self.metadata, "inputs")
        self.outputs = tensor_specs(self.metadata, "outputs")
        every = list(map(SizedModel, chosen.every))
        if dims:
            covered = chosen.covered
            self.inputs = open_sizes(self.inputs, [one.inputs for one in every], covered)
            self.outputs = open_sizes(self.outputs, [one.outputs for one in every], covered)
        self._variants = Variants(every, self.inputs, chosen.covered, chosen.dims)
        self._run_shapes = getattr(library, "run_shapes", None)
        # the library's variant, where it has one alone; otherwise a call chooses it
        self._set = None if "variants" in self.metadata else self._variants.only
        self.dims: Mapping[str, list[int] | Range] = chosen.dims
        self._output_names = [spec.name for spec in self.outputs]
        self._input_names = [spec.name for spec in self.inputs]
        self.threads: int = library.num_threads(handle)
        self.device = (device or 0) if "images" in self.metadata else None
        self._held: list[Any] = []  # what each run under way in a caller's stream reads and writes
        self.launches: str = library.launch_mode(handle).decode() if self.device is not None else ""
        self._input_pointers: Any = (c_void_p * max(1, len(self.inputs)))()
        self._output_pointers: Any = (c_void_p * max(1, len(self.outputs)))()

    @property
    def variants(self) -> tuple[SizedModel, ...]:
        """What the model was compiled for: sizes, inputs, outputs and stages of each variant that
        this model runs, which is one for a model of one shape. With a range they are the parts that
        a batch is made of, at each choice of the other sizes.
        """
        return self._variants.every

    @property
    def parted(self) -> str:
        """The dimension of which a run adds up several variants, such as 4 + 4 + 1 for a batch of
        9; "" if the library has no such dimension.
        """
        covered = self._variants.covered
        return covered.symbol if covered is not None else ""

    def sized_inputs(self, size: int) -> list[tuple[TensorSpec, ...]]:
        """The inputs at this size of the model's range, for each choice of its other sizes."""
        return [one.inputs for one in self._variants.at(size)]

    @property
    def stages(self) -> list[dict[str, Any]]:
        """One dictionary per stage, in order of execution: what ``gtco inspect`` shows. Raises
        :class:`OptionError` for a model of several shapes, each of which has its own.
        """
        if self._variants.only is None:
            if (covered := self._variants.covered) is not None:
                raise OptionError(
                    f"{self.path} runs {covered.symbol} of {covered.sizes}, each as parts with "
                    f"their own stages: gtco.load(path, dims={covered.first}) opens one size"
                )
            raise OptionError(
                f"{self.path} has {len(self._variants.every)} variants, each with its own stages: "
                f"gtco.load(path, dims={self._variants.every[0].sizes}) opens one of them"
            )
        return self._variants.only.stages

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Runs the model on inputs by position, by name, or in a dictionary by name.

        Takes numpy arrays or anything with ``__dlpack__`` (torch tensors included) of exactly the
        dtypes and shapes in :attr:`inputs`; they may be strided. In a model of several shapes
        their shapes choose the variant, which may be another one in each call. Returns the same
        kind: one tensor, or a tuple if there are several outputs. ``out=`` takes the results and is
        returned; it is one tensor or a sequence, dense, with the dtypes and shapes in
        :attr:`outputs`. Raises :class:`InputError` for a wrong name, dtype or shape.

        A model for GPUs takes arrays of the host, which are copied, and tensors on its device,
        which are not copied. For tensors on the device the results are on the device too, as
        torch's tensors or in ``out=``, and the call returns as soon as the work is in the stream.
        The stream is ``stream=``, or torch's current one, or the legacy default stream.
        """
        variant = None if kwargs else self._variants.given(args)
        if variant is None or len(args) != len(self.inputs) or not variant.fit(args):
            options = self._options(kwargs) if kwargs else kwargs
            results = self._results(bind(self.inputs, args, kwargs), **options)
        else:  # the checks left out here take longer than a small model
            results = self._execute(variant, args)
        return results[0] if len(results) == 1 else tuple(results)

    def _options(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Takes the arguments that are not inputs out of ``kwargs`` and returns them."""
        names = ("out",) if self.device is None else ("out", "stream")
        return {
            name: kwargs.pop(name)
            for name in names
            if name in kwargs and name not in self._input_names
        }

    def _results(self, values: Sequence[Any], out: Any = None, stream: Any = None) -> Sequence[Any]:
        """The outputs of a run on these inputs, in order: the tensors of ``out``, or new ones."""
        given = None if out is None else given_outputs(self.outputs, out)
        variant = self._variants.of(values)
        if stream is None and variant.fit(values):
            return self._execute(variant, values, given)
        values = list(map(as_stored, values))
        if self.device is not None and any(device_of(value) is not None for value in values):
            return self._run_on_device(variant, values, self.device, stream, given)
        if stream is not None:
            raise InputError("stream is for inputs on the device, and these are on the host")
        results = self._execute(variant, variant.read(values), given)
        if given is not None:
            return results
        kind = next((v for v in values if not isinstance(v, np.ndarray | np.generic)), np.empty(0))
        return [like(kind, result) for result in results]

    @overload
    def run(self, inputs: Mapping[str, Any], /) -> dict[str, Any]: ...
    @overload
    def run(self, names: Sequence[str] | None, inputs: Mapping[str, Any], /) -> list[Any]: ...
    def run(self, *args: Any) -> dict[str, Any] | list[Any]:
        """Runs the model on inputs by name; returns the outputs by name.

        ``run(names, inputs)`` is ONNX Runtime's call: it returns a list of the outputs with these
        names; None means all outputs.
        """
        if not 1 <= len(args) <= 2:
            raise InputError(
                f"run takes inputs by name, or names of outputs (None for all) and inputs by name; "
                f"got {len(args)} arguments"
            )
        names = args[0] if len(args) == 2 else None
        wanted = self._output_names if names is None else output_names(self.outputs, names)
        values = bind(self.inputs, (), feeds_of(args[-1]))
        variant = self._variants.given(values)
        if variant is not None and variant.fit(values):
            results = self._execute(variant, values)
        else:
            results = self._results(values)
        if len(args) == 2 and names is None:
            return list(results)
        by_name = dict(zip(self._output_names, results, strict=True))
        return [by_name[name] for name in wanted] if len(args) == 2 else by_name

    def profile(self, *args: Any, repeat: int = 5, **kwargs: Any) -> list[float]:
        """Seconds of each stage: the median of ``repeat`` runs after one run to warm up."""
        values = list(map(as_stored, bind(self.inputs, args, kwargs)))
        rounds = [self.timed(values) for _ in range(repeat + 1)]
        return [statistics.median(times) for times in zip(*rounds[1:], strict=True)]

    def _run_on_device(
        self,
        variant: SizedModel,
        values: Sequence[Any],
        device: int,
        stream: Any,
        given: list[Any] | None,
    ) -> list[Any]:
        """Puts a run into the stream and returns its outputs, ``given`` or new, before the run is
        over.
        """
        caller = Caller(values, device, stream)
        inputs = [
            caller.borrow("input", spec, value)
            for spec, value in zip(variant.inputs, values, strict=True)
        ]
        if given is None:
            given = caller.outputs(variant.outputs)
        outputs = [
            caller.borrow("output", spec, value)
            for spec, value in zip(variant.outputs, given, strict=True)
        ]
        held = caller.held([*values, *given])
        held += [holder for _, holder in (*inputs, *outputs)] if held else []
        self._call(
            variant,
            [pointer for pointer, _ in inputs],
            [pointer for pointer, _ in outputs],
            stream=caller.stream,
            held=held,
        )
        return given

    def timed(
        self, values: Sequence[Any], results: Sequence[np.ndarray] | None = None
    ) -> list[float]:
        """Seconds of each stage in one run on these inputs, in order, of all parts together. If
        ``results`` is given, it takes the outputs: dense arrays of the outputs' shapes and dtypes
        whose data begins at multiples of 64 bytes.
        """
        variant = self._variants.of(values)
        number = len(variant.stages)
        seconds = (c_double * max(1, number * variant.parts))()
        self._execute(variant, variant.read(values), results, seconds)
        return [sum(seconds[stage :: number]) for stage in range(number)]

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Copies the library, its header and its weights file (if it has one) to ``path``, which
        ends in .so.

        No incomplete file appears under the final names. Raises :class:`OptionError` if the folder
        does not exist, and :class:`BuildError` if the files cannot be written.
        """
        target = Path(path).absolute()
        if target.suffix != ".so":
            raise BuildError(f"{target} must end in .so; write to {target.name}.so for example")
        if target == self.path:
            return target
        check_place(target)
        copy_published(self.path, target)
        return target

    def close(self) -> None:
        """Frees the memory and the threads; later calls raise :class:`ArtifactError`."""
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
        return f"<gtco.{type(self).__name__} {name!r} ({inputs}) -> ({outputs}), {on}>"

    def _execute(
        self,
        variant: SizedModel,
        arrays: Sequence[np.ndarray],
        given: Sequence[Any] | None = None,
        seconds: Any = None,
    ) -> Sequence[Any]:
        """Runs the variant on dense arrays of the inputs' dtypes and shapes. Returns the tensors of
        ``out=`` if they are ``given``, else new arrays.
        """
        if given is None:
            made = [place.new() for place in variant.output_places]
            given, addresses = [array for array, _ in made], [address for _, address in made]
        else:
            written = list(map(Place.to_write, variant.output_places, given))
            addresses = [address_of(array) for array in written]
        self._call(variant, [address_of(array) for array in arrays], addresses, seconds)
        return given

    def _call(
        self,
        variant: SizedModel,
        inputs: list[int],
        outputs: list[int],
        seconds: Any = None,
        stream: int | None = None,
        held: Sequence[Any] = (),
    ) -> None:
        """Runs the model once with these pointers, on ``stream`` if it is given, and keeps ``held``
        until the run is over. Raises :class:`ArtifactError` with the library's message.
        """
        with self._lock:
            if not self._close.alive:
                if threading.current_thread().daemon and not threading.main_thread().is_alive():
                    raise SystemExit  # the interpreter ends, and this ends the thread in silence
                raise ArtifactError(
                    f"the model {self.path} is closed; open it again with gtco.load"
                )
            self._input_pointers[: len(inputs)] = inputs
            self._output_pointers[: len(outputs)] = outputs
            library, pointers = self._library, (self._input_pointers, self._output_pointers)
            if variant is not self._set:
                plain = not self._held and stream is None and seconds is None
                if plain and self._run_shapes is not None:  # one call of C less
                    self._set = None
                    self._check(self._run_shapes(self._handle, variant.shapes, *pointers))
                    self._set = variant
                    return
                self._check(library.set_shapes(self._handle, variant.shapes))
                self._set = variant
            if not self._held and stream is None and seconds is None:
                status = self._run(self._handle, *pointers)
                if status != OK:
                    self._check(status)
                return
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

"""``gtco.InferenceSession``: ONNX Runtime's session over libraries of gtco. A library is opened,
and an ONNX model is compiled; the cache has it the next time.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from gtco.integrations.session_model import SessionModel
from gtco.integrations.session_options import (
    RunOptions,
    SessionOptions,
    refuse,
    sizes_of,
    spinning_of,
    threads_of,
)
from gtco.integrations.session_values import (
    IOBinding,
    ModelMetadata,
    NodeArg,
    OrtValue,
    dtype_of,
    type_of,
)
from gtco.runtime.binding import feeds_of
from gtco.runtime.module import Model, load
from gtco.runtime.plan import TensorSpec
from gtco.runtime.publish import TemporaryFolder, kept
from gtco.support.dtypes import numpy_dtype
from gtco.support.errors import InputError, OptionError

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
_TIMES = "'gtco inspect model.so' times every stage, and so does gtco.Model.profile"
_DEVICE = "a session's tensors are in the CPU's memory"
_ADVICE = {
    "end_profiling": _TIMES,
    "get_profiling_start_time_ns": _TIMES,
    "get_tuning_results": "gtco tune keeps measurements in a file of records",
    "set_tuning_results": "InferenceSession(..., records=FILE) takes what gtco tune measured",
    "run_with_ortvaluevector": "use run_with_ort_values",
    "create_ortvalue_from_shape_and_type": "use OrtValue.ortvalue_from_shape_and_type",
    "get_input_epdevices": _DEVICE,
    "get_input_memory_infos": _DEVICE,
    "get_output_memory_infos": _DEVICE,
    "get_provider_graph_assignment_info": "'gtco inspect model.so' lists the stages",
    "release_captured_graph": "nothing is captured",
    "set_ep_dynamic_options": "options are given when the session is made",
}


def get_available_providers() -> list[str]:
    """The provider of a session that compiles, or that opens a library for CPUs. A library for GPUs
    runs with CUDAExecutionProvider whatever this says.
    """
    return [CPU]


get_all_providers = get_available_providers


def get_device() -> str:
    return "CPU"


def set_default_logger_severity(severity: int) -> None:
    """Does nothing: gtco logs nothing. Errors are raised."""


def set_default_logger_verbosity(verbosity: int) -> None:
    """Does nothing: gtco logs nothing."""


def disable_telemetry_events() -> None:
    """Does nothing: gtco sends nothing."""


def enable_telemetry_events() -> None:
    """Does nothing: gtco sends nothing."""


def preload_dlls(
    cuda: bool = True, cudnn: bool = True, msvc: bool = True, directory: str | None = None
) -> None:
    """Does nothing: a library needs libc alone."""


_SESSIONS: weakref.WeakSet[InferenceSession] = weakref.WeakSet()


def _renew() -> None:
    """In the child of a fork: threads are gone there, and a lock may be held by one of them."""
    for session in _SESSIONS:
        session._lock, session._runner = threading.Lock(), None


os.register_at_fork(after_in_child=_renew)


class InferenceSession:
    """A session as ``onnxruntime.InferenceSession``, so that a script changes its import alone.

    ``path_or_bytes`` is a library that gtco wrote (``.so``), or an ONNX model (``.onnx``), or the
    bytes of either. A model is compiled, which takes seconds the first time, with ``options`` of
    :func:`gtco.compile_model` such as ``precision`` or ``tune``. If the model leaves sizes open,
    each set of sizes is compiled when it is first run. Runs of a session wait for each other.

    Raises :class:`gtco.support.errors.GtcoError`; a part of ONNX Runtime's interface that gtco
    lacks raises one that says what to do instead.
    """

    def __init__(
        self,
        path_or_bytes: str | os.PathLike[str] | bytes,
        sess_options: SessionOptions | None = None,
        providers: Sequence[str | tuple[str, Mapping[str, Any]]] | None = None,
        provider_options: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        if sess_options is not None and not isinstance(sess_options, SessionOptions):
            raise OptionError(
                f"sess_options is a {type(sess_options).__module__}.SessionOptions: make it with "
                "gtco.SessionOptions()"
            )
        self._options = sess_options or SessionOptions()
        self._models: dict[tuple[Any, ...], Model] = {}
        self._lock = threading.Lock()
        self._runner: ThreadPoolExecutor | None = None
        _SESSIONS.add(self)
        self._source: SessionModel | None = None
        if _is_library(path_or_bytes):
            if options or sizes_of(self._options):
                given = ", ".join([*options, *sizes_of(self._options)])
                raise OptionError(
                    f"{given}: that is of a compile, and a library is compiled already"
                )
            self._only: Model | None = self._opened(path_or_bytes)
            self._meta = ModelMetadata("gtco", self._only.metadata["name"])
        else:
            self._source = SessionModel(path_or_bytes, sizes_of(self._options), options)
            self._meta = self._source.meta
            self._only = None if self._source.is_open else self._compiled({})
            if self._only is not None:
                self._source = None  # its weights are in the library
        self._providers = [CPU if self._only is None or self._only.device is None else CUDA]
        self.set_providers(providers, provider_options)
        if self._only is None:
            assert self._source is not None
            self._inputs, self._outputs = self._source.inputs, self._source.outputs
        else:
            self._inputs = list(map(_node, self._only.inputs))
            self._outputs = list(map(_node, self._only.outputs))

    def __getattr__(self, name: str) -> Any:
        refuse("InferenceSession", _ADVICE, name)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a gtco session cannot be pickled: it holds memory and threads of this process. Make "
            "it in the process that runs it, from the same file; the cache has the library there"
        )

    # what the session is --------------------------------------------------------------------------
    def get_inputs(self) -> list[NodeArg]:
        """The inputs with ``name``, ``type`` (``tensor(float)``) and ``shape``."""
        return list(self._inputs)

    def get_outputs(self) -> list[NodeArg]:
        """The outputs, as :meth:`get_inputs` has the inputs."""
        return list(self._outputs)

    def get_overridable_initializers(self) -> list[NodeArg]:
        """None: weights are part of the library."""
        return []

    def get_modelmeta(self) -> ModelMetadata:
        return self._meta

    def get_session_options(self) -> SessionOptions:
        return self._options

    def get_providers(self) -> list[str]:
        return list(self._providers)

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        return {name: {} for name in self._providers}

    def set_providers(
        self,
        providers: Sequence[str | tuple[str, Mapping[str, Any]]] | None = None,
        provider_options: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Checks that the session's own provider is among them. Warns about others that come before
        it.
        """
        (own,) = self._providers
        names = [name if isinstance(name, str) else name[0] for name in providers or [own]]
        if own not in names:
            advice = (
                "For GPUs compile with gtco.compile_to_file(model, 'model.so', "
                "target='cuda:...') and give the session model.so"
                if own == CPU
                else "Its library is for GPUs: leave providers out, or name that one"
            )
            raise OptionError(f"providers={names}: this session runs with {own}. {advice}")
        if before := names[: names.index(own)]:
            warnings.warn(
                f"gtco has no {', '.join(before)}: the session runs with {own}", stacklevel=3
            )

    def enable_fallback(self) -> None:
        """Does nothing: there is one provider."""

    def disable_fallback(self) -> None:
        """Does nothing: there is one provider."""

    # runs -----------------------------------------------------------------------------------------
    def run(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        run_options: RunOptions | None = None,
    ) -> list[Any]:
        """The outputs with these names, all if there are none, as a list of arrays. The inputs are
        arrays by name. Raises :class:`gtco.support.errors.InputError`, a ``ValueError``.
        """
        feed = input_feed
        if isinstance(feed, Mapping) and any(type(v) in (OrtValue, list) for v in feed.values()):
            feed = {name: self._array(name, value) for name, value in feed.items()}
        return self._model(feed).run(output_names or None, feed)

    def run_with_ort_values(
        self,
        output_names: Sequence[str] | None,
        input_dict_ort_values: Mapping[str, OrtValue],
        run_options: RunOptions | None = None,
    ) -> list[OrtValue]:
        return [OrtValue(array) for array in self.run(output_names, input_dict_ort_values)]

    def run_async(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        callback: Callable[[list[Any], Any, str], None],
        user_data: Any,
        run_options: RunOptions | None = None,
    ) -> None:
        """Starts a run and returns. ``callback(results, user_data, error)`` is called in another
        thread; ``error`` is "" or the text of what went wrong, with no results.
        """

        def run() -> None:
            try:
                results, error = self.run(output_names, input_feed), ""
            except Exception as failure:
                results, error = [], str(failure)
            callback(results, user_data, error)

        with self._lock:
            if self._runner is None:
                self._runner = ThreadPoolExecutor(1, "gtco-run")
        self._runner.submit(run)

    def io_binding(self) -> IOBinding:
        """Tensors to be bound to the inputs and outputs, for :meth:`run_with_iobinding`."""
        return IOBinding(self)

    def run_with_iobinding(
        self, iobinding: IOBinding, run_options: RunOptions | None = None
    ) -> None:
        """Runs on the bound inputs and puts the outputs where they are bound."""
        feed, outputs = iobinding.inputs, iobinding.outputs
        if not outputs:
            raise InputError("no output is bound: call bind_output(name) for those you want")
        model = self._model(feed)
        memory = [outputs.get(output.name) for output in self._outputs]
        if all(array is not None for array in memory):
            model(dict(feed), out=memory)
            names = [output.name for output in self._outputs]
            found: dict[str, Any] = dict(zip(names, memory, strict=True))
        else:
            found = model.run(feed)
        for name, array in outputs.items():
            if array is not None and array is not found[name]:
                _check_memory(name, array, found[name])
                np.copyto(array, found[name])
                found[name] = array
        iobinding.results = {name: found[name] for name in outputs}

    def _array(self, name: str, value: Any) -> Any:
        """The value as a run takes it: numbers in lists become an array of the input's dtype."""
        if isinstance(value, OrtValue):
            return value.numpy()
        if isinstance(value, list):
            kind = next(
                (node.type for node in self._inputs if node.name == name), type_of("float32")
            )
            try:
                return np.asarray(value, numpy_dtype(dtype_of(kind)))
            except (TypeError, ValueError) as error:
                raise InputError(
                    f"the list for input '{name}' is not an array of {dtype_of(kind)}: {error}"
                ) from error
        return value

    def _model(self, feed: Mapping[str, Any]) -> Model:
        """The model for inputs of these shapes."""
        if self._only is not None:
            return self._only
        assert self._source is not None
        shapes = self._source.shapes_of(feeds_of(feed))
        key = tuple(shapes.values())
        with self._lock:
            if key not in self._models:
                self._models[key] = self._compiled(shapes)
            return self._models[key]

    def _compiled(self, shapes: Mapping[str, Sequence[int]]) -> Model:
        assert self._source is not None
        from gtco.compiler import compile_to_file

        with kept("model") as folder:
            path = folder.path / "model.so"
            compile_to_file(
                self._source.model,
                path,
                shapes={**self._source.sizes, **shapes} or None,
                **self._source.options,
            )
            return self._opened(path, folder)

    def _opened(self, library: Any, folder: TemporaryFolder | None = None) -> Model:
        if isinstance(library, bytes | bytearray):
            with kept("model") as folder:
                path = folder.path / "model.so"
                path.write_bytes(library)
                return self._opened(path, folder)
        opened = partial(Model, temporary=folder) if folder else load
        return opened(
            library,
            threads_of(self._options),
            spin_microseconds=spinning_of(self._options),
        )


def _is_library(source: Any) -> bool:
    if isinstance(source, bytes | bytearray):
        return source[:4] == b"\x7fELF"
    return isinstance(source, str | os.PathLike) and Path(source).suffix == ".so"


def _node(spec: TensorSpec) -> NodeArg:
    return NodeArg(spec.name, type_of(spec.dtype), list(spec.shape))


def _check_memory(name: str, array: np.ndarray, result: np.ndarray) -> None:
    if array.shape != result.shape or array.dtype != result.dtype:
        raise InputError(
            f"output '{name}' is {result.dtype} of shape {result.shape}, and memory is bound for "
            f"{array.dtype} of shape {array.shape}"
        )

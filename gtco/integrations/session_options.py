"""ONNX Runtime's options for :class:`gtco.InferenceSession`: those that mean something here, and
for the others what to do instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, NoReturn

from gtco.support.errors import OptionError, UnsupportedError
from gtco.support.options import MOST_THREADS, check_whole

PAGE = "docs/onnxruntime.md has the whole list"
SPINNING = "session.intra_op.allow_spinning"


class NotHere(UnsupportedError, AttributeError):
    """A part of ONNX Runtime's interface that gtco does not have. The text says what to do."""


def refuse(what: str, advice: Mapping[str, str], name: str) -> NoReturn:
    """Raises :class:`NotHere` for a name of ONNX Runtime's, and ``AttributeError`` for others."""
    if name in advice:
        raise NotHere(f"{what}.{name} is ONNX Runtime's, and gtco has none: {advice[name]}")
    raise AttributeError(f"{what} has no attribute {name!r}; {PAGE}")


class GraphOptimizationLevel(IntEnum):
    """ONNX Runtime's levels. gtco has one way to compile, which ``ORT_ENABLE_ALL`` names best."""

    ORT_DISABLE_ALL = 0
    ORT_ENABLE_BASIC = 1
    ORT_ENABLE_EXTENDED = 2
    ORT_ENABLE_LAYOUT = 3
    ORT_ENABLE_ALL = 99


class ExecutionMode(IntEnum):
    """ONNX Runtime's modes. A run of gtco is sequential: all threads work on one stage."""

    ORT_SEQUENTIAL = 0
    ORT_PARALLEL = 1


def _any(value: Any) -> bool:
    return True


def _is(*accepted: Any) -> Callable[[Any], bool]:
    return lambda value: value in accepted


# The field, its default, the values that can be kept, and what to do instead of others. Hints on
# memory and scheduling change no result: stages run one after the other, each with all threads, in
# memory that is planned when the library is compiled.
_LEVEL = (
    "gtco optimizes everything; InferenceSession(..., simplify=False) leaves out the simplifier"
)
_FIELDS: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
    "intra_op_num_threads": (0, _any, ""),
    "inter_op_num_threads": (0, _any, ""),
    "execution_mode": (ExecutionMode.ORT_SEQUENTIAL, _any, ""),
    "graph_optimization_level": (GraphOptimizationLevel.ORT_ENABLE_ALL, _is(2, 3, 99), _LEVEL),
    "enable_cpu_mem_arena": (True, _any, ""),
    "enable_mem_pattern": (True, _any, ""),
    "enable_mem_reuse": (True, _any, ""),
    "enable_profiling": (
        False,
        _is(False),
        "'gtco inspect model.so' times every stage, and so does gtco.Model.profile",
    ),
    "log_severity_level": (-1, _any, ""),
    "log_verbosity_level": (0, _any, ""),
    "logid": ("", _any, ""),
    "use_deterministic_compute": (False, _any, ""),
    "use_per_session_threads": (True, _is(True), "each session has threads of its own"),
    "optimized_model_filepath": (
        "",
        _is(""),
        "gtco.compile_to_file(model, 'model.so') writes the library, which a session opens",
    ),
    "profile_file_prefix": ("onnxruntime_profile_", _is("onnxruntime_profile_"), "it has no use"),
}
_WEIGHTS = "put the values into the model's file, or beside it as its external data"
_PROVIDERS = "a session runs on the CPU; a library for GPUs is compiled with target='cuda:...'"
_ADVICE = {
    "execution_order": "stages run in the order of the compile",
    "add_external_initializers": _WEIGHTS,
    "add_external_initializers_from_files_in_memory": _WEIGHTS,
    "add_initializer": _WEIGHTS,
    "add_free_dimension_override_by_denotation": "use add_free_dimension_override_by_name",
    "add_provider": _PROVIDERS,
    "add_provider_for_devices": _PROVIDERS,
    "has_providers": _PROVIDERS,
    "set_provider_selection_policy": _PROVIDERS,
    "set_provider_selection_policy_delegate": _PROVIDERS,
    "register_custom_ops_library": "write the operator as ONNX's own (docs/limits.md)",
    "set_load_cancellation_flag": "a compile is stopped by Ctrl-C",
    "clear_ep_context_data_read_func": _PROVIDERS,
    "set_ep_context_data_read_func": _PROVIDERS,
}


class SessionOptions:
    """Options of a session, as ``onnxruntime.SessionOptions`` has them.

    ``intra_op_num_threads`` is the number of threads, and ``add_free_dimension_override_by_name``
    gives a symbolic dimension its size. The config entry ``session.intra_op.allow_spinning``, with
    "0", lets idle threads sleep at once. What concerns logging, memory and the order of operators
    has no effect. Other values than ONNX Runtime's defaults raise an
    :class:`gtco.support.errors.OptionError` that says what to do.
    """

    def __init__(self) -> None:
        for name, (default, _, _) in _FIELDS.items():
            object.__setattr__(self, name, default)
        object.__setattr__(self, "_entries", {})
        object.__setattr__(self, "_sizes", {})

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _FIELDS:
            refuse("SessionOptions", _ADVICE, name)
        _, accepted, advice = _FIELDS[name]
        if name == "intra_op_num_threads":
            check_whole(name, value, 0, MOST_THREADS)
        if not accepted(value):
            raise OptionError(f"SessionOptions.{name} = {value!r} does not fit gtco: {advice}")
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        refuse("SessionOptions", _ADVICE, name)

    def add_free_dimension_override_by_name(self, name: str, size: int) -> None:
        check_whole(name, size, 1)
        self._sizes[name] = size

    def add_session_config_entry(self, key: str, value: str) -> None:
        known = {
            SPINNING: ("0", "1"),
            "session.inter_op.allow_spinning": ("0", "1"),
            "session.set_denormal_as_zero": ("1",),  # it always is so
        }
        if value not in known.get(key, ()):
            raise OptionError(
                f"the config entry {key}={value!r} does not exist in gtco; known are "
                + ", ".join(f"{name} ({' or '.join(values)})" for name, values in known.items())
            )
        self._entries[key] = value

    def get_session_config_entry(self, key: str) -> str:
        if key not in self._entries:
            raise OptionError(f"the config entry {key!r} was not set")
        return str(self._entries[key])


def threads_of(options: SessionOptions) -> int:
    found: int = options.intra_op_num_threads
    return found


def sizes_of(options: SessionOptions) -> dict[str, int]:
    return dict(options._sizes)


def spinning_of(options: SessionOptions) -> int | None:
    """``spin_microseconds`` of :func:`gtco.load`."""
    return 0 if options._entries.get(SPINNING) == "0" else None


class RunOptions:
    """Options of a run, as ``onnxruntime.RunOptions``: those for logging, which have no effect."""

    _ADVICE = {  # noqa: RUF012
        "terminate": "a run takes milliseconds and is not stopped",
        "only_execute_path_to_fetches": "a run computes all outputs",
        "add_active_adapter": "merge the adapter into the model's weights",
        "add_run_config_entry": "there are no entries for single runs",
        "get_run_config_entry": "there are no entries for single runs",
    }

    def __init__(self) -> None:
        for name, value in {
            "log_severity_level": -1,
            "log_verbosity_level": 0,
            "logid": "",
        }.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in vars(self):
            refuse("RunOptions", self._ADVICE, name)
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        refuse("RunOptions", self._ADVICE, name)

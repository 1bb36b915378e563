"""gtco: vision transformers from ONNX or PyTorch to one shared library.

>>> compiled = gtco.compile_model("vit.onnx")
>>> y = compiled(x)
>>> compiled.save("vit.so"); model = gtco.load("vit.so")
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtco.support.environment import ensure_home
from gtco.support.errors import GtcoError, InputError, guarded
from gtco.support.version import __version__

if TYPE_CHECKING:
    from gtco.compiler import (
        aot_compile,
        compile_model,
        compile_to_file,
        quantize,
        quantize_weights,
    )
    from gtco.driver.compiled import CompiledModel
    from gtco.integrations.inference_session import (
        InferenceSession,
        disable_telemetry_events,
        enable_telemetry_events,
        get_all_providers,
        get_available_providers,
        get_device,
        preload_dlls,
        set_default_logger_severity,
        set_default_logger_verbosity,
    )
    from gtco.integrations.session_options import (
        ExecutionMode,
        GraphOptimizationLevel,
        RunOptions,
        SessionOptions,
    )
    from gtco.integrations.session_values import IOBinding, NodeArg, OrtValue
    from gtco.runtime.module import Model, load
    from gtco.support.options import Tune
    from gtco.support.sizes import Range

ensure_home()

# gtco.bench and gtco.models are inside gtco where it is installed, and beside it in a checkout.
_CHECKOUT = Path(__file__).resolve().parents[1]
if (_CHECKOUT / "bench" / "harness").is_dir():
    __path__.append(str(_CHECKOUT))

__all__ = [
    "CompiledModel",
    "ExecutionMode",
    "GraphOptimizationLevel",
    "GtcoError",
    "IOBinding",
    "InferenceSession",
    "InputError",
    "Model",
    "NodeArg",
    "OrtValue",
    "Range",
    "RunOptions",
    "SessionOptions",
    "Tune",
    "__version__",
    "aot_compile",
    "compile_model",
    "compile_to_file",
    "disable_telemetry_events",
    "enable_telemetry_events",
    "get_all_providers",
    "get_available_providers",
    "get_device",
    "load",
    "preload_dlls",
    "quantize",
    "quantize_weights",
    "set_default_logger_severity",
    "set_default_logger_verbosity",
]

_SESSION = "gtco.integrations.inference_session"
_SESSION_OPTIONS = "gtco.integrations.session_options"
_SESSION_VALUES = "gtco.integrations.session_values"

_HOMES = {
    "aot_compile": "gtco.compiler",
    "compile_model": "gtco.compiler",
    "compile_to_file": "gtco.compiler",
    "CompiledModel": "gtco.driver.compiled",
    "load": "gtco.runtime.module",
    "quantize": "gtco.compiler",
    "quantize_weights": "gtco.compiler",
    "Model": "gtco.runtime.module",
    "Range": "gtco.support.sizes",
    "Tune": "gtco.support.options",
    # the names are ONNX Runtime's
    "InferenceSession": _SESSION,
    "get_available_providers": _SESSION,
    "get_device": _SESSION,
    "set_default_logger_severity": _SESSION,
    "set_default_logger_verbosity": _SESSION,
    "disable_telemetry_events": _SESSION,
    "enable_telemetry_events": _SESSION,
    "get_all_providers": _SESSION,
    "preload_dlls": _SESSION,
    "ExecutionMode": _SESSION_OPTIONS,
    "GraphOptimizationLevel": _SESSION_OPTIONS,
    "RunOptions": _SESSION_OPTIONS,
    "SessionOptions": _SESSION_OPTIONS,
    "IOBinding": _SESSION_VALUES,
    "NodeArg": _SESSION_VALUES,
    "OrtValue": _SESSION_VALUES,
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    # imported on first use: gtco.load must not pull in the compiler and its libraries
    if name in _HOMES:
        from importlib import import_module

        with guarded(f"gtco.{name}"):  # its package may not be installed
            module = import_module(_HOMES[name])
        return getattr(module, name)
    from difflib import get_close_matches

    close = get_close_matches(name, __all__, n=1)
    raise AttributeError(
        f"module 'gtco' has no attribute '{name}'"
        + (f": did you mean '{close[0]}'?" if close else "")
        + " (dir(gtco) lists its names; docs/onnxruntime.md has those of ONNX Runtime)"
    )

"""gtco: vision transformers from ONNX or PyTorch to one shared library.

>>> compiled = gtco.compile_model("vit.onnx")
>>> y = compiled(x)
>>> compiled.save("vit.so"); model = gtco.load("vit.so")
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtco.support.errors import GtcoError
from gtco.support.version import __version__

if TYPE_CHECKING:
    from gtco.compiler import aot_compile, compile_model, compile_to_file
    from gtco.driver.compiled import CompiledModel
    from gtco.runtime.module import Model, load
    from gtco.support.options import Tune

# gtco.bench and gtco.models are inside gtco where it is installed, and beside it in a checkout.
_CHECKOUT = Path(__file__).resolve().parents[1]
if (_CHECKOUT / "bench" / "harness").is_dir():
    __path__.append(str(_CHECKOUT))

__all__ = [
    "CompiledModel",
    "GtcoError",
    "Model",
    "Tune",
    "__version__",
    "aot_compile",
    "compile_model",
    "compile_to_file",
    "load",
]

_HOMES = {
    "aot_compile": "gtco.compiler",
    "compile_model": "gtco.compiler",
    "compile_to_file": "gtco.compiler",
    "CompiledModel": "gtco.driver.compiled",
    "load": "gtco.runtime.module",
    "Model": "gtco.runtime.module",
    "Tune": "gtco.support.options",
}


def __getattr__(name: str) -> Any:
    # imported on first use: gtco.load must not pull in the compiler and its libraries
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'gtco' has no attribute '{name}'")

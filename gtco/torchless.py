"""TVM without PyTorch, for processes that are gtco's own.

``tvm_ffi`` imports torch wherever it is installed, to exchange tensors that gtco never hands it:
seconds, and some 150 MB, in every process. Hiding torch for the moment of the import spares both.
Not for the API: in a user's process another thread may import torch at that moment.
"""

from __future__ import annotations

import importlib
import sys

from gtco.garbage import uncollected


def import_tvm() -> None:
    """Import TVM, and torch with it only where torch is there already."""
    with uncollected():  # a sixth of an import's time
        if "torch" in sys.modules or "tvm_ffi" in sys.modules:
            importlib.import_module("tvm")
            return
        sys.modules["torch"] = None  # type: ignore[assignment]  # an import of it fails
        try:
            importlib.import_module("tvm")
        finally:
            del sys.modules["torch"]

"""What torch's exporter knows of operators, gathered once for each opset. Each export gathers the
same thousands of functions again, 0.4 s of CPU, which is more than the export of a small model.
"""

from __future__ import annotations

from functools import cache
from typing import Any


def gather_once(registry: Any) -> None:
    """``registry`` is the exporter's class ``ONNXRegistry``. An export may add functions of its
    own, so each gets a copy.
    """
    from torch.onnx._internal.exporter._constants import TORCHLIB_OPSET

    if registry.from_torchlib.__module__ == __name__:
        return
    gathered = cache(registry.from_torchlib)

    def from_torchlib(opset_version: int = TORCHLIB_OPSET) -> Any:
        known = gathered(opset_version)
        copy = registry()
        copy._opset_version = known.opset_version
        copy.functions = {name: list(found) for name, found in known.functions.items()}
        return copy

    registry.from_torchlib = staticmethod(from_torchlib)

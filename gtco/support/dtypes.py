"""numpy's types by their names, bfloat16 among them: that one is of ml_dtypes, and numpy knows it
by name only where something imported ml_dtypes before.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gtco.support.errors import ArtifactError


def numpy_dtype(name: str) -> np.dtype[Any]:
    """numpy's type of that name; bfloat16 comes from ml_dtypes."""
    if name == "bfloat16":
        try:
            import ml_dtypes
        except ModuleNotFoundError:
            raise ArtifactError(
                "tensors of bfloat16 need the package ml_dtypes: pip install ml_dtypes"
            ) from None
        name = ml_dtypes.bfloat16
    result: np.dtype[Any] = np.dtype(name)
    return result


def is_float(dtype: Any) -> bool:
    """numpy's floats and the bfloat16 of ml_dtypes, which is of kind V."""
    return dtype.kind == "f" or "float" in dtype.name

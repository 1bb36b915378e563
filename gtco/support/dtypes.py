"""numpy's dtypes by name, including bfloat16. ml_dtypes defines bfloat16, and numpy knows it by
name only after something has imported ml_dtypes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gtco.support.errors import ArtifactError


def numpy_dtype(name: str) -> np.dtype[Any]:
    """numpy's dtype with that name; bfloat16 comes from ml_dtypes."""
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
    """True for numpy's floats and for ml_dtypes' bfloat16, whose kind is V."""
    return dtype.kind == "f" or "float" in dtype.name

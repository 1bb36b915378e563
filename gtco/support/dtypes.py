"""numpy's dtypes by name, with bfloat16 and int4. ml_dtypes defines these, and numpy knows them by
name only after something has imported ml_dtypes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gtco.support.errors import ArtifactError


def numpy_dtype(name: str) -> np.dtype[Any]:
    """numpy's dtype with that name; bfloat16 and int4 come from ml_dtypes."""
    if name in ("bfloat16", "int4"):
        try:
            import ml_dtypes
        except ModuleNotFoundError:
            raise ArtifactError(
                f"tensors of {name} need the package ml_dtypes: pip install ml_dtypes"
            ) from None
        name = getattr(ml_dtypes, name)
    result: np.dtype[Any] = np.dtype(name)
    return result


def is_float(dtype: Any) -> bool:
    """True for numpy's floats and for ml_dtypes' bfloat16, whose kind is V."""
    return dtype.kind == "f" or "float" in dtype.name

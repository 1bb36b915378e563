"""The errors that gtco raises on purpose: what happened, where, and what to do next.

Everything a user can cause derives from :class:`GtcoError`; ``assert`` and other exceptions mean a
bug of ours.
"""

from __future__ import annotations

from typing import Any


class GtcoError(Exception):
    """Base class. ``str(error)`` is one paragraph a user can act on."""


class ModelError(GtcoError):
    """The model file or module cannot be read, checked or exported."""


class UnsupportedError(GtcoError):
    """The model is valid but uses something gtco cannot compile; names every such operator and
    node.
    """


class ShapeError(GtcoError):
    """A dimension has no value, or shapes do not fit each other."""


class InputError(GtcoError, ValueError):
    """A run-time input has the wrong name, dtype or shape."""


class ArtifactError(GtcoError):
    """A shared library is not gtco's, is damaged, or needs instructions this CPU lacks."""


class BuildError(GtcoError):
    """Code generation, the C compiler or the linker failed, or a file could not be written."""


class VerificationError(GtcoError):
    """The compiled model's outputs differ from the reference by more than the tolerance.

    ``report``: every comparison (a :class:`gtco.verification.VerificationReport`); None where the
    reference could not be run.
    """

    def __init__(self, message: str, report: Any = None) -> None:
        super().__init__(message)
        self.report = report


class OptionError(GtcoError, ValueError):
    """An option has a value gtco does not know."""

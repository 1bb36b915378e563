"""The errors that gtco raises on purpose: what happened, where, and what to do next.

Every error that a user can cause derives from :class:`GtcoError`. ``assert`` and other exceptions
mean a bug of gtco; :func:`guarded` turns them into an :class:`InternalError` that says where it
happened and how to report it.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class GtcoError(Exception):
    """Base class. ``str(error)`` is one paragraph that a user can act on."""


class ModelError(GtcoError):
    """The model file or module cannot be read, checked or exported."""


class UnsupportedError(GtcoError):
    """The model is valid but uses something that gtco cannot compile; the text names every such
    operator and node.
    """


class ShapeError(GtcoError):
    """A dimension has no value, or shapes do not fit each other."""


class UnknownDimension(ShapeError):
    """A size is given for a dimension that the model does not have."""


class InputError(GtcoError, ValueError):
    """A run-time input has the wrong name, dtype or shape."""


class ArtifactError(GtcoError):
    """A shared library is not gtco's, is damaged, or needs instructions that this CPU lacks."""


class BuildError(GtcoError):
    """Code generation, the C compiler or the linker failed, or a file could not be written."""


class VerificationError(GtcoError):
    """The compiled model's outputs differ from the reference by more than the tolerance.

    ``report``: every comparison (a :class:`gtco.verification.VerificationReport`); None if the
    reference could not be run.
    """

    def __init__(self, message: str, report: Any = None) -> None:
        super().__init__(message)
        self.report = report


class RecordError(GtcoError):
    """A file of records cannot be read or written, or holds something else."""


class FarmError(GtcoError):
    """The machines of a tuning farm cannot be reached, or none of them fits."""


class QuantizationError(GtcoError):
    """No choice of quantized products keeps the error within the budget; the text says the best."""


class OptionError(GtcoError, ValueError):
    """An option has a value that gtco does not accept."""


class InternalError(GtcoError):
    """gtco itself failed: a bug of gtco, not a fault of the model. The text says what was being
    done.
    """


REPORT = (
    "This is a fault of gtco, not of the model: please report it with this text and, where it may "
    "be shared, the model"
)


PACKAGES = {"tvm": "apache-tvm", "tvm_ffi": "apache-tvm-ffi"}  # their modules have other names


def installing(extra: str = "") -> str:
    """The command that installs what gtco needs, or one of its extras. If pip has installed gtco,
    it finds the extras by the name. A checkout may be on a path alone, and no index has gtco.
    """
    if not extra:
        return "pip install -e . in a checkout of gtco"
    by_name = f"pip install 'gtco[{extra}]'"
    return f"pip install -e '.[{extra}]' in a checkout of gtco ({by_name} if pip has installed it)"


def describe(error: BaseException) -> str:
    """An exception in one line: its type, the last line of its text, and where in gtco it was
    raised. TVM's text is left out, because it describes TVM's insides and nothing that the user
    knows.
    """
    frames = traceback.extract_tb(error.__traceback__)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if type(error).__module__.partition(".")[0] in PACKAGES or _raised_in(frames, PACKAGES):
        lines = ["raised inside TVM"]
    inside = [f for f in frames if f"{os.sep}gtco{os.sep}" in f.filename] or list(frames)
    where = f" ({os.path.basename(inside[-1].filename)}:{inside[-1].lineno})" if inside else ""
    return f"{type(error).__name__}{': ' if lines else ''}{lines[-1][:300] if lines else ''}{where}"


def _raised_in(frames: Sequence[traceback.FrameSummary], packages: Iterable[str]) -> bool:
    if not frames:
        return False
    parts = os.path.normpath(frames[-1].filename).split(os.sep)
    return any(package in parts for package in packages)


@contextmanager
def guarded(where: str) -> Iterator[None]:
    """Turns every exception raised inside into a GtcoError that names ``where``.

    A GtcoError stays as it is. A refusal of the machine (memory, files) or a package that is not
    installed becomes a :class:`BuildError`; anything else becomes an :class:`InternalError`.
    """
    try:
        yield
    except (GtcoError, BrokenPipeError):  # the reader closed the pipe: no failure
        raise
    except MemoryError as error:
        raise BuildError(
            f"out of memory in {where}: close other programs or use a larger machine"
        ) from error
    except OSError as error:
        raise BuildError(f"{where} failed: {error}") from error
    except Exception as error:
        module = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
        if module and module.partition(".")[0] != "gtco":
            raise BuildError(
                f"{where} needs {PACKAGES.get(module, module)}, which is not installed: "
                f"{installing()} brings all that compiling takes, and gtco doctor lists what is "
                "missing. gtco run, measure and records do without, and so does gtco inspect of a "
                "library"
            ) from error
        raise InternalError(
            f"internal failure in {where}: {describe(error)}. {REPORT} (--debug, or the error's "
            "cause in Python, has the traceback)"
        ) from error

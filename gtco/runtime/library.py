"""The C interface of an artifact (csrc/gtco_api.h), through ctypes."""

from __future__ import annotations

import _ctypes
import ctypes
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from ctypes import POINTER, c_char_p, c_double, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

from gtco.runtime.elf import FileKind, read_contents
from gtco.runtime.plan import TensorSpec
from gtco.support.errors import ArtifactError

OK, BUSY = 0, 6
LAUNCHES = {None: 0, "graph": 1, "persistent": 2}  # gtco_launches_option


class Options(ctypes.Structure):
    """gtco_options"""

    _fields_ = (
        ("num_threads", c_int32),
        ("spin_microseconds", c_int32),
        ("device", c_int32),
        ("launches", c_int32),
        ("reserved", c_int32 * 4),
    )


class TensorInfo(ctypes.Structure):
    """gtco_tensor_info"""

    _fields_ = (
        ("name", c_char_p),
        ("dtype", c_int),
        ("ndim", c_int32),
        ("dims", POINTER(c_int64)),
        ("symbols", POINTER(c_char_p)),
        ("nbytes", c_int64),
    )


PROTOTYPES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "gtco_open": (c_int, (POINTER(Options), POINTER(c_void_p))),
    "gtco_close": (None, (c_void_p,)),
    "gtco_num_inputs": (c_int, (c_void_p,)),
    "gtco_num_outputs": (c_int, (c_void_p,)),
    "gtco_num_steps": (c_int, (c_void_p,)),
    "gtco_set_shapes": (c_int, (c_void_p, c_void_p)),
    "gtco_sized_input": (POINTER(TensorInfo), (c_void_p, c_int)),
    "gtco_sized_output": (POINTER(TensorInfo), (c_void_p, c_int)),
    "gtco_num_threads": (c_int, (c_void_p,)),
    "gtco_input": (POINTER(TensorInfo), (c_void_p, c_int)),
    "gtco_output": (POINTER(TensorInfo), (c_void_p, c_int)),
    # arrays of pointers are c_void_p here: ctypes converts that twice as fast as POINTER(c_void_p)
    "gtco_run": (c_int, (c_void_p, c_void_p, c_void_p)),
    "gtco_run_shapes": (c_int, (c_void_p, c_void_p, c_void_p, c_void_p)),
    "gtco_run_on": (c_int, (c_void_p, c_void_p, c_void_p, c_void_p)),
    "gtco_wait": (c_int, (c_void_p,)),
    "gtco_profile": (c_int, (c_void_p, c_void_p, c_void_p, POINTER(c_double))),
    "gtco_launch_mode": (c_char_p, (c_void_p,)),
    "gtco_artifact_metadata": (c_char_p, ()),
    "gtco_last_error": (c_char_p, (c_void_p,)),
    "gtco_status_string": (c_char_p, (c_int,)),
}

# libraries of the first versions lack these, and may
LATER = {
    *("gtco_run_on", "gtco_wait", "gtco_launch_mode"),
    *("gtco_set_shapes", "gtco_sized_input", "gtco_sized_output", "gtco_run_shapes"),
}

LAST_CALL = 60.0  # seconds for which the end of the interpreter waits for a call

# A fork waits until no other thread is inside the dynamic loader, whose state the child inherits.
_loader_lock = threading.RLock()
os.register_at_fork(
    before=_loader_lock.acquire,
    after_in_parent=_loader_lock.release,
    after_in_child=_loader_lock.release,
)
_names: dict[Path, list[tuple[int, int, int, int] | None]] = {}


def file_identity(path: Path) -> tuple[int, int, int, int] | None:
    """A value that stays equal while the path holds the same file; None if there is no file."""
    try:
        info = path.stat()
    except (OSError, ValueError):
        return None
    return (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)


def _loader_name(path: Path) -> str:
    """A spelling of the path that is new for every new file under that path.

    The dynamic loader takes an equal name for the same library without looking at the file, so a
    model compiled again to the same path would come back as the old one while that is open. The
    n-th file gets n times "./" in its name.
    """
    identity = file_identity(path)
    seen = _names.setdefault(path, [])
    if identity not in seen:
        seen.append(identity)
    return f"{path.parent}/{'./' * seen.index(identity)}{path.name}"


def _forbidden(path: Path) -> str:
    """What to do if the folder's file system is mounted without the right to run code. The loader
    says only that it "failed to map segment from shared object".
    """
    if not os.statvfs(path).f_flag & os.ST_NOEXEC:
        return ""
    return (
        ". The file system there forbids running code (it is mounted noexec): put the library "
        "elsewhere, and if gtco made it for a moment, set TMPDIR to another folder"
    )


class Library:
    """A loaded artifact; :meth:`unload` closes it. Its attributes are the functions of gtco_api.h
    without the prefix.
    """

    def __init__(self, path: Path) -> None:
        """Raises :class:`ArtifactError` if the file is missing, damaged, or not an artifact of this
        version. In that case no code of it was run.
        """
        self.path = path
        contents = read_contents(path)
        self.id, self.metadata = contents.id, contents.metadata
        if not contents.isa.here:
            raise ArtifactError(
                f"{path} is a library for {contents.isa.name}, and this machine is none: open it "
                f"where it is to run. gtco inspect shows it here too, and gtco compile --verify "
                f"compares it here if {contents.isa.emulator} (qemu-user) is installed"
            )
        try:
            with _loader_lock:
                self._dll: ctypes.CDLL | None = ctypes.CDLL(_loader_name(path))
            self._functions = {}
            for name, (result, arguments) in PROTOTYPES.items():
                if name in LATER and not hasattr(self._dll, name):
                    continue
                function = getattr(self._dll, name)
                function.restype, function.argtypes = result, arguments
                self._functions[name.removeprefix("gtco_")] = function
        except (OSError, AttributeError) as error:
            raise ArtifactError(f"{path} cannot be loaded: {error}{_forbidden(path)}") from error

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_functions"][name]
        except KeyError:
            raise AttributeError(name) from None

    def open(self, threads: int, device: int = 0, launches: int = 0, spin: int = 0) -> int:
        """A handle (gtco_model*). Raises :class:`ArtifactError` with the library's own message if
        the model cannot be opened.
        """
        handle = c_void_p()
        options = Options(
            num_threads=threads, spin_microseconds=spin, device=device, launches=launches
        )
        status = self._functions["open"](options, handle)
        if status != OK or handle.value is None:
            raise ArtifactError(
                f"{self.path} cannot be opened: {self.last_error(None).decode(errors='replace')}"
            )
        return handle.value

    def unload(self) -> None:
        if self._dll is not None:
            handle, self._dll, self._functions = self._dll._handle, None, {}
            with _loader_lock:
                _ctypes.dlclose(handle)


def tensor_specs(metadata: Mapping[str, Any], kind: str) -> tuple[TensorSpec, ...]:
    """The ``inputs`` or ``outputs`` that an artifact's metadata describes."""
    return tuple(TensorSpec(t["name"], t["dtype"], tuple(t["shape"])) for t in metadata[kind])


def read_metadata(path: str | os.PathLike[str], wanted: FileKind | None = None) -> dict[str, Any]:
    """The metadata of an artifact. No code of it is run, so this also works on a machine that lacks
    the instructions that the model needs.
    """
    return read_contents(Path(path).absolute(), wanted).metadata


def check_model(path: Path, metadata: Mapping[str, Any]) -> None:
    """Raises :class:`ArtifactError` if an artifact is not a model but candidates to be timed."""
    if "candidates" in metadata:
        raise ArtifactError(
            f"{path} is a bundle of candidates, which gtco measure times, and no model; gtco "
            "compile makes one"
        )


def open_library(
    path: Path,
    threads: int,
    spin: int,
    device: int | None,
    launches: str | None,
    candidates: bool,
) -> tuple[Library, int]:
    """The library and a handle. If a compile publishes another library at this moment, the first
    try may find a library whose weights were just removed, or the code of the new one beside the
    metadata of the old one; then the new library is opened.
    """
    while True:
        before = file_identity(path)
        library = Library(path)
        try:
            if not candidates:
                check_model(path, library.metadata)
            asked = f"device={device}" if device is not None else f"launches={launches!r}"
            if asked != "launches=None" and "images" not in library.metadata:
                raise ArtifactError(
                    f"{path} was compiled for a CPU, and {asked} asks for a GPU; compile "
                    "the model with --target cuda:ARCHITECTURE"
                )
            handle = library.open(threads, device or 0, LAUNCHES[launches], spin)
        except ArtifactError:
            library.unload()
            if file_identity(path) == before:
                raise
            continue
        if file_identity(path) in (before, None):
            return library, handle
        library.close(handle)  # its code and its metadata may be of two compiles
        library.unload()


def release(
    locks: Sequence[threading.Lock],
    library: Library,
    handle: int,
    remove: Callable[[], object] | None,
    owner: int,
) -> None:
    """Ends a handle after the call that holds its lock. Where the interpreter ends, a daemon thread
    may be in a call; if that takes longer than LAST_CALL, the library stays open.
    """
    limit = -1 if threading.main_thread().is_alive() else LAST_CALL
    if locks[0].acquire(timeout=limit):
        try:
            library.close(handle)
            library.unload()
        finally:
            locks[0].release()
    # a forked child lets go of its copy, not of the file
    if remove is not None and os.getpid() == owner:
        remove()

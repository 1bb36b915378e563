"""What the environment may set; the only module that reads it.

====================  ===================================================================
GTCO_CACHE            folder for measurements and compiled libraries (default ``~/.cache/gtco``)
GTCO_CACHE_GB         how many GB of compiled libraries are kept there (default 4); 0 keeps none
GTCO_NUM_THREADS      threads of a compiled model, read by the C runtime when it opens
CC                    the C compiler that links (default ``gcc``, then ``cc``, then ``clang``; for
                      another instruction set a cross compiler)
RAY_AUTH_TOKEN        the token of a tuning farm, which Ray reads too
RAY_AUTH_TOKEN_PATH   the file that has the token (default ``~/.ray/auth_token``)
RAY_AUTH_MODE         ``token`` (default, where there is one) has Ray ask for the token
====================  ===================================================================
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path

from gtco.support.errors import BuildError, OptionError


def cache_bytes() -> int:
    """How many bytes of compiled libraries are kept. Raises :class:`OptionError`."""
    given = os.environ.get("GTCO_CACHE_GB") or "4"
    try:
        found = float(given)
    except ValueError:
        found = -1.0
    if not 0 <= found < inf:
        raise OptionError(
            f"GTCO_CACHE_GB={given!r}: give a number of gigabytes, such as 4; 0 keeps no libraries"
        )
    return int(found * 1e9)


def ensure_home() -> None:
    """Sets ``HOME`` to ``/``, as container engines do, for a user who has no home folder: no
    ``HOME``, and a number that the system does not know. TVM asks for the folder when it is
    imported.
    """
    try:
        Path.home()
    except RuntimeError:
        os.environ.setdefault("HOME", "/")


def cache_folder() -> Path:
    """The folder for measurements of this machine and for compiled libraries. A ``~`` is the home:
    no shell reads what a unit of systemd or a container's file of variables says.
    """
    chosen = os.environ.get("GTCO_CACHE")
    return Path(os.path.expanduser(chosen)) if chosen else Path.home() / ".cache" / "gtco"


def named_compiler() -> str | None:
    """The C compiler that ``CC`` names."""
    return os.environ.get("CC") or None


def ray_token() -> str:
    """Ray's token for the machines of a farm, where Ray itself looks for it; "" if there is none or
    if Ray is told not to use it.
    """
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return ""
    if given := os.environ.get("RAY_AUTH_TOKEN"):
        return given.strip()
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    try:
        return (Path(path) if path else Path.home() / ".ray" / "auth_token").read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def use_ray_token() -> None:
    """Has Ray send its token, where there is one and the environment does not say otherwise. Ray
    reads that when it is imported.
    """
    if ray_token():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def c_compiler() -> str:
    """The path of the C compiler that ``CC`` names; without ``CC`` that of one on PATH. Raises
    :class:`BuildError` if there is none.
    """
    wanted = named_compiler()
    for name in (wanted,) if wanted else ("gcc", "cc", "clang"):
        if path := shutil.which(name):
            return os.path.abspath(path)  # it is started in another folder
    missing = (
        f"the C compiler {wanted!r} is not found"
        if wanted
        else "no C compiler is found: none of gcc, cc and clang is on PATH"
    )
    raise BuildError(
        f"{missing}. gtco links every model with one. Install it (Debian, Ubuntu: apt install gcc "
        "libc6-dev; Fedora: dnf install gcc; Alpine: apk add gcc musl-dev) or set CC to its path"
    )


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """A context in which the variable of the environment is set, as the user has it or to this."""
    given = name in os.environ
    os.environ.setdefault(name, value)
    try:
        yield
    finally:
        if not given:
            del os.environ[name]

"""Looks into a shared library without loading it.

Loading runs the library's constructors, and a truncated one kills the process with SIGBUS, so both
are checked first: that the file holds every byte its headers promise, and that it carries gtco's
note.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

from gtco.errors import ArtifactError

ABI_VERSION = 1  # GTCO_ABI_VERSION in csrc/gtco_api.h
NOTE_NAME, NOTE_TYPE = (
    b"gtco\0",
    1,
)  # type 1: version of the ABI (4 bytes), padding (4), id of the compile (32)
_PT_LOAD, _PT_NOTE = 1, 4
_X86_64 = 62


def artifact_id(path: Path) -> bytes:
    """The id (32 bytes) of the compile that made this library.

    Raises :class:`ArtifactError` where the file is missing, damaged, not gtco's or of another
    version of the ABI.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = file.read(64)
            segments, end = _segments(path, header, file.read)
            if size < end:
                raise ArtifactError(
                    f"{path} is truncated: {size} bytes of at least {end}; copy or compile it again"
                )
            for offset, length in (s[1:] for s in segments if s[0] == _PT_NOTE):
                file.seek(offset)
                description = _find_note(file.read(min(length, 1 << 16)))
                if description is not None:
                    return _check(path, description)
    except OSError as error:
        raise ArtifactError(f"cannot read {path}: {error.strerror or error}") from error
    raise ArtifactError(
        f"{path} is a shared library, but not one that gtco made; compile a model with 'gtco "
        "compile model.onnx -o model.so'"
    )


def _segments(
    path: Path, header: bytes, read: Callable[[int], bytes]
) -> tuple[list[tuple[int, int, int]], int]:
    """Program headers as (type, offset, bytes in file), and the least size that the file must
    have.
    """
    if header[:4] != b"\x7fELF":
        raise ArtifactError(
            f"{path} is not a shared library; gtco.load takes the .so that 'gtco compile' writes"
        )
    if len(header) < 64:
        raise ArtifactError(f"{path} is truncated: {len(header)} bytes; copy or compile it again")
    machine = struct.unpack_from("<H", header, 18)[0]
    if header[4:6] != b"\x02\x01" or machine != _X86_64:
        raise ArtifactError(
            f"{path} is not a library for x86-64; compile the model for this machine"
        )
    ph_offset, sh_offset = struct.unpack_from("<QQ", header, 32)
    ph_size, ph_count, sh_size, sh_count = struct.unpack_from("<HHHH", header, 54)
    end = max(ph_offset + ph_size * ph_count, sh_offset + sh_size * sh_count)
    if ph_offset != 64 or ph_size != 56:
        return [], end
    table = read(ph_size * ph_count)
    segments = []
    for start in range(0, len(table) - len(table) % 56, 56):
        kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", table, start)
        segments.append((kind, offset, length))
        if kind == _PT_LOAD:
            end = max(end, offset + length)
    return segments, end


def _find_note(data: bytes) -> bytes | None:
    """The description of gtco's note in a PT_NOTE segment; names and descriptions are padded to 4
    bytes.
    """
    at = 0
    while at + 12 <= len(data):
        name_size, size, kind = struct.unpack_from("<III", data, at)
        name_at = at + 12
        start = name_at + -(-name_size // 4) * 4
        if kind == NOTE_TYPE and data[name_at : name_at + name_size] == NOTE_NAME:
            return data[start : start + size]
        at = start + -(-size // 4) * 4
    return None


def _check(path: Path, description: bytes) -> bytes:
    version = struct.unpack_from("<I", description)[0] if len(description) == 40 else None
    if version != ABI_VERSION:
        raise ArtifactError(
            f"{path} was made by another version of gtco (its ABI is {version}, this one's "
            f"{ABI_VERSION}); compile the model again"
        )
    return description[8:40]

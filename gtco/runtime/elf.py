"""Looks into a shared library without loading it.

Loading runs the library's constructors, and a damaged library kills the process (SIGBUS if it is
truncated). So three things are checked first: the file has every byte that its headers promise, it
has gtco's notes, and the bytes that the loader will map are those that the linker wrote. The
metadata is read here too, so no code of the library runs to describe it.

gtco's notes, in a PT_NOTE segment under the name "gtco":

============  ===================================================================================
``ID``        version of the ABI (4 bytes), padding (4), id of the compile (32)
``CONTENTS``  offset of the metadata from this field (8), its bytes (8); the same for the weights
              (zeros if they are in a file of their own); SHA-256 of the loaded bytes, without the
              weights and this field (32)
============  ===================================================================================
"""

from __future__ import annotations

import hashlib
import json
import stat
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gtco.machine.isa import ISAS, X86_64, Isa
from gtco.support.errors import ArtifactError

ABI_VERSION = 1  # GTCO_ABI_VERSION in csrc/gtco_api.h
NOTE_NAME, ID_NOTE, CONTENTS_NOTE = b"gtco\0", 1, 2
_PT_LOAD, _PT_NOTE = 1, 4
_HEADER, _SEGMENT = 64, 56  # bytes of the file's header and of a segment's
# The place, size and number of the section headers; `strip` may change these.
_SECTION_FIELDS = ((40, 48), (58, 64))
_DIGEST_AT = 32  # in the description of CONTENTS
_MOST_METADATA = 1 << 30  # bytes of text; more is damage


@dataclass(frozen=True)
class FileKind:
    """A kind of file in the words of error messages: its name, the command that takes it, the
    command that makes it.
    """

    name: str
    taken: str
    make: str


MODEL = FileKind(
    "shared library", "gtco.load takes the .so that 'gtco compile' writes", "compile the model"
)
BUNDLE = FileKind(
    "bundle of candidates",
    "gtco measure takes the .bundle that 'gtco candidates' writes",
    "make it with 'gtco candidates'",
)


@dataclass(frozen=True)
class _Segment:
    """A program header: where its bytes are in the file and in memory."""

    kind: int
    flags: int
    offset: int
    address: int
    size: int
    memory: int


@dataclass(frozen=True)
class Contents:
    """What a library says about itself. ``id``: 32 bytes that identify the compile that made it.
    ``isa``: the instruction set of its code.
    """

    id: bytes
    metadata: dict[str, Any]
    isa: Isa = X86_64


def read_contents(path: Path, wanted: FileKind | None = None) -> Contents:
    """The id and the metadata of a library. No code of it is run.

    Raises :class:`ArtifactError` if the file is missing, damaged, not gtco's or of another version.
    The text speaks of the ``wanted`` kind of file; None takes the kind from the file's name.
    """
    wanted = wanted or (BUNDLE if path.suffix == ".bundle" else MODEL)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ArtifactError(f"{path} is not a file; {wanted.taken}")
        with path.open("rb") as file:
            elf = _Elf(path, file, wanted)
            if elf.digest() != elf.contents[_DIGEST_AT:]:
                raise ArtifactError(
                    f"{path} is damaged, or was changed by another program: it is not as it was "
                    f"made. Copy it again, or {wanted.make} again"
                )
            return Contents(elf.id, _metadata(path, elf.metadata(), wanted), elf.isa)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = getattr(error, "strerror", None) or error
        raise ArtifactError(f"cannot read {path}: {reason}") from error


def seal(path: Path) -> None:
    """Writes the digest into a library that was just linked."""
    with path.open("r+b") as file:
        elf = _Elf(path, file)
        digest = elf.digest()
        file.seek(elf.digest_offset)
        file.write(digest)


class _Elf:
    """An open library of gtco's whose headers have been checked."""

    def __init__(self, path: Path, file: BinaryIO, wanted: FileKind = MODEL) -> None:
        self.path, self.file = path, file
        self.header = file.read(_HEADER)
        self.segments, end = _segments(path, self.header, file, wanted)
        self.isa = _isa(self.header) or X86_64
        size = file.seek(0, 2)
        if size < end:
            raise ArtifactError(
                f"{path} is truncated: {size} bytes of at least {end}; copy it again, or "
                f"{wanted.make} again"
            )
        notes: dict[int, tuple[_Segment, int, bytes]] = {}
        for segment in self.segments:
            if segment.kind == _PT_NOTE:
                data = self.read(segment.offset, min(segment.size, 1 << 16))
                for kind, at, description in _notes(data):
                    notes.setdefault(kind, (segment, at, description))
        if ID_NOTE not in notes:
            raise ArtifactError(
                f"{path} is a shared library, but not one that gtco made; {wanted.taken}"
            )
        self.id = _check_id(path, notes[ID_NOTE][2], wanted)
        if CONTENTS_NOTE not in notes or len(notes[CONTENTS_NOTE][2]) != 64:
            raise ArtifactError(
                f"{path} was made by an earlier version of gtco; {wanted.make} again"
            )
        segment, at, self.contents = notes[CONTENTS_NOTE]
        self.digest_offset = segment.offset + at + _DIGEST_AT
        self.note_address = segment.address + at

    def read(self, offset: int, size: int) -> bytes:
        self.file.seek(offset)
        return self.file.read(size)

    def metadata(self) -> bytes:
        offset, size = self.place(0)
        return self.read(offset, size)

    def place(self, field: int) -> tuple[int, int]:
        """The offset in the file and the number of bytes, read from two fields of CONTENTS,
        starting at ``field``.
        """
        distance, size = struct.unpack_from("<qq", self.contents, field)
        address = self.note_address + field + distance
        for segment in self.segments:
            inside = address - segment.address
            if segment.kind == _PT_LOAD and 0 <= inside <= inside + size <= segment.size:
                return segment.offset + inside, size
        raise ArtifactError(f"{self.path} is damaged: its notes point outside of it")

    def digest(self) -> bytes:
        """SHA-256 of the headers and of the bytes that are loaded. It leaves out the weights (they
        are large, and damage in them cannot end a process), the digest itself, and what `strip` may
        change.
        """
        holes = [_SECTION_FIELDS[0], _SECTION_FIELDS[1]]
        holes.append((self.digest_offset, self.digest_offset + 32))
        if any(self.contents[16:32]):
            offset, size = self.place(16)
            holes.append((offset, offset + size))
        holes.sort()
        digest = hashlib.sha256()
        for segment in self.segments:
            if segment.kind != _PT_LOAD:
                continue
            s = segment
            digest.update(struct.pack("<I4Q", s.flags, s.offset, s.address, s.size, s.memory))
            at, end = s.offset, s.offset + s.size
            for start, stop in [*holes, (end, end)]:
                while at < min(start, end):
                    data = self.read(at, min(start, end, at + (1 << 20)) - at)
                    if not data:
                        raise ArtifactError(f"{self.path} is truncated while it is read")
                    digest.update(data)
                    at += len(data)
                at = max(at, min(stop, end))
        digest.update(self.read(_HEADER, _SEGMENT * len(self.segments)))
        return digest.digest()


def _segments(
    path: Path, header: bytes, file: BinaryIO, wanted: FileKind
) -> tuple[list[_Segment], int]:
    """The program headers, and the least size that the file must have."""
    if header[:4] != b"\x7fELF":
        raise ArtifactError(f"{path} is not a {wanted.name}; {wanted.taken}")
    if len(header) < _HEADER:
        raise ArtifactError(
            f"{path} is truncated: {len(header)} bytes; copy it again, or {wanted.make} again"
        )
    if header[4:6] != b"\x02\x01" or _isa(header) is None:
        names = " or ".join(ISAS)
        raise ArtifactError(f"{path} is not a library for {names}; {wanted.make} for this machine")
    ph_offset, sh_offset = struct.unpack_from("<QQ", header, 32)
    ph_size, ph_count, sh_size, sh_count = struct.unpack_from("<HHHH", header, 54)
    end = max(ph_offset + ph_size * ph_count, sh_offset + sh_size * sh_count)
    if ph_offset != _HEADER or ph_size != _SEGMENT or ph_count > 64:
        return [], end
    table = file.read(ph_size * ph_count)
    segments = []
    for start in range(0, len(table) - len(table) % _SEGMENT, _SEGMENT):
        kind, flags, offset, address, _, size, memory = struct.unpack_from("<IIQQQQQ", table, start)
        segments.append(_Segment(kind, flags, offset, address, size, memory))
        if kind in (_PT_LOAD, _PT_NOTE):
            end = max(end, offset + size)
    return segments, end


def _isa(header: bytes) -> Isa | None:
    machine = struct.unpack_from("<H", header, 18)[0]
    return next((isa for isa in ISAS.values() if isa.elf == machine), None)


def _notes(data: bytes) -> list[tuple[int, int, bytes]]:
    """gtco's notes in a PT_NOTE segment: the type, the place of the description, the description.
    Names and descriptions are padded to 4 bytes.
    """
    found = []
    at = 0
    while at + 12 <= len(data):
        name_size, size, kind = struct.unpack_from("<III", data, at)
        name_at = at + 12
        start = name_at + -(-name_size // 4) * 4
        if data[name_at : name_at + name_size] == NOTE_NAME:
            found.append((kind, start, data[start : start + size]))
        at = start + -(-size // 4) * 4
    return found


def _check_id(path: Path, description: bytes, wanted: FileKind) -> bytes:
    version = struct.unpack_from("<I", description)[0] if len(description) == 40 else None
    if version != ABI_VERSION:
        raise ArtifactError(
            f"{path} was made by another version of gtco (its ABI is {version}, this one's "
            f"{ABI_VERSION}); {wanted.make} again"
        )
    return description[8:40]


def _metadata(path: Path, data: bytes, wanted: FileKind) -> dict[str, Any]:
    """From JSON, compressed by zlib. Libraries of earlier versions hold it as it is."""
    try:
        plain = data.startswith(b"{")
        text = data if plain else zlib.decompressobj().decompress(data, _MOST_METADATA)
        metadata = json.loads(text)
    except (zlib.error, ValueError, RecursionError):
        metadata = None
    if not isinstance(metadata, dict):
        raise ArtifactError(f"{path} is damaged: its metadata is not JSON; {wanted.make} again")
    return metadata

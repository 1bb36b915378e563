"""The symbols of an ELF object, as the code generator writes them."""

from __future__ import annotations

import struct
from collections.abc import Iterable

_SECTIONS_AT, _SECTION_SIZE, _SECTIONS = 40, 58, 60  # in the header of a file
_SYMBOLS = 2  # the type of the section of symbols
_NAME_OF_SECTION, _NAME_OF_FILE = 3, 4  # types of symbols that are neither code nor data
_SYMBOL = struct.Struct("<IBBHQQ")
_BESIDE = frozenset({"memcpy", "memset"})  # the library's own, beside its kernels: csrc/memory.c


def symbols(code: bytes) -> tuple[frozenset[str], frozenset[str]]:
    """The names that a 64-bit object defines, and those that it takes from elsewhere."""
    (at,) = struct.unpack_from("<Q", code, _SECTIONS_AT)
    size, count = struct.unpack_from("<HH", code, _SECTION_SIZE)
    # name, type, flags, address, offset, size, link
    sections = [struct.unpack_from("<IIQQQQI", code, at + size * i) for i in range(count)]
    defined: set[str] = set()
    taken: set[str] = set()
    for _, kind, _, _, offset, length, link in sections:
        if kind != _SYMBOLS:
            continue
        names = sections[link][4]
        for entry in range(offset, offset + length, _SYMBOL.size):
            name, info, _, section, _, _ = _SYMBOL.unpack_from(code, entry)
            if info & 15 in (_NAME_OF_SECTION, _NAME_OF_FILE):
                continue
            begin = names + name
            text = code[begin : code.index(b"\0", begin)].decode()
            (defined if section else taken).add(text)
    return frozenset(defined), frozenset(taken - {""})


def closed(objects: Iterable[bytes]) -> frozenset[str]:
    """The symbols of those objects that call no code outside of the library."""
    found: set[str] = set()
    for code in objects:
        defined, taken = symbols(code)
        if taken <= _BESIDE:
            found |= defined
    return frozenset(found)

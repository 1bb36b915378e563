"""The data of a library that is not code: weights, metadata, and the notes by which gtco knows it.

Weights are streamed to a file once and get into the library through ``.incbin``. Above a limit they
stay in a file of their own, because code reaches data in its library only within 2 GB.
"""

from __future__ import annotations

import hashlib
import struct
from typing import BinaryIO

import numpy as np

from gtco.runtime.artifact import Artifact
from gtco.runtime.elf import ABI_VERSION, CONTENTS_NOTE, ID_NOTE, NOTE_NAME
from gtco.runtime.gpu.plan import GpuArtifact
from gtco.runtime.plan import ALIGNMENT

WEIGHTS_MAGIC, WEIGHTS_HEADER_BYTES = b"GTCOWGT1", 4096  # csrc/weights.c


def write_weights(artifact: Artifact | GpuArtifact, file: BinaryIO, header: int) -> bytes:
    """Streams the weights to the file, behind ``header`` bytes, and returns their SHA-256, which
    also covers their places.
    """
    digest = hashlib.sha256()
    at = 0
    file.write(bytes(header))
    for offset, array in sorted(artifact.weights, key=lambda w: w[0]):
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        file.write(bytes(offset - at))
        file.write(data)
        digest.update(struct.pack("<QQ", offset, array.nbytes))
        digest.update(data)
        at = offset + array.nbytes
    if header:
        file.seek(0)
        file.write(WEIGHTS_MAGIC + struct.pack("<q", artifact.weights_bytes) + digest.digest())
    return digest.digest()


def data_source(identity: bytes, metadata: tuple[int, int], weights_bytes: int | None) -> str:
    """Assembly for the data of the library: gtco's notes (see elf.py), the metadata and, if
    ``weights_bytes`` is given, the weights. ``metadata``: its bytes in the file, and as text.
    """
    inside = weights_bytes is not None
    lines = [
        *_note(ID_NOTE, 8 + len(identity)),
        f".long {ABI_VERSION}, 0",
        f".byte {', '.join(map(str, identity))}",
        *_note(CONTENTS_NOTE, 64),
        f".quad gtco_the_metadata - ., {metadata[0]}",
        f".quad gtco_the_weights - ., {weights_bytes}" if inside else ".quad 0, 0",
        ".zero 32",
        ".section .rodata",
        ".globl gtco_the_metadata",
        ".hidden gtco_the_metadata",
        "gtco_the_metadata:",
        '.incbin "metadata"',
        ".balign 8",
        ".globl gtco_the_metadata_bytes",
        ".hidden gtco_the_metadata_bytes",
        "gtco_the_metadata_bytes:",
        f".quad {metadata[0]}, {metadata[1]}",
        ".bss",
        ".globl gtco_the_metadata_text",
        ".hidden gtco_the_metadata_text",
        "gtco_the_metadata_text:",
        f".zero {metadata[1] + 1}",
    ]
    if inside:
        # A section of its own: the linker puts it behind the code's own constants, which stay close
        # to the code.
        lines += [
            '.section .gtco_weights,"a",@progbits',
            ".balign 4096",
            ".globl gtco_the_weights",
            ".hidden gtco_the_weights",
            "gtco_the_weights:",
            '.incbin "weights"',
            f".zero {ALIGNMENT}",
        ]
    return "\n".join([*lines, '.section .note.GNU-stack,"",@progbits', ""])


def _note(kind: int, size: int) -> list[str]:
    return [
        '.section .note.gtco,"a",@note',
        ".balign 4",
        f".long {len(NOTE_NAME)}, {size}, {kind}",
        '.asciz "gtco"',
        ".balign 4",
    ]

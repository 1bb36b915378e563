"""The library makes the text of its metadata, for callers in C."""
# ruff: noqa: F401, F811 (fixtures are imported, and arguments of the same name)

from __future__ import annotations

import ctypes
import json
import random
import struct
import subprocess
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from gtco.runtime.elf import MODEL, _metadata
from gtco.runtime.library import read_metadata
from gtco.runtime.writing.table import CSRC
from gtco.support.environment import c_compiler
from gtco.support.errors import ArtifactError
from tests.runtime.test_models import kernels, small


def test_a_caller_in_c_gets_the_text_that_python_reads(small: Path) -> None:
    library = ctypes.CDLL(str(small))
    library.gtco_artifact_metadata.restype = ctypes.c_char_p
    first, second = library.gtco_artifact_metadata(), library.gtco_artifact_metadata()
    assert json.loads(first) == read_metadata(small) and first == second


def test_the_file_holds_neither_the_text_nor_debug_information(small: Path) -> None:
    data = small.read_bytes()
    assert b'"abi"' not in data and b".debug_" not in data


@pytest.fixture(scope="module")
def inflate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("inflate") / "inflate"
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined"]
    source = Path(__file__).with_name("inflate.c")
    made = [c_compiler(), *flags, "-fno-sanitize-recover=all", f"-I{CSRC}", str(source), "-pthread"]
    subprocess.run([*made, "-o", str(program)], check=True)
    return program


def texts(program: Path, cases: Sequence[tuple[bytes, int]]) -> list[bytes | None]:
    """The texts of compressed data and their sizes; None for what is damaged."""
    given = b"".join(struct.pack("<qq", len(data), size) + data for data, size in cases)
    out = subprocess.run([program], input=given, stdout=subprocess.PIPE, check=True).stdout
    found: list[bytes | None] = []
    for _, size in cases:
        good, out = out[0], out[1:]
        found.append(out[:size] if good else None)
        out = out[size:] if good else out
    assert not out
    return found


def compressed(text: bytes, level: int, strategy: int) -> bytes:
    made = zlib.compressobj(level, zlib.DEFLATED, 15, 9, strategy)
    return made.compress(text) + made.flush()


def test_every_kind_of_block(inflate: Path) -> None:
    """Stored, with fixed codes and with codes of their own, of texts of all lengths; repetitions
    as far back and as long as the format has them.
    """
    rng = random.Random(0)
    long = rng.randbytes(32768)
    samples = [b"", b"a", b"a" * 258 * 3, bytes(100_000), long + long[:300], long * 3]
    for size in (2, 10, 100, 1000, 10_000, 70_000):
        samples += [rng.randbytes(size), bytes(rng.choices(b'{[0123456789,"', k=size))]
        samples.append(json.dumps([rng.random() for _ in range(size // 20)]).encode())
    strategies = [zlib.Z_DEFAULT_STRATEGY, zlib.Z_HUFFMAN_ONLY, zlib.Z_RLE, zlib.Z_FIXED]
    cases = [
        (text, compressed(text, level, strategy))
        for text in samples
        for level in (0, 1, 6, 9)
        for strategy in strategies
    ]
    kinds = {data[2] >> 1 & 3 for _, data in cases}
    assert kinds == {0, 1, 2}
    assert texts(inflate, [(d, len(t)) for t, d in cases]) == [t for t, _ in cases]


def test_damage_touches_no_other_memory(inflate: Path) -> None:
    rng = random.Random(1)
    text = json.dumps([rng.choice(["weight", "arena", n]) for n in range(300)]).encode()
    cases = []
    for _ in range(2000):
        data = bytearray(compressed(text, rng.choice([1, 9]), rng.choice([0, zlib.Z_FIXED])))
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        cases.append((bytes(data[: rng.choice([len(data), rng.randrange(len(data))])]), len(text)))
    found = texts(inflate, cases)
    assert found.count(None) > 1000
    whole = compressed(text, 9, 0)
    wrong = [(whole, len(text) + 1), (whole, len(text) - 1), (whole[:-6], len(text))]
    assert texts(inflate, wrong) == [None] * 3


def test_a_library_of_an_earlier_version_is_read() -> None:
    """It holds the text as it is."""
    place = Path("m.so")
    assert _metadata(place, b'{"name": "m"}', MODEL) == {"name": "m"}
    assert _metadata(place, zlib.compress(b'{"name": "m"}'), MODEL) == {"name": "m"}
    for damaged in (b"", b"{", b"name", zlib.compress(b"[]"), zlib.compress(b'{"name": "m"}')[:-9]):
        with pytest.raises(ArtifactError, match="its metadata is not JSON"):
            _metadata(place, damaged, MODEL)

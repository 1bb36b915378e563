"""The files of a library in the cache: their sizes, names and modes."""

from __future__ import annotations

import hashlib
import json
import stat

import pytest

from gtco.driver.cache.library_cache import ENTRY, LibraryCache
from tests.driver.test_library_cache import GIGABYTE, entries, got, made, put


def test_a_library_as_large_as_the_cache_is_kept(tmp_path):
    """Its entry has a report too, and is a little larger than the cache. It stays all the same, and
    drives out what was there before.
    """
    cache = LibraryCache(tmp_path / "cache", 1000 + len("header"))
    for key in "ab":
        put(cache, key, made(tmp_path, 1000))
        assert entries(cache) == [key]
    assert got(cache, "b", tmp_path / "1") is not None
    put(cache, "larger", made(tmp_path, 1001))
    assert entries(cache) == ["b"]


@pytest.mark.parametrize("name", ["../secret", "./m.so", "m.so/"])
def test_an_entry_names_files_of_its_own_folder_alone(tmp_path, name):
    """Else another could be read, or written beside the place that it is fetched to."""
    cache = LibraryCache(tmp_path / "cache", GIGABYTE)
    put(cache, "a", made(tmp_path))
    (cache.folder / "secret").write_text("secret")
    entry = cache.folder / "a" / ENTRY
    known = json.loads(entry.read_text())
    digest = hashlib.sha256((cache.folder / "a" / name).read_bytes()).hexdigest()
    entry.write_text(json.dumps(known | {"files": {name: digest}}))
    inner = tmp_path / "outer" / "place"
    inner.mkdir(parents=True)
    assert got(cache, "a", inner) is None
    assert [path.name for path in inner.parent.iterdir()] == ["place"] and not [*inner.iterdir()]


@pytest.mark.parametrize("mode", [0o755, 0o640], ids=oct)
def test_files_keep_their_modes(tmp_path, mode):
    cache, source = LibraryCache(tmp_path / "cache", GIGABYTE), made(tmp_path)
    source.chmod(mode)
    put(cache, "a", source)
    assert got(cache, "a", tmp_path / "1") is not None
    assert stat.S_IMODE((tmp_path / "1" / "m.so").stat().st_mode) == mode

"""The files of a library in the cache: their sizes, names and modes."""

from __future__ import annotations

import hashlib
import json
import stat

import pytest

from gtco.driver.cache.library_cache import ENTRY, LibraryCache
from tests.driver.test_library_cache import GIGABYTE, A, B, entries, got, made, put


def test_a_library_as_large_as_the_cache_is_kept(tmp_path):
    """Its entry has a report too, and is a little larger than the cache. It stays all the same, and
    drives out what was there before.
    """
    cache = LibraryCache(tmp_path / "cache", 1000 + len("header"))
    for key in (A, B):
        put(cache, key, made(tmp_path, 1000))
        assert entries(cache) == [key]
    assert got(cache, B, tmp_path / "1") is not None
    put(cache, "larger", made(tmp_path, 1001))
    assert entries(cache) == [B]


@pytest.mark.parametrize("name", ["../secret", "./m.so", "m.so/"])
def test_an_entry_names_files_of_its_own_folder_alone(tmp_path, name):
    """Else another could be read, or written beside the place that it is fetched to."""
    cache = LibraryCache(tmp_path / "cache", GIGABYTE)
    put(cache, A, made(tmp_path))
    (cache.folder / "secret").write_text("secret")
    entry = cache.folder / A / ENTRY
    known = json.loads(entry.read_text())
    digest = hashlib.sha256((cache.folder / A / name).read_bytes()).hexdigest()
    entry.write_text(json.dumps(known | {"files": {name: digest}}))
    inner = tmp_path / "outer" / "place"
    inner.mkdir(parents=True)
    assert got(cache, A, inner) is None
    assert [path.name for path in inner.parent.iterdir()] == ["place"] and not [*inner.iterdir()]


@pytest.mark.parametrize("mode", [0o755, 0o640], ids=oct)
def test_files_keep_their_modes(tmp_path, mode):
    cache, source = LibraryCache(tmp_path / "cache", GIGABYTE), made(tmp_path)
    source.chmod(mode)
    put(cache, A, source)
    assert got(cache, A, tmp_path / "1") is not None
    assert stat.S_IMODE((tmp_path / "1" / "m.so").stat().st_mode) == mode


def test_folders_that_are_not_the_caches_stay(tmp_path):
    """GTCO_CACHE may name a folder that has some already."""
    cache = LibraryCache(tmp_path / "cache", 1000 + len("header"))
    (cache.folder / "project").mkdir(parents=True)
    (cache.folder / "project" / "thesis.tex").write_text("years of work")
    (cache.folder / "other" / ENTRY).mkdir(parents=True)
    for key in (A, B):
        put(cache, key, made(tmp_path, 1000))
    assert entries(cache) == [B, "other", "project"] and len(cache.sizes()) == 1
    assert (cache.folder / "project" / "thesis.tex").exists()

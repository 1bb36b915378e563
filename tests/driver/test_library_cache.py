"""The cache of compiled libraries: what is found again, what decides, damage, size, processes."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import gtco
from gtco.cli import arguments
from gtco.compiler import checked, compile_to_file
from gtco.driver.backend import backend_of
from gtco.driver.cache import caching
from gtco.driver.cache import key as cache_key
from gtco.driver.cache.library_cache import ENTRY, LibraryCache
from gtco.driver.compilation import Compilation, silent
from gtco.driver.library import Library
from gtco.frontend import onnx as onnx_frontend
from gtco.machine.target import target
from gtco.search.records.records import Record, Records
from gtco.support import environment
from gtco.support.errors import GtcoError, OptionError
from tests.driver.test_compiler import mlp

GIGABYTE = 10**9
A, B, C, D = (32 * letter for letter in "abcd")  # keys


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, which compiles use. The measured rates of the machine stay where they are."""
    monkeypatch.setattr(caching, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(caching, "cache_bytes", lambda: GIGABYTE)
    return LibraryCache(tmp_path / "cache" / "libraries", GIGABYTE)


def entries(cache):
    return sorted(p.name for p in cache.folder.iterdir()) if cache.folder.exists() else []


def library(folder: Path, model, **options):
    """``folder/m.so``, compiled from the model, its bytes, and the report."""
    folder.mkdir(exist_ok=True)
    report = compile_to_file(model, folder / "m.so", **options)
    return (folder / "m.so").read_bytes(), report


def nothing_is_compiled(monkeypatch):
    def build(*_):
        raise AssertionError("compiled")

    monkeypatch.setattr(Compilation, "generate", build)


def test_the_same_compile_again(cache, tmp_path, monkeypatch):
    model = mlp()
    first, report = library(tmp_path / "1", model)
    assert not report.cached and len(entries(cache)) == 1
    with monkeypatch.context() as patch:
        nothing_is_compiled(patch)
        path = tmp_path / "other.onnx"  # where the model comes from does not count
        onnx.save(model, path)
        second, again = library(tmp_path / "2", path, verify=True)
        assert second == first and again.cached and again.verification.passed
        assert (tmp_path / "2" / "m.h").read_text() == (tmp_path / "1" / "m.h").read_text()
        for name in ("stages", "notes", "predicted_seconds", "weights_bytes", "arena_bytes"):
            assert getattr(again, name) == getattr(report, name)
        assert [name for name, _ in again.phases] == ["look up", "verify"]
        assert again.peak_memory_bytes > 0
        with pytest.raises(AssertionError, match="compiled"):
            library(tmp_path / "3", model, cache=False)
        with pytest.raises(AssertionError, match="compiled"):
            library(tmp_path / "3", model, dump=tmp_path / "dump")
    damaged = cache.folder / entries(cache)[0] / "m.so"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    third, report = library(tmp_path / "3", model)
    assert third == first and not report.cached
    assert library(tmp_path / "4", model)[1].cached


def test_variants_have_their_reports(cache, tmp_path, monkeypatch):
    model = mlp(batch="b")
    first, report = library(tmp_path / "1", model, dims={"b": [1, 2]})
    nothing_is_compiled(monkeypatch)
    second, again = library(tmp_path / "2", model, dims={"b": [1, 2]}, verify=True)
    assert second == first and again.cached and list(again.variants) == ["b=1", "b=2"]
    for name, one in again.variants.items():
        assert one.stages == report.variants[name].stages and one.verification.passed


def test_what_went_wrong_once_is_not_kept(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(
        onnx_frontend, "run_onnxsim", lambda model, timeout: (model, "onnxsim was too slow")
    )
    _, report = library(tmp_path / "1", mlp())
    assert "onnxsim was too slow" in report.notes and not entries(cache)


def keys(models, **options):
    chosen = checked(options)
    machine = target(chosen.target)
    made = [Library(model, Path(output), None, chosen, silent) for model, output in models]
    with ExitStack() as stack:
        records = stack.enter_context(Records(chosen.records)) if chosen.records else None
        effort = backend_of(machine).effort(chosen.tune)
        found = caching.Caching(
            LibraryCache(Path("/nowhere"), 0), made, chosen, machine, records, effort
        )
        found.find_keys()
    return [found.keys[library] for library in made]


def key(model, output="m.so", **options):
    return keys([(model, output)], **options)[0]


def other_weights(model):
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    array = numpy_helper.to_array(changed.graph.initializer[0]).copy()
    array.flat[-1] += 1e-3
    name = changed.graph.initializer[0].name
    changed.graph.initializer[0].CopyFrom(numpy_helper.from_array(array, name))
    return changed


def test_everything_that_decides_is_in_the_key(tmp_path, monkeypatch):
    model = mlp(batch="b")
    base = key(model, shapes={"b": 2})
    assert key(model.SerializeToString(), shapes={"b": np.int64(2)}) == base
    for same in ({"workers": 1}, {"verify": True}, {"cache": True}):
        assert key(model, shapes={"b": 2}, **same) == base, same
    others = [key(other_weights(model), shapes={"b": 2}), key(model, "n.so", shapes={"b": 2})]
    for given in (
        {"shapes": {"b": 3}},
        {"shapes": None, "dims": {"b": [2, 3]}},
        {"precision": "bf16"},
        {"threads": 1},
        {"fast_algorithms": False},
        {"simplify": False},
        {"strict": True},
        {"target": "x86-64-v3"},
        {"tune": "quick"},
        {"tune": gtco.Tune(trials=3)},
    ):
        others.append(key(model, **{"shapes": {"b": 2}, **given}))
    with Records(tmp_path / "some.records") as records:
        others.append(key(model, shapes={"b": 2}, records=tmp_path / "some.records"))
        records.add([Record("stage", "label", "{}", "{}", "kept")])
        others.append(key(model, shapes={"b": 2}, records=tmp_path / "some.records"))
    for name, value in {
        "own_digest": lambda: "another gtco",
        "versions": lambda: {"numpy": "0"},
        "compiler_version": lambda compiler: "another gcc",
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(cache_key, name, value)
            others.append(key(model, shapes={"b": 2}))
    assert len({base, *others}) == 1 + len(others)
    assert key(model, shapes={"b": 2}) == base


def test_every_file_of_gtco_is_in_the_key():
    found = {str(path.relative_to(cache_key.OWN)) for path in cache_key.own_files()}
    some = {"__init__.py", "driver/cache/key.py", "tensor/stage.py", "runtime/csrc/api.c"}
    assert some <= found and not any("__pycache__" in name for name in found)
    folders = {path.name for path in cache_key.OWN.iterdir() if path.is_dir()} - {"__pycache__"}
    assert folders <= {name.split("/")[0] for name in found}


def test_models_that_are_tuned_together_are_kept_together():
    pair = [(mlp(), "a.so"), (other_weights(mlp()), "b.so")]
    alone = [key(*one) for one in pair]
    assert keys(pair) == alone
    tuned = keys(pair, tune="quick")
    assert len({*tuned, *(key(*one, tune="quick") for one in pair)}) == 4


def test_external_data_is_in_the_key(tmp_path):
    found, large = [], mlp(width=128)
    for name, model in (("a", large), ("b", other_weights(large))):
        path = tmp_path / f"{name}.onnx"
        found.append(key(model))
        onnx.save(model, path, save_as_external_data=True, location=f"{name}.data")
        found.append(key(path))
    assert found[0] == found[1] != found[2] == found[3]


def test_a_file_of_records_that_grows_and_a_dump_use_no_cache(monkeypatch):
    monkeypatch.setattr(caching, "cache_bytes", lambda: GIGABYTE)
    cpu = backend_of(target("native"))

    def used(**given):
        chosen = checked(given)
        return caching.cache_of(chosen, cpu.effort(chosen.tune)) is not None

    assert used() and used(tune="quick") and used(records="some.records")
    assert not used(records="some.records", tune="quick")
    assert not used(dump="folder") and not used(cache=False)
    monkeypatch.setattr(caching, "cache_bytes", lambda: 0)
    assert not used()


def test_the_size_from_the_environment(monkeypatch):
    for text, wanted in (("", 4 * GIGABYTE), ("0.5", GIGABYTE // 2), ("0", 0)):
        monkeypatch.setenv("GTCO_CACHE_GB", text)
        assert environment.cache_bytes() == wanted
    for text in ("four", "-1", "nan", "inf"):
        monkeypatch.setenv("GTCO_CACHE_GB", text)
        with pytest.raises(OptionError, match="give a number of gigabytes"):
            environment.cache_bytes()


def test_a_wrong_size_is_said_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setenv("GTCO_CACHE_GB", "four")
    phases = []
    for cache in (True, False):
        with pytest.raises(OptionError, match="GTCO_CACHE_GB='four'"):
            gtco.compile_to_file(
                tmp_path / "none.onnx",
                tmp_path / "m.so",
                cache=cache,
                progress=lambda name, *_: phases.append(name),
            )
    assert not phases


def test_the_command_lines_option():
    import argparse

    parser = argparse.ArgumentParser()
    arguments.add_compile_options(parser)
    arguments.add_tuning(parser)
    assert "cache" not in arguments.compile_options(parser.parse_args([]))  # gtco tune
    arguments.add_cache(parser)
    assert arguments.compile_options(parser.parse_args([]))["cache"] is True
    assert arguments.compile_options(parser.parse_args(["--no-cache"]))["cache"] is False


# the folder, without compiling ------------------------------------------------------------------
def made(tmp_path, size=100, name="made"):
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    (folder / "m.so").write_bytes(os.urandom(size))
    (folder / "m.h").write_text("header")
    return folder / "m.so"


def put(cache, key, source):
    assert cache.keep(key, source, {"stages": []}) == ""


def got(cache, key, place):
    place.mkdir(exist_ok=True)
    return cache.fetch(key, place)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def flipped(path):
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [cut, flipped, Path.unlink])
@pytest.mark.parametrize("name", ["m.so", "m.h", ENTRY])
def test_damage_is_a_miss(tmp_path, harm, name):
    cache, source = LibraryCache(tmp_path / "cache", GIGABYTE), made(tmp_path)
    put(cache, A, source)
    assert got(cache, A, tmp_path / "1")["report"] == {"stages": []}
    harm(tmp_path / "cache" / A / name)
    assert got(cache, A, tmp_path / "2") is None and not [*(tmp_path / "2").iterdir()]
    put(cache, A, source)
    assert got(cache, A, tmp_path / "2") is not None
    assert (tmp_path / "2" / "m.so").read_bytes() == source.read_bytes()


@pytest.mark.parametrize(
    "text", ["[]", "{}", "null", '{"files": {"../m.so": ""}}', '{"files": 3}', "\xff", "[" * 9999]
)
def test_an_entry_of_something_else_is_a_miss(tmp_path, text):
    cache = LibraryCache(tmp_path / "cache", GIGABYTE)
    put(cache, A, made(tmp_path))
    (tmp_path / "cache" / A / ENTRY).write_text(text, encoding="latin-1")
    assert got(cache, A, tmp_path / "1") is None


def test_a_changed_report_is_a_miss(tmp_path):
    cache = LibraryCache(tmp_path / "cache", GIGABYTE)
    put(cache, A, made(tmp_path))
    entry = tmp_path / "cache" / A / ENTRY
    known = json.loads(entry.read_text())
    entry.write_text(json.dumps({**known, "report": {"stages": None}}))
    assert got(cache, A, tmp_path / "1") is None and not [*(tmp_path / "1").iterdir()]


def test_the_library_that_was_not_used_for_longest_goes_first(tmp_path):
    cache = LibraryCache(tmp_path / "cache", 4500)
    for number, key in enumerate((A, B, C)):
        put(cache, key, made(tmp_path, 1000))
        os.utime(tmp_path / "cache" / key, (number, number))
    assert got(cache, A, tmp_path / "1") is not None
    put(cache, D, made(tmp_path, 1000))
    left = {p.name for p in (tmp_path / "cache").iterdir()}
    assert left == {A, C, D}
    put(cache, "large", made(tmp_path, 5000))  # is not kept, and drives nothing out
    assert {p.name for p in (tmp_path / "cache").iterdir()} == left


def test_another_users_libraries_stay(tmp_path, monkeypatch):
    """And those of this user go in their place."""
    cache = LibraryCache(tmp_path / "cache", 3000)
    for number, key in enumerate((A, B)):
        put(cache, key, made(tmp_path, 1000))
        os.utime(tmp_path / "cache" / key, (number, number))
    unlink = Path.unlink

    def refused(self, missing_ok=False):
        if self.parent.name == A:
            raise PermissionError(13, "Permission denied", str(self))
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", refused)
    put(cache, C, made(tmp_path, 1000))
    put(cache, D, made(tmp_path, 1000))
    assert {p.name for p in (tmp_path / "cache").iterdir()} == {A, D}


def test_what_a_killed_process_was_removing_goes(tmp_path):
    cache = LibraryCache(tmp_path / "cache", 3000)
    put(cache, A, made(tmp_path, 1000))
    (tmp_path / "cache" / A / ENTRY).unlink()
    put(cache, B, made(tmp_path, 1000))
    put(cache, C, made(tmp_path, 1000))
    put(cache, D, made(tmp_path, 1000))
    assert A not in {p.name for p in (tmp_path / "cache").iterdir()}


def test_an_entry_without_its_report_is_made_again(cache, tmp_path, monkeypatch):
    model = mlp()
    library(tmp_path / "1", model, target="x86-64-v3")
    (key,) = entries(cache)
    entry = cache.folder / key / ENTRY
    entry.write_text(json.dumps(json.loads(entry.read_text()) | {"report": [], "made": None}))
    again, _ = library(tmp_path / "2", model, target="x86-64-v3")
    nothing_is_compiled(monkeypatch)
    assert library(tmp_path / "3", model, target="x86-64-v3")[0] == again


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    cache = LibraryCache(tmp_path / "file" / "cache", GIGABYTE)
    said = cache.keep(A, made(tmp_path), {})
    assert f"in the cache {cache.folder}: Not a directory. Make room there or set" in said
    assert said.count("written") == 1
    with cache.alone(A):
        assert cache.fetch(A, tmp_path) is None


def child(function) -> int:
    """Runs the function in a process of its own and gives its id."""
    if (process := os.fork()) == 0:
        status = 1
        try:
            function()
            status = 0
        finally:
            os._exit(status)
    return process


def test_several_processes_make_a_library_once(tmp_path):
    cache, log = LibraryCache(tmp_path / "cache", GIGABYTE), tmp_path / "log"
    source = made(tmp_path)

    def compile_it():
        place = tmp_path / f"place{os.getpid()}"
        with cache.alone(A):
            if got(cache, A, place) is None:
                with log.open("a") as file:
                    file.write("made\n")
                put(cache, A, source)
        assert got(cache, A, place) is not None

    children = [child(compile_it) for _ in range(6)]
    assert {os.waitpid(process, 0)[1] for process in children} == {0}
    assert log.read_text() == "made\n"
    assert sorted(p.name for p in cache.folder.iterdir()) == [A]  # no locks, no leftovers


def test_a_killed_process_leaves_no_lock_and_no_half_library(tmp_path):
    cache, started = LibraryCache(tmp_path / "cache", GIGABYTE), tmp_path / "started"

    def hang():
        with cache.alone(A):
            started.touch()
            time.sleep(600)

    process = child(hang)
    while not started.exists():
        time.sleep(0.01)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    with cache.alone(A):
        put(cache, A, made(tmp_path))
    assert sorted(p.name for p in cache.folder.iterdir()) == [A]


def test_readers_see_whole_libraries_while_others_write(tmp_path):
    """Writers replace a library, and a small limit removes others, while readers copy it."""
    cache = LibraryCache(tmp_path / "cache", 250_000)
    sources = [made(tmp_path, 100_000, f"made{n}") for n in range(2)]
    whole = {source.read_bytes() for source in sources}

    def write():
        for n in range(60):
            put(cache, (A, B)[n % 2], sources[n % 2])

    def read():
        for n in range(150):
            place = tmp_path / f"read{os.getpid()}"
            if got(cache, (A, B)[n % 2], place) is not None:
                assert (place / "m.so").read_bytes() in whole

    children = [child(function) for function in (write, write, read, read)]
    assert {os.waitpid(process, 0)[1] for process in children} == {0}
    for path in cache.folder.iterdir():
        assert path.name in (A, B), path
        json.loads((path / ENTRY).read_text())


def test_a_failing_compile_keeps_nothing(cache, tmp_path):
    with pytest.raises(GtcoError):
        library(tmp_path / "1", b"no model")
    assert not entries(cache)

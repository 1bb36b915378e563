"""How a compiled model's files get their final names: all of them or none, whatever interrupts."""
# ruff: noqa: F401, F811 (fixtures are imported, and arguments of the same name)

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from gtco.runtime import publish as publish_module
from gtco.runtime.library import Library, read_metadata
from gtco.runtime.module import load
from gtco.runtime.publish import staging, weights_beside, write_whole
from gtco.runtime.writing.linking import write_artifact
from gtco.support.errors import ArtifactError, BuildError
from tests.runtime.test_models import SCALE, check, example_inputs, kernels, small, small_artifact

REPOSITORY = Path(__file__).parents[2]


def pair(kernels: bytes, folder: Path) -> None:
    """one.so has its weights beside it; two.so has other weights inside."""
    write_artifact(small_artifact(kernels), folder / "one.so", weights_inside_limit=0)
    doubled = small_artifact(kernels, weights=((0, np.zeros(1)), (64, 2 * SCALE)), name="two")
    write_artifact(doubled, folder / "two.so")


def kill_again_and_again(kernels: bytes, folder: Path, seconds: float, seed: int) -> None:
    pair(kernels, folder)
    command = [sys.executable, "-m", "tests.robustness.publishing_killed", str(folder)]
    done = subprocess.run(
        [*command, str(seconds), str(seed)], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    kills, one, two = map(int, done.stdout.split())
    assert kills == one + two >= 20 and one and two
    # the next run removes what the killed ones left behind
    out = folder / "out"
    assert {p.name for p in out.iterdir()} == {"m.so", "m.h", weights_beside(out / "m.so")[0].name}


def test_killed_at_any_moment_a_set_that_opens_is_left(kernels: bytes, tmp_path: Path) -> None:
    kill_again_and_again(kernels, tmp_path, 5, 0)


@pytest.mark.scheduled
@pytest.mark.parametrize("seed", range(5))
def test_killed_thousands_of_times(kernels: bytes, tmp_path: Path, seed: int) -> None:
    kill_again_and_again(kernels, tmp_path, 60, seed)


@pytest.mark.parametrize("old_inside", [True, False])
@pytest.mark.parametrize("new_inside", [True, False])
def test_an_error_at_every_step_leaves_the_older_one(
    kernels: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    old_inside: bool,
    new_inside: bool,
) -> None:
    """Each rename fails in its turn. The older set opens, and no other file is there."""
    path = tmp_path / "m.so"
    write_artifact(small_artifact(kernels), path, weights_inside_limit=10**9 * old_inside)
    before = {p.name for p in tmp_path.iterdir()}
    header = path.with_suffix(".h").read_bytes()
    doubled = small_artifact(kernels, weights=((0, np.zeros(1)), (64, 2 * SCALE)), name="two")
    replace = os.replace
    for failing in range(3 - new_inside):
        calls = []

        def full(source: Path, target: Path, calls: list = calls, failing: int = failing) -> None:
            calls.append(target)
            if len(calls) == failing + 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            replace(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(publish_module.os, "replace", full)
            with pytest.raises(BuildError, match=r"No space left.*MB are free"):
                write_artifact(doubled, path, weights_inside_limit=10**9 * new_inside)
        assert {p.name for p in tmp_path.iterdir()} == before
        assert path.with_suffix(".h").read_bytes() == header
        with load(path) as model:
            check(model(*example_inputs()), *example_inputs())


@pytest.mark.parametrize("room", [True, False])
def test_a_large_file_is_written_again_in_large_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    """It stays as it is where there is no room for a second one."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    target = tmp_path / "m.so"
    content = np.random.default_rng(0).bytes(publish_module.PIECE + 12345)
    with staging(target) as folder:
        made = folder / target.name
        made.write_bytes(content)
        made.chmod(0o751)
        before = made.stat().st_ino
        if not room:
            monkeypatch.setattr(publish_module.shutil, "copymode", full)
        publish_module.publish(folder, target)
        assert not list(folder.iterdir())
    assert target.read_bytes() == content and target.stat().st_mode & 0o777 == 0o751
    assert (target.stat().st_ino != before) == room


def test_everything_is_on_the_disk_before_it_has_its_name(
    kernels: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss of power may undo only the last step. Every file is flushed before the first rename.
    The folder is flushed between the other files' renames and the library's, and again before the
    older library's weights are removed.
    """
    path = tmp_path / "m.so"
    write_artifact(small_artifact(kernels), path, weights_inside_limit=0)
    doubled = small_artifact(kernels, weights=((0, np.zeros(1)), (64, 2 * SCALE)))
    (old,) = (p.name for p in weights_beside(path))
    steps: list[tuple[str, str]] = []
    fsync, replace, unlink = os.fsync, os.replace, Path.unlink

    def flushed(descriptor: int) -> None:
        steps.append(("flush", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        fsync(descriptor)

    def renamed(source: Path, target: Path) -> None:
        steps.append(("rename", Path(target).name))
        replace(source, target)

    def removed(self: Path, missing_ok: bool = False) -> None:
        steps.append(("remove", self.name))
        unlink(self, missing_ok)

    monkeypatch.setattr(publish_module.os, "fsync", flushed)
    monkeypatch.setattr(publish_module.os, "replace", renamed)
    monkeypatch.setattr(Path, "unlink", removed)
    write_artifact(doubled, path, weights_inside_limit=0)
    (new,) = (p.name for p in weights_beside(path))
    known = {"m.so", "m.h", old, new, tmp_path.name}
    files, folder = (new, "m.h", "m.so"), ("flush", tmp_path.name)
    assert [step for step in steps if step[1] in known] == [
        *(("flush", name) for name in files),
        *(("rename", name) for name in files[:-1]),
        folder,
        ("rename", "m.so"),
        folder,
        ("remove", old),
    ]


def test_a_folder_that_cannot_be_flushed(
    kernels: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that cannot flush folders is accepted; a file that cannot be written is an
    error.
    """
    path = tmp_path / "m.so"
    write_artifact(small_artifact(kernels), path)
    before = path.read_bytes()
    doubled = small_artifact(kernels, weights=((0, np.zeros(1)), (64, 2 * SCALE)))
    fsync = os.fsync

    def failing(kind: int, code: int) -> None:
        def flush(descriptor: int) -> None:
            if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_dir() == (kind == 1):
                raise OSError(code, os.strerror(code))
            fsync(descriptor)

        monkeypatch.setattr(publish_module.os, "fsync", flush)

    for code, said in ((errno.ENOSPC, "No space left.*MB are free"), (errno.EFBIG, "ulimit -f")):
        failing(0, code)
        with pytest.raises(BuildError, match=said):
            write_artifact(doubled, path)
    assert path.read_bytes() == before
    failing(1, errno.EINVAL)
    write_artifact(doubled, path)
    assert path.read_bytes() != before


def test_a_leftover_goes_and_a_living_one_stays(kernels: bytes, tmp_path: Path) -> None:
    target = tmp_path / "m.so"
    leftover = tmp_path / ".m.so.abcdefgh.gtco"
    leftover.mkdir()
    (leftover / "m.so").write_bytes(b"half")
    others = [tmp_path / name for name in (".n.so.abcdefgh.gtco", ".m.so.abcdefgh", ".m.so.x.gtco")]
    for other in others:
        other.mkdir()
    with staging(target) as living:
        write_artifact(small_artifact(kernels), target)
        assert not leftover.exists() and living.exists()
    assert not living.exists() and all(other.exists() for other in others)


def test_two_at_once_to_one_path(kernels: bytes, tmp_path: Path) -> None:
    """Neither takes the other's weights for stale ones. A process that loads meanwhile gets a
    model.
    """
    pair(kernels, tmp_path)
    write_artifact(
        small_artifact(kernels, weights=((0, np.zeros(1)), (64, 3 * SCALE))),
        tmp_path / "three.so",
        weights_inside_limit=0,
    )
    target, failures = tmp_path / "out" / "m.so", list[BaseException]()
    target.parent.mkdir()
    models = [load(tmp_path / f"{name}.so", threads=1) for name in ("one", "three")]
    models[0].save(target)
    x, mask = example_inputs()
    wanted = [model(x, mask)[0] for model in models]

    def save(model: object) -> None:
        try:
            for _ in range(40):
                model.save(target)  # type: ignore[attr-defined]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=save, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        with load(target, threads=1) as model:
            assert any(np.array_equal(model(x, mask)[0], y) for y in wanted)
    assert not failures
    assert len(list(target.parent.iterdir())) == 3


def test_a_path_through_a_symlink(kernels: bytes, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    path = write_artifact(small_artifact(kernels), tmp_path / "link/m.so", weights_inside_limit=0)
    with load(path) as model, load(tmp_path / "real/m.so") as same:
        assert model.metadata == same.metadata


def test_a_link_and_a_pipe_stay_what_they_are(tmp_path: Path) -> None:
    """A file is replaced, but not ``/dev/stdout`` or ``/dev/null``."""
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    assert write_whole(tmp_path / "link", b"new") == tmp_path / "link"
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_bytes() == b"new"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(tmp_path / "pipe", b"read")
        assert os.read(reader, 9) == b"read"
    finally:
        os.close(reader)
    assert (tmp_path / "pipe").is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe", "real"]


@pytest.mark.parametrize("how", [">", ">>"])
def test_standard_output_that_is_a_file_is_written_to(tmp_path: Path, how: str) -> None:
    """The file keeps its earlier content, and all that the process prints before and after."""
    (tmp_path / "log").write_text("earlier\n")
    script = (
        "from pathlib import Path; from gtco.runtime.publish import write_whole; print('before'); "
        "write_whole(Path('/dev/stdout'), b'whole\\n'); print('after')"
    )
    command = f"{sys.executable} -c \"$1\" {how} \"$0/log\""
    subprocess.run(["bash", "-c", command, str(tmp_path), script], cwd=REPOSITORY, check=True)
    written = "before\nwhole\nafter\n"
    expected = written if how == ">" else "earlier\n" + written
    assert (tmp_path / "log").read_text() == expected
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_a_library_of_any_name_replaces_its_header(kernels: bytes, tmp_path: Path) -> None:
    pair(kernels, tmp_path)
    for name in ("one", "two"):
        shutil.copy(tmp_path / "two.h", tmp_path / "older.h")
        (tmp_path / "older.h").write_text("earlier")
        write_artifact(small_artifact(kernels, name=name), tmp_path / "older.so")
        assert name in (tmp_path / "older.h").read_text()


def test_a_folder_that_somebody_has_locked(
    kernels: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``flock . gtco compile ... -o ./m.so`` does: it waits for a while, and says why."""
    monkeypatch.setattr(publish_module, "LOCKED_SECONDS", 0.1)
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with pytest.raises(BuildError, match="another process has held the lock"):
        write_artifact(small_artifact(kernels), tmp_path / "m.so")
    assert not [*tmp_path.iterdir()]
    os.close(folder)
    write_artifact(small_artifact(kernels), tmp_path / "m.so")


def test_what_is_saved_is_the_file_as_it_is_now(kernels: bytes, tmp_path: Path) -> None:
    """This also holds if another compile has replaced it since it was opened."""
    path = write_artifact(small_artifact(kernels), tmp_path / "m.so", weights_inside_limit=0)
    with load(path) as model:
        doubled = small_artifact(kernels, weights=((0, np.zeros(1)), (64, 2 * SCALE)))
        write_artifact(doubled, path, weights_inside_limit=0)
        saved = model.save(tmp_path / "copy.so")
    x, mask = example_inputs()
    with load(saved) as model:
        np.testing.assert_allclose(
            model(x, mask)[0], np.maximum(2 * x * SCALE + mask[:, None], 0), rtol=1e-6
        )

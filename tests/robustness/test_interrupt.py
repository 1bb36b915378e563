"""Ctrl-C in every phase, SIGTERM, SIGHUP, and disks that are really full: the exit is clear,
nothing is left behind, and a library that was there before is unchanged.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import psutil
import pytest

from gtco.compiler import compile_model, compile_to_file
from gtco.runtime.module import load
from gtco.runtime.publish import write_whole
from gtco.runtime.writing.linking import write_artifact
from gtco.support.errors import ArtifactError, BuildError, GtcoError
from tests.driver.test_compiler import check, mlp
from tests.runtime.test_models import check as check_small
from tests.runtime.test_models import example_inputs, kernels, small_artifact  # noqa: F401

# What a command imports before anything that imports TVM, so that TVM does not import torch.
TORCHLESS = "from gtco.support.torchless import import_tvm; import_tvm()\n"

# Runs `gtco compile`; the phase named by argv[1] makes the file argv[2] and waits.
DRIVER = """
import functools, os, sys, time
phase, marker, *command = sys.argv[1:]
waiting = f"import time; open({marker!r}, 'w').close(); time.sleep(300)"
def wait(*_, **__):
    exec(waiting)
if phase == "read":
    from gtco.frontend import onnx
    onnx.check_text = wait
elif phase == "onnxsim":
    from gtco.frontend import simplify
    simplify._CHILD = waiting
elif phase == "fuse":
    from gtco.graph.fusion import stages
    stages.fuse = wait
elif phase == "build":
    from gtco.driver import making
    job = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).recv(1); "
    command_ = (sys.executable, "-c", job + waiting)
    making.Workers = functools.partial(making.Workers, command=command_)
elif phase == "tune":
    from gtco.tuning import local
    local.run = wait
elif phase in ("gcc", "link"):  # with a child of its own, as gcc has cc1 and ld
    script = marker + ".sh"
    other = '*" -c "*) exec gcc "$@";; ' if phase == "link" else ""
    with open(script, "w") as file:
        file.write(f'#!/bin/sh\\ncase "$*" in {other}esac\\n')
        file.write(f"touch $TMPDIR/temporary {marker}\\nsleep 300\\n")
    os.chmod(script, 0o755)
    os.environ["CC"] = script
elif phase == "verify":
    from gtco import verification
    verification.verify = wait
from gtco.cli import main
raise SystemExit(main(["compile", *command]))
"""
# under nohup SIGHUP is ignored, also by children
HEARS_ALL = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
PHASES = ("read", "onnxsim", "fuse", "build", "tune", "gcc", "link", "verify")


def left(folder: Path) -> list[str]:
    """The contents of a folder for temporary files; .ses belongs to ONNX Runtime."""
    return sorted(p.name for p in folder.iterdir() if p.name != ".ses")


def start(root: Path, folder: Path, script: str, *arguments: str) -> subprocess.Popen[str]:
    (folder / "tmp").mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-c", HEARS_ALL + script, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(root)},
        start_new_session=True,
    )


def wait_until_it_waits(child: subprocess.Popen[str], marker: Path) -> None:
    """Returns when the child has made the marker and sleeps. A signal that comes just before the
    system call in which it sleeps does not end that call, and Python learns of it only afterwards.
    """
    process = psutil.Process(child.pid)
    while not marker.exists() or process.status() != psutil.STATUS_SLEEPING:
        assert child.poll() is None, child.communicate()
        time.sleep(0.05)


@pytest.mark.parametrize("phase", PHASES)
def test_ctrl_c_in_every_phase(phase: str, root: Path, tmp_path: Path) -> None:
    """It goes to the whole group of processes, as the terminal sends it. SIGTERM and SIGHUP are
    also tested, if there was no library before.
    """
    number = (signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)[PHASES.index(phase) % 4]
    kept = number == signal.SIGINT
    onnx.save(mlp(), tmp_path / "mlp.onnx")
    out = tmp_path / "out"
    out.mkdir()
    if kept:
        (out / "mlp.so").write_bytes(b"older")
    marker = tmp_path / "marker"
    command = [str(tmp_path / "mlp.onnx"), "-o", str(out / "mlp.so"), "--force", "--verify"]
    command += ["--tune", "quick" if phase == "tune" else "off"]
    child = start(root, tmp_path, TORCHLESS + DRIVER, phase, str(marker), *command)
    wait_until_it_waits(child, marker)
    processes = psutil.Process(child.pid).children(recursive=True)
    assert processes or phase == "verify"
    os.killpg(child.pid, number)
    _, errors = child.communicate(timeout=200)
    assert child.returncode == 128 + number, errors
    assert "interrupted" in errors and "Traceback" not in errors
    assert [p.name for p in out.iterdir()] == (["mlp.so"] if kept else [])
    assert not kept or (out / "mlp.so").read_bytes() == b"older"
    assert not left(tmp_path / "tmp")
    assert not psutil.wait_procs(processes, timeout=30)[1]


# A command in which the first stop comes in a function that TVM calls, and TVM loses it.
CALLED_BACK = """
import sys, time
import tvm_ffi
from gtco.cli import main
from gtco.cli.commands import doctor_command
def called():
    open(sys.argv[1], "w").close()
    time.sleep(300)
def command(options):
    try:
        tvm_ffi.convert(called)()
    except RuntimeError:
        time.sleep(300)
doctor_command.main = command
raise SystemExit(main(["doctor"]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_that_is_lost_is_raised_again(root: Path, tmp_path: Path, number: int) -> None:
    marker = tmp_path / "marker"
    child = start(root, tmp_path, TORCHLESS + CALLED_BACK, str(marker))
    wait_until_it_waits(child, marker)
    child.send_signal(number)
    _, errors = child.communicate(timeout=100)
    assert child.returncode == 128 + number
    assert errors.startswith("interrupted") and len(errors.splitlines()) == 1


# Runs `python -m gtco`, which gets Ctrl-C while it imports argv[1].
WHILE_IMPORTING = """
import os, runpy, signal, sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == wanted:
            os.kill(os.getpid(), signal.SIGINT)
wanted = sys.argv.pop(1)
sys.meta_path.insert(0, Interrupt())
runpy.run_module("gtco", run_name="__main__")
"""


@pytest.mark.parametrize("module", ["gtco.cli", "numpy.linalg", "gtco.cli.commands.doctor_command"])
def test_ctrl_c_before_the_command_begins(module: str, root: Path, tmp_path: Path) -> None:
    child = start(root, tmp_path, WHILE_IMPORTING, module, "doctor")
    output, errors = child.communicate(timeout=200)
    assert (child.returncode, output, errors) == (130, "", "interrupted\n")


@pytest.mark.parametrize("module", ["tvm", "tvm.relax", "tvm.tirx"])
def test_ctrl_c_waits_for_the_end_of_an_import(module: str, root: Path, tmp_path: Path) -> None:
    """Otherwise the exception would come while extensions are creating their modules."""
    onnx.save(mlp(), tmp_path / "mlp.onnx")
    command = [str(tmp_path / "mlp.onnx"), "-o", str(tmp_path / "mlp.so")]
    script = WHILE_IMPORTING.replace(
        'runpy.run_module("gtco"', 'import atexit\natexit.register(told)\nrunpy.run_module("gtco"'
    ).replace("class", "def told(): print('gtco.compiler' in sys.modules)\nclass")
    child = start(root, tmp_path, script, module, "compile", *command)
    output, errors = child.communicate(timeout=200)
    assert child.returncode == 130 and errors.endswith("interrupted\n"), errors
    assert output == "True\n", "it was to go on to the end of what is imported"
    assert not (tmp_path / "mlp.so").exists()


# Runs `gtco compile`, which gets Ctrl-C while it verifies, and repeatedly while it cleans up.
AGAIN = """
import os, shutil, signal, sys
from gtco import verification
from gtco.runtime import publish
def interrupt(*_, **__):
    os.kill(os.getpid(), signal.SIGINT)
remove = shutil.rmtree
def removed(*arguments, **options):
    interrupt()
    os.kill(os.getpid(), signal.SIGTERM)
    remove(*arguments, **options)
    print("cleaned up")
verification.verify = interrupt
publish.shutil.rmtree = removed
sys.argv[1:1] = ["compile"]
from gtco.__main__ import main
code = main()
interrupt()
raise SystemExit(code)
"""


def test_a_second_ctrl_c_does_not_cut_cleaning_up_short(root: Path, tmp_path: Path) -> None:
    onnx.save(mlp(), tmp_path / "mlp.onnx")
    (tmp_path / "out").mkdir()
    library = str(tmp_path / "out" / "mlp.so")
    options = ["-o", library, "--verify", "--tune", "off"]
    child = start(root, tmp_path, TORCHLESS + AGAIN, str(tmp_path / "mlp.onnx"), *options)
    output, errors = child.communicate(timeout=200)
    assert child.returncode == 130 and errors.endswith("interrupted\n"), errors
    assert "cleaned up" in output and "Traceback" not in errors
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.scheduled
def test_ctrl_c_at_any_moment(root: Path, tmp_path: Path) -> None:
    """Again and again, at a random moment of the compile of a real model."""
    rng = random.Random(0)
    onnx.save(mlp(layers=3), tmp_path / "mlp.onnx")
    out = tmp_path / "out"
    out.mkdir()
    command = [str(tmp_path / "mlp.onnx"), "-o", str(out / "mlp.so"), "--verify", "--tune", "off"]
    start(root, tmp_path, TORCHLESS + DRIVER, "none", "", *command).communicate()
    before = (out / "mlp.so").read_bytes()
    started = "import sys; from gtco.cli import main; print(flush=True); "
    for _ in range(40):
        script = started + "raise SystemExit(main(sys.argv[1:]))"
        child = start(root, tmp_path, script, "compile", *command)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(rng.uniform(0.05, 8))
        try:
            processes = psutil.Process(child.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            processes = []
        os.kill(child.pid, signal.SIGINT)
        _, errors = child.communicate(timeout=200)
        assert child.returncode in (0, 130), errors
        assert "Traceback" not in errors
        assert sorted(p.name for p in out.iterdir()) == ["mlp.h", "mlp.so"]
        assert child.returncode == 0 or (out / "mlp.so").read_bytes() == before
        assert not left(tmp_path / "tmp")
        assert not psutil.wait_procs(processes, timeout=30)[1]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MB, in memory."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(place)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def leave(disk: Path, nbytes: int) -> None:
    """Fills the disk except for ``nbytes``."""
    with (disk / "junk").open("wb") as file:
        info = os.statvfs(disk)
        os.posix_fallocate(file.fileno(), 0, max(4096, info.f_bavail * info.f_bsize - nbytes))


def test_a_full_disk_where_the_library_goes(disk: Path, kernels: bytes) -> None:  # noqa: F811
    """From no free space to enough: either an error that says so and the older set, or the new
    set.
    """
    path = write_artifact(small_artifact(kernels), disk / "m.so", weights_inside_limit=0)
    before = {p.name: p.read_bytes() for p in disk.iterdir()}
    newer = small_artifact(kernels, weights=((0, np.zeros(1)), (64, np.ones(40, np.float32))))
    outcomes = []
    for free in (0, 8, 24, 64, 128, 256, 512, 4096):
        leave(disk, free << 10)
        try:
            write_artifact(newer, path)
        except BuildError as error:
            assert "No space left on device" in str(error) and "MB are free" in str(error)
            outcomes.append(False)
            (disk / "junk").unlink()
            assert {p.name: p.read_bytes() for p in disk.iterdir()} == before
        else:
            outcomes.append(True)
            (disk / "junk").unlink()
            assert sorted(p.name for p in disk.iterdir()) == ["m.h", "m.so"]
            write_artifact(small_artifact(kernels), path, weights_inside_limit=0)
        with load(path) as model:
            check_small(model(*example_inputs()), *example_inputs())
    assert not outcomes[0] and outcomes[-1]


def test_a_full_disk_where_a_page_or_a_table_goes(disk: Path) -> None:
    """A write that fails leaves the old file as it was, and leaves no other file behind."""
    page = write_whole(disk / "page.html", b"before")
    leave(disk, 4096)
    with pytest.raises(BuildError, match="No space left on device"):
        write_whole(page, bytes(1 << 16))
    assert page.read_bytes() == b"before"
    assert left(disk) == ["junk", "page.html"]


def test_a_disk_that_forbids_running_code(
    disk: Path,
    kernels: bytes,  # noqa: F811
) -> None:
    small = write_artifact(small_artifact(kernels), disk / "small.so")
    subprocess.run(["mount", "-o", "remount,noexec", str(disk)], check=True)
    with pytest.raises(ArtifactError, match=r"mounted noexec.*set TMPDIR to another folder"):
        load(small)


def test_a_full_disk_for_temporary_files(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compile to a file needs no other place. A model in memory says what it lacks."""
    model = mlp()
    leave(disk, 0)
    monkeypatch.setenv("TMPDIR", str(disk))
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    compile_to_file(model, tmp_path / "m.so", verify=True)
    with load(tmp_path / "m.so") as compiled:
        check(compiled, model)
    with pytest.raises(GtcoError, match="No space left on device"):
        compile_model(model)
    assert left(disk) == ["junk"]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(GtcoError, match="TMPDIR"):
        compile_model(model)


def test_a_full_disk_for_the_dump(disk: Path, tmp_path: Path) -> None:
    leave(disk, 4096)
    with pytest.raises(BuildError, match=r"No space left on device"):
        compile_to_file(mlp(), tmp_path / "m.so", dump=disk)
    assert not (tmp_path / "m.so").exists()


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["completion bash", "--version"])
def test_a_full_disk_for_what_is_printed(
    command: str, unbuffered: str, root: Path, tmp_path: Path
) -> None:
    """Python buffers a short output by default, and writes it when the command is over."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "gtco", *command.split()],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(root), "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1 and "No space left" in done.stderr
    assert "Traceback" not in done.stderr

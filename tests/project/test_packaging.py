"""setup.py: the pins, the entry point, and the files in the package; what is installed, and what
runs with numpy alone.
"""
# ruff: noqa: F401, F811 (fixtures are imported, and arguments of the same name)

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import numpy as np
import onnx
import pytest
import setuptools

from gtco.cli.commands.doctor_command import NEEDED, OPTIONAL
from gtco.support.version import __version__
from tests.cli.test_artifact import library
from tests.driver.test_compiler import mlp
from tests.runtime.test_models import kernels


@pytest.fixture(scope="module")
def arguments(root):
    """The arguments that setup.py gives to setuptools.setup."""
    seen: dict = {}
    real, setuptools.setup = setuptools.setup, lambda **given: seen.update(given)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(root)
            runpy.run_path(str(root / "setup.py"))
    finally:
        setuptools.setup = real
    return seen


def test_the_pair_of_tvm_packages_is_pinned_and_installed(arguments):
    # apache-tvm 0.27.0.post1 with tvm-ffi 0.1.15, which pip picks by itself, crashes the process.
    assert "apache-tvm==0.27.0.post1" in arguments["install_requires"]
    assert "apache-tvm-ffi==0.1.14.post1" in arguments["install_requires"]
    assert metadata.version("apache-tvm") == "0.27.0.post1"
    assert metadata.version("apache-tvm-ffi") == "0.1.14.post1"


def test_doctor_asks_for_what_setup_installs(arguments):
    assert {name + (f"=={pin}" if pin else "") for name, pin in NEEDED.items()} == set(
        arguments["install_requires"]
    )


def test_doctor_asks_for_what_each_extra_is_for(arguments):
    for extra in ("torch", "tune", "completion", "report", "farm"):
        wanted = {
            re.split(r"[^\w-]", requirement)[0]
            for requirement in arguments["extras_require"][extra]
        }
        assert wanted & OPTIONAL.keys(), (extra, wanted)


def test_torch_is_never_unpinned(arguments):
    for extra, requirements in arguments["extras_require"].items():
        torch = [r for r in requirements if r.startswith("torch")]
        assert all(r == "torch==2.13.0" for r in torch), extra
        assert torch or extra not in ("torch", "test"), f"{extra} asks for no torch"
    assert set(arguments["extras_require"]) >= {"torch", "cuda", "bench", "test"}
    assert not any(r.startswith("torch") for r in arguments["install_requires"])


def test_the_table_of_versions_has_the_pins(arguments, root):
    page = (root / "docs/limits.md").read_text().partition("### Versions")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("|")]
    least = arguments["python_requires"].removeprefix(">=")
    assert [" Python ", f" {least} or later "] in rows
    extras = arguments["extras_require"]
    for requirement in (*arguments["install_requires"], *extras["torch"], *extras["cuda"]):
        name, _, pin = requirement.partition("==")
        (needed,) = (needed for names, needed in rows if name in re.split(r"[^\w-]+", names))
        assert pin.removesuffix(".*") in needed, requirement


def test_packages_entry_point_and_sources(arguments, root):
    packages = set(arguments["packages"])
    inside = {"gtco", "gtco.cli", "gtco.tensor", "gtco.models.family", "gtco.bench.harness"}
    assert inside <= packages and not [p for p in packages if p.partition(".")[0] != "gtco"]
    assert not any(p.startswith("tests") for p in packages)
    for folder in (p for p in (root / "gtco").rglob("*") if p.is_dir() and list(p.glob("*.py"))):
        assert ".".join(folder.relative_to(root).parts) in packages, f"{folder} has no __init__.py"
    assert arguments["entry_points"]["console_scripts"] == ["gtco=gtco.__main__:main"]
    for package, patterns in arguments["package_data"].items():
        for pattern in patterns:
            folder = package.removeprefix("gtco.") if "bench" in package else package
            assert list((root / folder.replace(".", "/")).glob(pattern)), (
                f"no {pattern} in {package}"
            )
    assert arguments["version"] == __version__ and arguments["license"] == "Apache-2.0"
    assert "Apache License" in (root / "LICENSE").read_text()


@pytest.fixture(scope="module")
def packed(root, tmp_path_factory):
    """A folder with the wheel and the sdist of this tree."""
    place = tmp_path_factory.mktemp("wheel")
    tree = place / "tree"
    tree.mkdir()
    for name in ("gtco", "bench", "models"):
        shutil.copytree(root / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "README.md", "LICENSE"):
        shutil.copy(root / name, tree / name)
    for kind in ("bdist_wheel", "sdist"):
        succeed([sys.executable, "setup.py", "-q", kind, "-d", str(place)], cwd=tree)
    return place


def succeed(command, **options):
    """What the command prints."""
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(packed):
    """The wheel of this tree, unpacked into a folder as pip does it."""
    (wheel,) = packed.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(packed / "site")
    return packed / "site"


def test_the_wheel_is_pure(packed):
    (wheel,) = packed.glob("*.whl")
    assert wheel.name == f"gtco-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    assert "gtco/py.typed" in names and not [n for n in names if n.endswith((".so", ".pyc"))]


def test_an_sdist_installs_in_a_fresh_environment(packed, tmp_path):
    """pip makes a wheel of the sdist, which has what the wheel of the tree has. The environment has
    nothing but numpy: this checkout is not there.
    """
    (sdist,) = packed.glob("*.tar.gz")
    python = tmp_path / "fresh" / "bin" / "python"
    succeed([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "fresh")])
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    alone = ["--no-index", "--no-deps", "--no-build-isolation"]
    made = tmp_path / "wheels"
    succeed([*pip, "wheel", *alone, "-w", str(made), str(sdist)], cwd=tmp_path)
    (wheel,), (direct,) = made.glob("*.whl"), packed.glob("*.whl")
    with zipfile.ZipFile(wheel) as file, zipfile.ZipFile(direct) as other:
        assert sorted(file.namelist()) == sorted(other.namelist())
    found = ["--find-links", str(made), "gtco"]
    succeed([*pip, "--python", str(python), "install", *alone[:2], *found], cwd=tmp_path)
    environment = {name: v for name, v in os.environ.items() if name != "PYTHONPATH"}
    where = "import gtco; print(gtco.__file__)"
    said = succeed([python, "-c", where], cwd=tmp_path, env=environment)
    assert said.startswith(str(tmp_path / "fresh"))
    for part in Path(np.__file__).parents[1].glob("numpy*"):
        (Path(said).parents[1] / part.name).symlink_to(part)
    said = succeed([python.with_name("gtco"), "--version"], cwd=tmp_path, env=environment)
    assert said.startswith(f"gtco {__version__}") and "apache-tvm none" in said


@pytest.mark.scheduled
@pytest.mark.parametrize("extra", "torch tune completion docs cuda report farm demo bench".split())
def test_extras_resolve(packed, tmp_path, extra):
    """By pip, in a fresh environment, from the index that pip knows. Nothing is installed."""
    python = tmp_path / "fresh" / "bin" / "python"
    succeed([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "fresh")])
    (wheel,) = packed.glob("*.whl")
    command = f"--disable-pip-version-check -q --python {python} install --dry-run --report -"
    said = succeed([sys.executable, "-m", "pip", *command.split(), f"{wheel}[{extra}]"])
    chosen = {item["metadata"]["name"].lower() for item in json.loads(said)["install"]}
    assert {"gtco", "apache-tvm", "numpy"} <= chosen


BARE = """
import sys

class Absent:
    packages = sys.argv[1].split(",")

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.packages:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
sys.argv = ["gtco", *sys.argv[2:]]
from gtco.__main__ import main
sys.exit(main())
"""
COMPILERS = "rich,ml_dtypes,onnx,onnxsim,tvm,tvm_ffi,networkx,torch,xgboost,scipy,google"


def run(site, absent, *command):
    """The installed command line, as if the packages ``absent`` were not installed."""
    return subprocess.run(
        [sys.executable, "-c", BARE, absent, *map(str, command)],
        cwd=site.parent,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )


def test_all_that_is_installed_lies_inside_gtco(installed):
    names = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert names == {"gtco"}
    assert (installed / "gtco/bench/kernels/streams.c").is_file()


def test_the_installed_benchmark_times_a_library_and_a_model(installed, library):
    """It runs in a folder that has other packages named models and bench."""
    for name in ("models", "bench"):
        (installed.parent / name).mkdir()
        (installed.parent / name / "__init__.py").write_text("raise SystemExit('not mine')")
    helped = run(installed, "-", "bench", "--help")
    assert helped.returncode == 0 and "--library" in helped.stdout
    done = run(installed, "-", "bench", library, "--rounds", 1, "--threads", 1)
    assert done.returncode == 0, done.stderr
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("gtco 0"))
    assert float(row.split()[2]) > 0
    onnx.save(mlp(batch="b"), installed.parent / "mlp.onnx")
    command = "bench mlp.onnx --shape b=3 --peers onnxruntime --rounds 1 --threads 1".split()
    done = run(installed, "-", *command)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith(("gtco 0", "onnxr"))]
    assert len(rows) == 3 and "failed" not in done.stdout and "GFLOP" in done.stdout
    listed = subprocess.run(
        [sys.executable, "-m", "gtco.models", "list"],
        cwd=installed.parent,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert "vit-ti-16" in listed.stdout, listed.stderr


def test_numpy_is_enough_to_run_and_inspect(installed, library):
    helped = run(installed, COMPILERS, "--help")
    assert helped.returncode == 0 and "compile" in helped.stdout
    done = run(installed, COMPILERS, "run", library, "--repeat", 2)
    assert done.returncode == 0 and "2 calls: median" in done.stdout, done.stderr
    shown = run(installed, COMPILERS, "inspect", library, "--no-profile", "--json")
    assert shown.returncode == 0 and '"inputs"' in shown.stdout, shown.stderr
    shown = run(installed, COMPILERS, "inspect", library)
    assert "peak: not measured: that takes apache-tvm, which is not installed" in shown.stdout
    told = run(installed, COMPILERS, "compile", "m.onnx")
    assert told.returncode == 1 and "is not installed: pip install" in told.stderr
    bench = run(installed, COMPILERS, "bench", library)
    assert bench.returncode == 1 and "need more than is installed" in bench.stderr

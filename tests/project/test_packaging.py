"""setup.py: the pins, the entry point, the files that travel."""

from __future__ import annotations

import runpy
from importlib import metadata

import pytest
import setuptools

from gtco.cli.doctor_command import NEEDED
from gtco.support.version import __version__


@pytest.fixture(scope="module")
def arguments(root):
    """What setup.py gives to setuptools.setup."""
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


def test_torch_is_never_unpinned(arguments):
    for extra, requirements in arguments["extras_require"].items():
        torch = [r for r in requirements if r.startswith("torch")]
        assert all(r == "torch==2.13.0" for r in torch), extra
        assert torch or extra not in ("torch", "test"), f"{extra} asks for no torch"
    assert set(arguments["extras_require"]) >= {"torch", "cuda", "bench", "test"}
    assert not any(r.startswith("torch") for r in arguments["install_requires"])


def test_packages_entry_point_and_sources(arguments, root):
    packages = set(arguments["packages"])
    assert {"gtco", "gtco.cli", "gtco.tensor", "models", "bench"} <= packages
    assert not any(p.startswith("tests") for p in packages)
    for folder in (p for p in (root / "gtco").rglob("*") if p.is_dir() and list(p.glob("*.py"))):
        assert ".".join(folder.relative_to(root).parts) in packages, f"{folder} has no __init__.py"
    assert arguments["entry_points"]["console_scripts"] == ["gtco=gtco.__main__:main"]
    for package, patterns in arguments["package_data"].items():
        for pattern in patterns:
            assert list((root / package.replace(".", "/")).glob(pattern)), (
                f"no {pattern} in {package}"
            )
    assert arguments["version"] == __version__ and arguments["license"] == "Apache-2.0"
    assert "Apache License" in (root / "LICENSE").read_text()

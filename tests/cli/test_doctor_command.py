"""gtco doctor: what it finds, what it misses, and that its pins are those of setup.py."""

from __future__ import annotations

import ctypes
import sys
import types
from importlib import metadata

import pytest

from gtco import cli
from gtco.cli.commands import doctor_command
from gtco.machine.cores import allowed_cores
from gtco.machine.target import target
from gtco.machine.tiles import Tiles
from gtco.search.calibration.peak import Peak
from gtco.support.errors import BuildError


@pytest.fixture(autouse=True)
def peak(monkeypatch):
    module = types.ModuleType("gtco.search.calibration.peak")
    module.machine_peak = lambda threads, operand: Peak(threads, (100e9 * threads,), 0.0)
    monkeypatch.setitem(sys.modules, "gtco.search.calibration.peak", module)


@pytest.fixture(autouse=True)
def rates(monkeypatch):
    """There is no table of rates."""
    module = types.ModuleType("gtco.search.calibration.profile")
    module.cached_rates = lambda target: None
    module.BUSY, module.MOST_TIMES = 0.2, 3
    monkeypatch.setitem(sys.modules, "gtco.search.calibration.profile", module)
    return module


def test_a_complete_machine(capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    for text in (
        "CPU",
        "fp32 200 GFLOP/s" if allowed_cores() == 2 else "GFLOP/s (1 windows of 0.25 s",
        "apache-tvm",
        "0.27.0.post1",
        "C compiler",
        "gtco can compile here",
    ):
        assert text in out


def test_missing_and_wrong_packages_say_how_to_get_them(monkeypatch, capsys):
    real = metadata.version

    def version(name):
        if name == "onnxsim":
            raise metadata.PackageNotFoundError(name)
        return "0.1.15" if name == "apache-tvm-ffi" else real(name)

    monkeypatch.setattr(metadata, "version", version)
    assert cli.main(["doctor", "--no-peak"]) == 1
    out = capsys.readouterr().out
    assert "pip install onnxsim" in out
    assert "pip install apache-tvm-ffi==0.1.14.post1" in out and "0.1.15, but gtco needs" in out


@pytest.mark.parametrize("wheel", ["xgboost-cpu", "xgboost", None])
def test_what_a_tuner_learns_with_is_named(monkeypatch, wheel):
    def version(name):
        if name == wheel:
            return "3.2.0"
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    (found,) = [c for c in doctor_command.package_checks() if "xgboost" in c.name]
    assert not found.needed
    if wheel:
        assert found.ok and found.found == "3.2.0"
    else:
        assert "pip install xgboost-cpu (for gtco tune" in found.fix


def test_no_c_compiler_and_no_optional_package(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert not doctor_command.compiler_check().ok and "gcc" in doctor_command.compiler_check().fix
    assert cli.main(["doctor", "--no-peak"]) == 1
    assert "gtco cannot compile here" in capsys.readouterr().out


def test_a_peak_that_cannot_be_measured_is_said_and_no_obstacle(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gtco.search.calibration.peak", None)
    assert cli.main(["doctor"]) == 0
    assert "not measured" in capsys.readouterr().out


def test_a_quota_and_the_threads_it_leaves(monkeypatch, capsys):
    monkeypatch.setattr(doctor_command, "cpu_quota", lambda: 1.5)
    monkeypatch.setattr(doctor_command, "allowed_cores", lambda: 2)
    monkeypatch.setattr(doctor_command.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    (cores,) = (check for check in doctor_command.machine_checks(True) if check.name == "cores")
    assert cores.found == "2 threads by default, of 4 CPUs allowed and a cgroup quota of 1.5"
    (peak,) = (check for check in doctor_command.machine_checks(True) if check.name == "peak")
    assert peak.found.startswith("fp32 200 GFLOP/s (1 windows of 0.25 s on 2 threads")


def test_tiles_that_work_and_tiles_that_do_not(monkeypatch):
    for found, mark, said in (
        (Tiles(("amx-tile", "amx-bf16")), "ok", "gtco multiplies products of bf16 in them"),
        (Tiles(("amx-tile", "amx-bf16", "amx-int8")), "ok", "products of bf16 and int8 in them"),
        (Tiles(("amx-tile",)), "ok", "multiplies none of its products in them"),
        (Tiles(reason="no tiles: they fault"), "none", "no tiles: they fault"),
    ):
        monkeypatch.setattr(doctor_command, "tiles", lambda flags, found=found: found)
        (check,) = (c for c in doctor_command.machine_checks(False) if c.name == "tiles")
        assert check.ok and check.mark == mark and said in check.found


@pytest.mark.parametrize("name", ["cascadelake", "alderlake", "x86-64-v3"])
def test_how_products_of_integers_are_computed(name, monkeypatch):
    monkeypatch.setattr(doctor_command, "detect", lambda: target(name))
    seen = {check.name: check.found for check in doctor_command.machine_checks(True)}
    if name == "x86-64-v3":
        assert "in fp32" in seen["int8"] and "peak of integers" not in seen
    else:
        assert "VPDPBUSD" in seen["int8"] and seen["peak of integers"].startswith("int8 ")


def test_whether_the_rates_are_measured(rates, monkeypatch, tmp_path):
    def found():
        checks = doctor_command.machine_checks(False)
        return next(check for check in checks if check.name == "kernel rates")

    monkeypatch.setenv("GTCO_CACHE", str(tmp_path))
    check = found()
    assert "not measured yet" in check.found and check.ok and "not yet" in check.mark
    rates.cached_rates = lambda target: types.SimpleNamespace(others=0.19)
    assert found().found == f"measured, kept in {tmp_path}" and "ok" in found().mark
    for times, what in ((2, "the next compile"), (3, "in 3 measurements, and the best is kept")):
        busy = types.SimpleNamespace(others=0.43, times=times)
        rates.cached_rates = lambda target, busy=busy: busy
        assert "had 43% of the CPUs" in found().found and what in found().found and found().ok


def test_ok_is_said_of_what_is_there_alone(monkeypatch):
    """A line about something that is missing, or missing so far, does not begin with ok."""

    def no_driver():
        raise OSError("no libcuda")

    monkeypatch.setattr(doctor_command, "open_driver", no_driver)
    checks = [*doctor_command.machine_checks(False), *doctor_command.gpu_checks()]
    lacking = ("not measured", "not installed", "no driver", "neither", "finds none")
    for check in checks:
        if any(word in check.found for word in lacking):
            assert "ok" not in check.mark, check
    assert not doctor_command.gpus_check(False).mark.count("ok")


def test_nvrtc_is_optional_and_its_absence_names_the_extra(monkeypatch, capsys):
    from gtco.codegen import nvrtc

    def missing():
        raise BuildError("compiling for a GPU needs NVRTC: pip install -e '.[cuda]'")

    assert "13." in next(c.found for c in doctor_command.gpu_checks() if c.name == "NVRTC")
    monkeypatch.setattr(nvrtc, "version", missing)
    assert cli.main(["doctor", "--no-peak"]) == 0
    out = capsys.readouterr().out
    assert "absent" in out and "pip install -e '.[cuda]'" in out and "gtco can compile" in out


@pytest.mark.parametrize("absent", ["NVRTC", "apache-tvm", None])
def test_what_cannot_be_compiled_is_not_promised(monkeypatch, absent):
    from gtco.codegen import nvrtc

    def missing():
        raise BuildError("compiling for a GPU needs NVRTC")

    def version(name):
        if name == absent:
            raise metadata.PackageNotFoundError(name)
        return real(name)

    def no_driver(name, *given, **named):
        if "libcuda.so" in str(name):
            raise OSError(name)
        return opened(name, *given, **named)

    real, opened = metadata.version, ctypes.CDLL
    monkeypatch.setattr("gtco.runtime.gpu.driver.ctypes.CDLL", no_driver)
    monkeypatch.setattr(metadata, "version", version)
    if absent == "NVRTC":
        monkeypatch.setattr(nvrtc, "version", missing)
    (found,) = [check.found for check in doctor_command.gpu_checks() if check.name == "GPUs"]
    said = "be neither compiled nor run here" if absent else "be compiled here, not run"
    assert found == f"no driver (libcuda.so.1): models for GPUs can {said}"


class Driver:
    """A driver with GPUs, or with the error that it gives for one of them."""

    def __init__(self, *found):
        self.found = found

    def cuInit(self, flags):
        return 0

    def cuDeviceGetCount(self, count):
        count._obj.value = len(self.found)
        return 0

    def cuDeviceGet(self, device, index):
        device._obj.value = index
        return 0

    def cuDeviceGetName(self, text, size, device):
        found = self.found[device.value]
        if isinstance(found, int):
            return found
        text.value = found[0].encode()
        return 0

    def cuGetErrorName(self, status, name):
        name._obj.value = {2: b"CUDA_ERROR_OUT_OF_MEMORY"}.get(status)
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):
        value._obj.value = self.found[device.value][attribute - 74]
        return 0


@pytest.mark.parametrize(
    ("driver", "said"),
    [
        (Driver(), "the driver finds none"),
        (Driver(("NVIDIA H100", 9, 0), ("T4", 7, 5)), "NVIDIA H100 (sm_90), T4 (sm_75)"),
        (Driver(2), "device 0 (CUDA_ERROR_OUT_OF_MEMORY)"),
        (Driver(997), "device 0 (its error 997)"),
        (types.SimpleNamespace(cuInit=lambda flags: 100), "the driver finds none"),
        (None, "no driver"),
    ],
)
def test_gpus_are_what_the_driver_names(monkeypatch, driver, said):
    def opened(name):
        if driver is None:
            raise OSError(name)
        return driver

    monkeypatch.setattr("gtco.runtime.gpu.driver.ctypes.CDLL", opened)
    assert doctor_command.gpus_check().found.startswith(said)


def test_the_cache_of_libraries(monkeypatch, tmp_path):
    """Its place, what it has, its bound; and what is in the way of it."""
    monkeypatch.setenv("GTCO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("GTCO_CACHE_GB", "3")
    folder = tmp_path / "cache" / "libraries"
    check = doctor_command.cache_check()
    assert check.mark == "ok" and check.found == f"{folder}: not made yet, at most 3 GB"
    for key, size in ((32 * "a", 10_000_000), (32 * "b", 20_000_000)):
        (folder / key).mkdir(parents=True)
        (folder / key / "entry.json").write_text("{}")
        (folder / key / "m.so").write_bytes(bytes(size))
    (folder / "a.lock").touch()  # no library, nor is what a compile is writing
    (folder / ".made").mkdir()
    check = doctor_command.cache_check()
    assert check.mark == "ok" and check.found == f"{folder}: 2 libraries, 0.03 GB, at most 3 GB"
    monkeypatch.setattr(doctor_command.os, "access", lambda path, mode: False)
    check = doctor_command.cache_check()
    assert check.mark == "absent" and "cannot be written" in check.found
    assert "GTCO_CACHE" in check.fix
    monkeypatch.setenv("GTCO_CACHE_GB", "0")
    assert doctor_command.cache_check().found == "off, by GTCO_CACHE_GB=0"
    monkeypatch.setenv("GTCO_CACHE_GB", "much")
    check = doctor_command.cache_check()
    assert check.mark == "absent" and "GTCO_CACHE_GB='much'" in check.fix


def test_a_cache_behind_a_file_is_said_to_be_in_the_way(monkeypatch, tmp_path):
    monkeypatch.setenv("GTCO_CACHE_GB", "1")
    (tmp_path / "file").touch()
    monkeypatch.setenv("GTCO_CACHE", str(tmp_path / "file"))
    check = doctor_command.cache_check()
    assert check.mark == "absent" and f"{tmp_path / 'file'} cannot be written" in check.fix

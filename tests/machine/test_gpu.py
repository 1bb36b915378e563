"""GPUs as targets: names, what several architectures have in common, and options that do not go
with them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gtco.driver import backend
from gtco.driver.backend import backend_of
from gtco.graph.graph import Graph
from gtco.machine.gpu import ARCHITECTURES, GPUS, GpuTarget, gpu_target
from gtco.machine.target import Target, cpu_target, target
from gtco.runtime.gpu.driver import Gpu
from gtco.support.errors import ArtifactError, BuildError, OptionError, ShapeError
from gtco.support.options import CompileOptions
from gtco.tensor.stage import TensorType


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_an_architecture_is_a_target(arch):
    machine = target(f"cuda:{arch}")
    assert isinstance(machine, GpuTarget) and machine.kind == "cuda"
    assert machine.images == (arch,) and machine.arch == arch
    assert machine.generation == int(arch[3:5])
    assert machine.rate("fma") > 1e12 and machine.rate("mma:float16") > 5e13
    assert bool(machine.rate("mma:bfloat16")) is (machine.generation >= 80)


def test_a_gpu_has_a_name():
    machine = gpu_target("cuda:l4")
    assert (machine.name, machine.arch, machine.images) == ("cuda:l4", "sm_89", ("sm_89",))
    # dense figures of the vendor's sheet, in FLOP/s
    assert gpu_target("cuda:a100").rate("mma:float16") == pytest.approx(312e12, rel=0.01)
    assert gpu_target("cuda:a100").rate("fma") == pytest.approx(19.5e12, rel=0.01)


@pytest.mark.parametrize(
    ("images", "runs", "not_runs"),
    [
        ("sm_80", ["80", "86", "89", "90", "120"], ["75"]),
        ("sm_90a", ["90"], ["89", "100"]),
        ("sm_75,sm_89", ["75", "89", "90"], ["80", "86"]),
        ("sm_80,sm_90a", ["80", "90", "100"], ["75"]),
    ],
)
def test_which_gpus_run_it(images, runs, not_runs):
    """An image runs on later GPUs of its family, PTX of the newest one on all later GPUs, and one
    of sm_90a there alone.
    """
    machine = target(f"cuda:{images}")
    for there in runs + not_runs:
        assert machine.runs_on(int(there[:-1]), int(there[-1])) == (there in runs), there


def test_another_gpu_is_an_error_before_the_work(monkeypatch):
    here = backend_of(target("cuda:sm_90a"))
    monkeypatch.setattr(backend, "gpu", lambda index: Gpu("NVIDIA A100", 8, 0))
    said = r"NVIDIA A100 \(sm_80\) does not run code for sm_90a"
    with pytest.raises(ArtifactError, match=said):
        here.check_loadable(CompileOptions())
    with pytest.raises(OptionError, match=said):
        here.check_options(CompileOptions(verify=True))
    monkeypatch.setattr(backend, "gpu", lambda index: Gpu("NVIDIA H100 PCIe", 9, 0))
    here.check_loadable(CompileOptions())


def test_a_gpu_that_only_ptx_would_serve_is_one_that_runs_nothing_without_it(monkeypatch):
    here = backend_of(target("cuda:sm_80"))
    monkeypatch.setattr(backend, "gpu", lambda index: Gpu("NVIDIA H100 PCIe", 9, 0))
    here.check_loadable(CompileOptions())
    with pytest.raises(ArtifactError, match="does not run code for sm_80 without PTX"):
        here.check_loadable(CompileOptions(ptx=False))
    monkeypatch.setattr(backend, "gpu", lambda index: Gpu("NVIDIA A10", 8, 6))
    here.check_loadable(CompileOptions(ptx=False))


def test_programs_for_several_architectures_take_what_all_have():
    both = gpu_target("cuda:sm_90a, sm_75")
    assert both.name == "cuda:sm_90a,sm_75" and both.images == ("sm_90a", "sm_75")
    assert both.arch == "sm_90a" and both.sms == GPUS["cuda:h100"].sms
    assert both.shared == GPUS["cuda:2080ti"].shared and both.generation == 75
    assert both.rate("mma:float16") and not both.rate("mma:bfloat16")
    assert gpu_target("cuda:sm_80,sm_80,a100").images == ("sm_80",)


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ("cuda:H100", "cuda:h100"),
        ("CUDA:SM_80", "cuda:sm_80"),
        ("cuda:sm_80,cuda:SM_90A", "cuda:sm_80,sm_90a"),
        ("cuda:L4, Cuda:a100", "cuda:l4,a100"),
    ],
)
def test_capitals_and_prefixes_make_no_other_target(given, plain):
    """They make no other name either, by which records would be found."""
    assert target(given) == target(plain) and target(given).name == plain


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("cuda:sm_80,sm_90a", "sm_80"),
        ("cuda:sm_90a,sm_89,sm_75", "sm_89"),
        ("cuda:2080ti", "sm_75"),
        ("cuda:h100", ""),
    ],
)
def test_what_newer_gpus_run_the_code_of(name: str, arch: str) -> None:
    assert gpu_target(name).portable == arch


@pytest.mark.parametrize("name", [*GPUS, "cuda:sm_80,sm_90a"])
def test_targets_go_to_json_and_back(name):
    machine = gpu_target(name)
    assert GpuTarget.from_json(machine.to_json()) == machine


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("cuda:sm_70", "'sm_70'.*CUDA 13 ended what is older than sm_75"),
        ("cuda:V100", "'V100'.*of sm_70, and CUDA 13 ended"),
        ("cuda:sm_100", r"GPUs newer than sm_90a \(Hopper\) run the PTX of sm_89"),
        ("cuda:sm_80,sm_60", "'sm_60'.*CUDA 13"),
        ("cuda:sm_90", "'sm_90'.*sm_90a"),
        ("cuda:SM_86", "'SM_86'.*run what is made for sm_80,sm_89"),
        ("cuda:sm_87", "'sm_87'.*run images of sm_80"),
        ("cuda:voodoo2", "'voodoo2'.*Known: sm_75, sm_80, sm_89, sm_90a, 2080ti"),
        ("cuda:", "no GPU is named"),
        ("cuda", "no GPU is named"),
        ("cuda:sm_80,", "no GPU is named"),
        ("cdua:sm_80", "unknown target 'cdua:sm_80'.*for GPUs cuda:"),
    ],
)
def test_other_names_are_refused(name, reason):
    with pytest.raises(OptionError, match=reason):
        target(name)


def test_what_is_of_cpus_alone_says_so():
    assert isinstance(cpu_target("znver4"), Target)
    with pytest.raises(OptionError, match="'cuda:h100' is a GPU"):
        cpu_target("cuda:h100")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"threads": 4}, "threads=4: 'cuda:sm_80' is a GPU"),
        ({"records": Path("x.sqlite")}, "records='x.sqlite': the file.*measures nothing"),
    ],
)
def test_options_of_cpus_are_refused_for_gpus(given, reason):
    options = CompileOptions(target="cuda:sm_80", precision="fp16", **given)
    with pytest.raises(OptionError, match=reason):
        backend_of(target(options.target)).check(options)


@pytest.mark.parametrize("tune", ["quick", "full"])
def test_nothing_is_tuned_for_gpus(tune):
    with pytest.raises(OptionError, match=f"tune={tune}: 'cuda:sm_80' is a GPU"):
        backend_of(target("cuda:sm_80")).effort(tune)
    assert backend_of(target("cuda:sm_80")).effort("off") is None


def test_float16_is_for_gpus():
    options = CompileOptions(target="x86-64-v3", precision="fp16")
    with pytest.raises(OptionError, match=r"fp16 is for GPUs.*'x86-64-v3' has fp32, bf16"):
        backend_of(target(options.target)).check(options)
    backend_of(target("cuda:sm_75")).check(CompileOptions(precision="fp16"))


@pytest.mark.parametrize(
    ("name", "precision", "said"),
    [
        ("cuda:sm_75", "bf16", "CUDA cores, since Tensor Cores of sm_75 do not multiply"),
        ("cuda:sm_80,2080ti,h100", "bf16", "on sm_80 and sm_90a too.*where sm_75 is left out"),
        ("cuda:sm_80,sm_90a", "bf16", None),
        ("cuda:sm_75", "fp16", None),
        ("cuda:sm_75", "fp32", None),
        ("x86-64-v3", "bf16", None),
    ],
)
def test_a_format_that_tensor_cores_do_not_multiply_is_noted(name, precision, said):
    notes = backend_of(target(name)).precision_notes(precision)
    assert len(notes) == (said is not None)
    assert all(re.search(said, note) for note in notes)


def test_without_nvrtc_the_extra_is_named(monkeypatch):
    def missing() -> None:
        raise BuildError("compiling for a GPU needs NVRTC: pip install -e '.[cuda]'")

    monkeypatch.setattr("gtco.codegen.nvrtc.library", missing)
    backend_of(target("x86-64-v3")).check(CompileOptions())
    with pytest.raises(BuildError, match=r"\.\[cuda\]"):
        backend_of(target("cuda:sm_80")).check(CompileOptions())


@pytest.mark.parametrize("rows, refused", [(2**31 - 1025, False), (2**31 - 1024, True)])
def test_a_tensor_that_32_bits_do_not_index_is_refused(rows, refused):
    graph = Graph(("x",), ("x",), {"x": TensorType((rows,), "int8")})
    backend_of(target("x86-64-v3")).check_indices(graph)
    if refused:
        with pytest.raises(ShapeError, match=r"'x'.*2\.1 billion elements"):
            backend_of(target("cuda:l4")).check_indices(graph)
    else:
        backend_of(target("cuda:l4")).check_indices(graph)

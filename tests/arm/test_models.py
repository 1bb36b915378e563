"""Whole models for AArch64, run by qemu-user and compared with ONNX Runtime; and what gtco says of
a library that this machine cannot run.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import gtco
from gtco import cli
from gtco.compiler import compile_to_file
from gtco.machine.isa import AARCH64
from gtco.runtime.elf import read_contents
from gtco.runtime.emulated import EmulatedModel
from gtco.runtime.writing.cross import compiler_for
from gtco.support.errors import ArtifactError, BuildError, OptionError
from models.export import export_onnx
from models.family import FAMILY
from tests.arm.emulation import tools
from tests.fuzz.models import convolution
from tests.quantization.models import block, images, quantized

# rounding alone changes their outputs by 1e-3 and more (docs/benchmarks.md)
UNSTABLE = ("dpt", "depth-anything", "zoedepth", "nextvit", "efficientloftr")

pytestmark = pytest.mark.skipif(AARCH64.here, reason="this machine needs no emulator")


@pytest.fixture(autouse=True)
def needs_tools() -> None:
    tools()


def answers(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    import onnxruntime

    session = onnxruntime.InferenceSession(model.SerializeToString())
    return list(session.run(None, inputs))


@pytest.mark.parametrize("kind", ["int8", "uint8"])
def test_casts_of_64_bits_to_8(kind: str, tmp_path: Path) -> None:
    """LLVM 22 stores three lanes of them wrong. The lengths have tails of one to three lanes."""
    wide = {"int8": "int64", "uint8": "uint64"}[kind]
    number = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    sizes, path = (3, 7, 9, 10), tmp_path / "m.so"
    inputs = ", ".join(f"{wide}[{n}] x{n}" for n in sizes)
    outputs = ", ".join(f"{kind}[{n}] y{n}" for n in sizes)
    casts = " ".join(f"y{n} = Cast<to={number}>(x{n})" for n in sizes)
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": 17]> g ({inputs}) => ({outputs}) {{ {casts} }}'
    )
    compile_to_file(model, path, target="aarch64", cache=False)
    given = {f"x{n}": np.arange(1, n + 1, dtype=wide) for n in sizes}
    with EmulatedModel(path, cpu="cortex-a53") as compiled:
        found = compiled.run(given)
    for n in sizes:
        np.testing.assert_array_equal(found[f"y{n}"], given[f"x{n}"].astype(kind))


def test_a_float_model_is_right_on_any_aarch64(tmp_path: Path) -> None:
    """On a CPU without any extension, and on two threads."""
    model, path = convolution(), tmp_path / "m.so"
    report = compile_to_file(model, path, target="aarch64", threads=2, cache=False)
    assert read_contents(path).isa is AARCH64 and report.predicted_seconds > 0
    assert "gtco_open" in (tmp_path / "m.h").read_text()
    x = np.random.default_rng(0).standard_normal((1, 3, 12, 12), np.float32)
    with EmulatedModel(path, cpu="cortex-a53") as compiled:
        for scale in (1.0, 100.0):
            (wanted,) = answers(model, {"x": x * np.float32(scale)})
            got = compiled.run({"x": x * np.float32(scale)})["y"]
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4 * abs(wanted).max())


def test_an_int8_model_is_right_and_asks_for_its_instructions(tmp_path: Path) -> None:
    model, x, path = quantized(block(), images()).model, images(1, seed=1), tmp_path / "m.so"
    compile_to_file(model, path, target="neoverse-v1", shapes={"N": 1}, cache=False)
    metadata = read_contents(path).metadata
    assert metadata["cpu_features"] == ["bf16", "dotprod", "i8mm"] and metadata["isa"] == "aarch64"
    rows = {str(s["schedule"].get("tile", "")).partition(":")[0] for s in metadata["steps"]}
    assert rows & {"sdot", "smmla"}, rows
    (wanted,) = answers(model, {"image": x})
    with EmulatedModel(path) as compiled:
        got = compiled.run({"image": x})["logits"]
    np.testing.assert_allclose(got, wanted, atol=0.02 * abs(wanted).max())
    with pytest.raises(ArtifactError, match=r"was compiled for .*i8mm.* which this machine.*lacks"):
        EmulatedModel(path, cpu="cortex-a76")


def test_a_bfloat16_model_is_right(tmp_path: Path) -> None:
    """As near to float32 as on x86-64, by BFMMLA; and refused where a CPU lacks it."""
    model, x, path = block(), images(2, seed=2), tmp_path / "m.so"
    report = compile_to_file(
        model, path, target="neoverse-v1", shapes={"N": 2}, precision="bf16", cache=False
    )
    rows = {str(stage["schedule"].get("tile", "")).partition(":")[0] for stage in report.stages}
    assert "bfmmla" in rows, rows
    (wanted,) = answers(model, {"image": x})
    with EmulatedModel(path) as compiled:
        got = compiled.run({"image": x})["logits"]
    lost = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
    assert 2.0**-14 < lost < 0.02, lost
    with pytest.raises(ArtifactError, match=r"was compiled for .*bf16.* which this machine.*lacks"):
        EmulatedModel(path, cpu="cortex-a76")


def test_clang_links_for_it(tmp_path: Path, monkeypatch: Any) -> None:
    """The runtime and the program that runs it too are clang's."""
    clang = shutil.which("clang")
    if clang is None:
        pytest.skip("no clang: apt install clang")
    monkeypatch.setenv("CC", clang)
    assert compiler_for(AARCH64) == clang
    model, path = convolution(), tmp_path / "m.so"
    compile_to_file(model, path, target="aarch64", threads=2, cache=False)
    assert read_contents(path).isa is AARCH64
    x = np.random.default_rng(0).standard_normal((1, 3, 12, 12), np.float32)
    (wanted,) = answers(model, {"x": x})
    with EmulatedModel(path, cpu="cortex-a53") as compiled:
        got = compiled.run({"x": x})["y"]
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4 * abs(wanted).max())


def scaled() -> onnx.ModelProto:
    return onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 17]> g (float[64] x) => (float[64] y) '
        "<float s = {0.5}> { y = Mul(x, s) }"
    )


def test_denormals_are_flushed_and_what_cannot_run_here_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on x86-64, where the mode is that of MXCSR; also verify runs by the emulator."""
    path = tmp_path / "m.so"
    report = compile_to_file(scaled(), path, target="cortex-a76", verify=True, cache=False)
    assert report.verification is not None and report.verification.passed
    assert any("qemu-aarch64" in note for note in report.notes)
    x = np.full(64, 1.5 * 2.0**-126, np.float32)
    with EmulatedModel(path) as compiled:
        assert (compiled.run({"x": x})["y"] == 0).all()
    with pytest.raises(ArtifactError, match=r"is a library for aarch64.*open it where"):
        gtco.load(path)
    assert cli.main(["inspect", str(path)]) == 0  # as that error says
    assert "not measured: a library for aarch64" in capsys.readouterr().out
    with pytest.raises(ArtifactError, match="compile_to_file"):
        gtco.compile_model(scaled(), target="cortex-a76")
    with pytest.raises(OptionError, match="Tune where the library will run"):
        compile_to_file(scaled(), path, target="cortex-a76", tune="quick")


def test_without_tools_the_package_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "gcc").symlink_to(gtco.support.environment.c_compiler())
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(BuildError, match="apt install gcc-aarch64-linux-gnu"):
        compile_to_file(scaled(), tmp_path / "m.so", target="cortex-a76", cache=False)
    monkeypatch.setenv("CC", str(tmp_path / "gcc"))
    with pytest.raises(BuildError, match="compiles for x86_64"):
        compile_to_file(scaled(), tmp_path / "m.so", target="cortex-a76", cache=False)


@pytest.mark.scheduled
@pytest.mark.parametrize("name", FAMILY)
def test_a_model_of_the_family_is_right(name: str, tmp_path: Path) -> None:
    member, path = FAMILY[name], tmp_path / "m.so"
    net, inputs = member.create(), member.inputs()
    onnx = tmp_path / "m.onnx"  # by an exporter that can
    export_onnx(net, inputs, onnx, exporter=member.exporters[0])
    compile_to_file(onnx, path, target="neoverse-n1", cache=False)
    wanted = flat(net(*inputs))
    with EmulatedModel(path) as compiled:
        values = {s.name: x.numpy() for s, x in zip(compiled.inputs, inputs, strict=True)}
        got = list(compiled.run(values).values())
    assert len(got) == len(wanted)
    for y, z in zip(got, wanted, strict=True):
        atol = (2e-3 if name in UNSTABLE else 1e-3) * abs(z).max()
        np.testing.assert_allclose(y, z, atol=atol, rtol=0)


def flat(value: Any) -> list[np.ndarray]:
    """The tensors of a module's result, in order."""
    import torch

    return [x.numpy() for x in torch.utils._pytree.tree_leaves(value) if torch.is_tensor(x)]

"""Builds that repeat. The same model, versions and table give the same bytes, wherever they are
built and in whatever order the workers end. For a named target this holds on any machine.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from gtco.codegen.processes import environment
from gtco.machine.target import detect
from gtco.search.calibration import profile
from tests.search.test_profile import made_up

MODEL = """<ir_version: 10, opset_import: ["": 21]>
m (float[1, 3, 24, 24] x) => (float[36, 12] y, float[36, 36] s)
{
  c = Conv<strides = [4, 4]>(x, k)
  f = Reshape<allowzero = 0>(c, to)
  t = Transpose<perm = [1, 0]>(f)
  n = LayerNormalization<axis = -1>(t, scale, bias)
  q = MatMul(n, w)
  u = Transpose<perm = [1, 0]>(n)
  a = MatMul(q, u)
  s = Softmax<axis = -1>(a)
  v = MatMul(s, n)
  r = Add(v, t)
  h = MatMul(r, w1)
  g = Gelu(h)
  y = MatMul(g, w2)
}"""
SHAPES = {"k": (16, 3, 4, 4), "scale": (16,), "bias": (16,), "w": (16, 16), "w1": (16, 40)}

# A process on another machine, where kernels come in another order.
ELSEWHERE = """
import sys
from gtco.cli import main
from gtco.support.torchless import import_tvm

import_tvm()
import gtco.compiler
from gtco.codegen.workers import Workers

def nothing(*_):
    raise AssertionError("this is another machine")

build = Workers.build
if sys.argv.pop(1) == "elsewhere":
    Workers.build = lambda self, jobs: reversed(list(build(self, jobs)))
    if sys.argv.pop(1) == "named":
        for module in list(sys.modules.values()):
            if module.__name__.startswith("gtco."):
                for name, other in (("detect", nothing), ("allowed_cores", lambda *_: 5)):
                    if hasattr(module, name):
                        setattr(module, name, other)
else:
    sys.argv.pop(1)
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random = np.random.default_rng(0)
    made = onnx.parser.parse_model(MODEL)
    for name, shape in {**SHAPES, "w2": (40, 12)}.items():
        value = random.standard_normal(shape).astype(np.float32)
        made.graph.initializer.append(numpy_helper.from_array(value, name))
    made.graph.initializer.append(numpy_helper.from_array(np.array([16, 36]), "to"))
    path = tmp_path_factory.mktemp("repeatable") / "m.onnx"
    onnx.save(made, path)
    return path


@pytest.mark.parametrize("target", ["x86-64-v4", "native"])
def test_the_same_command_gives_the_same_bytes(model: Path, tmp_path: Path, target: str) -> None:
    machine = detect()
    table = profile.table_of(machine, made_up(machine, 1))
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GTCO_CACHE", str(tmp_path / "cache"))
        key = profile.machine_key(machine)
        data = profile._as_json(table, key) | {"others": 0.0, "times": 1}
        assert not profile.save(profile._path(machine), data)
    for number, where in enumerate(("here", "elsewhere")):
        folder = tmp_path / where
        (folder / "tmp").mkdir(parents=True)
        setting = {
            **environment(),
            "GTCO_CACHE": str(tmp_path / "cache"),
            "PYTHONHASHSEED": str(number + 1),
            "TMPDIR": str(folder / "tmp"),
        }
        named = "native" if target == "native" else "named"
        command = [sys.executable, "-c", ELSEWHERE, where, named, "compile", str(model)]
        command += ["-o", "m.so", "--tune", "off", "--target", target]
        done = subprocess.run(command, cwd=folder, env=setting, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "calibrate" not in done.stdout + done.stderr  # the table is there
        found.append({name: (folder / name).read_bytes() for name in ("m.so", "m.h")})
    assert found[0] == found[1]

"""gtco's own processes run without torch. If torch is needed, it is imported later."""

from __future__ import annotations

import subprocess
import sys

import onnx
import pytest
from onnx import TensorProto, helper

pytest.importorskip("torch")

COMMAND = """
import sys
from gtco.cli import main
assert main(["compile", sys.argv[1], "-o", sys.argv[2], "--tune", "quick"]) == 0
assert "tvm" in sys.modules and "torch" not in sys.modules
"""
MODULE_AFTERWARDS = """
import torch, gtco
module, x = torch.nn.Linear(24, 17).eval(), torch.randn(5, 24)
torch.testing.assert_close(gtco.compile_model(module, (x,))(x), module(x))
"""
WORKER = """
import os, sys, gtco.codegen.serve
from tvm import backend, runtime
print("tvm" in sys.modules, "torch" in sys.modules)
print(backend.is_loaded("cuda"), runtime.disco, os.environ.get("TVM_DEVICE_BACKEND_AUTOLOAD"))
"""


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_command_compiles_without_torch_and_a_module_can_follow(tmp_path):
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 8])
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    onnx.save(model, tmp_path / "m.onnx")
    run(COMMAND + MODULE_AFTERWARDS, str(tmp_path / "m.onnx"), str(tmp_path / "m.so"))


def test_a_worker_does_without_torch():
    assert run(WORKER).split()[:2] == ["True", "False"]


@pytest.mark.parametrize("given", [None, "1"])
def test_a_worker_imports_no_more_of_tvm_than_it_needs(monkeypatch, given):
    monkeypatch.delenv("TVM_DEVICE_BACKEND_AUTOLOAD", raising=False)
    if given is not None:
        monkeypatch.setenv("TVM_DEVICE_BACKEND_AUTOLOAD", given)
    assert run(WORKER).split()[2:] == [str(given is not None), "None", str(given)]


def test_torch_that_is_there_stays():
    script = "import torch\nfrom gtco.support.torchless import import_tvm\nimport_tvm()\n"
    assert run(script + "import sys; print(sys.modules['torch'] is torch)").strip() == "True"
